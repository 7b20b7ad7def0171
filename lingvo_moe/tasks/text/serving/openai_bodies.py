"""Parses the bodies of OpenAI's API for completions and chats, and writes answers in its form.

What its clients send is taken, or refused with the name of the parameter: none is ignored that would change an answer.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.checks import ParamError
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.tasks.text.serving.batcher import Translation
from lingvo_moe.tasks.text.serving.bodies import TextRequest, check_sizes, kind_of, object_of
from lingvo_moe.tasks.text.serving.limits import Limits
from lingvo_moe.tasks.text.serving.request_error import RequestError

_COMPLETION_TOKENS = 16  # of a completion, where no max_tokens is given, as OpenAI has it
_SAMPLING = ("temperature", "top_p", "seed", "stop", "top_k", "min_p", "repetition_penalty")
# Further parameters, with the values that change nothing here; None is one of each.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "best_of": [1],
    "echo": [False],
    "frequency_penalty": [0],
    "function_call": ["none"],
    "functions": [[]],
    "logit_bias": [{}],
    "logprobs": [False],
    "modalities": [["text"]],
    "parallel_tool_calls": [True, False],
    "presence_penalty": [0],
    "response_format": [{"type": "text"}],
    "service_tier": ["auto", "default"],
    "store": [False],
    "suffix": [""],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "top_logprobs": [0],
}
_OF_THE_CALLER = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # say who asks
_LARGEST_SEED = 2**31


@dataclass(frozen=True)
class OpenAiRequest(TextRequest):
    """A request for completions: of prompts, in `lines`; or of a conversation, whose `lines` come later."""

    messages: Sequence[Mapping[str, str]] = ()  # the conversation of a chat
    n: int = 1  # answers to each
    with_usage: bool = False  # whether a stream ends with the numbers of tokens


def parse_openai(
    body: bytes, limits: Limits, most: int, name: str, chat: bool, draws: bool = True
) -> OpenAiRequest:
    """Reads the body of /v1/chat/completions, if it is a `chat`, or of /v1/completions.

    `most` is the largest number of new tokens, `name` the model's; one that `draws` has the temperature 1, where none
    is given, as OpenAI has it.

    Raises:
        RequestError: 400 for what is wrong or not here, 404 for another model, 413 for too many or too long texts.
    """
    what = ("messages", "max_completion_tokens") if chat else ("prompt",)
    ours = (*what, "model", "max_tokens", "n", "stream", "stream_options", *_SAMPLING)
    content = object_of(body, (*ours, *_NEUTRAL, *_OF_THE_CALLER))
    content = {key: value for key, value in content.items() if value is not None}
    for key, neutral in _NEUTRAL.items():
        if key in content and content[key] not in neutral:
            shown = json.dumps(content[key])[:60]
            raise RequestError(400, f'"{key}" is {shown}, which this server does not have')
    if content.get("model") != name:
        shown = json.dumps(content.get("model"))[:60]
        raise RequestError(404, f'"model" is {shown}; this server has "{name}"')
    stream, n = content.get("stream", False), content.get("n", 1)
    options = content.get("stream_options", {})
    if not isinstance(stream, bool):
        raise RequestError(400, f'"stream" is {kind_of(stream)}; give true or false')
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise RequestError(400, '"stream_options" has "include_usage" alone')
    if why := checks.Integer(1, limits.max_lines)(n):
        raise RequestError(400, str(ParamError("n", json.dumps(n), why)))
    messages = _messages(content.get("messages")) if chat else ()
    texts = [] if chat else _prompts(content.get("prompt"))
    if stream and (n > 1 or len(texts) > 1):
        raise RequestError(400, '"stream" is of one text: leave "n" out, and send one prompt')
    if (count := n if chat else n * len(texts)) > limits.max_lines:  # before they are made
        raise RequestError(
            413, f"{count} lines; at most {limits.max_lines} in a request: send them in parts"
        )
    lines = [text.encode("utf-8", "replace") for text in texts for _ in range(n)]
    sizes = [message["content"].encode("utf-8", "replace") for message in messages]
    check_sizes(sizes or lines, limits)
    content = {"temperature": float(draws), **content}
    sampling = _sampling(content, most if chat else min(_COMPLETION_TOKENS, most), most)
    settings = [Sampling(**sampling, number=i) for i in range(count)]
    with_usage = bool(options.get("include_usage"))
    form: Literal["prompts", "stream"] = "stream" if stream else "prompts"
    return OpenAiRequest(lines, None, form, settings, messages, n, with_usage)


def _sampling(content: Mapping[str, Any], default: int, most: int) -> dict[str, Any]:
    """The fields of Sampling. Raises RequestError."""
    limit = content.get("max_completion_tokens", content.get("max_tokens", default))
    fields = {"max_tokens": limit, "seed": secrets.randbelow(_LARGEST_SEED)}
    fields |= {name: content[name] for name in _SAMPLING if name in content}
    if isinstance(fields["seed"], int):  # OpenAI's have 64 bits
        fields["seed"] %= _LARGEST_SEED
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    for name, value in fields.items():
        if why := Sampling.RANGES[name](value):
            raise RequestError(400, str(ParamError(name, json.dumps(value), why)))
    if limit > most:
        raise RequestError(400, f"max_tokens={limit}: this model gives at most {most}")
    return {**fields, "stop": tuple(fields.get("stop", ()))}


def _prompts(prompt: Any) -> list[str]:
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError(400, '"prompt": give a string or a list of strings; ids are not taken')
    return texts


def _messages(messages: Any) -> list[dict[str, str]]:
    """Role and content of each message, whose parts of text are put together. Raises RequestError."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, '"messages": give a list of {"role": "user", "content": "..."}')
    read = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(400, f'messages[{i}]: give an object with "role" and "content"')
        keys = {key for key, value in message.items() if value not in (None, [])}
        if more := sorted(keys - {"role", "content", "name"}):
            raise RequestError(
                400, f'messages[{i}] has "{more[0]}", which this server does not read'
            )
        content = message.get("content")
        parts: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
        try:
            assert all(part["type"] == "text" for part in parts)
            text = "".join(part["text"] for part in parts)
        except (TypeError, KeyError, AssertionError):
            raise RequestError(
                400, f"messages[{i}].content: give a string, or parts of the type text"
            ) from None
        read.append({"role": message["role"], "content": text})
    return read


class OpenAiAnswer:
    """The answer to a request, whole or in events."""

    def __init__(self, name: str, chat: bool):
        self._chat = chat
        prefix, kind = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
        self._about = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": name,
        }

    def Whole(self, translations: Sequence[Translation], n: int) -> dict[str, Any]:
        """The body for all answers, n of each prompt."""
        choices, about = [], [t.about or {} for t in translations]
        for i, (translation, one) in enumerate(zip(translations, about)):
            text = translation.texts[0]
            message = {"role": "assistant", "content": text, "refusal": None}
            content = {"message": message} if self._chat else {"text": text}
            choices.append(self._Choice(i, content, one["finish_reason"]))
        read = sum(one["prompt_tokens"] + 1 for one in about[::n])
        usage = _usage(read, sum(one["tokens"] for one in about))
        return {**self._about, "choices": choices, "usage": usage}

    def Events(self, text: str, end: Any, first: bool, with_usage: bool) -> list[Any]:
        """The events of a step: `end` is the Continuation at the last one, else None."""
        parts: list[tuple[dict[str, Any], str | None]] = []
        if self._chat:
            if first:
                parts.append(({"delta": {"role": "assistant", "content": ""}}, None))
            if text:
                parts.append(({"delta": {"content": text}}, None))
            if end:
                parts.append(({"delta": {}}, end.finish_reason))
        elif text or end:
            parts.append(({"text": text}, end.finish_reason if end else None))
        more = {"usage": None} if with_usage else {}
        about = {**self._about, "object": "chat.completion.chunk"} if self._chat else self._about
        events: list[Any] = [
            {**about, "choices": [self._Choice(0, *part)], **more} for part in parts
        ]
        if end and with_usage:
            usage = _usage(end.prompt_tokens + 1, end.tokens)
            events.append({**about, "choices": [], "usage": usage})
        return events

    def _Choice(self, index: int, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def openai_error(status: int, message: str) -> dict[str, Any]:
    """The body of an error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = "model_not_found" if status == 404 else None
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def model_entry(name: str) -> dict[str, Any]:
    """A model in the list of models."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "lingvo_moe"}


def _usage(prompt: int, completion: int) -> dict[str, int]:
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
