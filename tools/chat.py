"""Talks with a language model in a terminal: each line is answered, token by token.

    python -m tools.chat --from=model.gguf
    python -m tools.chat --logdir=RUN --temperature=0.2 --top_p=0.9

The model needs a chat template (docs/importing.md). /new begins another conversation; Ctrl-C ends an answer, and the
chat where there is none; so does Ctrl-D.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lingvo_moe.core.console.command import say
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.decode.ranges import LENGTH, Sampling

from . import _cli, _models, _published

if TYPE_CHECKING:  # it imports TensorFlow
    from lingvo_moe.tasks.lm.saved_generator import Texts

_NEW = "/new"


def define_flags() -> Flags:
    flags, ranges = Flags("python -m tools.chat", __doc__), Sampling.RANGES
    _cli.define_model_flags(flags)
    _published.define_from_flag(flags)
    flags.DEFINE_string("system", "", "a message that begins each conversation")
    flags.DEFINE_integer("max_tokens", 512, "tokens of an answer at most", ranges["max_tokens"])
    help = "draw tokens, by logits divided by this; 0: take the most likely one"
    flags.DEFINE_float("temperature", 0.0, help, ranges["temperature"])
    help = "draw one of the fewest tokens that have this probability together"
    flags.DEFINE_float("top_p", 1.0, help, ranges["top_p"])
    flags.DEFINE_integer("seed", 0, "of what is drawn", ranges["seed"])
    with flags.Section("with --logdir (an exported model has these inside)"):
        _cli.define_run_flags(flags)
        help = f"tokens of a conversation at most (default: {_cli.CHAT_LENGTH})"
        flags.DEFINE_integer("max_source_length", None, help, LENGTH)
        _cli.define_weights_flag(flags)
    of_runs = "checkpoint_step average_last use_ema max_source_length weights"
    flags.OnlyWith(of_runs, "it was fixed when the model was exported", logdir=True)
    flags.OnlyWith("trust_run", "an exported model names no classes", logdir=True)
    flags.OnlyWith("top_p seed", "nothing is drawn", temperature=True)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("chat", lambda: _run(args))


def _run(args: Flags) -> int:
    say("chat: loading the model; the first time its program is traced, which takes up to a minute")
    _cli.load_tensorflow()
    _published.imported(args)
    from lingvo_moe.tasks.text.vocabulary.chat import chat_of

    generator, about = _models.open_generator(args, args.max_tokens)
    chat = chat_of(generator.vocabulary)
    list(generator.Stream(chat.Ids([{"role": "user", "content": ""}]), Sampling(1)))
    say(f"chat: {about.get('model', args.saved_model)}; {_NEW} begins again, Ctrl-D ends")
    system = [{"role": "system", "content": args.system}] * bool(args.system)
    messages, number = list(system), 0
    for text in _lines():
        if text == _NEW:
            messages = list(system)
            continue
        asked = [*messages, {"role": "user", "content": text}]
        names = ("max_tokens", "temperature", "top_p", "seed")
        sampling = Sampling(**{name: getattr(args, name) for name in names}, number=number)
        number += 1
        try:
            ids = chat.Ids(asked)
            if len(ids) > generator.options.max_source_length:
                raise ValueError(f"the conversation has {len(ids)} tokens: {_NEW} begins again")
        except ValueError as e:
            say(f"chat: {e}")
            continue
        messages = [*asked, {"role": "assistant", "content": _answer(generator, ids, sampling)}]
    return 0


def _lines() -> Iterator[str]:
    """The lines that are typed, until Ctrl-C or Ctrl-D."""
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text:
            yield text


def _answer(generator: "Texts", ids: Sequence[int], sampling: Sampling) -> str:
    """Prints an answer as it comes, up to Ctrl-C, and returns it."""
    parts = list[str]()
    try:
        for part, _ in generator.Stream(ids, sampling):
            print(part, end="", flush=True)
            parts.append(part)
    except KeyboardInterrupt:
        print(" …", end="")
    print()
    return "".join(parts)


if __name__ == "__main__":
    _cli.run(main)
