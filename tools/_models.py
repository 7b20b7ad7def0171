"""Opens the model of --logdir or --saved_model, for the commands that translate, score, generate and serve."""

from typing import TYPE_CHECKING, Any

from lingvo_moe.core.console.flags import Flags
from lingvo_moe.core.runs.run_dir import RunDir

from . import _cli, _mesh

if TYPE_CHECKING:  # they import NumPy or TensorFlow
    from lingvo_moe.tasks.lm.generator import Generator
    from lingvo_moe.tasks.lm.saved_generator import SavedGenerator
    from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator
    from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, Translator


def define_draft_flag(flags: Flags) -> None:
    """Defines --draft, which generator_from_run reads; after define_model_flags and --beam_size."""
    help = (
        "a run of a small language model with the same vocabulary, which proposes tokens: that of --logdir reads "
        "several at once, and texts stay the same (docs/language_models.md)"
    )
    flags.DEFINE_path("draft", None, help, address=True)
    flags.OnlyWith("draft", "an exported model has no function that verifies tokens", logdir=True)
    flags.OnlyWith("draft", "a beam search reads one token at a time", beam_size=(None, 1))


def load_from_run(args: Flags, options: "TranslateOptions") -> "tuple[Translator, dict[str, Any]]":
    """Calls `load_translator` for --logdir with the flags of define_search_flags, or `load_ensemble` for several runs.

    Raises ValueError, OSError.
    """
    from lingvo_moe.core.engine.compiled_cache import enable_compilation_cache
    from lingvo_moe.tasks.mt.decoding.ensemble import load_ensemble
    from lingvo_moe.tasks.mt.decoding.translator import load_translator

    enable_compilation_cache()  # which keeps the traced search
    if draft := args.Values().get("draft"):
        raise ValueError(f"--draft={draft} is for language models, and {args.logdir} is none")
    runs = _cli.logdirs(args)
    if len(runs) == 1:
        engine = _mesh.engine_of(args)
        weights = _cli.chosen(args)
        loaded = load_translator(runs[0], options, weights, args.shortlist, args.trust_run, engine)
        _mesh.lead(loaded[0].mesh_search)
        return loaded
    _mesh.refuse(args, f"--logdir={args.logdir}: an ensemble runs on one host")
    if args.shortlist:
        raise ValueError(f"--shortlist={args.shortlist} goes with one run, not with an ensemble")
    return load_ensemble([(run, _cli.chosen(args, run)) for run in runs], options, args.trust_run)


def open_translator(args: Flags) -> "tuple[Translator | SavedTranslator, dict[str, Any]]":
    """Returns the Translator of --logdir or the SavedTranslator of --saved_model, and a description of the model.

    Raises:
        ValueError: nothing there, or a damaged checkpoint.
    """
    if args.saved_model:
        from lingvo_moe.tasks.mt.decoding.saved_translator import SavedTranslator

        translator = SavedTranslator(args.saved_model)
        about = {k: v for k, v in translator.about.items() if k == "target_language"}
        return translator, {"saved_model": str(args.saved_model), **about}
    options = _cli.search_options(args, args.Values().get("nbest") or 1)
    translator, about = load_from_run(args, options)
    return translator, {"logdir": str(args.logdir), **about}


def is_language_model(args: Flags) -> bool:
    """Whether --saved_model or --logdir is of a language model, by its description; TensorFlow is loaded."""
    from lingvo_moe.tasks.lm.lm_model import LmModel
    from lingvo_moe.tasks.text.decoding.saved_functions import use_of

    if "saved_model" in args.Names() and args.saved_model:
        return use_of(args.saved_model) == "generate"
    task = RunDir(_cli.logdirs(args)[0], trust_run=args.trust_run).Params().task
    return issubclass(task.cls, LmModel)


def generator_from_run(
    args: Flags, max_length: int | None = None
) -> "tuple[Generator, dict[str, Any]]":
    """Loads a language model from a run. `max_length` is the largest number of new tokens; None: --max_length.

    Raises ValueError: also for a flag that only translation has.
    """
    from lingvo_moe.core.engine.compiled_cache import enable_compilation_cache
    from lingvo_moe.tasks.lm.generator import GenerateOptions, load_draft, load_generator
    from lingvo_moe.tasks.text.runs.run_dir import TextRunDir

    if getattr(args, "shortlist", None):
        what = f"{args.logdir} is of a language model; leave it out"
        raise ValueError(f"--shortlist is for translation models: {what}")
    values = {**args.Values(), **({"max_length": max_length} if max_length else {})}
    names = (*_cli.SEARCH_FLAGS, "weights")
    options = {name: values[name] for name in names if values.get(name) is not None}
    if b'"chat_template"' in TextRunDir(args.logdir, trust_run=args.trust_run).vocabs.target:
        options.setdefault("max_source_length", _cli.CHAT_LENGTH)
    enable_compilation_cache()  # which keeps the traced search
    draft = values.get("draft")
    if draft:
        _mesh.refuse(args, f"--draft={draft} is for one host")
    engine = _mesh.engine_of(args)
    asked = (args.logdir, GenerateOptions(**options), _cli.chosen(args), args.trust_run)
    if engine is None:
        loaded = load_generator(*asked)
        if draft:
            try:
                loaded[0].DraftBy(load_draft(draft, GenerateOptions(**options), args.trust_run))
            except ValueError as e:
                raise ValueError(f"--draft={draft}: {e}") from e
        return loaded
    from lingvo_moe.tasks.lm.mesh_generator import load_mesh_generator

    generator, about = load_mesh_generator(engine, *asked)
    _mesh.lead(generator.mesh_search)
    return generator, about


def open_generator(
    args: Flags, max_length: int | None = None
) -> "tuple[Generator | SavedGenerator, dict[str, Any]]":
    """Opens the language model of --logdir or --saved_model; `max_length` as for generator_from_run."""
    if args.saved_model:
        from lingvo_moe.tasks.lm.saved_generator import SavedGenerator

        return SavedGenerator(args.saved_model), {"saved_model": str(args.saved_model)}
    generator, about = generator_from_run(args, max_length)
    return generator, {"logdir": str(args.logdir), **about}
