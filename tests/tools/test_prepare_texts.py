"""tools.prepare for a language model: texts without a translation."""

import json
import random
import re

from lingvo_moe.core.config import registry
from tools import prepare


def _sentence(i: int) -> str:
    rng = random.Random(i)
    return " ".join(
        "".join(rng.choices(["бвгдклмнпрст", "аеиоу"][j % 2], k=1)[0] for j in range(6))
        for _ in range(5)
    )


def test_a_language_model_takes_texts_without_a_translation(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    lines = [*(_sentence(i) for i in range(900)), "", _sentence(0), "not Russian"]
    (tmp_path / "texts/ru.txt").write_text("\n".join(lines))
    given = [f"--input={tmp_path}/texts", f"--output={tmp_path}/data", "--model=lm.Tiny"]
    assert prepare.main([*given, "--target_vocab_size=330"]) == 0
    about = json.loads((tmp_path / "data/prepared.json").read_text())["languages"]["ru"]
    assert about["dropped"] == {"empty": 1, "wrong_script": 1, "duplicate": 1}
    assert about["kept"] + about["dev"] == 900
    models = [(tmp_path / f"data/vocab/{side}.model").read_bytes() for side in ("source", "target")]
    assert models[0] == models[1]
    said = capsys.readouterr().out
    assert "\nrows of input.target_length=" in said and "source_length" not in said
    command = said.split("next: python -m lingvo_moe.trainer ")[1].splitlines()[0]
    assert "--model=lm.Tiny" in command
    assert "input.target_vocab_size=330;task.vocab_size=330;input.target_length=" in command
    (text,) = re.findall("--model_params_override='(.*)'", command)
    params = registry.GetParams("lm.Tiny", f"{text};input.data_dir={tmp_path / 'data'}")
    inputs = params.input.Instantiate()
    inputs.Prepare()
    assert next(iter(inputs)).ids.shape == (8, params.input.target_length)
    assert prepare.main([*given, "--source_vocab_size=330"]) == 1
    why = "--source_vocab_size=330: has no effect with --model=lm.Tiny, which has one vocabulary"
    assert why in capsys.readouterr().err
    # Translation cannot use them.
    assert prepare.main([*given[:1], f"--output={tmp_path}/other", "--model=mt.M4Tiny"]) == 1
    assert "<lang>.txt, texts alone, with --model of a language model" in capsys.readouterr().err
