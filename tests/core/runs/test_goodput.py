"""Time of a run: records with known answers, any record adds up, and damaged lines are left out."""

import json
import random

import pytest

from lingvo_moe.core.files.checked_lines import append_row
from lingvo_moe.core.runs import goodput, time_record
from lingvo_moe.core.runs.goodput import RECOVERY, WASTED, GoodputError, account, read_segments
from lingvo_moe.core.runs.time_record import (
    BEGIN,
    END,
    FIRST,
    INITIALIZATION,
    INPUT,
    KINDS,
    SAVE,
    SAVED,
    STARTUP,
    STEP,
    STEPS,
    TimeRecord,
)


def _write(file, began, *lines):
    """Lines of a segment: (event, step, status, seconds by kind)."""
    for event, step, status, seconds in lines:
        row = {"event": event, "began": began, "step": step, "status": status, "seconds": seconds}
        append_row(file, row)


def _killed_and_stopped(file):
    """Three segments: killed at step 9 with its checkpoint at 4; stopped at 7; ended at 10, where one is resumed."""
    _write(
        file,
        1000.0,
        (BEGIN, None, None, {INITIALIZATION: 3.0}),
        (FIRST, 1, None, {INITIALIZATION: 3.0, STARTUP: 5.0, STEP: 2.5}),
        (SAVED, 4, None, {INITIALIZATION: 3.0, STARTUP: 5.0, STEP: 4.0, SAVE: 1.0}),
        (STEPS, 9, None, {INITIALIZATION: 3.0, STARTUP: 5.0, STEP: 6.5, SAVE: 1.0}),
    )
    _write(
        file,
        1020.0,
        (BEGIN, None, None, {INITIALIZATION: 2.0}),
        (FIRST, 5, None, {INITIALIZATION: 2.0, STARTUP: 1.0, STEP: 0.5}),
        (SAVED, 7, None, {INITIALIZATION: 2.0, STARTUP: 1.0, STEP: 1.5, SAVE: 1.0}),
        (END, 7, 143, {INITIALIZATION: 2.0, STARTUP: 1.0, STEP: 1.5, SAVE: 2.0}),
    )
    _write(
        file,
        1030.0,
        (BEGIN, None, None, {INITIALIZATION: 2.0}),
        (FIRST, 8, None, {INITIALIZATION: 2.0, STARTUP: 1.0, STEP: 0.5}),
        (END, 10, 0, {INITIALIZATION: 2.0, STARTUP: 1.0, STEP: 1.5, INPUT: 0.5}),
    )


def test_known_answers(tmp_path):
    _killed_and_stopped(tmp_path / "time.jsonl")
    segments, damaged = read_segments(tmp_path / "time.jsonl")
    found = account(segments)
    assert damaged == 0
    wanted = dict.fromkeys(goodput.PARTS, 0.0)
    wanted |= {
        STEP: 0.5 * 10,
        WASTED: 0.5 * 5,  # steps 5 to 9
        INITIALIZATION: 3.0 + 2.0 + 2.0,
        STARTUP: 5.0 + 1.0 + 1.0 + 2.0,  # the very first step took 2.5 s instead of 0.5 s
        SAVE: 1.0 + 2.0,
        INPUT: 0.5,
        RECOVERY: (20.0 - 15.5) + (10.0 - 6.5),
    }
    assert found.seconds == pytest.approx(wanted)
    assert found.total == pytest.approx(35.0)  # from 1000 to 1035
    assert found.goodput == pytest.approx(5 / 35)
    assert (found.segments, found.disruptions, found.max_productive_step) == (3, 2, 10)
    assert found.step_seconds == pytest.approx(0.5)
    assert (found.saves, found.save_seconds) == (2, 1.0)
    # Of both: the gap and the start; of the stop also the end of its save.
    assert found.restart_seconds == pytest.approx(((4.5 + 3.0) + (3.5 + 3.0)) / 2 + (0 + 1.0) / 2)
    assert found.steps_between_saves == 3
    assert found.share_of_steps == pytest.approx(6.0 / 6.5)


def test_nobody_waited_for_the_next_command_after_one_that_ended_by_itself(tmp_path):
    file = tmp_path / "time.jsonl"
    _killed_and_stopped(file)
    before = account(read_segments(file)[0])
    _write(file, 9000.0, (BEGIN, None, None, {}), (END, 10, 0, {INITIALIZATION: 2.0}))
    after = account(read_segments(file)[0])
    assert after.total == pytest.approx(before.total + 2.0)
    assert after.disruptions == before.disruptions


def test_steps_that_two_restarts_lose_are_lost(tmp_path):
    """The newest checkpoint was damaged and deleted: the third segment goes on before the second began."""
    file = tmp_path / "time.jsonl"
    for began, first, last in ((0.0, 0, 10), (100.0, 8, 12), (200.0, 4, 6)):
        lines = [(step, {STEP: float(step - first)}) for step in (first + 1, last)]
        events = [(event, step, None, s) for event, (step, s) in zip((FIRST, STEPS), lines)]
        _write(file, began, (BEGIN, None, None, {}), *events)
    found = account(read_segments(file)[0])
    assert found.seconds[STEP] == pytest.approx(4 + 0 + 2)
    assert found.seconds[WASTED] == pytest.approx(6 + 4)


def _random_segment(rng, began, step):
    """The lines of a segment from a step on, see _write; the last step, and the seconds in all."""
    seconds = dict.fromkeys(KINDS, 0.0)
    events = [BEGIN]
    if rng.random() < 0.8:
        events += [FIRST, *rng.choices([STEPS, SAVED], k=rng.randint(0, 5))]
    events += [END] * (rng.random() < 0.3)
    lines = []
    for event in events:
        for kind in rng.sample(KINDS, 3):
            seconds[kind] += rng.uniform(0, 3)
        step += {FIRST: 1, STEPS: rng.randint(1, 9)}.get(event, 0)
        status = 143 if event == END else None
        lines.append((event, None if event == BEGIN else step, status, dict(seconds)))
    return lines, step, sum(seconds.values())


def test_any_record_adds_up(tmp_path):
    """The parts sum to the time from the first start to the last line, and none is negative."""
    for seed in range(100):
        rng, file, start, step = random.Random(seed), tmp_path / f"{seed}.jsonl", 1e9, 0
        now = start
        for _ in range(rng.randint(1, 6)):
            lines, step, elapsed = _random_segment(rng, now, rng.randint(0, step))
            _write(file, now, *lines)
            end = now + elapsed
            now = end + rng.uniform(0, 5)
        found = account(read_segments(file)[0])
        assert found.total == pytest.approx(end - start, abs=1e-4), seed
        assert all(value > -1e-9 for value in found.seconds.values()), (seed, found.seconds)


def test_the_time_of_a_block_is_of_one_kind(tmp_path, monkeypatch):
    """A clock that a test moves; a line about steps comes once a second, however short they are."""
    now = 0.0
    monkeypatch.setattr(time_record.time, "monotonic", lambda: now)
    monkeypatch.setattr(time_record.time, "time", lambda: 5000.0)
    file = tmp_path / "time.jsonl"
    record = TimeRecord()
    now += 2.0
    record.Switch(STARTUP)
    record.Open(file)
    now += 3.0
    with record.In(STEP):
        for step in range(1, 101):
            with record.In(INPUT):
                now += 0.01
            now += 0.04
            record.Step(step)
        with record.In(SAVE):
            now += 1.0
            record.Saved(100)
    record.End(100, 0)
    (segment,), _ = read_segments(file)
    wanted = {INITIALIZATION: 2.0, STARTUP: 3.0, STEP: 4.0, INPUT: 1.0, SAVE: 1.0}
    assert segment.seconds == pytest.approx(wanted)
    assert (segment.began, segment.status, segment.first, segment.last) == (5000.0, 0, 0, 100)
    events = [json.loads(line)["event"] for line in file.read_text().splitlines()]
    assert events == [BEGIN, FIRST, *[STEPS] * 4, SAVED, END]


def test_a_record_cut_at_any_byte_is_read_and_goes_on(tmp_path):
    """Killed while it writes a line, the trainer leaves a part of it, which is no damage."""
    _killed_and_stopped(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    first_line = whole.index(b"\n")
    for cut in range(first_line + 1, len(whole)):
        file = tmp_path / "time.jsonl"
        file.write_bytes(whole[:cut])
        assert read_segments(file)[1] == 0
        account(read_segments(file)[0])
        if cut % 50 == 0:
            lines = file.read_bytes().count(b"\n")
            TimeRecord().Open(file)
            after = file.read_bytes()
            assert after.startswith(whole[: whole.rindex(b"\n", 0, cut) + 1])
            assert after.count(b"\n") == lines + 1 and read_segments(file)[1] == 0


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    file = tmp_path / "time.jsonl"
    _killed_and_stopped(file)
    lines = file.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"4.0", b"4.1")
    file.write_bytes(b"".join(lines))
    _write(file, 1e9, (STEPS, 1, None, {"SLEEPING": 1.0}))
    _write(file, 1e9, (STEPS, 1, None, {STEP: -1.0}))
    segments, damaged = read_segments(file)
    assert (len(segments), damaged) == (3, 3)
    assert account(segments).total == pytest.approx(35.0)
    with pytest.raises(GoodputError, match=r"none\.jsonl: there is no such file"):
        read_segments(tmp_path / "none.jsonl")
    file.write_bytes(b"")
    with pytest.raises(GoodputError, match="holds no whole line"):
        read_segments(file)
