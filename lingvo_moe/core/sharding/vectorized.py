"""One function for all positions along a mesh axis: each device runs it on its own slices of the arguments.

`vectorized(fn, "stage", elems)` maps `fn` over the leading dimension of tensors, which the axis shards: what JAX calls
vmap with `spmd_axis_name`. Each traced operation of `fn` gets a leading dimension (`tf.vectorized_map`). An annotation
inside `fn` is for one slice, and shards the new dimension along the axis beside; a manual region inside is one for
each slice.

Some of TensorFlow's converters of operations are replaced meanwhile (core/private/tensorflow.py).
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.core.private import tensorflow as private
from lingvo_moe.core.private.tensorflow import gen_xla_ops, pfor
from lingvo_moe.core.sharding.annotate import mesh_of, read_tiles, tile
from lingvo_moe.core.sharding.mesh import (
    Mesh,
    ShardingError,
    Slice,
    tracing_all_slices,
    tracing_slice,
)

# (axis) -> a function of tensors that have a leading dimension, which the axis shards.
Mapped = Callable[[str], Callable[..., Sequence[tf.Tensor]]]


def vectorized(
    fn: Callable[..., Sequence[tf.Tensor]], axis: str, elems: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Maps `fn` over the leading dimension of tensors, of size K.

    Args:
        fn: (a slice of each of `elems`) -> a flat sequence of tensors. Other tensors that it uses are the same for
            every slice. A loop in it runs equally often for every slice. Gradients are taken inside it, not through
            it.
        axis: the mesh axis that shards the leading dimension; a mesh of one device need not have it.
        elems: tensors [K, ...]; the devices along the axis divide K.

    Raises:
        ShardingError: no mesh is in force, it has no such axis, or its size does not divide K.
        ValueError: `fn` uses an operation that cannot be mapped.
    """
    what = f"vectorized over axis {axis!r}"
    mesh = mesh_of(what, None)
    count = elems[0].shape[0]
    if mesh.size > 1 and count % mesh.axis_size(axis):
        raise ShardingError(f"{what} of mesh {mesh}: {count} slices are not a multiple of its size")
    failed: list[Exception] = []

    def one(slices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        try:
            return list(fn(*slices))
        except Exception as e:
            failed.append(e)
            raise

    with tracing_slice(Slice(axis, count, as_one_operation)), _converters(mesh, axis, count):
        try:
            return list(
                tf.vectorized_map(one, list(elems), fallback_to_while_loop=False, warn=False)
            )
        except Exception:
            if failed:  # which TensorFlow would wrap
                raise failed[0] from None
            raise


def as_one_operation(
    plain: Callable[..., Sequence[tf.Tensor]], mapped: Mapped, tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Calls a function, inside of another one that is vectorized, whose form for all slices is given.

    Gradients are those of `mapped`.

    Args:
        plain: of one slice of `tensors`; tells shapes and types of the results, floating point, and is not run.
        mapped: the same for all slices.
    """
    floating = [i for i, t in enumerate(tensors) if t.dtype.is_floating]
    count = len(tensors)

    @private.custom_gradient
    def run(*arguments: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
        def grad(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
            def plain_gradients(*args: tf.Tensor) -> list[tf.Tensor]:
                return [tf.identity(args[i]) for i in floating]

            def mapped_gradients(axis: str) -> Callable[..., Sequence[tf.Tensor]]:
                def gradients(*args: tf.Tensor) -> Sequence[tf.Tensor]:
                    sources = [args[i] for i in floating]
                    with tf.GradientTape(watch_accessed_variables=False) as tape:
                        tape.watch(sources)
                        results = list(mapped(axis)(*args[:count]))
                    return tape.gradient(
                        results, sources, args[count:], tf.UnconnectedGradients.ZERO
                    )

                return gradients

            grads = _operation(plain_gradients, mapped_gradients, [*arguments, *upstream])
            by_index = dict(zip(floating, grads, strict=True))
            return [by_index.get(i) for i in range(count)]

        return _operation(plain, mapped, arguments), grad

    return list(run(*tensors))


def _operation(
    plain: Callable[..., Sequence[tf.Tensor]], mapped: Mapped, tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """A call of `plain` that becomes one of `mapped` when the function around it is converted."""
    results = tf.function(lambda *args: list(plain(*args)), autograph=False)(*tensors)

    def convert(pfor_input: Any) -> list[Any]:
        with tracing_all_slices() as one:
            args = [
                tf.ensure_shape(_stacked(pfor_input.input(i), one.count), [one.count, *t.shape])
                for i, t in enumerate(tensors)
            ]
            return [pfor.wrap(result, True) for result in mapped(one.axis)(*args)]

    results[0].op.pfor_converter = convert
    return results


def _converters(mesh: Mesh, axis: str, count: int) -> contextlib.AbstractContextManager[None]:
    """Replaces TensorFlow's converters of some operations."""
    usual = private.converter("GatherV2")
    return private.converting(
        {
            # TensorFlow has none.
            "Bitcast": lambda pfor_input: pfor.wrap(
                tf.bitcast(pfor_input.stacked_input(0), pfor_input.get_attr("type")), True
            ),
            "GatherV2": lambda pfor_input: _gather(pfor_input, usual),
            "PadV2": _pad,
            "StatelessWhile": lambda pfor_input: _while(pfor_input, count),
            "UnsortedSegmentSum": lambda pfor_input: _segment_sum(pfor_input, count),
            "While": lambda pfor_input: _while(pfor_input, count),
            "XlaDynamicUpdateSlice": lambda pfor_input: _update(pfor_input, count),
            "XlaSharding": lambda pfor_input: _annotation(pfor_input, mesh, axis),
        }
    )


def _annotation(pfor_input: Any, mesh: Mesh, axis: str) -> Any:
    x = pfor_input.stacked_input(0)
    parts = read_tiles(pfor_input.get_attr("sharding"), x.shape.rank - 1, mesh)
    assert parts is not None
    return pfor.wrap(tile(x, _with_leading(parts, mesh, axis), mesh), True)


def _with_leading(parts: np.ndarray, mesh: Mesh, axis: str) -> np.ndarray:
    """Adds a leading dimension, which the axis shards, to the parts of a tensor."""
    number = mesh.axis_names.index(axis)
    position = np.empty(mesh.size, np.int64)
    position[mesh.device_array()] = np.indices(mesh.shape)[number]
    order = np.argsort(position[parts], axis=-1, kind="stable")
    copies = np.take_along_axis(parts, order, axis=-1)
    size = mesh.shape[number]
    if not np.all(
        np.sort(position[parts], axis=-1) == np.repeat(np.arange(size), parts.shape[-1] // size)
    ):
        raise ShardingError(
            f"vectorized over axis {axis!r} of mesh {mesh}: an annotation of a slice gives the devices along that axis "
            "different parts; shard it along the other axes"
        )
    return np.moveaxis(copies.reshape([*parts.shape[:-1], size, -1]), -2, 0)


def _pad(pfor_input: Any) -> Any:
    """TensorFlow's own pads with zeros, whatever `constant_values` are."""
    x, paddings = pfor_input.stacked_input(0), pfor_input.unstacked_input(1)
    paddings = tf.concat([[[0, 0]], paddings], 0)
    return pfor.wrap(tf.pad(x, paddings, constant_values=pfor_input.unstacked_input(2)), True)


def _gather(pfor_input: Any, otherwise: Callable[[Any], Any]) -> Any:
    """Gathers once if all slices take the same places; TensorFlow's own conversion gathers for each slice."""
    (x, stacked, _), (places, by_slice, _) = pfor_input.input(0), pfor_input.input(1)
    axis = tf.get_static_value(pfor_input.unstacked_input(2))
    if not stacked or by_slice or pfor_input.get_attr("batch_dims") or axis is None or axis < 0:
        return otherwise(pfor_input)
    return pfor.wrap(tf.gather(x, places, axis=int(axis) + 1), True)


def _segment_sum(pfor_input: Any, count: int) -> Any:
    """Sums within each slice; in TensorFlow's own, one sum over all, the partitioner would not see the slices."""
    rows, places = (_stacked(pfor_input.input(i), count) for i in (0, 1))
    num = tf.cast(pfor_input.unstacked_input(2), tf.int32)
    row_shape = rows.shape[places.shape.rank :]
    slices = tf.reshape(tf.range(count), [count] + [1] * (places.shape.rank - 1))
    slices = tf.broadcast_to(slices, places.shape)
    index = tf.stack([slices, tf.cast(places, tf.int32)], -1)
    return pfor.wrap(tf.scatter_nd(index, rows, tf.stack([count, num, *row_shape])), True)


def _update(pfor_input: Any, count: int) -> Any:
    """Takes one place for all slices; TensorFlow has none."""
    x, part = (_stacked(pfor_input.input(i), count) for i in (0, 1))
    place = tf.concat([[0], pfor_input.unstacked_input(2)], 0)
    return pfor.wrap(gen_xla_ops.xla_dynamic_update_slice(x, part, place), True)


def _while(pfor_input: Any, count: int) -> list[Any]:
    """A loop that runs equally often for all slices: TensorFlow's own has none of static shapes."""
    cond, body = (private.function_of(pfor_input.op, attr) for attr in ("cond", "body"))
    stacked = [x.is_stacked for x in pfor_input.inputs]
    while (dependent := _depending(body, stacked)) != stacked:
        stacked = dependent

    def converted(function: Any, args: Sequence[tf.Tensor]) -> list[Any]:
        inner = pfor.PFor(
            loop_var=pfor_input.pfor.loop_var,
            loop_len=count,
            pfor_ops=function.graph.get_operations(),
            fallback_to_while_loop=False,
            all_indices=tf.range(count),
        )
        wrapped = [pfor.wrap(x, of_slice) for x, of_slice in zip(args, stacked, strict=True)]
        return private.vectorized_call(function, inner, wrapped)

    def again(*args: tf.Tensor) -> tf.Tensor:
        (decision,) = converted(cond, args)
        if decision.is_stacked:
            raise ValueError(f"{pfor_input.op.name}: the loop's length differs between slices")
        return decision.t

    def step(*args: tf.Tensor) -> list[tf.Tensor]:
        results = converted(body, args)
        return [
            _stacked(x, count) if of_slice else x.t
            for x, of_slice in zip(results, stacked, strict=True)
        ]

    start = [
        _stacked(x, count) if of_slice else x.t
        for x, of_slice in zip(pfor_input.inputs, stacked, strict=True)
    ]
    results = tf.while_loop(again, step, start)
    return [pfor.wrap(x, of_slice) for x, of_slice in zip(results, stacked, strict=True)]


def _depending(body: Any, stacked: list[bool]) -> list[bool]:
    """Says of each loop variable whether it is stacked after an iteration: so are those that depend on one that is."""
    return [
        before or any(stacked[i] for i in _inputs_of(body.graph, out) if i < len(stacked))
        for before, out in zip(stacked, body.graph.outputs, strict=True)
    ]


def _inputs_of(graph: Any, tensor: Any) -> set[int]:
    """The inputs of a function's graph that a tensor in it depends on, by their numbers."""
    numbers = {id(x): i for i, x in enumerate(graph.inputs)}
    waiting, seen, numbers_of_inputs = [tensor], set(), set()
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if id(x) in numbers:
            numbers_of_inputs.add(numbers[id(x)])
            continue
        inputs = set(range(len(x.op.inputs)))
        if x.op.type in ("PartitionedCall", "StatefulPartitionedCall"):
            called = private.function_of(x.op, "f").graph
            inputs = _inputs_of(called, called.outputs[x.value_index])
        elif x.op.type in ("StatelessWhile", "While"):
            inputs = _inputs_of_loop(private.function_of(x.op, "body").graph, x.value_index)
        waiting += [x.op.inputs[i] for i in inputs]
    return numbers_of_inputs


def _inputs_of_loop(body: Any, variable: int) -> set[int]:
    """The variables whose start a loop's variable depends on, in a loop that runs equally often for all slices."""
    variables, waiting = {variable}, [variable]
    while waiting:
        new = _inputs_of(body, body.outputs[waiting.pop()]) - variables
        variables |= new
        waiting += new
    return variables


def _stacked(x: Any, count: int) -> tf.Tensor:
    return x.t if x.is_stacked else tf.broadcast_to(x.t, [count, *x.t.shape])
