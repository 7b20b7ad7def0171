"""Parses shardings as HLO prints them: which part of a tensor each device holds.

{replicated}                                    every device holds the full tensor
{maximal device=3}                              one device holds the full tensor
{manual}                                        the program itself decides what a device holds
{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}   2 parts of dimension 0, 4 copies of each
{devices=[2,4]<=[4,2]T(1,0)}                    devices 0..7 as a 4x2 array, transposed to 2x4
{devices=[2,2,2]<=[8] last_tile_dims={manual, replicated}}  subgroups of other kinds
{{replicated}, {devices=[8,1]<=[8]}}            one for each array of a tuple
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

import numpy as np

from lingvo_moe.analysis.programs.hlo.groups import device_ids
from lingvo_moe.analysis.programs.hlo.instructions import HloError, balanced
from lingvo_moe.core.sharding import DimsMapping, Mesh
from lingvo_moe.core.sharding.letters import read_tile_devices

REPLICATED = "replicated"
MANUAL = "manual"
_KINDS = (REPLICATED, MANUAL, "maximal", "tiled")
_DEVICES = re.compile(r"devices=\[([\d,]*)\](?:<=(\[[\d,]+\](?:T\([\d,]+\))?)|([\d,]+))")
_SUBGROUPS = re.compile(r"last_tile_dims=\{([^}]*)\}")
_COMMENT = re.compile(r"/\*.*?\*/")
_MOST_DEVICES_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class TensorSharding:
    """The sharding of one tensor."""

    # 'replicated' (full on every device), 'maximal' (full on one device), 'manual' (decided by the program), or
    # 'tiled' (split into parts).
    kind: str
    tiles: tuple[int, ...] = ()  # if tiled, the number of parts of each dimension
    # Logical device numbers. If tiled, they are in row-major order of the parts; the devices that hold the same part
    # are adjacent, in the order of the subgroups. Empty if the tensor is replicated or manual and the number of
    # devices is unknown.
    devices: tuple[int, ...] = ()
    # (kind, number of devices) of each further tile dimension. The devices of a 'replicated' subgroup hold copies of
    # the part; for a 'manual' one the program decides.
    subgroups: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise HloError(f"a sharding is of kind {', '.join(_KINDS)}, not {self.kind!r}")
        if self.kind == "tiled":
            wanted = math.prod(self.tiles) * math.prod(count for _, count in self.subgroups)
            if len(self.devices) != wanted or len(set(self.devices)) != wanted:
                raise HloError(
                    f"a sharding of {wanted} parts and copies names {len(self.devices)} devices, "
                    f"{len(set(self.devices))} of them different"
                )

    @property
    def copies(self) -> int:
        """The number of devices that hold each part."""
        if self.kind == "tiled":
            return math.prod(count for what, count in self.subgroups if what == REPLICATED)
        return len(self.devices) if self.kind == REPLICATED else 1

    @property
    def manual(self) -> int:
        """The number of devices that share a part in a way that the program itself decides; 1 if none."""
        return math.prod(count for what, count in self.subgroups if what == MANUAL)

    @property
    def is_sharded(self) -> bool:
        """Whether any dimension has several parts."""
        return self.kind == "tiled" and any(count > 1 for count in self.tiles)

    def OnMesh(self, mesh: Mesh) -> DimsMapping | None:
        """The mesh axes that each dimension is sharded over, as `mesh_split` takes them.

        Returns:
            () for a replicated tensor; None if axes of this mesh cannot express the sharding, e.g.
            for a dimension with fewer parts than an axis has devices.
        """
        if self.kind == REPLICATED or (self.kind == "tiled" and mesh.size == 1):
            return ()
        if self.kind != "tiled" or len(self.devices) != mesh.size or self.manual > 1:
            return None
        if not self.is_sharded:
            return ()
        return read_tile_devices(np.array(self.devices).reshape(*self.tiles, -1), mesh)

    def PartShape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's part, rounded up where a dimension does not divide evenly.

        Raises HloError: `shape` does not have the sharding's rank.
        """
        if self.kind != "tiled":
            return tuple(shape)
        self._check_rank(len(shape))
        return tuple(-(-size // parts) for size, parts in zip(shape, self.tiles, strict=True))

    def Padding(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The number of elements that the parts together have beyond the tensor's own, by dimension."""
        if self.kind != "tiled":
            return (0,) * len(shape)
        parts = self.PartShape(shape)
        return tuple(n * p - s for n, p, s in zip(self.tiles, parts, shape, strict=True))

    def DeviceOf(self, part: Sequence[int]) -> tuple[int, ...]:
        """The devices that hold a part, e.g. `DeviceOf((0, 3))`. Raises HloError: there is no such part."""
        if self.kind != "tiled":
            return self.devices
        self._check_rank(len(part))
        if not all(0 <= i < n for i, n in zip(part, self.tiles, strict=True)):
            raise HloError(f"part {tuple(part)}: there are {'x'.join(map(str, self.tiles))} parts")
        copies = math.prod(count for _, count in self.subgroups)
        first = int(np.ravel_multi_index(tuple(part), self.tiles)) * copies if self.tiles else 0
        return self.devices[first : first + copies]

    def Extent(self, shape: Sequence[int], part: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Returns (begin, end) of a part in each dimension, without padding; it may be empty."""
        if self.kind != "tiled":
            return tuple((0, size) for size in shape)
        sizes = zip(shape, self.PartShape(shape), part, strict=True)
        return tuple((min(i * p, s), min((i + 1) * p, s)) for s, p, i in sizes)

    def Text(self) -> str:
        """The sharding in HLO's notation, with its devices listed."""
        if self.kind == "maximal":
            return f"{{maximal device={self.devices[0]}}}"
        if self.kind != "tiled":
            return f"{{{self.kind}}}"
        dims = ",".join(map(str, (*self.tiles, *(count for _, count in self.subgroups))))
        text = f"devices=[{dims}]{','.join(map(str, self.devices))}"
        if [what for what, _ in self.subgroups] == [REPLICATED]:
            text += " last_tile_dim_replicate"
        elif self.subgroups:
            text += f" last_tile_dims={{{', '.join(what for what, _ in self.subgroups)}}}"
        return f"{{{text}}}"

    def __str__(self) -> str:
        if self.kind == REPLICATED:
            return "replicated"
        if self.kind == "maximal":
            return f"unsharded on device {self.devices[0]}"
        if self.kind == MANUAL:
            return "manual"
        sharded = [f"dim {d} in {n}" for d, n in enumerate(self.tiles) if n > 1]
        text = " and ".join(sharded) + " parts" if sharded else "unsharded"
        if self.copies > 1:
            text += f", {self.copies} copies of each" if sharded else f", {self.copies} copies"
        if self.manual > 1:
            text += f", manual over {self.manual}"
        if self.devices != tuple(range(len(self.devices))):
            shown = ",".join(map(str, self.devices[:_MOST_DEVICES_SHOWN]))
            text += f", on devices {shown}{',..' * (len(self.devices) > _MOST_DEVICES_SHOWN)}"
        return text

    def _check_rank(self, rank: int) -> None:
        if rank != len(self.tiles):
            raise HloError(
                f"expected {len(self.tiles)} dimensions, as the sharding has; got {rank}"
            )


def parse_sharding(text: str, num_devices: int = 0) -> tuple[TensorSharding, ...]:
    """Parses HLO's `sharding=` attribute.

    Args:
        text: the attribute's value, with its braces.
        num_devices: the program's number of devices, which hold a replicated tensor; 0 if unknown.

    Returns:
        One sharding, or one for each array of a tuple, in order.

    Raises:
        HloError: the text is in none of the notations above.
    """
    return _parse(_COMMENT.sub("", text).strip(), num_devices)


@functools.lru_cache(maxsize=4096)
def _parse(text: str, num_devices: int) -> tuple[TensorSharding, ...]:
    if not (text.startswith("{") and text.endswith("}")):
        raise HloError(f"not a sharding: {text[:80]!r}")
    inner = text[1:-1].strip()
    if inner.startswith("{"):
        return tuple(one for piece in _pieces(inner) for one in _parse(piece, num_devices))
    everywhere = tuple(range(num_devices))
    first = inner.partition(" ")[0]
    if first in (REPLICATED, MANUAL):
        return (TensorSharding(first, devices=everywhere),)
    single = re.match(r"maximal device=(\d+)", inner)
    if single:
        return (TensorSharding("maximal", devices=(int(single[1]),)),)
    match = _DEVICES.match(inner)
    if not match and inner:
        raise HloError(f"cannot read the sharding {text[:120]!r}")
    return (_tiled(inner, match),) if match else ()


def _pieces(text: str) -> list[str]:
    """Splits a list of `{...}` groups into the outermost groups."""
    pieces, at = [], text.find("{")
    while at >= 0:
        pieces.append(balanced(text, at))
        at = text.find("{", at + len(pieces[-1]))
    return pieces


def _tiled(inner: str, match: re.Match[str]) -> TensorSharding:
    dims = tuple(int(n) for n in match[1].split(",") if n)
    devices = tuple(device_ids(match[2] or match[3]).flatten().tolist())
    kinds: list[str] = []
    named = _SUBGROUPS.search(inner)
    if named:
        kinds = [kind.strip() for kind in named[1].split(",") if kind.strip()]
    elif "last_tile_dim_replicate" in inner:
        kinds = [REPLICATED]
    rank = len(dims) - len(kinds)
    subgroups = tuple(zip(kinds, dims[rank:], strict=True))
    return TensorSharding("tiled", dims[:rank], devices, subgroups)
