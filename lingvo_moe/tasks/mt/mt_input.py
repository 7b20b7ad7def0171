"""MtInput: packed rows of pairs for translation. Letters: B row of the batch, T time."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lingvo_moe.core.config.hyperparams import InstantiableParams
from lingvo_moe.core.input.base_input import ArraySpec
from lingvo_moe.core.nested_map import NestedMap
from lingvo_moe.tasks.text.batches.packed_input import LENGTH, PackedInput
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.scan import Scan
from lingvo_moe.tasks.text.vocabulary.special_ids import BOS_ID, EOS_ID


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
        p.Define("source_length", 64, "T of the source; a pair needs its ids and eos.", LENGTH)
        p.Define(
            "task_ids",
            False,
            "Batches also tell each token's language by number, for models that route by task; the model sets it.",
        )
        return p

    @staticmethod
    def Whole(source: Sequence[int], target: Sequence[int], task: int, vocabs: NestedMap) -> Any:
        """See PackedInput. Raises DataError: the marks of rows are not those of the vocabularies."""
        _check_marks(vocabs)
        return source, target, task

    def _check_sizes(self, vocabs: NestedMap, scanned: Scan) -> None:
        super()._check_sizes(vocabs, scanned)
        _check_marks(vocabs)

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


def _check_marks(vocabs: NestedMap) -> None:
    """Raises DataError: a vocabulary of a published translator, whose languages rows of pairs do not name."""
    for vocabulary in vocabs.values():
        if (vocabulary.bos_id, vocabulary.eos_id) != (BOS_ID, EOS_ID):
            raise DataError(
                f"{vocabulary.path or 'the vocabulary'}: begin and end must be the ids {BOS_ID} and {EOS_ID} in pairs;"
                f" they are {vocabulary.bos_id} and {vocabulary.eos_id}: an imported translator only translates"
            )
