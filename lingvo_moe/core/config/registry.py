"""The registry of experiments: `mt.M4MoE2048E36L` names a class in the package `lingvo_moe.params.mt`.

`my.package.Mine` names a class of any other module, which need not be registered.

An experiment is a class with three methods, each returning Params: `Task()` (the model and how it
is optimised), `Input()` (the data) and `Train()` (the length of the run, its checkpoints and
summaries).
"""

import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.checks import did_you_mean, nearest
from lingvo_moe.core.config.class_names import (
    NOT_OWN,
    any_class,
    current_name,
    failed_import,
    own_class,
)
from lingvo_moe.core.config.hyperparams import InstantiableParams, ParamError, Params
from lingvo_moe.core.config.param_text import leaves

_ROOT = "lingvo_moe.params"
# Modules whose experiments are in several others since; runs may name them.
_DIVIDED = ("lm.open_models", "lm.imported")
_registry: dict[str, type["Experiment"]] = {}

# The parameters that a search always sets: how a model lies on devices.
CHOSEN = (
    "train.mesh",
    "train.shard_state",
    "train.offload",
    "train.num_micro_batches",
    "task.activation_split",
    "task.weight_split",
    "task.repeat",
    "task.remat",
    "task.pipeline.stages",
    "task.pipeline.micro_batches",
    "task.pipeline.schedule",
    "task.pipeline.repeats",
    "task.pipeline.splits",
)


class RegistryError(ValueError):
    """An experiment or an override that does not exist."""


class Experiment:
    """The base of every registered experiment."""

    def Task(self) -> InstantiableParams:
        """The model: Params of a BaseTask."""
        raise NotImplementedError

    def Input(self) -> InstantiableParams:
        """The data: Params of a BaseInput."""
        raise NotImplementedError

    def Train(self) -> Params:
        """The run: see `TrainParams`."""
        return TrainParams()


def TrainParams() -> Params:
    """Parameters of a run: devices, length, checkpoints and summaries. None changes the results, but by rounding."""
    p = Params()
    _DefineStep(p)
    _DefineIntervals(p)
    return p


def _DefineStep(p: Params) -> None:
    p.Define(
        "mesh",
        "expert:1",
        "The devices that the experiment was made for, axis:size,...; with others than these the "
        "first axis changes its size. --mesh is used instead.",
    )
    p.Define("max_steps", 1_000_000, "The step at which training ends.", checks.COUNT)
    p.Define(
        "upcycle_at",
        0,
        "A model with experts is trained without them up to this step, as a run of its own in LOGDIR-dense; then they "
        "grow out of its layers. 0: experts from the start.",
        checks.COUNT,
    )
    p.Define(
        "max_units",
        0,
        "Training ends when so many tokens (images, ...) were trained on, padding left out; it is looked for at "
        "summaries and checkpoints. 0: no such limit.",
        checks.COUNT,
    )
    p.Define(
        "max_cpu_seconds",
        0.0,
        "Training ends after so many CPU seconds of the process, all threads together, without those of compiling and "
        "of evaluations; it is looked for at summaries and checkpoints. 0: no such limit.",
        checks.NOT_NEGATIVE,
    )
    p.Define(
        "num_micro_batches",
        1,
        "M: a step computes gradients of M equal parts of its batch, one after another, and updates the weights once. "
        "Activations take less memory. M divides input.batch_size, and task.num_groups of a model with experts.",
        checks.SIZE,
    )
    p.Define(
        "shard_state",
        "none",
        "What of the training state is sharded along mesh axes that would hold copies of it, where these divide it: "
        "slots (those of the optimizer), gradients (and slots) or weights (and both). Each takes less memory; weights "
        "take more communication. Checkpoints stay the same.",
        checks.one_of(checks.STATE_LEVELS),
    )
    p.Define(
        "offload",
        "none",
        "What of stacks of layers is in the hosts' memory, and moves to the devices layer by layer: slots (those of "
        "the optimizer), master (the float32 values of bfloat16 weights), experts (their weights, gradients and "
        "slots), activations (the inputs of blocks, kept for the backward pass), or a list of these and of patterns "
        "of variables' paths, e.g. ['*.ffn.w?'] (as experts).",
        checks.OFFLOAD,
    )


def _DefineIntervals(p: Params) -> None:
    p.Define("save_interval_steps", 1000, "Steps between checkpoints.", checks.SIZE)
    p.Define(
        "save_max_to_keep",
        3,
        "Checkpoints kept, the newest ones; the best is kept too, and the newest from which a step succeeded.",
        checks.SIZE,
    )
    p.Define(
        "max_skipped_steps",
        8,
        "Training ends after so many steps in a row whose loss or gradient is not finite, which change nothing; it is "
        "looked for at summaries and checkpoints. 0: never.",
        checks.COUNT,
    )
    p.Define(
        "summary_interval_steps", 10, "Steps between summaries and progress lines.", checks.SIZE
    )
    p.Define(
        "profile_steps",
        "",
        "The first and the last step of which a trace is written into the run, for TensorBoard's profile page and "
        "Perfetto, e.g. 10-15; '': none.",
        checks.Steps(),
    )
    p.Define(
        "stall_seconds",
        50.0,
        "A process of several that is behind the others for so long, in reading or writing, is named and the job ends. "
        "0: never.",
        checks.NOT_NEGATIVE,
    )
    p.Define(
        "eval_interval_steps",
        0,
        "Steps between evaluations on held-out data; one more follows the last step. 0: never.",
        checks.COUNT,
    )
    p.Define("eval_batches", 8, "Held-out batches of an evaluation.", checks.SIZE)
    p.Define(
        "eval_decode_every",
        0,
        "Steps between scores of decoded held-out lines (BLEU), by the model on the devices; a multiple of "
        "eval_interval_steps, with whose evaluations they come. 0: never.",
        checks.COUNT,
    )
    p.Define(
        "early_stopping_evals",
        0,
        "Training ends after so many evaluations without a lower held-out loss; 0: never.",
        checks.COUNT,
    )


def Register(cls: type[Experiment]) -> type[Experiment]:
    """Class decorator: makes `params/mt/m4.py:Name` known as `mt.Name` and `mt.m4.Name`.

    Raises RegistryError: the name is taken by another class.
    """
    parts = cls.__module__.removeprefix(f"{_ROOT}.").split(".")
    for name in {f"{'.'.join(parts)}.{cls.__name__}", f"{parts[0]}.{cls.__name__}"}:
        other = _registry.get(name)
        if other is not None and (other.__module__, other.__name__) != (
            cls.__module__,
            cls.__name__,
        ):
            raise RegistryError(
                f"experiment {name!r} is both {other.__module__} and {cls.__module__}"
            )
        _registry[name] = cls
    return cls


def AllNames(task: str = "") -> list[str]:
    """The short names, `task.Class`, of all experiments of a task; '' for those of all tasks."""
    tasks = [task] if task else _tasks()
    for name in tasks:
        _import_task(name)
    return sorted(
        name for name in _registry if name.split(".")[0] in tasks and name.count(".") == 1
    )


def About(name: str) -> str:
    """The first sentence about an experiment."""
    text = " ".join((GetExperiment(name).__doc__ or "").split())
    return re.split(r"(?<=\.) (?=[A-Z])", text, maxsplit=1)[0]


def GetExperiment(name: str, trusted: bool = True) -> type[Experiment]:
    """The class of `mt.Name` or `mt.module.Name`, or of `package.module.Name` outside of lingvo_moe.params.

    Args:
        name: where it begins with no task of lingvo_moe.params, the module before its last dot is imported.
        trusted: whether the user typed it; else it may only name one of lingvo_moe.params, and imports nothing else.

    Raises:
        RegistryError: there is none, with the nearest names; or one that is not trusted.
    """
    parts = name.split(".")
    if len(parts) < 2 or not all(map(str.isidentifier, parts)):
        example = _hint(re.sub(r"[^\w.]", "", name)) or ", e.g. 'mt.M4MoE2048E36L'"
        raise RegistryError(f"--model={name!r}: expected task.Experiment{example}")
    if parts[0] not in _tasks():
        if not trusted:
            raise RegistryError(f"--model={NOT_OWN.format(name)}")
        return _registry.get(name) or _of_module(name)
    _import_task(parts[0])
    # Its module may have had another name when a run began.
    name = current_name(f"{_ROOT}.{name}").removeprefix(f"{_ROOT}.")
    if name.rpartition(".")[0] in _DIVIDED:
        name = f"{parts[0]}.{parts[-1]}"
    if name not in _registry:
        names = [n for n in _registry if n.count(".") == name.count(".")]
        raise RegistryError(f"--model={name!r}: no such experiment{did_you_mean(name, names)}")
    return _registry[name]


def GetParams(
    name: str, override: str = "", trusted: bool = True, skip_derived: bool = False
) -> Params:
    """The Params of an experiment: `task`, `input` and `train`, with overrides applied.

    Args:
        name: as GetExperiment.
        override: `path=value` pairs separated by `;`, e.g.
            'task.num_experts=16;train.max_steps=100'; a semicolon in a value is written `\\;`. In
            order: a class chosen by name, e.g. 'task.moe.router=hash', before what is in it. A text with newlines,
            or with spaces at its ends, is written as a Python string literal.
        trusted: whether the user typed all this; else no name in it, of the experiment or 'type/module/Class' in a
            value, imports code outside lingvo_moe.
        skip_derived: whether to pass over parameters that would have no effect, which older versions took, instead of
            refusing them.

    Raises:
        RegistryError: no such experiment, an unknown path, or a value of another type.
    """
    return WithOverrides(AsDefined(name, trusted), override, trusted, skip_derived)


def AsDefined(name: str, trusted: bool = True) -> Params:
    """The Params of an experiment as its class defines them, for WithOverrides. Raises as GetExperiment."""
    experiment = GetExperiment(name, trusted)()
    p = Params()
    p.Define("task", experiment.Task(), "The model and its optimiser.")
    p.Define("input", experiment.Input(), "The data.")
    p.Define("train", experiment.Train(), "The run.")
    p.Derive("task.shard_state", "train.shard_state")
    p.Derive("task.offload", "train.offload")
    return p


def WithOverrides(
    defined: Params, override: str, trusted: bool = True, skip_derived: bool = False
) -> Params:
    """Returns a copy of the Params of AsDefined with overrides applied, and what follows from them: see GetParams."""
    find_class, p = any_class if trusted else own_class, defined.Copy()
    for path, value in split_override(override):
        if skip_derived and p.WhyDerived(path):
            continue
        set_from_text(p, path, value, "--model_params_override", find_class)
    if not skip_derived:
        _check_effects(defined, p, override)
    try:
        configure(p)
    except AttributeError as e:
        others = (p.task.cls, p.input.cls) != (defined.task.cls, defined.input.cls)
        if not others or not (e.name == "ConfigureInput" or str(e).startswith("no parameter")):
            raise  # a mistake in the task's own method
        raise RegistryError(
            f"--model_params_override: the task does not work with the input; remove task.cls or input.cls from it: {e}"
        ) from None
    return p


def configure(p: Params) -> None:
    """Sets the parameters of an experiment, as GetParams returns them, that follow from others."""
    p.task.cls.ConfigureInput(p.task, p.input)
    p.task.shard_state, p.task.offload = p.train.shard_state, p.train.offload


def _check_effects(defined: Params, p: Params, override: str) -> None:
    """Raises RegistryError for a parameter that an override sets without effect to another value than its own."""
    was = dict(leaves(defined, ""))
    for path, value in split_override(override):
        if p.IsDefault(path) or (path in was and was[path] == p.Get(path)):
            continue
        if why := p.WhyUnused(path):
            raise RegistryError(
                f"--model_params_override: {path}={value}: {why}; set that, or leave this out"
            )


def set_from_text(
    p: Params, path: str, value: str, source: str, find_class: Callable[[str], type] = any_class
) -> None:
    """Sets a parameter of an experiment.

    Args:
        p: as GetParams returns it; it is changed.
        source: the flag, or the file and line, that the value comes from; messages begin with it.
        find_class: gives the class that 'type/module/Class' names; own_class of class_names.py for text that the user
            did not type.

    Raises:
        RegistryError: an unknown path, or a value that the parameter cannot have.
    """
    try:
        p.SetFromText(path, value, find_class=find_class)
    except ParamError as e:
        raise RegistryError(f"{source}: {e}") from None
    except (AttributeError, ValueError) as e:
        raise RegistryError(f"{source}: {path}={value}: {e}") from None


def escape(value: str) -> str:
    """The text with which an override sets a parameter of type str to exactly this value."""
    plain = (
        value == value.strip()
        and "\n" not in value
        and not value.endswith("\\")
        and value[:1] not in "'\""  # nor empty
        and not value.startswith("type/")
    )
    if plain:
        return value.replace(";", "\\;")
    return repr(value).replace(";", "\\x3b")


def split_override(text: str) -> Iterator[tuple[str, str]]:
    """The paths and values of an override, as SetFromText of hyperparams.py takes them.

    Raises RegistryError: a part that is not of the form path=value.
    """
    for part in re.split(r"(?<!\\)[;\n]", text):
        if not part.strip():
            continue
        part = part.replace("\\;", ";")
        path, equals, value = part.partition("=")
        if not equals or not path.strip():
            raise RegistryError(f"--model_params_override: {part!r} is not of the form path=value")
        yield path.strip(), value.strip()


def part_of(override: str, belongs: Callable[[str], bool]) -> str:
    """The part of an override whose paths belong there."""
    parts = (f"{path}={value}" for path, value in split_override(override) if belongs(path))
    # A backslash at the end would escape the semicolon that follows.
    spaced = (f"{part} " if part.endswith("\\") else part for part in parts)
    return ";".join(part.replace(";", r"\;") for part in spaced).strip(" ")


def without_strategy(override: str) -> str:
    """The part of an override that does not say how a model lies on devices."""
    return part_of(override, lambda path: path not in CHOSEN)


def _hint(name: str) -> str:
    """The experiments whose names are nearest to a name with a task, or without one."""
    if "." in name:
        names = AllNames()
        return nearest(name, [name] if name in names else names)
    hints = (nearest(f"{task}.{name}", AllNames(task)) for task in _tasks())
    return next(filter(None, hints), "")


def _of_module(name: str) -> type[Experiment]:
    """The experiment `package.module.Name`, whose module is imported."""
    path, _, cls = name.rpartition(".")
    try:
        module = importlib.import_module(path)
    except Exception as e:
        missing = e.name if isinstance(e, ModuleNotFoundError) else None
        if missing and f"{path}.".startswith(f"{missing}."):
            raise RegistryError(f"--model={name!r}: {_missing(missing)}") from None
        raise RegistryError(f"--model={name!r}: {failed_import(path, e)}") from e
    experiment = getattr(module, cls, None)
    if isinstance(experiment, type) and issubclass(experiment, Experiment):
        return experiment
    wrong = (
        "there is no"
        if experiment is None
        else "not derived from lingvo_moe.core.config.registry.Experiment:"
    )
    others = [
        n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Experiment)
    ]
    raise RegistryError(
        f"--model={name!r}: {wrong} {cls} in {getattr(module, '__file__', path)}{did_you_mean(cls, others)}"
    )


def _missing(module: str) -> str:
    """Says why an experiment's module is not found."""
    package = sys.modules.get(module.rpartition(".")[0])
    if package:
        return (
            f"no module {module!r} in {', '.join(getattr(package, '__path__', [package.__name__]))}"
        )
    tasks = _tasks()
    return (
        f"no task {module!r} in lingvo_moe.params{did_you_mean(module, tasks)}, and no module {module!r} where Python "
        f"looks (first of all in {sys.path[0] or '.'})"
    )


def _import_task(task: str) -> None:
    """Imports every module of `params.<task>`, which registers its experiments."""
    package = importlib.import_module(f"{_ROOT}.{task}")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{_ROOT}.{task}.{module.name}")


def _tasks() -> list[str]:
    """The packages in `lingvo_moe.params`."""
    root = importlib.import_module(_ROOT)
    return [m.name for m in pkgutil.iter_modules(root.__path__) if m.ispkg]
