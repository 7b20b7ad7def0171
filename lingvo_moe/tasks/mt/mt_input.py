"""MtInput: packed rows of pairs for translation. Letters: B row of the batch, T time."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.input.base_input import ArraySpec
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.batches.held_out_batches import encoded
from lingvo_moe.tasks.text.batches.packed_input import PackedInput
from lingvo_moe.tasks.text.batches.rows_of_pairs import Shape, Sized, to_batch


class MtInput(PackedInput):
    """The input of a translation task."""

    BATCH_SIZES: ClassVar[tuple[str, ...]] = ("batch_size", "source_length", "target_length")
    DATA: ClassVar[str] = "<lang>.tsv.gz files"
    VOCAB_SETTINGS: ClassVar[Mapping[str, str]] = {
        side: f"input.{side}_vocab_size={{most}};task.{side}_vocab_size={{most}}"
        for side in ("source", "target")
    }

    @classmethod
    def Params(cls) -> InstantiableParams:
        p = super().Params()
        p.Define(
            "source_length",
            64,
            "T of the source; a pair needs its ids and eos.",
            check=checks.Integer(2),
        )
        p.Define(
            "task_ids",
            False,
            "Batches also tell each token's language by number, for models that route by task; the "
            "model sets it.",
        )
        return p

    def BatchSpec(self) -> NestedMap:
        """See BaseInput: int32 [B,T] arrays."""

        def side(length: int, *names: str) -> NestedMap:
            spec = ArraySpec((self.p.batch_size, length), "int32", "BT")
            return NestedMap(dict.fromkeys(names, spec))

        tasks = ["task_ids"] if self.p.task_ids else []
        return NestedMap(
            src=side(self.p.source_length, "ids", "segment_ids", "segment_pos", *tasks),
            tgt=side(self.p.target_length, "ids", "labels", "segment_ids", "segment_pos", *tasks),
        )

    @staticmethod
    def ToBatch(rows: Sequence[Sequence[Any]], shape: Shape) -> NestedMap:
        """See rows_of_pairs.to_batch."""
        return to_batch(rows, shape)

    @staticmethod
    def Whole(source: Sequence[int], target: Sequence[int], task: int, vocabs: NestedMap) -> Any:
        """See PackedInput."""
        return source, target, task

    def _Shape(self) -> Shape:
        p = self.p
        return Shape(p.batch_size, p.source_length, p.target_length, p.pack, p.task_ids)

    def _HeldOutSized(self, pair: tuple[str, str], task: int | None) -> Sized | None:
        encode = self.vocabs.source.Encode, self.vocabs.target.Encode
        return encoded(encode, self.shape, self.p.too_long == "truncate")(pair, task)
