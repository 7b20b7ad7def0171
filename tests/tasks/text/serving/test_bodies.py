"""JSON bodies: which are accepted, which are refused, and the error messages."""

import base64
import contextlib
import json

import pytest
from hypothesis import given, strategies as st

from lingvo_moe.tasks.text.serving.batcher import Translation
from lingvo_moe.tasks.text.serving.bodies import (
    answer,
    parse_generate,
    parse_predict,
    parse_translate,
)
from lingvo_moe.tasks.text.serving.limits import Limits
from lingvo_moe.tasks.text.serving.request_error import RequestError

LIMITS = Limits(max_lines=3, max_line_chars=5)


def translate(content, known=()):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return parse_translate(body, LIMITS, known)


def predict(content, known=()):
    return parse_predict(json.dumps(content).encode(), LIMITS, known)


@pytest.mark.parametrize("text, lines", [
    ("a", [b"a"]),
    ("", [b""]),
    ("a\n", [b"a", b""]),
    ("\ufeffa\r\n\r\nb", [b"a", b"", b"b"]),
    ("a\u2028\rb\0", ["a\u2028\rb\0".encode()]),
    ("\ud83d", ["\ufffd".encode()]),
    (["a\udc80", "\ud83d\ude00"], ["a\ufffd".encode(), "\U0001f600".encode()]),
    (["a", "", "\ufeff"], [b"a", b"", b"\xef\xbb\xbf"]),
    ([], []),
])  # fmt: skip
def test_a_text_is_its_lines(text, lines):
    assert translate({"text": text}).lines == lines


@pytest.mark.parametrize("body, status, message", [
    (b"{", 400, "not JSON: Expecting property name"),
    (b'{"text": "a"} x', 400, "not JSON: Extra data"),
    (b'{"text": "\xc3"}', 400, "not UTF-8: invalid continuation byte at byte 10"),
    (b"[" * 100_000, 400, "nested too deeply"),
    (b'{"text": ' + b"9" * 10_000 + b"}", 400, "not JSON"),
    (None, 400, "the body is null"),
    ({"texts": "a"}, 400, "no field \"texts\" (did you mean 'text'?)"),
    ({"text": "a", "x" * 99: 1}, 400, f'no field "{"x" * 40}" (known: language, text)'),
    ({}, 400, 'the field "text" is missing'),
    ({"text": 5}, 400, '"text" is a number'),
    ({"text": ["a", True]}, 400, "text[1] is true; give a string"),
    ({"text": ["a", "b\nc"]}, 400, "text[1] holds a newline"),
    ({"text": "a", "language": 1}, 400, '"language" is a number'),
    ({"text": "a\nb\nc\nd"}, 413, "4 lines; at most 3 in a request"),
    ({"text": ["a", "ßßßßßß"]}, 413, "line 2 has 6 characters; at most 5"),
])  # fmt: skip
def test_what_is_refused(body, status, message):
    with pytest.raises(RequestError) as caught:
        translate(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.status_code == status
    assert message in caught.value.message


def test_languages():
    known = ("de", "fi")
    assert translate({"text": "a\nb", "language": "de"}, known).languages == ["de", "de"]
    assert translate({"text": "a", "language": "de"}).languages is None  # it does not route by them
    for content, message in (
        ({"text": "a"}, 'give "language": this model routes by it (de, fi)'),
        ({"text": "a", "language": "sv"}, 'no language "sv" (known: de, fi)'),
    ):
        with pytest.raises(RequestError) as caught:
            translate(content, known)
        assert message in caught.value.message


def test_directions():
    def languages_of(*directions):
        rows = [{"text": "a", "language": direction} for direction in directions]
        body = json.dumps({"instances": rows}).encode()
        return parse_predict(body, LIMITS, ("de", "fi"), True).languages

    assert languages_of("de-fi", "fi-fi") == ["de-fi", "fi-fi"]
    for direction, message in (
        (None, 'give "language": SOURCE-TARGET, e.g. "de-fi"'),
        ("de", '"language" is "de"; give SOURCE-TARGET, e.g. "de-fi"'),
        ("de-sv", 'no language "sv" (known: de, fi)'),
        ("de-fi-de", 'no language "fi-de"'),
    ):
        with pytest.raises(RequestError) as caught:
            languages_of("de-fi", direction)
        assert caught.value.status_code == 400
        assert caught.value.message.startswith(message)


FOUND = [
    Translation(["A", "B"], [-1.0, float("-inf")], False),
    Translation(["C", "D"], [-2, -3], True),
]


def test_answers_of_our_own():
    wanted = translate({"text": "a\nb"})
    assert answer(wanted, FOUND) == {
        "translations": ["A", "C"],
        "scores": [-1.0, -2],
        "truncated": [False, True],
    }


@pytest.mark.parametrize("instances", [
    ["a", "b"],
    [{"text": "a"}, "b"],
    [{"b64": base64.b64encode(b"a").decode()}, {"text": {"b64": "Yg=="}}],
    [{"text": "a", "language": "de"}, {"text": "b", "language": "fi"}],
])  # fmt: skip
def test_tensorflow_serving_by_rows(instances):
    wanted = predict({"instances": instances, "signature_name": "predict"})
    assert wanted.lines == [b"a", b"b"]
    assert answer(wanted, FOUND) == {
        "predictions": [
            {"translations": ["A", "B"], "scores": [-1.0, None], "truncated": False},
            {"translations": ["C", "D"], "scores": [-2, -3], "truncated": True},
        ]
    }


@pytest.mark.parametrize("inputs", [["a", {"b64": "/w=="}], {"text": ["a", {"b64": "/w=="}]}])
def test_tensorflow_serving_by_columns(inputs):
    wanted = predict({"inputs": inputs})
    assert wanted.lines == [b"a", b"\xff"]
    assert answer(wanted, FOUND) == {
        "outputs": {
            "translations": [["A", "B"], ["C", "D"]],
            "scores": [[-1.0, None], [-2, -3]],
            "truncated": [False, True],
        }
    }


@pytest.mark.parametrize("content, message", [
    ({}, 'give one of "instances"'),
    ({"instances": "a"}, '"instances" is a string; give a list'),
    ({"instances": [{"txt": "a"}]}, 'instances[0]: give {"text": "..."}'),
    ({"instances": [{"b64": "?"}]}, "instances, text 0 is not base64"),
    ({"instances": [{"text": "a", "language": 1}]}, "language 0 is a number"),
    ({"inputs": {"text": ["a"], "language": "de"}}, "language is a string; give a list"),
    ({"inputs": {"text": ["a"], "language": []}}, "1 texts, but 0 languages"),
    ({"inputs": {"a": 1}}, '"inputs": give {"text": ["..."]}'),
    ({"instances": [], "signature_name": "classify"}, '"signature_name" is "classify"'),
])  # fmt: skip
def test_what_is_refused_in_tensorflow_serving_s_form(content, message):
    with pytest.raises(RequestError) as caught:
        predict(content)
    assert caught.value.status_code == 400
    assert message in caught.value.message


_NO_NUMBER = (None, True, [], {}, "3", "", [1])
_WRONG = {
    "text": (None, True, 3, {}, 1.5, [None], [["a"]]),
    "stream": (None, 0, "true", []),
    "max_tokens": (*_NO_NUMBER, 0, -1, 1.5, 51, 2**31, 10**400, float("nan"), float("inf")),
    "temperature": (*_NO_NUMBER, -0.1, 10**400, 1e39, 1e-39, float("nan"), float("-inf")),
    "top_k": (*_NO_NUMBER, -1, 0.5, 2**31, 2**64, float("nan")),
    "top_p": (*_NO_NUMBER, 0, 1.1, -1, 10**400, float("nan")),
    "seed": (*_NO_NUMBER, 0.5, 2**31, -(2**31) - 1, float("inf")),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in _WRONG.items() for value in values]
)
def test_a_wrong_field_of_a_prompt_is_named(name, value):
    body = json.dumps({"text": "a", name: value}).encode()
    with pytest.raises(RequestError) as caught:
        parse_generate(body, LIMITS, 50)
    assert caught.value.status_code == 400
    assert name in caught.value.message and "\n" not in caught.value.message


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=3),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(
                st.sampled_from(["text", "language", "instances", "inputs", "b64", *_WRONG]), x
            )
        ),
    )
)
def test_any_json_is_taken_or_refused(content):
    body = json.dumps(content).encode()
    for parse in (parse_translate, parse_predict, parse_generate):
        for known in (50,) if parse is parse_generate else ((), ("de",)):
            with contextlib.suppress(RequestError):
                wanted = parse(body, LIMITS, known)
                assert all(isinstance(line, bytes) for line in wanted.lines)
