"""Signature: the arguments and results of a function of trees that is called with flat tensors.

Free of TensorFlow and JAX.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lingvo_moe.core.engine.lowering.specs import SpecError, TensorSpec
from lingvo_moe.core.nested_map import first_difference, flatten_items, pack
from lingvo_moe.core.sharding import Mesh


@dataclass(frozen=True)
class Signature:
    """Names, shapes, dtypes and shardings of a function's flat tensors, and the trees that they form."""

    name: str  # the function's name
    mesh: Mesh  # the mesh that its shardings speak of
    # `args`, `results`: the flat tensors; names are paths such as `state.theta.w` and `result[0].theta.w`.
    args: tuple[TensorSpec, ...]
    results: tuple[TensorSpec, ...]
    arg_structure: Any  # {"names": of the arguments, "trees": as `nested_map.skeleton` gives them}
    result_structure: Any  # {"tuple": whether there are several results, "tree": a skeleton}
    donated: tuple[int, ...]  # numbers of the flat arguments whose memory the results may take

    def FlattenArgs(self, *args: Any) -> list[Any]:
        """The leaves of the arguments in the function's order.

        Raises SpecError: another structure, naming the first leaf that differs.
        """
        names = self.arg_structure["names"]
        if len(args) != len(names):
            raise SpecError(
                f"{self.name}: takes {len(names)} argument(s) ({', '.join(names)}), got {len(args)}"
            )
        items = [item for name, tree in zip(names, args) for item in flatten_items(tree, name)]
        paths, expected = [path for path, _ in items], [spec.name for spec in self.args]
        if paths != expected:
            raise SpecError(f"{self.name}: argument {first_difference(expected, paths)}")
        return [leaf for _, leaf in items]

    def PackResults(self, leaves: list[Any]) -> Any:
        """The results in the function's structure; several results come as a tuple."""
        packed = pack(self.result_structure["tree"], leaves)
        return tuple(packed) if self.result_structure["tuple"] else packed

    def ToJson(self) -> dict[str, Any]:
        """A plain dict."""
        return {
            "name": self.name,
            "mesh": {"axis_names": self.mesh.axis_names, "shape": self.mesh.shape},
            "args": [spec.ToJson() for spec in self.args],
            "results": [spec.ToJson() for spec in self.results],
            "arg_structure": self.arg_structure,
            "result_structure": self.result_structure,
            "donated": self.donated,
        }

    @classmethod
    def FromJson(cls, value: Mapping[str, Any]) -> "Signature":
        """The inverse of ToJson."""
        return cls(
            name=value["name"],
            mesh=Mesh(value["mesh"]["axis_names"], value["mesh"]["shape"]),
            args=tuple(TensorSpec.FromJson(s) for s in value["args"]),
            results=tuple(TensorSpec.FromJson(s) for s in value["results"]),
            arg_structure=value["arg_structure"],
            result_structure=value["result_structure"],
            donated=tuple(value["donated"]),
        )
