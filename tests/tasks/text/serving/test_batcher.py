"""Concurrent requests to one translator: which lines share a batch, which requests wait, what a failure affects."""

import asyncio
import threading

import pytest
from hypothesis import given, strategies as st
from local_server import Capitals

from lingvo_moe.tasks.text.serving.batcher import Batcher


def run(work, translator, max_lines=4, max_wait=0.0, **more):
    """Runs `await work(batcher)` beside the batcher's own loop."""

    async def both():
        batcher = Batcher(translator.Translate, max_lines, max_wait, **more)
        loop = asyncio.ensure_future(batcher.Run())
        try:
            return await asyncio.wait_for(work(batcher), 20)
        finally:
            loop.cancel()
            translator.gate.set()

    return asyncio.run(both())


async def held(translator, batcher, *requests):
    """Starts requests while the translator is held up by a first one, so that they all wait; then lets it go."""
    translator.gate.clear()
    first = asyncio.ensure_future(batcher.Translate([b"first"]))
    await asyncio.to_thread(translator.entered.wait)
    tasks = [asyncio.ensure_future(batcher.Translate(*r)) for r in requests]
    await asyncio.sleep(0)
    translator.gate.set()
    await first
    return tasks


def test_what_waits_is_translated_together():
    translator = Capitals()
    seen = []

    async def work(batcher):
        await asyncio.gather(*await held(translator, batcher, *[([b"x%d" % i],) for i in range(6)]))

    run(work, translator, on_batch=lambda lines, seconds: seen.append(lines))
    assert translator.batches == [[b"first"], [b"x0", b"x1", b"x2", b"x3"], [b"x4", b"x5"]]
    assert seen == [1, 4, 2]


def test_a_huge_request_takes_turns_with_small_ones():
    """Three small requests after one of 40 lines are in the very next batch."""
    translator, order = Capitals(), []

    async def work(batcher):
        huge = [b"h%d" % i for i in range(40)]
        tasks = await held(translator, batcher, (huge,), ([b"a"],), ([b"b", b"bb"],), ([b"c"],))
        for name, task in zip("habc", tasks):
            task.add_done_callback(lambda _, name=name: order.append(name))
        out = await asyncio.gather(*tasks)
        assert [t.texts[0] for t in out[0]] == [line.decode().upper() for line in huge]

    run(work, translator)
    assert translator.batches[1] == [b"h0", b"a", b"b", b"c"]
    assert order == ["a", "c", "b", "h"]
    assert b"bb" in translator.batches[2]


@pytest.mark.parametrize("requests, batches", [
    # The translator would run a program for each length, and a short line would wait for a long one's.
    ([["l" * 500, "s"], ["s"], ["l" * 500]], [["l" * 500] * 2, ["s"] * 2]),
    ([["l" * 5000] * 5], [["l" * 5000] * 2, ["l" * 5000] * 2, ["l" * 5000]]),
], ids=["long ones and short ones are not mixed", "of long ones there are fewer"])  # fmt: skip
def test_the_lines_of_a_batch(requests, batches):
    translator = Capitals()

    async def work(batcher):
        lines = [([line.encode() for line in request],) for request in requests]
        await asyncio.gather(*await held(translator, batcher, *lines))

    run(work, translator)
    assert [[line.decode() for line in batch] for batch in translator.batches[1:]] == batches


@given(st.lists(st.lists(st.integers(0, 300), max_size=9), max_size=6), st.integers(1, 5))
def test_every_line_is_translated_once(sizes, max_lines):
    requests = [
        [b"%d-%d-" % (r, i) + b"x" * n for i, n in enumerate(s)] for r, s in enumerate(sizes)
    ]
    translator = Capitals()

    async def work(batcher):
        return await asyncio.gather(*map(batcher.Translate, requests))

    out = run(work, translator, max_lines)
    assert [[t.texts[0].lower().encode() for t in found] for found in out] == requests
    sent = [line for lines in requests for line in lines]
    assert sorted(line for batch in translator.batches for line in batch) == sorted(sent)
    assert all(len(batch) <= max_lines for batch in translator.batches)


def test_a_first_line_waits_a_little_for_others():
    translator = Capitals()

    async def work(batcher):
        first = asyncio.ensure_future(batcher.Translate([b"a"]))
        await asyncio.sleep(0.05)
        await asyncio.gather(first, batcher.Translate([b"b", b"c", b"d"]))  # full: no more waiting

    run(work, translator, max_wait=15)
    assert translator.batches == [[b"a", b"b", b"c", b"d"]]


def test_lines_nobody_waits_for_are_not_translated():
    translator = Capitals()

    async def work(batcher):
        translator.gate.clear()
        first = asyncio.ensure_future(batcher.Translate([b"first", b"second"]))
        await asyncio.to_thread(translator.entered.wait)
        rest = [asyncio.ensure_future(batcher.Translate([b"gone"] * 9)) for _ in range(2)]
        await asyncio.sleep(0)
        assert batcher.lines == 20
        for task in rest:
            task.cancel()
        await asyncio.sleep(0)
        assert batcher.lines == 2
        translator.gate.set()
        await first

    run(work, translator)
    assert translator.batches == [[b"first", b"second"]]


def test_a_request_that_breaks_the_model_breaks_no_other():
    translator = Capitals()

    async def work(batcher):
        tasks = await held(translator, batcher, ([b"a"],), ([b"poison", b"b"],), ([b"c"],))
        return await asyncio.gather(*tasks, return_exceptions=True)

    good, bad, also_good = run(work, translator)
    assert good[0].texts[0] == "A"
    assert also_good[0].texts[0] == "C"
    with pytest.raises(RuntimeError, match="the model broke"):
        raise bad


def test_of_a_request_that_failed_nothing_more_is_translated():
    translator = Capitals()

    async def work(batcher):
        lines = [b"poison", b"a", b"b", b"c"]
        with pytest.raises(RuntimeError, match="the model broke"):
            await batcher.Translate(lines)
        return await batcher.Translate([b"d"])

    assert run(work, translator, max_lines=2)[0].texts[0] == "D"
    assert translator.batches == [[b"poison", b"a"], [b"d"]]


def test_a_translator_that_loses_lines_is_found_out():
    class Loses(Capitals):
        def Translate(self, lines, languages=None):
            return super().Translate(lines[1:])

    with pytest.raises(RuntimeError, match="0 translations of 1 lines"):
        run(lambda b: b.Translate([b"a"]), Loses())


def test_languages_go_with_their_lines_in_one_thread():
    translator, threads = Capitals(("de", "fi")), set()
    plain = translator.Translate
    translator.Translate = lambda *a: threads.add(threading.get_ident()) or plain(*a)

    async def work(batcher):
        return await asyncio.gather(
            batcher.Translate([b"a"], ["de"]), batcher.Translate([b"b"], ["fi"])
        )

    a, b = run(work, translator)
    assert (a[0].texts[0], b[0].texts[0]) == ("Ade", "Bfi")
    assert translator.batches == [[b"a", b"b"]]
    assert len(threads) == 1
