"""Parses the JSON bodies of requests, and writes the answers in the same form.

Two forms: our own, `{"text": ...}`, and that of TensorFlow Serving's predict requests, `{"instances": [...]}` or
`{"inputs": ...}`, so that its clients work unchanged.
"""

import base64
import binascii
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.checks import ParamError, did_you_mean
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.tasks.text.decoding.line_stream import utf8_of
from lingvo_moe.tasks.text.serving.batcher import Translation
from lingvo_moe.tasks.text.serving.limits import Limits
from lingvo_moe.tasks.text.serving.request_error import RequestError

_SIGNATURES = ("serving_default", "predict")
# What has an effect only where tokens are drawn, with the values that say nothing.
_OF_DRAWS = {"n": 1} | {
    name: getattr(Sampling, name) for name in ("top_k", "top_p", "min_p", "seed")
}


@dataclass(frozen=True)
class TextRequest:
    """Lines to translate."""

    lines: Sequence[bytes | list[int]]  # the texts, in order, or ids of a conversation
    languages: list[str] | None  # the language of each line; None for a model that routes by none
    # Of the answer: 'text', or TensorFlow Serving's 'instances' (by rows) or 'inputs' (by columns); 'prompts' of a
    # language model, and 'stream', token by token.
    form: Literal["text", "instances", "inputs", "prompts", "stream"]
    settings: Sequence[Sampling] = ()  # the settings of each prompt of a language model


def parse_translate(
    body: bytes, limits: Limits, served: Sequence[str], by_direction: bool = False
) -> TextRequest:
    """Reads `{"text": "one line, or several", "language": "de"}` or `{"text": ["line", ...]}`.

    `served` are the source languages of a model that routes by them; `by_direction`: those of a model that translates
    from any language to any, where "language" is "SOURCE-TARGET".

    Raises:
        RequestError: 400 for any other body, 413 for too many or too long lines.
    """
    content = object_of(body, ("text", "language"))
    if "text" not in content:
        raise RequestError(400, 'the field "text" is missing: {"text": "..."} or {"text": ["..."]}')
    text, language = content["text"], content.get("language")
    if isinstance(text, str):
        # As a file: what newlines separate, so that as many lines come out as go in.
        parts = text.removeprefix("\ufeff").split("\n")
        lines = [utf8_of(part.removesuffix("\r")) for part in parts]
    elif isinstance(text, list):
        lines = [_line(line, f"text[{i}]") for i, line in enumerate(text)]
        for i, line in enumerate(lines):
            if b"\n" in line:
                raise RequestError(
                    400, f"text[{i}] holds a newline; give each line as a string of its own"
                )
    else:
        raise RequestError(400, f'"text" is {kind_of(text)}; give a string or a list of strings')
    if language is not None and not isinstance(language, str):
        raise RequestError(400, f'"language" is {kind_of(language)}; give a string, e.g. "de"')
    check_sizes(lines, limits)
    languages = _languages([language] * len(lines), served, by_direction)
    return TextRequest(lines, languages, "text")


def parse_predict(
    body: bytes, limits: Limits, served: Sequence[str], by_direction: bool = False
) -> TextRequest:
    """Reads a predict request in TensorFlow Serving's REST form; arguments and errors as parse_translate."""
    content = object_of(body, ("signature_name", "instances", "inputs"))
    name = content.get("signature_name", _SIGNATURES[0])
    if name not in _SIGNATURES:
        raise RequestError(400, f'"signature_name" is {json.dumps(name)[:60]}; it is "predict"')
    if ("instances" in content) == ("inputs" in content):
        raise RequestError(400, 'give one of "instances", a list by rows, and "inputs", by columns')
    if "instances" in content:
        form: Literal["instances", "inputs"] = "instances"
        texts, languages = _rows(content["instances"])
    else:
        form = "inputs"
        texts, languages = _columns(content["inputs"])
    lines = [_line(text, f"{form}, text {i}") for i, text in enumerate(texts)]
    for i, language in enumerate(languages):
        if language is not None and not isinstance(language, str):
            raise RequestError(400, f"{form}, language {i} is {kind_of(language)}; give a string")
    check_sizes(lines, limits)
    return TextRequest(lines, _languages(languages, served, by_direction), form)


def parse_generate(body: bytes, limits: Limits, most: int) -> TextRequest:
    """Reads `{"text": "a prompt" or ["a prompt", ...]}` with fields of Sampling, "n": samples of each, and "stream":
    true, for one text. "stop" may be one string.

    `most` is the largest max_tokens.

    Raises:
        RequestError: as parse_translate.
    """
    names = [name for name in Sampling.RANGES if name != "number"]
    content = object_of(body, ("text", "stream", "n", *names))
    text, stream, n = content.get("text"), content.get("stream", False), content.get("n", 1)
    if isinstance(content.get("stop"), str):
        content["stop"] = [content["stop"]]
    if not isinstance(stream, bool):
        raise RequestError(400, f'"stream" is {kind_of(stream)}; give true or false')
    if not isinstance(text, str) and (stream or not isinstance(text, list)):
        one = "" if stream else " or a list of strings"
        raise RequestError(400, f'"text" is {kind_of(text)}; give a string{one}')
    if text == []:
        raise RequestError(400, '"text" is an empty list; give at least one prompt')
    texts = [text] if isinstance(text, str) else text
    lines = [_line(line, f"text[{i}]") for i, line in enumerate(texts)]
    fields: dict[str, Any] = {"max_tokens": min(Sampling.max_tokens, most)}
    fields |= {name: content[name] for name in names if name in content}
    for name, value in [*fields.items(), ("n", n)]:
        check = checks.Integer(1, limits.max_lines) if name == "n" else Sampling.RANGES[name]
        if why := check(value):
            raise RequestError(400, str(ParamError(name, json.dumps(value), why)))
    if stream and (n > 1 or fields.get("logprobs")):
        raise RequestError(
            400, '"stream" is of one text, without logprobs: leave n and logprobs out'
        )
    for name, default in _OF_DRAWS.items():
        value = {**fields, "n": n}.get(name, default)
        if value != default and not fields.get("temperature"):
            raise RequestError(
                400, f'"{name}" is {value}, but nothing is drawn: give a "temperature"'
            )
    fields["stop"] = tuple(fields.get("stop", ()))
    if n > 1 and len(lines) * n > limits.max_lines:
        raise RequestError(
            413,
            f"{len(lines)} texts {n} times; at most {limits.max_lines} in a request: send them in parts",
        )
    lines = [line for line in lines for _ in range(n)]
    settings = [Sampling(**fields, number=i) for i in range(len(lines))]
    if fields["max_tokens"] > most:
        raise RequestError(
            400, f"max_tokens={fields['max_tokens']}: this model gives at most {most}"
        )
    check_sizes(lines, limits)
    return TextRequest(lines, None, "stream" if stream else "prompts", settings)


def answer(wanted: TextRequest, translations: list[Translation]) -> dict[str, Any]:
    """The body for the translations of `wanted.lines`: the best of each, or all K in TensorFlow Serving's forms."""
    truncated = [t.truncated for t in translations]
    if wanted.form == "prompts":
        texts = {"texts": [t.texts[0] for t in translations], "truncated": truncated}
        about = [t.about or {} for t in translations]
        return texts | {name: [entry[name] for entry in about] for name in (about or [{}])[0]}
    if wanted.form == "text":
        return {
            "translations": [t.texts[0] for t in translations],
            "scores": [_finite(t.scores)[0] for t in translations],
            "truncated": truncated,
        }
    columns = {
        "translations": [t.texts for t in translations],
        "scores": [_finite(t.scores) for t in translations],
        "truncated": truncated,
    }
    if wanted.form == "inputs":
        return {"outputs": columns}
    return {"predictions": [dict(zip(columns, row)) for row in zip(*columns.values())]}


def object_of(body: bytes, fields: Sequence[str]) -> dict[str, Any]:
    """The object of a body, which has none but these fields. Raises RequestError."""
    try:
        content = json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise RequestError(400, f"the body is not UTF-8: {e.reason} at byte {e.start}") from None
    except RecursionError:
        raise RequestError(
            400, "the body is no JSON that is looked at: nested too deeply"
        ) from None
    except ValueError as e:
        raise RequestError(400, f"the body is not JSON: {e}") from None
    if not isinstance(content, dict):
        raise RequestError(
            400, f'the body is {kind_of(content)}; give an object, {{"{fields[0]}": ...}}'
        )
    for name in content:
        if name not in fields:
            shown = json.dumps(name[:40])
            raise RequestError(400, f"no field {shown}{did_you_mean(name[:40], list(fields))}")
    return content


def _rows(instances: Any) -> tuple[list, list]:
    if not isinstance(instances, list):
        raise RequestError(400, f'"instances" is {kind_of(instances)}; give a list')
    rows = [r if _is_columns(r) else {"text": r} for r in instances]
    for i, row in enumerate(rows):
        if "text" not in row or not row.keys() <= {"text", "language"}:
            raise RequestError(
                400, f'instances[{i}]: give {{"text": "..."}}, with "language" or not'
            )
    return [r["text"] for r in rows], [r.get("language") for r in rows]


def _columns(inputs: Any) -> tuple[list, list]:
    columns = inputs if _is_columns(inputs) else {"text": inputs}
    if "text" not in columns or not columns.keys() <= {"text", "language"}:
        raise RequestError(400, '"inputs": give {"text": ["..."]}, with "language" or not')
    texts: Any = columns["text"]
    languages: Any = columns.get("language")
    if languages is None and isinstance(texts, list):
        languages = [None] * len(texts)
    for name, column in (("text", texts), ("language", languages)):
        if not isinstance(column, list):
            raise RequestError(400, f'"inputs": {name} is {kind_of(column)}; give a list')
    if len(texts) != len(languages):
        raise RequestError(400, f"{len(texts)} texts, but {len(languages)} languages")
    return texts, languages


def _is_columns(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() != {"b64"}


def _line(value: Any, where: str) -> bytes:
    """The bytes of a string, or of TensorFlow Serving's {"b64": "..."}."""
    if isinstance(value, str):
        return utf8_of(value)
    if isinstance(value, dict) and value.keys() == {"b64"} and isinstance(value["b64"], str):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (binascii.Error, ValueError) as e:
            raise RequestError(400, f"{where} is not base64: {e}") from None
    raise RequestError(400, f"{where} is {kind_of(value)}; give a string")


def check_sizes(lines: Sequence[bytes], limits: Limits) -> None:
    """Raises RequestError 413 for too many or too long lines."""
    if len(lines) > limits.max_lines:
        raise RequestError(
            413, f"{len(lines)} lines; at most {limits.max_lines} in a request: send them in parts"
        )
    for i, line in enumerate(lines):
        length = len(line.decode("utf-8", "replace"))
        if length > limits.max_line_chars:
            raise RequestError(
                413, f"line {i + 1} has {length} characters; at most {limits.max_line_chars}"
            )


def _languages(
    languages: Sequence[str | None], served: Sequence[str], by_direction: bool
) -> list[str] | None:
    if not served:
        return None
    example = f'SOURCE-TARGET, e.g. "{served[0]}-{served[-1]}"'
    for language in dict.fromkeys(languages):
        if language is None:
            why = example if by_direction else f"this model routes by it ({', '.join(served)})"
            raise RequestError(400, f'give "language": {why}')
        codes = language.split("-", 1) if by_direction else [language]
        if by_direction and len(codes) == 1:
            shown = json.dumps(language[:40])
            raise RequestError(400, f'"language" is {shown}; give {example}')
        for code in codes:
            if code not in served:
                hint = did_you_mean(code[:40], list(served))
                raise RequestError(400, f"no language {json.dumps(code[:40])}{hint}")
    return [str(language) for language in languages]


def _finite(scores: list[float]) -> list[float | None]:
    return [s if math.isfinite(s) else None for s in scores]  # JSON has no infinity


def kind_of(value: Any) -> str:
    """The JSON type of a value, for messages."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {"str": "a string", "list": "a list", "dict": "an object"}
    return names.get(type(value).__name__, "a number")
