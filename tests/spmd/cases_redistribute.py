"""Cases of redistribution; test_redistribute covers every pair of shardings."""

from spmd_case import Case, floats, ints

from lingvo_moe.core.sharding import Mesh, redistribute
from lingvo_moe.core.sharding.annotate import mesh_split, shard

GRID = Mesh.parse("x:2,y:4")
# Four bands of rows, each on two devices.
APART = [[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]]
BESIDE = [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
SNAKE = Mesh(("r", "c"), (2, 4), (0, 1, 2, 3, 7, 6, 5, 4))


def _moved(source, target):
    return lambda a: 3.0 * redistribute(2.0 * a, source, target)


# name: (shape, source, target, forward collectives, gradient's collectives)
_MOVES = {
    "cut-further": ((8, 8), ("x", None), ("x", "y"), {}, {"all-gather": 1}),
    "let-go": ((8, 8), ("x", "y"), ("x", None), {"all-gather": 1}, {}),
    "let-go-of-two": ((8, 8), ("x", "y"), (None, None), {"all-gather": 2}, {}),
    "rows-to-columns": (
        (8, 8),
        (("x", "y"), None),
        (None, ("x", "y")),
        {"all-to-all": 1},
        {"all-to-all": 1},
    ),
    "another-order-of-axes": (
        (8, 8),
        (("x", "y"), None),
        (("y", "x"), None),
        {"collective-permute": 1},
        {"collective-permute": 1},
    ),
    "two-meshes": (
        (8, 8),
        ("x", "y"),
        (SNAKE, ("r", "c")),
        {"collective-permute": 1},
        {"collective-permute": 1},
    ),
    "uneven": ((15, 7), ("x", None), (None, "x"), {"all-to-all": 1}, {"all-to-all": 1}),
    "of-rank-three": (
        (4, 8, 4),
        ("y", "x", None),
        (None, "x", "y"),
        {"all-to-all": 1},
        {"all-to-all": 1},
    ),
}

CASES = [
    Case(
        f"redistribute-{name}",
        _moved(source, target),
        (floats(*shape),),
        mesh="x:2,y:4",
        forward=forward,
        backward=backward,
        whole=True,
        several_processes=name in ("rows-to-columns", "two-meshes", "let-go"),
    )
    for name, (shape, source, target, forward, backward) in _MOVES.items()
] + [
    Case(
        "redistribute-integers",
        lambda a: redistribute(mesh_split(a, GRID, ("y", None)), ("y", None), (None, "y")) + 1,
        (ints(8, 8, below=9),),
        mesh="x:2,y:4",
        forward={"all-to-all": 1},
        whole=True,
    ),
    Case(
        "shard-with-copies-of-parts",
        lambda a: (
            2.0
            * shard(
                shard(a, [[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]]),
                [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]],
            )
        ),
        (floats(8, 4),),
        mesh="d:8",
        forward={"collective-permute": 1},
        backward={"collective-permute": 1},
        whole=True,
        several_processes=True,
    ),
]
