"""Detects gathers in batches that XLA's SPMD partitioner (of jaxlib 0.10.2) computes wrongly.

`tf.gather(x, ids, batch_dims=1)` becomes a gather whose indices are joined with the number of their batch. XLA sees
that each device needs its own batches only. If operand and indices shard the batch into numbers of parts of which
neither divides the other, it still takes the batches of one device for those of the other.
"""

import math
from collections.abc import Iterator, Sequence

from lingvo_moe.analysis.programs.hlo.attributes import dims_list
from lingvo_moe.analysis.programs.hlo.instructions import Computation, Instruction
from lingvo_moe.analysis.programs.hlo.sharding import TensorSharding
from lingvo_moe.analysis.programs.partitioner.faults_of_products import parts


def disagree_on_batch(
    gather: Instruction,
    operands: Sequence[Instruction],
    shardings: Sequence[TensorSharding],
    inside: Computation,
) -> bool:
    """Whether operand and indices shard a batch into numbers of parts of which neither divides the other.

    False if either is sharded along other dimensions too: those are right.
    """
    operand, indices = shardings
    for of_operand, of_indices in _batches(gather, operands[1], inside):
        (count,), (beside,) = parts(operand, [of_operand]), parts(indices, [of_indices])
        alone = math.prod(operand.tiles) == count and math.prod(indices.tiles) == beside
        if alone and count % beside and beside % count:
            return True
    return False


def _batches(
    gather: Instruction, indices: Instruction, inside: Computation
) -> Iterator[tuple[int, int]]:
    """Batch dimensions of operand and indices: along the latter, a part of the indices counts the former's batches."""
    while indices.opcode == "copy":
        indices = inside.operands(indices)[0]
    if indices.opcode == "concatenate":
        targets = dims_list(gather, "start_index_map")
        for piece, target in zip(inside.operands(indices), targets):
            counted = _counted_dim(piece, inside)
            if counted is not None:
                yield target, counted


def _counted_dim(piece: Instruction, inside: Computation) -> int | None:
    """The dimension along which an iota, or a copy of it along further dimensions, counts; None for others."""
    if piece.opcode == "iota":
        return int(piece.attribute("iota_dimension"))
    if piece.opcode not in ("broadcast", "copy"):
        return None
    dim = _counted_dim(inside.operands(piece)[0], inside)
    if dim is None or piece.opcode == "copy":
        return dim
    return dims_list(piece, "dimensions")[dim]
