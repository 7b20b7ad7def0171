"""Counts the floating-point operations of matrix products, two for each multiply-add, and finds their number format.

The TPU compiler turns every product into a convolution, a batched one into a convolution whose window
has padding, strides and dilations. As in XLA's own cost analysis, only window positions that meet
data count, not those that fall on padding or into holes. The GPU compiler keeps products as `dot`s inside fusions, or
calls cuBLAS and cuDNN, whose calls state their dimensions. Of the TPU's kernels (kernels/pallas/) the program's name
scope says how many keys a query looks at, or how many rows experts have.
"""

import math
import re
from typing import NamedTuple

from lingvo_moe.analysis.programs.hlo import attributes
from lingvo_moe.analysis.programs.hlo.instructions import Computation, HloError, Instruction
from lingvo_moe.analysis.programs.hlo.module import Module

# Number formats of products. A GPU multiplies float32 in TF32 unless the program demands more.
FP8, BFLOAT16, TF32, FLOAT32 = FORMATS = ("fp8", "bfloat16", "tf32", "float32")
_CUBLAS = re.compile(r'custom_call_target="__cublas\$[^"]*"')
_CUDNN = re.compile(r'custom_call_target="__cudnn\$conv(\w+)"')
# Of a TPU's attention, by the phase in its name: products as large as of queries and keys, and those as with values.
_PHASES = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)}
_ATTENTION = re.compile(r"/about_(\d+)_keys(?:_\d+)?/(?:.*/)?splash_m[hq]a_(fwd|dq|dkv)_")
_GROUPED = re.compile(r"/about_(\d+)_rows(?:_\d+)?/(?:.*/)?\S*\bt?gmm\b\S*/pallas_call$")
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_HIGH = re.compile(r"operand_precision=\{[^}]*highest|algorithm=dot_f32_f32_f32\b")
_PRECISE_CALL = re.compile(
    r'"operand_precision":\[[^\]]*"HIGHEST"|"algorithm":"ALG_DOT_F32_F32_F32"'
)


def number_format(product: Instruction, inside: Computation) -> str:
    """The format, of FORMATS, in which a device multiplies: by the operands' dtypes and the precision demanded."""
    operands = inside.operands(product)
    if kernel := _kernel_of(product, inside):
        operands = kernel.factors
    lhs, rhs = (operand.arrays[0] for operand in operands[:2])
    if lhs.dtype.startswith("f8") and rhs.dtype.startswith("f8"):
        return FP8
    bits = max(8 * array.num_bytes // max(1, math.prod(array.dims)) for array in (lhs, rhs))
    if bits <= 16:
        return BFLOAT16
    precise = _HIGH.search(product.attributes) or _PRECISE_CALL.search(product.attributes)
    return FLOAT32 if precise or bits > 32 else TF32


def matmul_flops(instruction: Instruction, inside: Computation) -> int:
    """FLOPs of one execution of a `dot`, a `convolution` or a call of a kernel; 0 for any other instruction."""
    if instruction.opcode == "dot":
        lhs = inside.operands(instruction)[0].arrays[0].dims
        contracted = attributes.dims_list(instruction, "lhs_contracting_dims")
        multiplies = math.prod(lhs[d] for d in contracted)
        return 2 * math.prod(instruction.arrays[0].dims) * multiplies
    if instruction.opcode == "convolution":
        image = inside.operands(instruction)[0].arrays[0]
        return _convolution_flops(instruction, image.dims, instruction.arrays[0].dims)
    if instruction.opcode != "custom-call":
        return 0
    if _CUBLAS.search(instruction.attributes):
        return _cublas_flops(instruction, inside)
    if call := _CUDNN.search(instruction.attributes):
        return _cudnn_flops(instruction, inside, call[1])
    if kernel := _kernel_of(instruction, inside):
        return kernel.flops
    return 0


class _Kernel(NamedTuple):
    """A kernel of Pallas."""

    flops: int
    factors: list[Instruction]  # the floats among its operands; what is multiplied is first
    widths: tuple[int, ...]  # the sizes of its products that need not be of whole tiles


def _kernel_of(instruction: Instruction, inside: Computation) -> _Kernel | None:
    """Reads a call of one; None for other instructions."""
    attention, grouped = (form.search(instruction.op_name) for form in (_ATTENTION, _GROUPED))
    match = attention or grouped
    if instruction.opcode != "custom-call" or not match:
        return None
    operands = inside.operands(instruction)
    floats = [operand for operand in operands if not operand.arrays[0].dtype.startswith("s")]
    about = int(match[1])
    if attention:  # queries, keys and values [B,N,T,K], or, where B is 1, [N,T,K]
        q, _, v = (operand.arrays[0].dims for operand in floats[:3])
        of_keys, of_values = _PHASES[attention[2]]
        depth = of_keys * q[-1] + of_values * v[-1]
        return _Kernel(2 * about * math.prod(q[:-1]) * depth, floats, q[-1:])
    arrays = [instruction.arrays[0], *(operand.arrays[0] for operand in floats)]
    (weights,) = (array.dims for array in arrays if len(array.dims) == 3)  # or their gradient
    return _Kernel(2 * about * math.prod(weights[1:]), floats, weights[1:])


def _cublas_flops(instruction: Instruction, inside: Computation) -> int:
    contracted = _CONTRACTED.search(instruction.attributes)
    if not contracted:
        raise HloError(f"{instruction.name} calls cuBLAS without saying which dimensions it sums")
    lhs = inside.operands(instruction)[0].arrays[0].dims
    multiplies = math.prod(lhs[int(d)] for d in re.findall(r"\d+", contracted[1]))
    # The first result is the product; a workspace may follow.
    return 2 * math.prod(instruction.arrays[0].dims) * multiplies


def _cudnn_flops(instruction: Instruction, inside: Computation, kind: str) -> int:
    """FLOPs of a convolution or one of its gradients, whose attributes are those of the convolution."""
    first, second = (operand.arrays[0].dims for operand in inside.operands(instruction)[:2])
    result = instruction.arrays[0].dims  # a workspace follows
    if kind == "BackwardInput":
        return _convolution_flops(instruction, result, first)
    if kind == "BackwardFilter":
        return _convolution_flops(instruction, first, second)
    return _convolution_flops(instruction, first, result)


def _convolution_flops(
    instruction: Instruction, lhs: tuple[int, ...], output: tuple[int, ...]
) -> int:
    dims = attributes.convolution_dims(instruction)
    count = output[dims.output["f"]]
    count *= lhs[dims.lhs["f"]] // _groups(instruction, "feature_group_count")
    count *= lhs[dims.lhs["b"]] // _groups(instruction, "batch_group_count")
    for spatial, window in enumerate(attributes.window(instruction)):
        label = str(spatial)
        size, positions = lhs[dims.lhs[label]], output[dims.output[label]]
        count *= attributes.valid_positions(window, size, positions)
    return 2 * count


def _groups(instruction: Instruction, key: str) -> int:
    return int(instruction.attribute(key) or 1)


def in_tiles(product: "MatrixProduct", tile: int) -> int:
    """FLOPs of a product whose sizes are rounded up to whole tiles of a matrix unit.

    The unit holds a tile of one factor, and loading one takes as long as a tile of the other needs to stream through.
    """
    instruction, result = product.instruction, product.instruction.arrays[0].dims
    if not product.flops:
        return 0
    sizes: tuple[float, ...]
    if kernel := _kernel_of(instruction, product.inside):
        sizes = kernel.widths
    else:
        summed = product.flops / (2 * math.prod(result))
        convolves = instruction.opcode == "convolution"
        columns = result[attributes.convolution_dims(instruction).output["f"] if convolves else -1]
        sizes = summed, columns, math.prod(result) / columns
    return round(product.flops * math.prod(math.ceil(n / tile) * tile / n for n in sizes))


class MatrixProduct(NamedTuple):
    """A matrix product: its FLOPs, the instruction, and the computation that contains it."""

    flops: int
    instruction: Instruction
    inside: Computation


class MatmulFlops:
    """Counts the matrix products of a module, including those inside fusions."""

    def __init__(self, module: Module):
        self._module = module
        self._inside: dict[str, list[MatrixProduct]] = {}

    def products(self, instruction: Instruction, inside: Computation) -> list[MatrixProduct]:
        """Returns each product in one execution of an instruction; inside of a fusion, too."""
        if instruction.opcode == "fusion":
            return self._of_computation(instruction.called[0])
        flops = matmul_flops(instruction, inside)
        return [MatrixProduct(flops, instruction, inside)] if flops else []

    def _of_computation(self, name: str) -> list[MatrixProduct]:
        products = self._inside.get(name)
        if products is None:
            called = self._module.computation(name)
            products = [p for i in called.instructions for p in self.products(i, called)]
            self._inside[name] = products
        return products
