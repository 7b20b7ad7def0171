"""Continues prompts with a language model: each input line gives one output line.

    python -m tools.generate --logdir=RUN <prompts.txt
    python -m tools.generate --saved_model=DIR --input=prompts.txt --output=texts.jsonl --json --temperature=0.8

A prompt is a line, or in a JSON object (--field). Its continuation is the most likely next token, again and again; or
with --temperature one that is drawn; or with --beam_size the most likely text that a beam search finds. It ends where
the model ends the text, before a --stop, or after --max_tokens. A text depends on its prompt, the number of its line
and --seed, not on other lines. With --json a line is an object: prompt, text, tokens and prompt_tokens (how many they
are), finish_reason ("stop" where the model or a --stop ended the text, or "length"), finished (whether it was "stop"),
and with --logprobs each token; with --n, samples is a list of such objects without the prompt.
"""

import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.decode.ranges import Sampling
from lingvo_moe.tasks.text.decoding.line_stream import Line

from . import _cli, _lines, _mesh, _models, _published

if TYPE_CHECKING:  # it imports TensorFlow
    from lingvo_moe.tasks.lm.saved_generator import Continuation

_INTEGERS = {
    "max_tokens": "new tokens at most",
    "top_k": "draw one of this many most likely tokens; 0: of all",
    "seed": "of what is drawn",
}
_NUMBERS = {
    "temperature": "draw tokens, by logits divided by this; 0: take the most likely one",
    "top_p": "draw one of the fewest tokens that have this probability together",
    "min_p": "draw only tokens with at least this share of the likeliest one's probability; 0: all",
    "repetition_penalty": "divide the logits of tokens that the prompt or the text has; 1: nothing",
}


def define_flags() -> Flags:
    flags, defaults = Flags("python -m tools.generate", __doc__), Sampling()
    _cli.define_model_flags(flags)
    _published.define_from_flag(flags)
    _lines.define_flags(flags, "prompts", languages=False)
    _lines.define_field_flag(flags)
    flags.DEFINE_boolean("json", False, "write JSON lines")
    for name, help in _INTEGERS.items():
        flags.DEFINE_integer(name, getattr(defaults, name), help, Sampling.RANGES[name])
    for name, help in _NUMBERS.items():
        flags.DEFINE_float(name, getattr(defaults, name), help, Sampling.RANGES[name])
    flags.DEFINE_multi_string("stop", "a text that ends the continuation, which is without it")
    flags.DEFINE_boolean("logprobs", False, "with --json: each token and its log-probability")
    flags.DEFINE_integer(
        "n", 1, "with --json and --temperature: samples of each prompt", checks.SIZE
    )
    _cli.define_search_flags(flags, translates=False)
    _models.define_draft_flag(flags)
    _mesh.define_flags(flags)
    flags.OnlyWith("top_k top_p min_p seed n", "nothing is drawn", temperature=True)
    flags.OnlyWith("logprobs n", "a line has one text", json=True)
    not_of_a_beam = "temperature repetition_penalty stop logprobs"
    flags.OnlyWith(not_of_a_beam, "a beam search has none of these", beam_size=(None, 1))
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    if args.length_alpha is not None and (args.beam_size or 1) == 1:
        flag = f"--length_alpha={args.length_alpha}"
        args.Fail(f"{flag} goes with a --beam_size of 2 or more: greedy search has one text")
    if why := Sampling.RANGES["stop"](args.stop):
        args.Fail(f"--stop={args.stop}: {why}")
    return _mesh.attempt("generate", lambda: _run(args))


def _run(args: Flags) -> int:
    with _lines.opened(args) as (source, sink):
        _mesh.load_tensorflow(args)
        _published.imported(args)
        generator, _ = _models.open_generator(args, args.max_tokens)
        numbers, texts_of = itertools.count(), _lines.text_reader(args)
        settings = {name: getattr(args, name) for name in (*_INTEGERS, *_NUMBERS, "logprobs")}
        settings["stop"] = tuple(args.stop)

        def answer(lines: list[Line]) -> list[tuple[str, str]]:
            prompts = texts_of(lines)
            repeated = [prompt for prompt in prompts for _ in range(args.n)]
            samplings = [Sampling(**settings, number=next(numbers)) for _ in repeated]
            continuations = generator.Generate(repeated, samplings)
            samples = [continuations[i : i + args.n] for i in range(0, len(continuations), args.n)]
            texts = [some[0].text for some in samples]
            if args.json:
                texts = [_as_json(*one) for one in zip(prompts, samples, strict=True)]
            cut = (line.is_cut or some[0].truncated for line, some in zip(lines, samples))
            return [(text, _TOO_LONG if was else "") for text, was in zip(texts, cut)]

        return _lines.answer_all("generate", args, answer, source, sink)


_TOO_LONG = "is too long: its beginning is not read"


def _as_json(prompt: bytes, samples: Sequence["Continuation"]) -> str:
    records = [{"text": one.text, **one.About()} for one in samples]
    fields: dict[str, object] = records[0] if len(records) == 1 else {"samples": records}
    shown = {"prompt": prompt.decode("utf-8", "replace"), **fields}
    return json.dumps(shown, ensure_ascii=False)


if __name__ == "__main__":
    _cli.run(main)
