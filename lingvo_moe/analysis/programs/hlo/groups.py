"""Reads which devices take part in a collective: its replica groups or source-target pairs.

XLA prints groups in three notations:

* lists, `{{0,1},{2,3}}`;
* an iota, `[groups,devices]<=[all]`, maybe reshaped and transposed: `[8,2]<=[4,2,2]T(1,0,2)`;
* a mesh with the axes that communicate, `mesh['x'=4,'y'=2] {'x'}`. Of a part of an axis the size of the parts before
  it and its own follow the name: `{'x':(2)2}`. Devices that are not in order are listed, or given as a transposed
  iota: `mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'x'}`.

An empty list means all devices. A collective-permute has pairs instead; each counts as a group of two. Transfers
between TPU slices have a notation of their own (megascale.py).
"""

import functools
import math
import re

import numpy as np

from lingvo_moe.analysis.programs.hlo import megascale
from lingvo_moe.analysis.programs.hlo.instructions import HloError, Instruction

Groups = tuple[tuple[int, ...], ...]

_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_LIST = re.compile(r"\{([\d,\s]+)\}")
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)$")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}")
_IN_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_TALKING = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def num_devices(module_attributes: str) -> int:
    """The number of devices that a program is for, of its first line; 0 where that does not say it."""
    match = _PARTITIONS.search(module_attributes)
    return int(match[1]) if match else 0


def device_groups(instruction: Instruction, module_attributes: str = "") -> Groups:
    """Returns the ids of the devices in each replica group; of a permute, each (source, target) pair.

    Args:
      module_attributes: `Module.attributes`, which holds the number of devices; of a machine of several TPU slices,
        those of one slice.

    Raises:
      HloError: the groups are of different sizes, or in none of these notations.
    """
    if instruction.opcode.startswith("collective-permute"):
        return _lists(instruction.attribute("source_target_pairs"))
    devices = num_devices(module_attributes)
    if instruction.opcode == "send":
        return megascale.transfer_groups(instruction, devices or 1)
    text = instruction.attribute("replica_groups")
    if text.startswith("mesh["):  # its list of devices follows a comma
        mesh = _MESH.search(instruction.attributes)
        text = mesh[0] if mesh else text
    groups = _read(text)
    if not groups and text in ("", "{}", "{{}}") and devices:
        groups = (tuple(range(devices)),)
    if not groups or len({len(group) for group in groups}) != 1:
        raise HloError(
            f"{instruction.opcode} {instruction.name}: cannot read replica_groups={text[:80]}"
        )
    return groups


@functools.lru_cache(maxsize=256)
def _read(text: str) -> Groups:
    """The groups of a text in one of the three notations; () for any other."""
    if iota := _IOTA.match(text):
        return _rows(device_ids(iota[3]), int(iota[1]), int(iota[2]))
    if mesh := _MESH.match(text):
        return _along_axes(mesh[1], mesh[2], mesh[3])
    return _lists(text)


@functools.lru_cache(maxsize=256)
def _lists(text: str) -> Groups:
    return tuple(tuple(map(int, group.split(","))) for group in _LIST.findall(text))


def device_ids(text: str) -> np.ndarray:
    """Device ids: an iota `[4,2]`, maybe transposed `[4,2]T(1,0)`, or a list `0,2,1,3`."""
    iota = _IN_ORDER.match(text)
    if not iota:
        return np.array([int(n) for n in text.split(",")])
    dims = [int(n) for n in iota[1].split(",")]
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose([int(n) for n in iota[2].split(",")]) if iota[2] else ids


def _along_axes(axes_text: str, ids_text: str | None, talking_text: str) -> Groups:
    """Groups of devices that differ only along the named axes, or parts of axes, in the order of their names."""
    sizes = {name: int(size) for name, size in _AXIS.findall(axes_text)}
    wanted = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in _TALKING.findall(talking_text)
    ]
    dims: list[int] = []
    place: dict[tuple[str, int], int] = {}  # (axis, size of the parts before) -> dimension
    for name, size in sizes.items():
        done = 1
        for _, before, part in sorted(w for w in wanted if w[0] == name):
            place[name, before] = len(dims) + 1
            dims += [before // done, part]
            done = before * part
        dims.append(size // done)
    talking = [place[name, before] for name, before, _ in wanted]
    silent = [i for i in range(len(dims)) if i not in talking]
    every = device_ids(ids_text or f"[{math.prod(dims)}]")
    ids = every.reshape(dims).transpose(silent + talking)
    devices = math.prod(dims[i] for i in talking)
    return _rows(ids, ids.size // devices, devices)


def _rows(ids: np.ndarray, groups: int, devices: int) -> Groups:
    return tuple(map(tuple, ids.reshape(groups, devices).tolist()))
