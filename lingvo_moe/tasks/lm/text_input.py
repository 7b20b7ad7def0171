"""LmInput: packed rows of text from the data of a translation task. Letters: B row of the batch, T time."""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.input.base_input import ArraySpec, HeldOutBatch
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.mt.input.lengths import Lengths, Loss, loss_of
from lingvo_moe.tasks.mt.input.mt_input import BatchIterator, MtInput
from lingvo_moe.tasks.mt.input.rows_of_pairs import Shape


class LmInput(MtInput):
    """The input of a language model: the target side of MtInput's data.

    Each text is packed as a pair with itself, and the batch takes the second copy. The vocabularies are those of the
    data, so that one data directory serves both tasks; that of the source is not used.
    """

    BATCH_SIZES: ClassVar[tuple[str, ...]] = ("batch_size", "target_length")
    SIDES: ClassVar[tuple[str, str]] = ("target", "target")
    VOCAB_SETTINGS: ClassVar[Mapping[str, str]] = {
        "source": "input.source_vocab_size={most}",
        "target": "input.target_vocab_size={most};task.vocab_size={most}",
    }

    @classmethod
    def Params(cls) -> InstantiableParams:
        return super().Params().Delete("source_length", "task_ids")

    def BatchSpec(self) -> NestedMap:
        """See BaseInput: int32 [B,T] arrays."""
        spec = ArraySpec((self.p.batch_size, self.p.target_length), "int32", "BT")
        return NestedMap(dict.fromkeys(("ids", "labels", "segment_ids", "segment_pos"), spec))

    def _Shape(self) -> Shape:
        p = self.p
        return Shape(p.batch_size, p.target_length, p.target_length, p.pack)

    def _LossOf(self, lengths: Lengths) -> Loss:
        return loss_of(lengths, (self.p.target_length,))

    def __iter__(self) -> "TextIterator":
        """Endless batches from the beginning; each call starts from the beginning."""
        return TextIterator(self)

    def HeldOut(self) -> Iterator[HeldOutBatch]:
        """See MtInput: the target sides of data_dir/dev."""
        for found in super().HeldOut():
            yield HeldOutBatch(found.batch.tgt, found.group)


class TextIterator(BatchIterator):
    """Batches of packed texts, without end; see BaseInput."""

    def __next__(self) -> NestedMap:
        """The next batch: `tgt` of rows_of_pairs.to_batch.

        Raises DataError: no text fits into a row, or a damaged cache.
        """
        return super().__next__().tgt
