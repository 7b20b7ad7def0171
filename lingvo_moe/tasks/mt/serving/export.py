"""Loads a run's checkpoint as a Translator or a Generator, and exports it as a SavedModel."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf

from lingvo_moe.core.engine.checkpoints.checkpoints import Checkpointer, CheckpointError
from lingvo_moe.core.engine.checkpoints.run_weights import NEWEST, Chosen, read_newest, read_weights
from lingvo_moe.core.files.copies import upload
from lingvo_moe.core.files.files import not_written, replaced_directory, write_atomic
from lingvo_moe.core.files.manifest import write_manifest
from lingvo_moe.core.files.store import check_place, is_address
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.core.runs.directories import EXPORTED, check_replaceable
from lingvo_moe.core.task.base_task import BaseTask
from lingvo_moe.tasks.lm.generator import GenerateOptions, Generator
from lingvo_moe.tasks.lm.model import LmModel
from lingvo_moe.tasks.lm.saved_generator import TOKENIZER
from lingvo_moe.tasks.mt.decoding.shortlist import Shortlist
from lingvo_moe.tasks.mt.decoding.translator import TranslateOptions, Translator
from lingvo_moe.tasks.mt.runs.run_dir import RunDir
from lingvo_moe.tasks.mt.serving.saved_translator import (
    ABOUT,
    ABOUT_GENERATOR,
    MANIFEST,
    quiet_absl,
)


def load_translator(
    logdir: str | os.PathLike,
    options: TranslateOptions | None = None,
    chosen: Chosen = NEWEST,
    shortlist: str | os.PathLike | None = None,
    trust_run: bool = False,
) -> tuple[Translator, dict[str, Any]]:
    """The model of a run at a checkpoint.

    Args:
        logdir: a trainer's.
        options, chosen: how to translate, and with which weights.
        shortlist: a file of tools.shortlist; None to score all tokens.
        trust_run: see RunDir.

    Returns:
        The translator, and what it is: model, params_override, step, weights; averaged_steps, of a mean; ema,
        of a moving average; and shortlist.

    Raises:
        RunDirError: no run there, or a damaged one, or one that names a class outside lingvo_moe.
        DataError: no shortlist there, or one for other vocabularies.
        CheckpointError: no such checkpoint, fewer than asked for, a damaged one, or one that is not of the run's
            model; or the run keeps no moving average.
        ValueError: as Translator.
    """
    run = RunDir(logdir, trust_run=trust_run)
    model, vocabs = run.Task(), run.vocabs
    some = Shortlist.Load(shortlist) if shortlist else None
    theta, about = load_theta(run, model, chosen)
    about["weights"] = options.weights if options else "float32"
    if some:
        about["shortlist"] = some.About()
    languages = run.languages or () if model.RoutesByTask(model.p) else ()
    return Translator(model, theta, vocabs, options, languages, some), about


def load_theta(
    run: RunDir, model: BaseTask, chosen: Chosen = NEWEST
) -> tuple[NestedMap, dict[str, Any]]:
    """The weights of a run's model at a checkpoint, as NumPy arrays, and their description; see load_translator."""
    found = run.experiment
    about: dict[str, Any] = {"model": found["model"], "params_override": found["params_override"]}
    if chosen.use_ema and chosen.average_last > 1:
        raise CheckpointError(
            "--use_ema: a moving average is not averaged again; leave "
            f"--average_last={chosen.average_last} out"
        )

    def read(checkpointer: Checkpointer, at: int) -> NestedMap:
        about["step"] = at
        if chosen.average_last == 1:
            return read_weights(checkpointer, model, at, chosen.use_ema)
        about["averaged_steps"] = steps = _last_steps(checkpointer, at, chosen.average_last)
        return checkpointer.RestoreMeanToNumpy("theta", steps)

    theta = read_newest(run.checkpoint_dir, read, chosen.step)
    if chosen.use_ema:
        about["ema"] = model.p.ema_decay
    _check_theta(f"{run.checkpoint_dir}, step {about['step']}", theta, model.VariableSpecs())
    return theta, about


def _last_steps(checkpointer: Checkpointer, step: int, number: int) -> list[int]:
    """The steps of the last `number` checkpoints up to `step`."""
    steps = [s for s in checkpointer.Steps() if s <= step]
    if step not in steps:
        raise CheckpointError(
            f"{checkpointer.directory}, step {step}: there is no such checkpoint; there are {checkpointer.Steps()}"
        )
    if len(steps) < number:
        raise CheckpointError(
            f"--average_last={number}: {checkpointer.directory} has {len(steps)} up to there, {steps}; a trainer "
            "keeps train.save_max_to_keep of them"
        )
    return steps[-number:]


def load_generator(
    logdir: str | os.PathLike,
    options: GenerateOptions | None = None,
    chosen: Chosen = NEWEST,
    trust_run: bool = False,
) -> tuple[Generator, dict[str, Any]]:
    """The language model of a run at a checkpoint; arguments, result and errors as load_translator."""
    run = RunDir(logdir, trust_run=trust_run)
    model = run.Task(LmModel)
    theta, about = load_theta(run, model, chosen)
    about["weights"] = "float32"
    return Generator(model, theta, run.vocabs.target, options), about


def export(
    exported: Translator | Generator, output: str | os.PathLike, about: dict[str, Any] | None = None
) -> None:
    """Writes a SavedModel atomically, with the signature 'serving_default' and its alias 'predict'.

    Of a translator: input `text` string [N], and `language` string [N] where the model routes by language; outputs
    `translations` string [N,K], `scores` float32 [N,K], `truncated` bool [N]. Of a generator see Generator._Generate.
    It needs TensorFlow, and TensorFlow Text imported for its ops; nothing of this package. `assets.extra` says what it
    is, and lists all files with their SHA-256, which SavedFunctions verifies.

    At an address it is written here first; the list of files comes last. A server may load it once that is there.

    `output` may hold a SavedModel, which is replaced; `about` is kept in the SavedModel, with the options.

    Raises:
        OutputError: `output` holds something else, or lies inside a run, data or another model.
        PathError: a path from which TensorFlow could not load a model.
        OSError: it cannot be written; it is named.
    """
    check_place(output, "--output")
    check_replaceable(output, EXPORTED)
    if is_address(output):
        with tempfile.TemporaryDirectory(prefix="lingvo_moe.") as temporary:
            made = Path(temporary, "model")
            export(exported, made, about)
            upload(made, os.fspath(output), MANIFEST)
        return
    output = Path(output)
    with replaced_directory(output.absolute()) as directory, quiet_absl():
        translates = not isinstance(exported, Generator)
        function = exported.translate if translates else exported.generate
        signature = function.get_concrete_function()
        try:
            tf.saved_model.save(
                exported,
                str(directory),
                signatures={"serving_default": signature, "predict": signature},
                # Models define gradients of their own; nobody differentiates a search.
                options=tf.saved_model.SaveOptions(experimental_custom_gradients=False),
            )
        except tf.errors.OpError as e:
            raise not_written(e, output) from e
        file = directory / (ABOUT if translates else ABOUT_GENERATOR)
        file.parent.mkdir()
        content = {
            **(about or {}),
            "languages": exported.languages,
            "options": {**vars(exported.options), "xla": exported.options.xla},
        }
        write_atomic(file, (json.dumps(content, indent=2) + "\n").encode())
        if isinstance(exported, Generator) and exported.vocabulary:
            write_atomic(directory / TOKENIZER, exported.vocabulary.model_bytes)
        write_manifest(directory, MANIFEST)


def _check_theta(where: str, theta: NestedMap, specs: NestedMap) -> None:
    """Raises CheckpointError unless theta has the variables and shapes of the specs."""
    have = {path: tuple(x.shape) for path, x in theta.FlattenItems()}
    want = {path: spec.shape for path, spec in specs.FlattenItems()}
    for path in sorted(have.keys() | want.keys()):
        if have.get(path) != want.get(path):
            raise CheckpointError(
                f"{where} is not of this run's model: {path} is {have.get(path, 'missing')} in it,"
                f" {want.get(path, 'missing')} in the model"
            )
