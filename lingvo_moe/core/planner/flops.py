"""Floating-point operations of matrix products, two for each multiply-add.

A TPU's compiler has convolutions for all products, batched ones by windows with padding, strides and
dilations. What counts, as in XLA's own cost analysis, is the positions of a window that meet data.
"""

import math

from lingvo_moe.core.hlo import attributes
from lingvo_moe.core.hlo.module import Computation, Instruction, Module


def matmul_flops(instruction: Instruction, inside: Computation) -> int:
    """Of one execution of a `dot` or a `convolution`; 0 of anything else."""
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
    """Counts the products of a module, those inside of fusions too."""

    def __init__(self, module: Module):
        self._module = module
        self._inside: dict[str, list[tuple[int, Instruction]]] = {}

    def products(
        self, instruction: Instruction, inside: Computation
    ) -> list[tuple[int, Instruction]]:
        """(flops, the dot or convolution) of each product that one execution does."""
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
