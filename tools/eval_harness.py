"""Evaluates a language model by lm-evaluation-harness (lm_eval), which has the tasks and the measures.

    python -m tools.eval_harness --logdir=RUN --tasks=lambada_openai,hellaswag --limit=200 --output=results.json

lm_eval is not among the requirements: `pip install lm_eval`. It fetches the data of tasks from the internet. The model
answers its three kinds of requests: the log-probability of a continuation, and whether greedy search finds it; that of
a whole text, in pieces of --max_length tokens; and texts up to a stop. A context that is too long loses its beginning.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lingvo_moe.core.config import checks
from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.decode.ranges import LENGTH, Sampling
from lingvo_moe.core.files.files import write_atomic

from . import _cli

if TYPE_CHECKING:  # they import TensorFlow
    from lingvo_moe.tasks.lm.saved_generator import Texts
    from lingvo_moe.tasks.text.quality.forced_decoding import Scorer

_SAME = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# The settings of a request for a text, with what Sampling calls them; others are refused.
_SETTINGS = {"max_gen_toks": "max_tokens", **dict(zip(_SAME, _SAME))}


class HarnessModel:
    """The requests of lm_eval's class LM; one of a request is an object with `args`.

    Args:
        scorer: of a language model.
        generator: of the same one.
    """

    def __init__(self, scorer: "Scorer", generator: "Texts"):
        self._scorer, self._generator = scorer, generator

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, in nats, and whether each of its tokens is the likeliest.

        `args` are context and continuation.
        """
        del disable_tqdm
        parts = [self._Split(*request.args) for request in requests]
        scores = self._scorer.ScoreIds([[*before, *after] for before, after in parts])
        return [
            (float(log_probs[-len(after) :].sum()), bool(likeliest[-len(after) :].all()))
            if after
            else (0.0, True)
            for (_, after), (log_probs, likeliest) in zip(parts, scores, strict=True)
        ]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each text, in nats; `args` is the text.

        Each token counts once. Those of a text of several pieces are given the last token of the piece before.
        """
        del disable_tqdm
        pieces = [list(self._Pieces(self._scorer.Encode(request.args[0]))) for request in requests]
        scores = iter(self._scorer.ScoreIds([ids for text in pieces for ids, _ in text]))
        return [sum(float(next(scores)[0][-new:].sum()) for _, new in text) for text in pieces]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text that continues each context, up to a stop; `args` are the context and a dictionary of settings.

        Raises ValueError: an unknown setting.
        """
        del disable_tqdm
        contexts, settings = zip(*(request.args for request in requests), strict=True)
        most = self._generator.options.max_length
        samplings = [_sampling(one, number, most) for number, one in enumerate(settings)]
        return [one.text for one in self._generator.Generate(contexts, samplings)]

    def _Split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of a context and those of its continuation, at most as many as a row has together."""
        blanks = len(context) - len(context.rstrip())
        if blanks:  # tokens begin with their blank
            context, continuation = context[:-blanks], context[-blanks:] + continuation
        begin = len(self._scorer.Encode(context))
        ids = self._scorer.Encode(context + continuation)
        after = ids[begin:][-self._scorer.most_ids :]
        return ids[:begin][max(0, begin + len(after) - self._scorer.most_ids) :], after

    def _Pieces(self, ids: list[int]) -> Iterator[tuple[list[int], int]]:
        """The pieces of a text, and how many ids at the end of each are new."""
        most = self._scorer.most_ids
        if ids:
            yield ids[:most], len(ids[:most])
        for start in range(most, len(ids), most - 1):
            new = ids[start : start + most - 1]
            yield [ids[start - 1], *new], len(new)


def _sampling(settings: Mapping[str, Any], number: int, most: int) -> Sampling:
    until = settings.get("until") or ()
    stops = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
    allowed = {"until", "do_sample", *_SETTINGS}
    if unknown := settings.keys() - allowed:
        raise ValueError(
            f"generation_kwargs has {', '.join(sorted(unknown))}; known are {', '.join(sorted(allowed))}"
        )
    values = {new: settings[name] for name, new in _SETTINGS.items() if name in settings}
    values.setdefault("max_tokens", min(256, most))
    if not settings.get("do_sample", True):
        values["temperature"] = 0.0
    return Sampling(**values, stop=stops, number=number)


def define_flags() -> Flags:
    flags = Flags("python -m tools.eval_harness", __doc__)
    _cli.define_logdir_flag(flags)
    flags.DEFINE_string("tasks", None, "tasks of lm_eval, with commas between them", required=True)
    flags.DEFINE_integer(
        "num_fewshot", None, "examples in a context (default: the task's)", checks.COUNT
    )
    flags.DEFINE_integer("limit", None, "examples of a task at most (default: all)", checks.SIZE)
    flags.DEFINE_integer("max_length", 1024, "tokens of a context and its continuation", LENGTH)
    flags.DEFINE_integer("max_gen_toks", 256, "new tokens that a task may ask for", LENGTH)
    flags.DEFINE_path("output", None, "a file for all results, as JSON")
    _cli.define_run_flags(flags)
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    args = define_flags().Parse(argv)
    return _cli.attempt("eval_harness", lambda: _run(args))


def _run(args: Flags) -> int:
    _cli.check_output_files(args, "output")
    table, results = _evaluated(args, lambda: _opened(args))
    print(table)
    if args.output:
        write_atomic(args.output, (json.dumps(results, indent=2, default=str) + "\n").encode())
        _cli.made(args.output)
    return 0


def _evaluated(
    args: Flags, open_model: Callable[[], tuple["Scorer", "Texts"]]
) -> tuple[str, dict[str, Any]]:
    """The results of lm_eval, as its table and by task."""
    try:
        import lm_eval
        from lm_eval.api.model import LM
        from lm_eval.utils import make_table
    except ImportError as e:
        raise ValueError(f"lm_eval is not installed ({e}): pip install lm_eval") from None

    class Model(HarnessModel, LM):
        def __init__(self, *parts: Any):
            LM.__init__(self)
            HarnessModel.__init__(self, *parts)

    _cli.load_tensorflow()
    results = lm_eval.simple_evaluate(
        model=Model(*open_model()),
        tasks=list(_cli.names(args.tasks)),
        num_fewshot=args.num_fewshot,
        limit=args.limit,
    )
    return make_table(results), results["results"]


def _opened(args: Flags) -> tuple["Scorer", "Texts"]:
    from lingvo_moe.tasks.lm.generator import GenerateOptions, load_generator
    from lingvo_moe.tasks.text.quality.forced_decoding import ScoreOptions, Scorer

    weights = _cli.chosen(args)
    options = GenerateOptions(max_source_length=args.max_length, max_length=args.max_gen_toks)
    generator, _ = load_generator(args.logdir, options, weights, args.trust_run)
    score = ScoreOptions(max_length=args.max_length)
    return Scorer(args.logdir, score, weights, args.trust_run), generator


if __name__ == "__main__":
    _cli.run(main)
