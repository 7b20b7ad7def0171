"""Breaks down the memory of a device by kind and layer.

The totals are the compiler's. The breakdown has two sources: the program's signature gives the sizes of
the arguments, and liveness analysis of the schedule gives the other buffers live at the peak and their
layers. The difference between the breakdown and the total (the allocator's packing, the padding of
arguments to tiles) is reported as `padding`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  teaches NumPy the names of its types
import numpy as np

from lingvo_moe.analysis.plans.memory.advice import Peak, advise
from lingvo_moe.analysis.plans.memory.liveness import Buffer, Liveness, Value, liveness
from lingvo_moe.analysis.plans.work.costs import Placer
from lingvo_moe.analysis.programs.hlo.module import Executed, Module, parse_module
from lingvo_moe.analysis.programs.hlo.parts import LOOP, NO_LAYERS, Layers, Place
from lingvo_moe.core.sharding import DimsMapping, Mesh
from lingvo_moe.core.sharding.letters import DEVICE, part_shape

ARGUMENTS = ("weights", "slots", "inputs")
TRACED = ("weight_copies", "activations", "gradients", "temporaries")
_OPTIMIZER = "optimizer/"


class ArgumentSpec(Protocol):
    """One argument of a program, e.g. an `engine.lowering.specs.TensorSpec`."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def split(self) -> DimsMapping | None: ...
    @property
    def memory(self) -> str: ...


class Arguments(Protocol):
    """A program's arguments and its mesh, e.g. a `lowering.signature.Signature`."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def args(self) -> Sequence[ArgumentSpec]: ...


class Misfit(Protocol):
    """The compiler's report on a program that is too large, e.g. an `aot.OutOfMemory`.

    Attributes:
        needed_bytes: bytes that the program needs on a device.
        limit_bytes: HBM capacity of a device in bytes.
        hlo_text: the scheduled module as text; '' if the compiler left none.
        holders: the largest buffers that the compiler lists, each with `op_name` and `bytes`.
    """

    needed_bytes: int
    limit_bytes: int
    hlo_text: str

    @property
    def holders(self) -> Sequence[Any]: ...


@dataclass(frozen=True)
class _Live:
    """A buffer that is live at the peak, its kind and the layer it belongs to."""

    buffer: Buffer
    kind: str
    place: Place


def memory_plan(
    program: Module | str,
    reported: Mapping[str, int],
    signature: Arguments,
    hbm: int,
    layers: Layers = NO_LAYERS,
) -> dict[str, Any]:
    """Returns a plan's `memory` for a program that the compiler accepted.

    Args:
        program: the scheduled module, or its text.
        reported: the compiler's sizes in bytes: arguments, outputs, aliased, temporaries, code, peak, and what the
            program needs (`needed`; if missing, peak and code).
        signature: the program's arguments and mesh.
        hbm: HBM capacity of a device in bytes.
        layers: those of the model, for the places of buffers.

    Returns:
        Bytes on one device, with the fields that docs/plan_json.md describes.
    """
    module = parse_module(program) if isinstance(program, str) else program
    traced = liveness(module)
    at, traced_peak = traced.Peak()
    attribution = _Attribution(module, traced, signature, layers)
    live = attribution.At(at)
    # For TPUs not the sum of all sizes: if memory is plentiful, the compiler does not reuse it.
    needed = reported.get("needed", reported["peak"] + reported["code"])
    kinds = argument_bytes(signature) | dict.fromkeys(TRACED, 0)
    for item in live:
        if item.kind in TRACED:
            kinds[item.kind] += item.buffer.num_bytes
    kinds["code"] = reported["code"]
    rest = needed - sum(kinds.values())
    if rest < 0:  # the trace finds more than the compiler keeps: reduce what it cannot attribute
        kinds["temporaries"] = max(kinds["temporaries"] + rest, 0)
    kinds["padding"] = max(needed - sum(kinds.values()), 0)
    float32 = _float32(live)
    return {
        **{key: int(reported[key]) for key in reported},
        "needed": needed,
        "hbm": hbm,
        "fits": True,  # the compiler refuses a program that does not fit
        "misses_by": 0,
        "kinds": kinds,
        "float32": float32,
        "traced_peak": traced_peak,
        "kept_for_backward": attribution.KeptForBackward(),
        "holders": _grouped(live),
        "advice": advise(_held(signature, kinds, float32), needed, hbm),
    }


def misfit_plan(error: Misfit, signature: Arguments, layers: Layers = NO_LAYERS) -> dict[str, Any]:
    """Returns a plan's `memory` for a program that the compiler refused for its size.

    If the error carries the refused module, buffers are traced through its schedule. Otherwise all
    memory except the arguments is one sum, and `holders` are the buffers that the compiler lists.

    Args:
        error: the compiler's report.
        signature: the program's arguments and mesh.
        layers: those of the model, for the places of buffers.
    """
    needed, hbm = error.needed_bytes, error.limit_bytes
    if error.hlo_text:
        return _traced_misfit(error, signature, layers)
    kinds = argument_bytes(signature)
    kinds["temporaries"] = max(needed - sum(kinds.values()), 0)
    groups: dict[tuple[str, str, str, str], int] = defaultdict(int)
    for holder in error.holders:
        place = layers.place(holder.op_name, False)
        groups["temporaries", place.layer, place.part, place.phase] += holder.bytes
    replicated, divisible = _replicated_and_divisible(signature)
    # A training step has a gradient for each weight; gradients do not shrink with the batch.
    gradients = min(kinds["weights"], kinds["temporaries"]) if kinds["slots"] else 0
    scaling = kinds["inputs"] + kinds["temporaries"] - gradients
    peak = Peak(kinds | {"gradients": gradients}, replicated, divisible, scaling)
    return {
        "arguments": sum(kinds[kind] for kind in ARGUMENTS),
        "peak": needed,
        "needed": needed,
        "hbm": hbm,
        "fits": False,
        "misses_by": max(needed - hbm, 0),
        "kinds": kinds,
        "holders": _rows(groups),
        "advice": advise(peak, needed, hbm),
    }


def _traced_misfit(error: Misfit, signature: Arguments, layers: Layers) -> dict[str, Any]:
    """`misfit_plan` for an error that carries the schedule of the refused module."""
    by_kind = argument_bytes(signature)
    arguments = sum(by_kind[kind] for kind in ARGUMENTS)
    reported = {
        "arguments": arguments,
        "outputs": 0,
        "aliased": 0,
        "temporaries": max(error.needed_bytes - arguments, 0),
        "code": 0,
        "peak": error.needed_bytes,
    }
    traced = memory_plan(error.hlo_text, reported, signature, error.limit_bytes, layers)
    unknown = {"outputs", "aliased", "code"}
    out = {key: value for key, value in traced.items() if key not in unknown}
    return out | {"fits": False, "misses_by": max(error.needed_bytes - error.limit_bytes, 0)}


def argument_bytes(signature: Arguments) -> dict[str, int]:
    """Bytes of weights, optimizer slots and other arguments in one device's memory, without padding."""
    kinds = dict.fromkeys(ARGUMENTS, 0)
    for spec in signature.args:
        if spec.memory == DEVICE:
            kinds[_kind_of_argument(spec.name)] += _bytes(spec, signature.mesh)
    return kinds


def _kind_of_argument(name: str) -> str:
    heads = name.split(".")[:2]
    return "weights" if "theta" in heads else "slots" if {"slots", "ema"} & {*heads} else "inputs"


def _bytes(spec: ArgumentSpec, mesh: Mesh) -> int:
    return math.prod(_local_shape(spec, mesh)) * np.dtype(spec.dtype).itemsize


def _local_shape(spec: ArgumentSpec, mesh: Mesh) -> tuple[int, ...]:
    return part_shape(spec.shape, _split(spec, mesh), mesh)


def _split(spec: ArgumentSpec, mesh: Mesh) -> DimsMapping:
    """The mesh axis or axes of each dimension; all None for a replicated tensor."""
    if mesh.size == 1 or not spec.split:
        return (None,) * len(spec.shape)
    return spec.split


class _Attribution:
    """Finds the kind of each buffer and the layer it belongs to."""

    def __init__(self, module: Module, traced: Liveness, signature: Arguments, layers: Layers):
        self._module = module
        self._traced = traced
        self._args = signature.args
        self._layers = layers
        self._placer = Placer(module, layers)
        weights = [s for s in signature.args if _kind_of_argument(s.name) == "weights"]
        # Shapes are compared without dimensions of 1 and in any order: the compiler may transpose.
        self._weight_shapes = {_key(_local_shape(s, signature.mesh)) for s in weights}
        self._sources = self._trace_sources()
        self._readers = self._trace_readers()

    def At(self, at: int) -> list[_Live]:
        """The buffers that are live at a position of the schedule."""
        return [self._describe(number) for number in self._live(at)]

    def KeptForBackward(self) -> int:
        """Bytes of activations live where the first loop with gradients begins; 0 without such a loop."""
        if self._traced.backward >= self._traced.length:
            return 0
        live = [n for n in self._live(self._traced.backward) if self._kind(n) == "activations"]
        return sum(self._traced.buffers[number].num_bytes for number in live)

    def _live(self, at: int) -> list[int]:
        return [i for i, b in enumerate(self._traced.buffers) if b.start <= at <= b.end]

    def _describe(self, number: int) -> _Live:
        buffer, kind = self._traced.buffers[number], self._kind(number)
        if buffer.argument is not None:
            return _Live(buffer, kind, self._place_argument(buffer.argument))
        if kind == "weight_copies":
            (argument, *_) = self._sources[buffer.values[0].instruction.name]
            return _Live(buffer, kind, self._place_argument(argument))
        return _Live(buffer, kind, self._place(number, kind))

    def _kind(self, number: int) -> str:
        buffer = self._traced.buffers[number]
        if buffer.argument is not None:
            return _kind_of_argument(self._args[buffer.argument].name)
        first = buffer.values[0].instruction
        sources = self._sources.get(first.name)
        shape = _key(
            max((v.instruction.arrays[v.index].dims for v in buffer.values), key=math.prod)
        )
        is_weight_shape = shape in self._weight_shapes and math.prod(shape) > 1
        if sources and is_weight_shape and self._all_weights(sources):
            return "weight_copies"
        backward = any(v.producer.in_backward_loop for v in buffer.values)
        later = backward or buffer.end > self._traced.backward
        if is_weight_shape and later and not any(map(self._is_forward, buffer.values)):
            return "gradients"
        if buffer.start < self._traced.backward < buffer.end:
            return "activations"
        return "temporaries"

    def _is_forward(self, value: Value) -> bool:
        if value.instruction.opcode in ("broadcast", "constant"):
            return False
        place = self._placer.place(value.producer)
        return place.phase == "forward" and place.part != "other"

    def _all_weights(self, arguments: Iterable[int]) -> bool:
        return all(_kind_of_argument(self._args[a].name) == "weights" for a in arguments)

    def _place_argument(self, number: int) -> Place:
        if _kind_of_argument(self._args[number].name) == "inputs":
            return Place("other", "", "")
        scope = _scope(self._layers.root, self._args[number].name)
        place = self._layers.place(scope, False)
        return Place(place.part, place.layer, "", place.path)

    def _place(self, number: int, kind: str) -> Place:
        """Returns the part, layer and phase of a buffer, from the instructions that write or read it.

        For a gradient this is the part whose optimizer step reads the buffer. If there is none, and for other kinds,
        it is the place of the last writer that names a layer; failing that, a loop that writes it, a reader that names
        a layer, or the last writer.

        Args:
            number: the buffer's index.
            kind: its kind, e.g. 'gradients'.
        """
        buffer = self._traced.buffers[number]
        if kind == "gradients":
            for reader in self._readers.get(number, ()):
                name = reader.instruction.op_name
                if _OPTIMIZER in name:
                    place = self._placer.place_name(name.replace(_OPTIMIZER, ""), False)
                    if place.is_clear:
                        return Place(place.part, place.layer, "backward", place.path)
        places = [self._placer.place(v.producer) for v in reversed(buffer.values)]
        readers = (self._placer.place(r) for r in self._readers.get(number, ()))
        clear = next((p for p in places if p.is_clear), None)
        loop = next((p for p in places if p.part == LOOP), None)
        return clear or loop or next((p for p in readers if p.is_clear), places[0])

    def _trace_sources(self) -> dict[str, frozenset[int]]:
        """Finds the values of the entry that are computed from arguments alone, and the numbers of those arguments."""
        roots: dict[str, frozenset[int]] = {}
        for instruction in self._module.entry.instructions:
            if instruction.opcode == "parameter":
                roots[instruction.name] = frozenset((int(instruction.literal),))
            elif instruction.opcode in ("constant", "iota"):
                roots[instruction.name] = frozenset()
            elif instruction.opcode != "while" and all(o in roots for o in instruction.operands):
                sources = (roots[o] for o in instruction.operands)
                roots[instruction.name] = frozenset().union(*sources)
        return roots

    def _trace_readers(self) -> dict[int, list[Executed]]:
        """Finds the instructions of the entry that read each buffer, without tuples, views and loops."""
        readers: dict[int, list[Executed]] = defaultdict(list)
        entry = self._module.entry
        silent = ("tuple", "get-tuple-element", "bitcast", "while")
        for instruction in entry.instructions:
            if instruction.opcode in silent:
                continue
            for operand in instruction.operands:
                for number in self._traced.buffer_of[operand]:
                    if number is not None:
                        readers[number].append(Executed(instruction, entry, 1, False))
        return readers


def _scope(root: str, name: str) -> str:
    """Turns an argument's path into the name that an operation in its layer's scope would have."""
    path = [p for p in name.split(".")[1:] if p not in ("theta", "slots", "ema")]
    return "/".join([root, *path, "x"]).replace("[", "_").replace("]", "")


def _key(dims: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(d for d in dims if d > 1))


def _grouped(live: Iterable[_Live]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str, str], int] = defaultdict(int)
    for item in live:
        key = (item.kind, item.place.layer, item.place.part, item.place.phase)
        groups[key] += item.buffer.num_bytes
    return _rows(groups)


def _rows(groups: Mapping[tuple[str, str, str, str], int]) -> list[dict[str, Any]]:
    rows = [
        {"kind": kind, "layer": layer, "part": part, "phase": phase, "bytes": size}
        for (kind, layer, part, phase), size in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def _replicated_and_divisible(signature: Arguments) -> tuple[int, int]:
    """Returns bytes on a device of replicated weights and slots, and of those that can be split further.

    A sharded tensor can be split further if a sharded dimension has more than one element a device.
    """
    replicated = divisible = 0
    for spec in signature.args:
        if _kind_of_argument(spec.name) == "inputs" or spec.memory != DEVICE:
            continue
        local = _bytes(spec, signature.mesh)
        sharded = [
            size
            for size, axis in zip(_local_shape(spec, signature.mesh), _split(spec, signature.mesh))
            if axis is not None
        ]
        replicated += local if not sharded else 0
        divisible += local if any(size > 1 for size in sharded) else 0
    return replicated, divisible


def _float32(live: Iterable[_Live]) -> dict[str, int]:
    """Bytes of activations and of temporaries that are float32."""
    by_kind = dict.fromkeys(("activations", "temporaries"), 0)
    for item in live:
        first = item.buffer.values[0]
        if item.kind in by_kind and first.instruction.arrays[first.index].dtype == "f32":
            by_kind[item.kind] += item.buffer.num_bytes
    return by_kind


def _held(signature: Arguments, kinds: Mapping[str, int], float32: Mapping[str, int]) -> Peak:
    replicated, divisible = _replicated_and_divisible(signature)
    return Peak(
        kinds,
        replicated,
        divisible,
        scaling=kinds["inputs"] + kinds["activations"] + kinds["temporaries"],
        float32=float32,
    )
