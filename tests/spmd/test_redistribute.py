"""Redistribution: the plan is the cheapest possible, and the compiled program follows it.

Several redistributions share a program, each under a name that identifies its collectives, so that every pair of
shardings is compiled.
"""

import itertools
import math
import re
from collections import defaultdict

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings, strategies as st
from spmd_case import floats

from lingvo_moe.analysis.programs.hlo.collective_list import parse_collectives
from lingvo_moe.analysis.programs.hlo.collectives import collective_use
from lingvo_moe.analysis.programs.hlo.module import parse_module
from lingvo_moe.core.engine.eager.testing import run_sharded
from lingvo_moe.core.sharding import Mesh, mesh_split, use_mesh
from lingvo_moe.core.sharding.letters import tile_devices
from lingvo_moe.core.sharding.redistribution import redistribute
from lingvo_moe.core.sharding.redistribution_plan import plan_redistribution, total_bytes

MESH = Mesh.parse("x:2,y:4")
CUBE = Mesh.parse("x:2,y:2,z:2")
LINE = Mesh.parse("d:8")
# The same eight devices in other meshes; the last shares no axis with MESH.
ARRANGEMENTS = {
    "transposed": Mesh(("a", "b"), (4, 2), (0, 4, 1, 5, 2, 6, 3, 7)),
    "reversed": Mesh(("d",), (8,), (7, 6, 5, 4, 3, 2, 1, 0)),
    "shuffled": Mesh(("d",), (8,), (3, 1, 2, 0, 5, 7, 6, 4)),
}


def _mappings(mesh, rank):
    """All the mappings of a tensor of a rank over a mesh."""
    found = []
    for count in range(len(mesh.axis_names) + 1):
        for order in itertools.permutations(mesh.axis_names, count):
            for borders in itertools.combinations_with_replacement(range(count + 1), rank - 1):
                parts = [order[a:b] for a, b in itertools.pairwise((0, *borders, count))]
                found.append(tuple((p[0] if len(p) == 1 else p) if p else None for p in parts))
    return found


# --- the compiled program follows the plan


def _planned(plan):
    """(kind, bytes of the collective's result on a device) of the steps that communicate."""
    return sorted(
        (s.kind, s.num_bytes * s.ways // (s.ways - 1) if s.ways > 1 else s.num_bytes)
        for s in plan
        if s.kind != "slice"
    )


def _found(hlo):
    """The collectives of a compiled program, by the number of the pair and whether it is of the gradient."""
    found = defaultdict(list)
    for collective in parse_collectives(hlo):
        pair = re.search(r"/pair(\d+)/redistribute(/gradient)?/", collective.op_name)
        if pair is None:  # collectives that bring results into the requested form
            assert collective.op_name.endswith("call_exported"), collective
            continue
        found[int(pair[1]), bool(pair[2])].append((collective.kind, collective.num_bytes))
    return {key: sorted(f) for key, f in found.items()}


def _check(shape, pairs, ambient=MESH):
    """Redistributes a tensor for each (source, target), and its cotangent back, in one program."""
    count = len(pairs)
    tensors = [floats(*shape, seed=i) for i in range(count)]
    cotangents = [floats(*shape, seed=100 + i) for i in range(count)]

    def values_and_gradients(*args):
        xs, us = args[:count], args[count:]
        with tf.GradientTape() as tape:
            tape.watch(xs)
            ys = [_move(i, x, *pair) for i, (x, pair) in enumerate(zip(xs, pairs))]
        return [*ys, *tape.gradient(ys, xs, output_gradients=us)]

    got, collectives = run_sharded(
        values_and_gradients, [*tensors, *cotangents], ambient, results=None
    )
    for g, t in zip(got, [*tensors, *cotangents], strict=True):
        np.testing.assert_array_equal(g, 6 * t)
    found = _found(collectives.hlo)
    for i, (source, target) in enumerate(pairs):
        for back, ends in ((False, (source, target)), (True, (target, source))):
            plan = plan_redistribution(shape, 4, *ends)
            assert found.get((i, back), []) == _planned(plan), [str(p) for p in (*ends, *plan)]


def _move(i, x, source, target):
    with tf.name_scope(f"pair{i}"):
        return redistribute(2.0 * x, source, target) * 3.0


@pytest.mark.slow  # in all
@pytest.mark.parametrize("source", _mappings(MESH, 2), ids=str)
def test_every_pair_of_shardings_of_a_matrix(source):
    """16 x 16 over 2 x 4 devices: 121 pairs, forward and backward."""
    _check((16, 16), [((MESH, source), (MESH, target)) for target in _mappings(MESH, 2)])


def test_between_meshes_that_arrange_the_same_devices_differently():
    pairs = [
        ((MESH, source), (mesh, target))
        for mesh in ARRANGEMENTS.values()
        for source in (("x", "y"), (("y", "x"), None), (None, "x"))
        for target in _mappings(mesh, 2)[:4:2]
    ]
    _check((16, 16), pairs)


def test_uneven_parts():
    """15 x 10 over 2, 4 and 8: the collectives carry padding, as the plan counts."""
    some = [(None, None), ("x", None), (None, ("x", "y")), ("y", "x"), (("y", "x"), None)]
    _check((15, 10), [((MESH, s), (MESH, t)) for s, t in itertools.product(some, some)])


def test_three_dimensions_and_three_axes():
    random = np.random.RandomState(0)
    mappings = _mappings(CUBE, 3)
    chosen = random.randint(len(mappings), size=(12, 2))
    _check((8, 8, 8), [((CUBE, mappings[s]), (CUBE, mappings[t])) for s, t in chosen], CUBE)


def test_the_gradient_of_the_gradient_comes_back_too():
    source, target = ("x", None), (None, "y")

    def second(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(redistribute(x, source, target) ** 3)
            first = inner.gradient(loss, x)
        return outer.gradient(first, x)

    x = floats(8, 8)
    got, _ = run_sharded(second, [x], MESH, results=None)
    np.testing.assert_allclose(got, 6 * x, rtol=1e-5)


def _jump_bytes(pairs):
    """Bytes that a device receives from each source to target if two adjacent annotations leave the way to XLA."""

    def jumps(*tensors):
        results = []
        for i, (x, (source, target)) in enumerate(zip(tensors, pairs, strict=True)):
            with tf.name_scope(f"pair_{i}_"):
                results.append(mesh_split(mesh_split(2.0 * x, MESH, source), MESH, target) * 3.0)
        return results

    _, collectives = run_sharded(jumps, [floats(16, 16)] * len(pairs), MESH, results=None)
    received = [0] * len(pairs)
    for body in parse_module(collectives.hlo).computations.values():
        for instruction in body.instructions:
            use = collective_use(instruction, body)
            if use is None or instruction.op_name.endswith("call_exported"):
                continue
            kept = 0 if use.kind == "collective-permute" else use.bytes // use.participants
            received[int(re.search(r"pair_(\d+)_", instruction.op_name)[1])] += use.bytes - kept
    return received


def test_of_all_pairs_the_plan_never_receives_more_than_the_partitioner_s_own_way():
    """The figures of docs/manual_sharding.md."""
    pairs = list(itertools.product(_mappings(MESH, 2), repeat=2))
    planned = [
        total_bytes(plan_redistribution((16, 16), 4, (MESH, source), (MESH, target)))
        for source, target in pairs
    ]
    own = _jump_bytes(pairs)
    assert all(plan <= jump for plan, jump in zip(planned, own, strict=True))
    assert sum(plan < jump for plan, jump in zip(planned, own, strict=True)) == 28


def test_one_device_has_nothing_to_move():
    mesh = Mesh.parse("x:1,y:1")
    with use_mesh(mesh):
        x = tf.ones([3, 5])
        assert redistribute(x, ("x", None), (None, "y")) is x
    assert plan_redistribution((3, 5), 4, (mesh, ("x", None)), (mesh, (None, "y"))) == ()
    assert plan_redistribution((), 4, (MESH, ()), (LINE, ())) == ()


# --- the plan is the cheapest


def test_thousands_of_devices_and_a_part_of_an_axis():
    pod, line = Mesh.parse("data:64,model:32"), Mesh.parse("expert:2048")
    shape = (2048, 4096, 64)
    plan = plan_redistribution(
        shape, 4, (pod, ("data", "model", None)), (line, ("expert", None, None))
    )
    assert [(s.kind, s.ways) for s in plan] == [("all-to-all", 32)]
    assert total_bytes(plan) == math.prod(shape) * 4 // 2048 * 31 // 32
    # A quarter of the way: of the two factors of y only one has to move.
    plan = plan_redistribution((16, 16), 4, (MESH, ("x", None)), (MESH, ("y", None)))
    assert [s.kind for s in plan] == ["slice", "collective-permute"] and total_bytes(plan) == 256


@st.composite
def _problems(draw, counts, sizes):
    """A shape and two shardings over some number of devices, in two arrangements of them."""
    count = draw(st.sampled_from(counts))
    grids = [g for g in _GRIDS if math.prod(g) == count]
    shape = tuple(draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=2)))
    layouts = []
    for _ in range(2):
        grid = draw(st.sampled_from(grids))
        ids = draw(st.one_of(st.just(()), st.permutations(range(count)).map(tuple)))
        mesh = Mesh("abc"[: len(grid)], grid, ids)
        layouts.append((mesh, draw(st.sampled_from(_mappings(mesh, len(shape))))))
    return shape, *layouts


_GRIDS = [(4,), (2, 2), (6,), (2, 3), (3, 2), (8,), (2, 4), (4, 2), (2, 2, 2)]


@settings(max_examples=100)
@given(_problems([4, 6, 8], [24, 48, 10, 15]))
def test_plans_lead_there_and_count_right(problem):
    shape, source, target = problem
    plan = plan_redistribution(shape, 1, source, target)
    state = here = _regions(shape, tile_devices(source[1], source[0]))
    there = _regions(shape, tile_devices(target[1], target[0]))
    for step in plan:
        after = _regions(shape, step.assignment())
        assert step.num_bytes == _move_bytes(step.kind, shape, state, after), str(step)
        state = after
    assert state == there
    missing = max(_volume(t) - _volume(_overlap(h, t)) for h, t in zip(here[1], there[1]))
    assert total_bytes(plan) >= missing
    if {s.kind for s in plan} <= {"slice"}:
        assert missing == 0


@settings(max_examples=20)
@given(_problems([4, 8], [16, 24]))
def test_no_sequence_of_moves_is_cheaper(problem):
    """Compares with all orders of moves over all shardings that factors of the two meshes can express."""
    shape, source, target = problem
    here = _regions(shape, tile_devices(source[1], source[0]))
    there = _regions(shape, tile_devices(target[1], target[0]))
    plan = plan_redistribution(shape, 1, source, target)
    states = _shardings(shape, source[0]) | _shardings(shape, target[0])
    assert total_bytes(plan) == _cheapest(states, shape, here, there), [str(s) for s in plan]


# A state is (tiles, for each device its box): what a device holds, whatever axes say so.


def _regions(shape, assignment):
    tiles = assignment.shape[:-1]
    boxes = [None] * assignment.size
    for part in np.ndindex(*tiles):
        box = []
        for size, count, index in zip(shape, tiles, part):
            length = -(-size // count)
            box.append((min(index * length, size), min((index + 1) * length, size)))
        for device in assignment[part]:
            boxes[device] = tuple(box)
    return tiles, tuple(boxes)


def _volume(box):
    return math.prod(b - a for a, b in box)


def _overlap(first, second):
    return tuple((max(a, c), max(max(a, c), min(b, d))) for (a, b), (c, d) in zip(first, second))


def _move_bytes(kind, shape, before, after):
    """Bytes that a device receives by a move, from the boxes alone; None if there is no such move."""
    (old_tiles, old), (new_tiles, new) = before, after
    old_part = math.prod(-(-n // t) for n, t in zip(shape, old_tiles))
    changed = [d for d, (a, b) in enumerate(zip(old_tiles, new_tiles)) if a != b]
    if kind == "slice":
        fits = all(_overlap(o, n) == n or not _volume(n) for o, n in zip(old, new))
        return 0 if fits else None
    if kind == "collective-permute":
        return old_part if old_tiles == new_tiles and old != new else None
    if kind == "all-gather":
        fits = all(_overlap(o, n) == o or not _volume(o) for o, n in zip(old, new))
        if len(changed) != 1 or not fits:
            return None
        ways = old_tiles[changed[0]] // new_tiles[changed[0]]
        return (ways - 1) * old_part
    if kind == "all-to-all" and len(changed) == 2:
        down, up = changed if old_tiles[changed[0]] > new_tiles[changed[0]] else changed[::-1]
        ways = old_tiles[down] // new_tiles[down]
        if ways < 2 or (new_tiles[down] * ways, old_tiles[up] * ways) != (
            old_tiles[down],
            new_tiles[up],
        ):
            return None
        # The i-th of those that hold a box together gets the i-th piece of it, sharded the other way.
        sizes = [-(-n // t) for n, t in zip(shape, old_tiles)]
        piece = -(-shape[up] // new_tiles[up])
        for o, n in zip(old, new):
            if (o[down][0] - n[down][0]) * piece != (n[up][0] - o[up][0]) * sizes[down]:
                return None
            if _volume(o) and _volume(n) and _overlap(o, n) != _swapped(o, n, up):
                return None
        sizes[up] = piece
        return (ways - 1) * math.prod(sizes)
    return None


def _swapped(old, new, up):
    """The box that a device keeps in an all-to-all: the old one, split along `up` like the new one."""
    return tuple(n if d == up else o for d, (o, n) in enumerate(zip(old, new)))


def _cheapest(states, shape, here, there):
    """Dijkstra's algorithm, with moves known by what devices hold before and after."""
    kinds = ("slice", "collective-permute", "all-gather", "all-to-all")
    cost, done = {here: 0}, set()
    while there not in done:
        state = min(cost.keys() - done, key=lambda s: cost[s])
        done.add(state)
        for other in states - done:
            moves = [_move_bytes(kind, shape, state, other) for kind in kinds]
            new = cost[state] + min((m for m in moves if m is not None), default=math.inf)
            if new < cost.get(other, math.inf):
                cost[other] = new
    return cost[there]


def _shardings(shape, mesh):
    """All shardings that the prime factors of a mesh's axes can express; all factors are 2 here."""
    primes = (2,) * int(math.log2(mesh.size))
    mesh = Mesh("pqr"[: len(primes)], primes, mesh.device_ids)
    return {_regions(shape, tile_devices(m, mesh)) for m in _mappings(mesh, len(shape))}
