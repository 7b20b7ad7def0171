"""Program: a lowered function that can be run, inspected and saved to a file.

StableHLO with shardings (serialised by `jax.export`) and what is needed to call it: names, shapes,
dtypes and shardings of arguments and results, their structure, the mesh, which arguments are
donated. Loading and running one needs no TensorFlow.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lingvo_moe.core.engine.lowering.signature import Signature
from lingvo_moe.core.files import files
from lingvo_moe.core.sharding import Mesh

if TYPE_CHECKING:
    from lingvo_moe.core.engine.lowering.sources import Sources

_MAGIC = b"lingvo_moe program 1\n"
# After the magic: the length of the JSON header and that of the StableHLO, then both, then the
# SHA-256 of all before it.
_LENGTHS = struct.Struct("<QQ")

_STRING = r'"(?:[^"\\]|\\.)*"'
# ` loc(...)`, whose parentheses nest: fused[#loc1, #loc2], callsite("a"(#loc3) at "b"(#loc4)).
_LOCATION = re.compile(
    rf" loc\((?:[^()\"]|{_STRING}|\((?:[^()\"]|{_STRING}|\((?:[^()\"]|{_STRING})*\))*\))*\)"
)


class ProgramError(ValueError):
    """A program file that cannot be read."""


@dataclass(frozen=True)
class Program:
    """A function lowered for a mesh, for any platform."""

    signature: Signature  # how it is called
    exported: bytes  # what `jax.export` serialised
    # Where its operations were written, for `explaining.explain`; no part of the hash nor of a file, which names
    # nothing of the machine, so None in a program that was loaded.
    sources: "Sources | None" = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.signature.name

    @property
    def mesh(self) -> Mesh:
        """The mesh that it was lowered for."""
        return self.signature.mesh

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 of the text and of the header: equal for equal programs, in any process and on any platform."""
        digest = hashlib.sha256(self.Text().encode())
        digest.update(self._header().encode())
        return digest.hexdigest()

    @functools.cached_property
    def names_hash(self) -> str:
        """SHA-256 of its operations' names, which `hash` leaves out, but which readers of a compiled program use."""
        text = self._Module()
        names = [
            name
            for line in re.findall(r"^#loc.*", text, flags=re.MULTILINE)
            for name in re.findall(_STRING, line)
            if "/" in name and not name.endswith('.py"')  # others are lines of this machine's files
        ]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()

    def Text(self) -> str:
        """The StableHLO as text, without source locations, its functions numbered in order of appearance."""
        return normalized_text(self._Module())

    def _Module(self) -> str:
        from jax import export

        return export.deserialize(bytearray(self.exported)).mlir_module()

    def Save(self, path: str) -> None:
        """Writes the program to one file, atomically."""
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        files.write_atomic(path, self.ToBytes())

    def ToBytes(self) -> bytes:
        """The file that Save writes."""
        header = self._header().encode()
        body = _MAGIC + _LENGTHS.pack(len(header), len(self.exported)) + header + self.exported
        return body + hashlib.sha256(body).digest()

    @classmethod
    def Load(cls, path: str) -> "Program":
        """Reads what Save wrote.

        Raises ProgramError: no such file, no program file, or one that was cut short or altered.
        """
        try:
            with open(path, "rb") as f:
                data = f.read()
        except OSError as e:
            raise ProgramError(f"program {path}: {e.strerror}") from None
        return cls.FromBytes(data, path)

    @classmethod
    def FromBytes(cls, data: bytes, path: str) -> "Program":
        """The program of a file's bytes; `path` names the file for errors. Raises as Load."""
        start = len(_MAGIC) + _LENGTHS.size
        if not data.startswith(_MAGIC):
            raise ProgramError(f"program {path}: this is no program file, or one of another format")
        if len(data) >= start:
            header_bytes, exported_bytes = _LENGTHS.unpack_from(data, len(_MAGIC))
            expected = start + header_bytes + exported_bytes + 32
        if len(data) < start or len(data) != expected:
            raise ProgramError(
                f"program {path}: the file was cut short or has grown ({len(data)} bytes); write it again"
            )
        if hashlib.sha256(data[:-32]).digest() != data[-32:]:
            raise ProgramError(f"program {path}: the contents are damaged; write it again")
        header = json.loads(data[start : start + header_bytes])
        return cls(Signature.FromJson(header), data[start + header_bytes : -32])

    def _header(self) -> str:
        return json.dumps(self.signature.ToJson(), sort_keys=True)


def normalized_text(text: str) -> str:
    """StableHLO text without source locations and with functions renamed by order of definition.

    TensorFlow numbers its functions by a counter of the process, and locations hold paths of the
    machine; neither says anything about the program.
    """
    text = re.sub(r"^#loc.*\n", "", text, flags=re.MULTILINE)
    text = _LOCATION.sub("", text)
    names = re.findall(r"func\.func private @([\w.$-]+|\"[^\"]*\")", text)
    new = {name: f"fn{i}" for i, name in enumerate(names)}
    return re.sub(
        r"@([\w.$-]+|\"[^\"]*\")",
        lambda m: f"@{new[m.group(1)]}" if m.group(1) in new else m.group(0),
        text,
    )
