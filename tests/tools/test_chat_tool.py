"""tools.chat: what is asked and answered in a conversation, and what ends an answer, a conversation and the chat."""

import builtins
from types import SimpleNamespace

import pytest

from lingvo_moe.tasks.text.vocabulary import chat as conversations
from tools import _cli, _models, _published, chat

LONGEST = 20


@pytest.fixture
def asked(monkeypatch):
    """The conversations that the model is asked to continue, with the number of each draw."""
    asked = []

    def stream(ids, sampling):
        asked.append((ids, sampling.number))
        if ids[-1:] == ["stop"]:
            yield "so ", None
            raise KeyboardInterrupt
        yield from [("an ", None), ("answer", "whole")]

    model = SimpleNamespace(max_source_length=LONGEST)
    generator = SimpleNamespace(Stream=stream, vocabulary=None, options=model)
    words = SimpleNamespace(Ids=lambda messages: " ".join(m["content"] for m in messages).split())
    monkeypatch.setattr(_cli, "load_tensorflow", lambda: None)
    monkeypatch.setattr(_published, "imported", lambda args: None)
    monkeypatch.setattr(
        _models, "open_generator", lambda args, most: (generator, {"model": "lm.X"})
    )
    monkeypatch.setattr(conversations, "chat_of", lambda vocabulary: words)
    return asked


def _chat(monkeypatch, lines, *flags):
    typed = iter(lines)

    def read(prompt):
        line = next(typed, EOFError)
        if line in (EOFError, KeyboardInterrupt):
            raise line
        return line

    monkeypatch.setattr(builtins, "input", read)
    return chat.main(["--logdir=RUN", *flags])


def test_a_conversation_goes_on_until_a_new_one(asked, monkeypatch, capsys):
    lines = ["one", " ", "stop", "three", "/new", "four"]
    assert _chat(monkeypatch, lines, "--system=be kind") == 0
    first = ["be", "kind", "one"]
    second = [*first, "an", "answer", "stop"]
    expected = [first, second, [*second, "so", "three"], ["be", "kind", "four"]]
    assert asked == [([], 0), *((ids, number) for number, ids in enumerate(expected))]
    assert capsys.readouterr().out == "an answer\nso  …\nan answer\nan answer\n\n"


def test_a_conversation_that_is_too_long_is_named_and_goes_on_without_the_message(
    asked, monkeypatch, capsys
):
    lines = ["one", "word " * LONGEST, "two", KeyboardInterrupt, "three"]
    assert _chat(monkeypatch, lines) == 0
    assert [ids for ids, _ in asked[1:]] == [["one"], ["one", "an", "answer", "two"]]
    assert "the conversation has 23 tokens: /new begins again" in capsys.readouterr().err
