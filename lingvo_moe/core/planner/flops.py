"""Counts the floating-point operations of matrix products: two for each multiply-add.

The TPU compiler turns every product into a convolution, a batched one into a convolution whose window
has padding, strides and dilations. As in XLA's own cost analysis, only window positions that meet
data count, not those that fall on padding or into holes.
"""

import math

from lingvo_moe.core.hlo import attributes
from lingvo_moe.core.hlo.module import Computation, Instruction, Module


def matmul_flops(instruction: Instruction, inside: Computation) -> int:
    """FLOPs of one execution of a `dot` or a `convolution`; 0 for any other instruction."""
    if instruction.opcode == "dot":
        lhs = inside.operands(instruction)[0].arrays[0].dims
        contracted = attributes.dims_list(instruction, "lhs_contracting_dims")
        multiplies = math.prod(lhs[d] for d in contracted)
        return 2 * math.prod(instruction.arrays[0].dims) * multiplies
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, inside)
    return 0


def _convolution_flops(instruction: Instruction, inside: Computation) -> int:
    dims = attributes.convolution_dims(instruction)
    lhs = inside.operands(instruction)[0].arrays[0].dims
    output = instruction.arrays[0].dims
    count = output[dims.output["f"]]
    count *= lhs[dims.lhs["f"]] // _groups(instruction, "feature_group_count")
    count *= lhs[dims.lhs["b"]] // _groups(instruction, "batch_group_count")
    for spatial, window in enumerate(attributes.window(instruction)):
        label = str(spatial)
        sizes = lhs[dims.lhs[label]], output[dims.output[label]]
        count *= window.valid_positions(*sizes)
    return 2 * count


def _groups(instruction: Instruction, key: str) -> int:
    return int(instruction.attribute(key) or 1)


class MatmulFlops:
    """Counts the matrix products of a module, including those inside fusions."""

    def __init__(self, module: Module):
        self._module = module
        self._inside: dict[str, list[tuple[int, Instruction]]] = {}

    def products(
        self, instruction: Instruction, inside: Computation
    ) -> list[tuple[int, Instruction]]:
        """Returns (FLOPs, the dot or convolution) for each product in one execution of `instruction`.

        Args:
          instruction: any instruction; a fusion is searched for products.
          inside: the computation that contains it.
        """
        if instruction.opcode == "fusion":
            return self._of_computation(instruction.called[0])
        flops = matmul_flops(instruction, inside)
        return [(flops, instruction)] if flops else []

    def _of_computation(self, name: str) -> list[tuple[int, Instruction]]:
        found = self._inside.get(name)
        if found is None:
            called = self._module.computation(name)
            found = [p for i in called.instructions for p in self.products(i, called)]
            self._inside[name] = found
        return found
