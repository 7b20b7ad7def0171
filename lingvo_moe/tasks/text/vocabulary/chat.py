"""Conversations as the ids that a model continues, by the chat template of its tokenizer."""

import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.vocabulary.tokenizer_json import JsonVocabulary

_SECONDS = 5.0  # that a template may take
Message = Mapping[str, str]  # "role", e.g. user, and "content"


class Chat:
    """The conversations of a vocabulary with a chat template, which is a program that others wrote.

    It runs in Jinja2's sandbox, in a process with limits of memory and time, which is started when it is needed and
    ends with this one. A message that spells a mark, e.g. that of a turn's end, is refused.
    """

    def __init__(self, vocabulary: JsonVocabulary, seconds: float = _SECONDS):
        """Raises DataError: the vocabulary has no chat template."""
        if not vocabulary.chat_template:
            raise DataError("this model's tokenizer has no chat template: it continues texts only")
        self._vocabulary, self._seconds = vocabulary, seconds
        longest_first = sorted(vocabulary.special, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._special = {*vocabulary.special} - {vocabulary.marks.get("unk_token")}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def Ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation and of what begins the answer, with all marks.

        Raises DataError: the template refuses the conversation, fails, or takes too long; or a message spells a mark.
        """
        for number, message in enumerate(messages, 1):
            for text in message.values():
                if mark := self._marks.search(text):
                    raise DataError(
                        f"message {number} spells {mark[0]}, a mark of this model's conversations: leave it out"
                    )
        text = self.Text(messages)
        ids = self._vocabulary.EncodeMarked(text)
        if not ids:
            raise DataError("the chat template makes nothing of this conversation")
        # Some tokenizers look for marks in what they have normalized: those have to be in the text already.
        spelled = Counter(mark[0] for mark in self._marks.finditer(text))
        made = Counter(piece for piece in self._vocabulary.Pieces(ids) if piece in self._special)
        if more := [*(made - spelled)]:
            raise DataError(
                f"a message spells {more[0]} in other letters, a mark of this model's conversations: leave it out"
            )
        return ids

    def Text(self, messages: Sequence[Message]) -> str:
        """The text of a conversation and of what begins the answer. Raises DataError, as Ids."""
        variables = {
            **self._vocabulary.marks,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        with self._lock:
            answer = self._Ask(variables)
        if "text" not in answer:
            raise DataError(f"the chat template: {answer['error']}")
        return answer["text"]

    def _Ask(self, variables: Mapping[str, Any]) -> dict[str, str]:
        """The answer of the process, which ends where it does not answer in time."""
        contents = [variables]
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(Path(__file__).with_name("render_chat.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            contents.insert(0, {"template": self._vocabulary.chat_template})
        assert self._process.stdout
        end = threading.Timer(self._seconds, self._process.kill)  # while it is written to, too
        end.start()
        for content in contents:
            self._Send(content)
        line = self._process.stdout.readline()
        end.cancel()
        if line.endswith(b"\n"):
            return json.loads(line)
        self.Close()
        return {"error": f"has not answered within {self._seconds:g} s, or needs too much memory"}

    def _Send(self, content: Mapping[str, Any]) -> None:
        assert self._process and self._process.stdin
        try:
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # it ended; nothing comes back
            pass

    def Close(self) -> None:
        """Ends the process."""
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None


def chat_of(vocabulary: JsonVocabulary | None) -> Chat:
    """The conversations of a generator's vocabulary, None for one of SentencePiece. Raises DataError: it has none."""
    if vocabulary is None:
        raise DataError("this model's vocabulary has no chat template: it continues texts only")
    return Chat(vocabulary)
