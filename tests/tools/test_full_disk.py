"""A full disk while a tool writes data: one line that names the file, and nothing half written."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from damage import full_disk

from tools import build_corpus, prepare, train_vocab

_WORDS = ["".join(parts) for parts in itertools.product("bdfglmnrst", "aeiou", "kpvw", "aü")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    directory = tmp_path_factory.mktemp("corpus")
    for lang in ("de", "sw"):
        sentences = [rng.choice(_WORDS, rng.integers(2, 7)) for _ in range(300)]
        lines = [f"{' '.join(w)} {lang}\t{' '.join(x[::-1] for x in w)}\n" for w in sentences]
        (directory / f"{lang}.tsv").write_text("".join(lines), "utf-8")
    return directory


_SIZES = ["--source_vocab_size=320", "--target_vocab_size=300", "--dev_share=0.1"]


@pytest.mark.parametrize("tool, flags, free, file", [
    (prepare, ["--input={corpus}", *_SIZES], 200, "00000/de.tsv"),
    (prepare, ["--input={corpus}", *_SIZES], 30_000, "source.model"),
    (train_vocab, ["--data_dir={corpus}", "--source_size=320", "--target_size=300"], 999, ""),
    (build_corpus, ["--languages=de", "--packages=Babel"], 999, "out/de.tsv.gz"),
])  # fmt: skip
def test_one_line_names_the_file_and_nothing_is_left(
    tool, flags, free, file, corpus, tmp_path, capsys
):
    given = [f"--output={tmp_path / 'out'}", *(flag.format(corpus=corpus) for flag in flags)]
    with full_disk(free):
        assert tool.main(given) == 1
    name = tool.__name__.removeprefix("tools.")
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"{name}: [Errno 27] File too large: '")
    assert error.endswith(f"{file}'")
    left = [path.name for path in tmp_path.iterdir()]
    assert left in ([], [".out.preparing"])
