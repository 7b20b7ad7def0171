"""Damages: the described change, repeatable by seed, undone without a trace."""

import os
from pathlib import Path

from damage import KINDS, damages


def _state(directory: Path) -> dict[str, tuple[bytes, int, int]]:
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode)
        for path in directory.iterdir()
    }


def test_each_kind_does_what_it_says_and_undoes_it(tmp_path: Path) -> None:
    names = ["a.model", "b.model", "alone.json", "empty.txt"]
    for i, name in enumerate(names):
        path = tmp_path / name
        path.write_bytes(b"" if name == "empty.txt" else os.urandom(100 + i))
        os.utime(path, ns=(10**18, 10**18 + i))
    (tmp_path / "b.model").chmod(0o600)
    before = _state(tmp_path)
    seen = set()
    for damage in damages([tmp_path / name for name in names], 200, seed=1):
        damage.Apply()
        after = _state(tmp_path)
        changed = {name for name in before if before[name] != after.get(name)}
        touched = {damage.path.name} | ({damage.other.name} if damage.other else set())
        assert changed == touched, damage
        old, new = before[damage.path.name], after.get(damage.path.name)
        seen.add((damage.kind, damage.path.name))
        if new is None:
            assert damage.kind == "delete"
            new = old
        else:
            assert damage.kind != "delete" and new[1:] == old[1:]
        if damage.kind == "cut":
            assert len(new[0]) < len(old[0]) and old[0].startswith(new[0])
        if damage.kind == "flip":
            bits = int.from_bytes(old[0], "big") ^ int.from_bytes(new[0], "big")
            assert len(new[0]) == len(old[0]) and bits.bit_count() == 1
        if damage.other:
            assert new[0] == before[damage.other.name][0]
        damage.path.unlink(missing_ok=True)  # as a program that clears what it finds damaged
        damage.Undo()
        assert _state(tmp_path) == before
    assert {kind for kind, name in seen if name == "a.model"} == set(KINDS)
    assert ("swap", "alone.json") not in seen
    assert {kind for kind, name in seen if name == "empty.txt"} == {"delete"}


def test_a_seed_gives_the_same_damages_again(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.write_text(path.name * 50)
    first, again, other = (list(map(str, damages(paths, 40, seed))) for seed in (3, 3, 4))
    assert first == again != other
