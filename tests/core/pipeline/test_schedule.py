"""Schedules: every stage does every micro-batch's work once, after what it needs, and waits as long as the laws say."""

import hypothesis
import hypothesis.strategies as st

from lingvo_moe.core.pipeline import schedule as schedules
from lingvo_moe.core.pipeline.schedule import BACKWARD, FORWARD, LOSS, WEIGHTS, Order, make_schedule

STAGES, MICRO_BATCHES = st.integers(1, 8), st.integers(1, 32)


@st.composite
def made(draw):
    name, K, stacks = (
        draw(st.sampled_from(schedules.SCHEDULES)),
        draw(STAGES),
        draw(st.integers(1, 2)),
    )
    V = draw(st.integers(2, 4)) if name == "interleaved" else 1
    M = draw(MICRO_BATCHES) * (K if V > 1 else 1)
    return name, make_schedule(name, K, M, V, stacks)


def units(schedule, work):
    """{(micro-batch, chunk, stage): tick} of a kind of work that passes through the stages, by the rule of the ticks
    alone: a stage works one tick after the one before it, on groups of K micro-batches, chunk after chunk."""
    K, M, V = schedule.stages, schedule.micro_batches, schedule.repeats
    found = {}
    for unit in range(V * M):
        number, chunk = unit, 0
        if V > 1:
            number, chunk = unit // (V * K) * K + unit % K, unit // K % V
        for stage in range(K):
            late = {Order.FROM_FIRST: stage, Order.FROM_LAST: K - 1 - stage}[work.order]
            part = chunk if work.order is Order.FROM_FIRST else V - 1 - chunk
            found[number, part, stage] = work.start + unit + late
    return found


@hypothesis.given(made())
def test_work_comes_after_what_it_needs_and_what_is_kept_suffices(case):
    _, schedule = case
    K, M, V = schedule.stages, schedule.micro_batches, schedule.repeats
    forward = [units(schedule, schedule.WorkOf(FORWARD, j)) for j in range(schedule.stacks)]
    backward = [units(schedule, schedule.WorkOf(BACKWARD, j)) for j in range(schedule.stacks)]
    loss = schedule.WorkOf(LOSS, schedule.stacks - 1)
    for j, ticks in enumerate(forward):
        work = schedule.WorkOf(FORWARD, j)
        assert set(ticks.values()) == set(range(work.start, work.stop))
        for (m, v, s), tick in ticks.items():
            if s:
                assert ticks[m, v, s - 1] == tick - 1
            elif v:
                assert ticks[m, v - 1, K - 1] == tick - 1
            elif j:
                assert forward[j - 1][m, V - 1, K - 1] == tick - 1
            assert tick < backward[j][m, v, s] + (1 if j == schedule.stacks - 1 else 0)
            if s < K - 1:
                assert backward[j][m, v, s + 1] == backward[j][m, v, s] - 1
            if not schedule.splits_backward:
                kept = schedule.InputsKept(j)
                assert backward[j][m, v, s] - tick < kept or kept == work.ticks
    out = [forward[-1][m, V - 1, K - 1] for m in range(M)]
    at_loss = [backward[-1][m, V - 1, K - 1] for m in range(M)]
    assert all(loss.start <= tick < loss.stop for tick in at_loss)
    assert {b - f for b, f in zip(at_loss, out, strict=True)} == {schedule.outputs_kept - 1}


@hypothesis.given(made())
def test_the_bubble_is_that_of_the_law(case):
    name, schedule = case
    K, M, V = schedule.stages, schedule.micro_batches, schedule.repeats
    phases = schedule.Phases()
    assert [p.start for p in phases[1:]] == [p.stop for p in phases[:-1]]
    for kind, useful in ((FORWARD, V * M), (BACKWARD, V * M)):
        for j in range(schedule.stacks):
            ticks = sum(
                p.stop - p.start
                for p in phases
                if any((w.kind, w.stack) == (kind, j) for w in p.works)
            )
            assert ticks - useful == K - 1
    for work in schedule.works:
        if work.kind == WEIGHTS:
            assert name == "zb_h1" and work.ticks == M


def test_1f1b_keeps_as_much_whatever_the_number_of_micro_batches():
    kept = {make_schedule("1f1b", 4, M).InputsKept(0) for M in (8, 16, 32)}
    assert kept == {2 * 4 - 1}
    assert make_schedule("gpipe", 4, 32).InputsKept(0) == 32 + 4 - 1
    assert len(make_schedule("1f1b", 4, 32).Phases()) == 3
