"""OpenAI's endpoints: bodies as its client package sends them, answers and streams as it reads them."""

import importlib.util
import json
import sys

import pytest
from local_server import Echo, running

from lingvo_moe.tasks.text.serving.limits import Limits
from lingvo_moe.tasks.text.serving.openai_bodies import parse_openai
from lingvo_moe.tasks.text.serving.request_error import RequestError
from tools.import_graph import ROOT

_USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
USER = {"role": "user", "content": "red green"}


class Counting(Echo):
    """Says of each answer that its prompt had four tokens, and it three."""

    def About(self, line):
        return {"tokens": 3, "prompt_tokens": 4, "finish_reason": "length"}


@pytest.fixture(scope="module")
def server():
    with running(Counting(), Limits(max_lines=4, max_line_chars=40)) as it:
        yield it


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    if importlib.util.find_spec("tokenizers") is None:
        pytest.skip("needs tokenizers: pip install --no-deps -r requirements-tokenizers.txt")
    sys.path.append(str(ROOT / "tests/tasks/text/vocabulary"))
    from test_tokenizer_json import save_tokenizer

    from lingvo_moe.tasks.text.vocabulary.tokenizer_json import CONFIG, JsonVocabulary

    directory = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    config = json.loads((directory / CONFIG).read_text())
    template = "{% for m in messages %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}"
    (directory / CONFIG).write_text(json.dumps({**config, "chat_template": template}))
    with running(Counting(vocabulary=JsonVocabulary.Load(directory))) as it:
        yield it


def _events(reply):
    assert reply.headers["Content-Type"] == "text/event-stream; charset=UTF-8"
    *events, done, end = reply.body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_models(server):
    entry = {"id": "translator", "object": "model", "created": 0, "owned_by": "lingvo_moe"}
    assert server.Ask("GET", "/v1/models").content == {"object": "list", "data": [entry]}
    assert entry.items() <= server.Ask("GET", "/v1/models/translator").content.items()


def test_completions(server):
    asked = {"model": "translator", "prompt": ["a b", "c"], "n": 2, "seed": 2**40 + 3, "user": "x"}
    content = server.Ask("POST", "/v1/completions", asked).content
    texts = ["a b 3.0", "a b 3.1", "c 3.2", "c 3.3"]
    assert content["choices"] == [
        {"index": i, "text": text, "logprobs": None, "finish_reason": "length"}
        for i, text in enumerate(texts)
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": 12, "total_tokens": 22}
    assert (content["object"], content["model"]) == ("text_completion", "translator")
    assert content["usage"] == usage and content["id"].startswith("cmpl-")
    more = {"stream": True, "stream_options": {"include_usage": True}}
    asked = {"model": "translator", "prompt": "a b", **more, "max_tokens": None, "stop": "x"}
    *chunks, last = _events(server.Ask("POST", "/v1/completions", asked))
    found = [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks]
    assert found == [(" a", None), (" b", None), ("", "length")]
    assert (last["choices"], last["usage"]) == ([], _USAGE)


def test_a_beam_is_asked_without_a_temperature():
    asked = {"model": "translator", "prompt": "a"}
    with running(Counting(beam_size=2)) as server:
        assert server.Ask("POST", "/v1/completions", asked).status == 200
        reply = server.Ask("POST", "/v1/completions", {**asked, "temperature": 0.5})
        assert "leave out temperature" in reply.content["error"]["message"]


def test_chats(chatting):
    parts = [{"type": "text", "text": "red "}, {"type": "text", "text": "green"}]
    asked = {"model": "translator", "messages": [USER], "seed": 1, "max_completion_tokens": 9}
    for content in ("red green", parts):
        asked["messages"] = [{"role": "user", "content": content}]
        reply = chatting.Ask("POST", "/v1/chat/completions", asked).content
        (choice,) = reply["choices"]
        message = {"role": "assistant", "content": "user red green  1.0", "refusal": None}
        assert (choice["message"], choice["finish_reason"]) == (message, "length")
        assert (reply["object"], reply["usage"]) == ("chat.completion", _USAGE)
    chunks = _events(chatting.Ask("POST", "/v1/chat/completions", {**asked, "stream": True}))
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1 and "usage" not in chunks[-1]
    first, *deltas = [c["choices"][0] for c in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert [d["delta"] for d in deltas] == [{"content": f" {w}"} for w in USER_WORDS] + [{}]
    assert deltas[-1]["finish_reason"] == "length"
    too_long = [{"role": "user", "content": "a " * 300}]
    reply = chatting.Ask("POST", "/v1/chat/completions", {**asked, "messages": too_long})
    assert reply.status == 400 and "tokens; at most 200 here" in reply.content["error"]["message"]
    page = chatting.Ask("GET", "/")
    assert page.status == 200 and b"v1/chat/completions" in page.body


USER_WORDS = ["user", "red", "green"]


@pytest.mark.parametrize(("more", "status", "message"), [
    ({"model": "gpt"}, 404, '"model" is "gpt"; this server has "translator"'),
    ({"prompt": [1, 2]}, 400, '"prompt": give a string or a list of strings'),
    ({"logprobs": 2}, 400, '"logprobs" is 2, which this server does not have'),
    ({"presence_penalty": 0.5}, 400, '"presence_penalty" is 0.5, which'),
    ({"temprature": 1}, 400, 'no field "temprature" (did you mean'),
    ({"temperature": "hot"}, 400, 'temperature="hot": must be'),
    ({"seed": "x"}, 400, 'seed="x": must be'),
    ({"max_tokens": 51}, 400, "max_tokens=51: this model gives at most 50"),
    ({"n": 0}, 400, "n=0: must be"),
    ({"n": 2, "stream": True}, 400, '"stream" is of one text'),
    ({"n": 4, "prompt": ["a", "b"]}, 413, "8 lines; at most 4"),
    ({"prompt": "a" * 41}, 413, "line 1 has 41 characters"),
    ({"stream_options": {"x": 1}}, 400, '"stream_options" has'),
])  # fmt: skip
def test_refusals_have_openai_s_form(server, more, status, message):
    asked = {"model": "translator", "prompt": "a", **more}
    reply = server.Ask("POST", "/v1/completions", asked)
    error = reply.content["error"]
    assert (reply.status, error["message"][: len(message)]) == (status, message)
    assert error["type"] == "invalid_request_error" and error.keys() >= {"param", "code"}


def test_a_short_body_does_not_become_many_lines():
    asked = {"model": "m", "prompt": ["a"] * 100_000, "n": 128}
    with pytest.raises(RequestError, match="12800000 lines; at most 128 in a request"):
        parse_openai(json.dumps(asked).encode(), Limits(), 9, "m", False)


@pytest.mark.parametrize(("messages", "message"), [
    (None, '"messages": give a list'),
    ([{"role": "user"}], "messages[0].content: give a string, or parts"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
    ([{"content": "a"}], "messages[0]: give an object"),
    ([{**USER, "tool_calls": [1]}], 'messages[0] has "tool_calls"'),
    ([USER], "this model has no chat template"),
])  # fmt: skip
def test_conversations_that_are_refused(server, messages, message):
    asked = {"model": "translator", "messages": messages, "tools": [], "frequency_penalty": 0.0}
    reply = server.Ask("POST", "/v1/chat/completions", asked)
    assert (reply.status, reply.content["error"]["message"][: len(message)]) == (400, message)
