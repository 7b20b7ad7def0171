"""Half of a surrogate pair, which is no text, reaches a translator as the same bytes by every way."""

import json

import pytest
import tensorflow as tf
from hypothesis import given, strategies as st
from local_server import Capitals, Running, running

from lingvo_moe.tasks.mt.decoding.saved_translator import translations_of
from lingvo_moe.tasks.text.decoding.line_stream import utf8_of

_CASES = {
    "a high half": ("red\ud83d", "red\ufffd"),
    "a low half": ("\udc80red", "\ufffdred"),
    "halves in the wrong order": ("\ude00\ud83d", "\ufffd\ufffd"),
    "both halves": ("\ud83d\ude00 red", "\U0001f600 red"),
}


@pytest.fixture(scope="module")
def server():
    with running(Capitals()) as it:
        yield it


def in_python(text: str) -> bytes:
    """The bytes that the function of a Translator, or of an exported model, gets."""
    got: list[bytes] = []

    def translate(lines: tf.Tensor) -> dict[str, tf.Tensor]:
        got.extend(lines.numpy())
        return {
            "translations": tf.constant([["x"]]),
            "scores": tf.zeros([1, 1]),
            "truncated": tf.zeros([1], tf.bool),
        }

    translations_of(translate, [text])
    return got[0]


def by_http(it: Running, path: str, content: object) -> bytes:
    """The bytes that the translator behind a server gets."""
    it.service.translator.batches.clear()
    assert it.Ask("POST", path, json.dumps(content).encode()).status == 200
    return it.service.translator.batches[0][0]


@pytest.mark.parametrize("text, want", _CASES.values(), ids=_CASES)
def test_it_is_the_same_by_every_way(text, want, server):
    predict = "/v1/models/translator:predict"
    assert in_python(text) == want.encode()
    assert by_http(server, "/translate", {"text": text}) == want.encode()
    assert by_http(server, "/translate", {"text": [text]}) == want.encode()
    assert by_http(server, predict, {"instances": [text]}) == want.encode()
    assert by_http(server, predict, {"inputs": {"text": [text]}}) == want.encode()


@given(st.text(st.sampled_from("a\ud800\udfff\ud83d\ude00\ufffd\U0001f600")))
def test_all_else_stays(text):
    """JSON is read as usual, and text that UTF-8 can spell is unchanged."""
    want = "".join(
        "\ufffd" if "\ud800" <= c <= "\udfff" else c for c in json.loads(json.dumps(text))
    )
    assert utf8_of(text).decode() == want
