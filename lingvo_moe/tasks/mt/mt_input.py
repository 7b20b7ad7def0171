"""MtInput: packed rows of pairs for translation. Letters: B row of the batch, T time."""

from collections.abc import Mapping
from typing import ClassVar

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

    def _check_sizes(self, vocabs: NestedMap, scanned: Scan) -> None:
        super()._check_sizes(vocabs, scanned)
        marks = [(vocabulary.bos_id, vocabulary.eos_id) for vocabulary in vocabs.values()]
        if self.codes is None and set(marks) != {(BOS_ID, EOS_ID)}:
            raise DataError(
                f"{vocabs.source.path or 'the vocabulary'}: begin and end must be the ids {BOS_ID} and {EOS_ID}, but "
                f"are {marks[0]}: it is that of a published model, whose languages input.vocab_dir=RUN/vocab names, of "
                "an imported run"
            )

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
