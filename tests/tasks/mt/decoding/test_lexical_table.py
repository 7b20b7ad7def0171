"""Model 1 compared with a plain implementation, and on a language whose dictionary is known."""

from collections import defaultdict

import numpy as np
import pytest

from lingvo_moe.tasks.mt.decoding import lexical_table as lt

WORDS, FIRST = 40, 4  # the words are pieces 4 to 43, on either side


def bitext(pairs: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]], np.ndarray]:
    """Sentences, their translations word by word in another order, and the dictionary; each sentence also gets a
    frequent word on the target's side that translates nothing."""
    rng = np.random.default_rng(seed)
    dictionary = FIRST + rng.permutation(WORDS)
    sources = [rng.integers(FIRST, FIRST + WORDS, rng.integers(1, 9)) for _ in range(pairs)]
    targets = [rng.permutation([*dictionary[s - FIRST], FIRST + WORDS]) for s in sources]
    return [s.tolist() for s in sources], [t.tolist() for t in targets], dictionary


def plain(sources, targets, rounds: int) -> dict[int, dict[int, float]]:
    """t(e|f), by the formulas."""
    t: dict = defaultdict(lambda: 1.0)
    for _ in range(rounds):
        counts: dict = defaultdict(lambda: defaultdict(float))
        for source, target in zip(sources, targets, strict=True):
            source = [*source, 2]
            for e in target:
                total = sum(t[f, e] for f in source)
                for f in source:
                    counts[f][e] += t[f, e] / total
        t = {(f, e): c / sum(row.values()) for f, row in counts.items() for e, c in row.items()}
    out: dict = defaultdict(dict)
    for (f, e), p in t.items():
        out[f][e] = p
    return out


@pytest.mark.parametrize("cells, events", [(2**23, 2**21), (120, 7)], ids=["whole", "in parts"])
def test_it_is_model_1(monkeypatch, cells, events):
    monkeypatch.setattr(lt, "_CELLS", cells)
    monkeypatch.setattr(lt, "_EVENTS", events)
    sources, targets, _ = bitext(30)
    sources[3], targets[5] = [], []  # nothing left after tokenising
    pairs = lt.TokenPairs.Join(sources, targets)
    said = []
    table = lt.lexical_table(pairs, 60, 50, keep=50, rounds=3, progress=said.append)
    want = plain(sources, targets, 3)
    for piece in range(60):
        ids, probs = table[piece].indices, table[piece].data
        assert set(ids.tolist()) == set(want[piece])
        np.testing.assert_allclose(probs, [want[piece][e] for e in ids.tolist()], rtol=1e-4)
        assert (np.diff(probs) <= 0).all()
    assert "round 3 of 3" in said[-1]


def test_it_finds_the_dictionary():
    sources, targets, dictionary = bitext(400)
    pairs = lt.TokenPairs.Join(sources, targets)
    assert len(pairs.source_starts) == len(pairs.target_starts) == 401
    table = lt.lexical_table(pairs, 50, 50, keep=8)
    best = [table[piece].indices[0] for piece in range(FIRST, FIRST + WORDS)]
    np.testing.assert_array_equal(best, dictionary)
    assert table[2].indices[0] == FIRST + WORDS  # of the empty word
    assert max(table[piece].nnz for piece in range(50)) == 8
    assert table[49].nnz == 0  # never seen
