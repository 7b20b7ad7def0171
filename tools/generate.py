"""Continues prompts with a language model: each input line gives one output line.

    python -m tools.generate --logdir=RUN <prompts.txt
    python -m tools.generate --saved_model=DIR --input=prompts.txt --output=texts.jsonl --json --temperature=0.8

A prompt is a line, or in a JSON object (--field). Its continuation is the most likely next token, again and again; or
with --temperature one that is drawn; or with --beam_size the most likely text that a beam search finds. It ends where
the model ends the text, or after --max_tokens. A text depends on its prompt, the number of its line and --seed, not on
other lines. With --json a line is an object: prompt, text, tokens, finished (whether the model ended the text).
"""

import itertools
import json
from collections.abc import Sequence

from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.tasks.text.decoding.line_stream import Line

from . import _cli, _lines

_INTEGERS = {
    "max_tokens": "new tokens at most",
    "top_k": "draw one of this many most likely tokens; 0: of all",
    "seed": "of what is drawn",
}
_NUMBERS = {
    "temperature": "draw tokens, by logits divided by this; 0: take the most likely one",
    "top_p": "draw one of the fewest tokens that have this probability together",
}


def define_flags() -> Flags:
    flags, defaults = Flags("python -m tools.generate", __doc__), Sampling()
    _cli.define_model_flags(flags)
    _lines.define_flags(flags, "prompts", languages=False)
    _lines.define_field_flag(flags)
    flags.DEFINE_boolean("json", False, "write JSON lines")
    for name, help in _INTEGERS.items():
        flags.DEFINE_integer(name, getattr(defaults, name), help, Sampling.RANGES[name])
    for name, help in _NUMBERS.items():
        flags.DEFINE_float(name, getattr(defaults, name), help, Sampling.RANGES[name])
    _cli.define_search_flags(flags, translates=False)
    flags.OnlyWith("top_k top_p seed", "nothing is drawn", temperature=True)
    flags.OnlyWith("temperature", "a beam search draws nothing", beam_size=(None, 1))
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    if args.length_alpha is not None and (args.beam_size or 1) == 1:
        given = f"--length_alpha={args.length_alpha}"
        args.Fail(f"{given} goes with a --beam_size of 2 or more: greedy search has one text")
    return _cli.attempt("generate", lambda: _run(args))


def _run(args: Flags) -> int:
    with _lines.opened(args) as (source, sink):
        _cli.load_tensorflow()
        generator, _ = _cli.open_generator(args, args.max_tokens)
        numbers, texts_of = itertools.count(), _lines.text_reader(args)
        settings = {name: getattr(args, name) for name in (*_INTEGERS, *_NUMBERS)}

        def answer(lines: list[Line]) -> list[tuple[str, str]]:
            prompts = texts_of(lines)
            each = [Sampling(**settings, number=next(numbers)) for _ in lines]
            out = generator.Generate(prompts, each)
            texts = out.texts
            if args.json:
                columns = zip(prompts, out.texts, out.tokens, out.finished, strict=True)
                texts = [_as_json(*column) for column in columns]
            cut = (line.is_cut or truncated for line, truncated in zip(lines, out.truncated))
            return [(text, _TOO_LONG if was else "") for text, was in zip(texts, cut)]

        return _lines.answer_all("generate", args, answer, source, sink)


_TOO_LONG = "is too long: its beginning is not read"


def _as_json(prompt: bytes, text: str, tokens: int, finished: bool) -> str:
    shown: dict[str, object] = {"prompt": prompt.decode("utf-8", "replace"), "text": text}
    shown |= {"tokens": int(tokens), "finished": bool(finished)}
    return json.dumps(shown, ensure_ascii=False)


if __name__ == "__main__":
    _cli.run(main)
