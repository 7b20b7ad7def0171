"""The data of benchmarks/quality_peers.py: the same pieces, training pairs and held-out pairs for every contender."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lingvo_moe.core.files import files
from lingvo_moe.tasks.mt.mt_input import MtInput
from lingvo_moe.tasks.text.data.dev_set import DevSet
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.vocabulary.vocabulary import Vocabulary

SIDES = ("source", "target")
VOCABULARIES, HELD_OUT = "vocabularies.json", "held_out.json"


@dataclass(frozen=True)
class Data:
    """Data that was written to a directory.

    Attributes:
        directory: train.source, train.target, dev.source and dev.target, a pair a line, its pieces separated by
            spaces; VOCABULARIES, the pieces of each side by id; HELD_OUT, (language, source, target) of each dev pair;
            vocab/, the vocabularies as our runs read them.
        held_out: the dev pairs by language.
        train_pairs: the training pairs of each language.
        lengths: the tokens of each dev pair's target, the end of the sentence included.
        too_long: training and dev pairs that are left out for all contenders, since a row of ours cannot hold them.
    """

    directory: Path
    held_out: dict[str, list[tuple[str, str]]]
    train_pairs: dict[str, int]
    lengths: list[int]
    too_long: tuple[int, int]

    @property
    def tokens(self) -> int:
        """The tokens of all targets of the dev pairs: a loss is divided by them."""
        return sum(self.lengths)


def write_data(directory: Path, inputs: MtInput, most: int) -> Data:
    """Writes what an input reads, for systems that have another input.

    Args:
        directory: made if missing.
        inputs: prepared.
        most: dev pairs of each language at most.

    Raises:
        DataError: a language has no dev pairs, or none that fits.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocabs = [inputs.vocabs[side] for side in SIDES]
    pieces = {side: v.Pieces(range(v.size)) for side, v in zip(SIDES, vocabs)}
    _write_json(directory / VOCABULARIES, pieces)
    (directory / "vocab").mkdir(exist_ok=True)
    for side, vocabulary in zip(SIDES, vocabs):
        files.write_atomic(directory / "vocab" / f"{side}.model", vocabulary.model_bytes)
    kept, too_long = [], [0, 0]
    train_pairs = dict.fromkeys(inputs.languages, 0)
    for number, (language, count) in enumerate(inputs.languages.items()):
        for position in range(count):
            pair = inputs.records.Read(number, position)
            fits = inputs.shape.Fits(*map(len, pair))
            too_long[0] += not fits
            train_pairs[language] += fits
            kept += [pair] if fits else []
    _write_pieces(directory / "train", kept, vocabs)
    held_out: dict[str, list[tuple[str, str]]] = {}
    ids: list[tuple[Sequence[int], ...]] = []
    for language, pairs in DevSet(inputs.p.data_dir, most, list(inputs.languages)).items():
        encoded = [tuple(v.Encode(t.strip()) for v, t in zip(vocabs, pair)) for pair in pairs]
        fitting = [i for i, pair in enumerate(encoded) if inputs.shape.Fits(*map(len, pair))]
        too_long[1] += len(pairs) - len(fitting)
        if not fitting:
            raise DataError(
                f"{language}: none of its {len(pairs)} dev pairs fits into a row: make input.source_length and"
                " input.target_length larger, or leave the language out"
            )
        held_out[language] = [pairs[i] for i in fitting]
        ids += [encoded[i] for i in fitting]
    _write_pieces(directory / "dev", ids, vocabs)
    _write_json(
        directory / HELD_OUT, [(k, *pair) for k, pairs in held_out.items() for pair in pairs]
    )
    return Data(
        directory,
        held_out,
        train_pairs,
        [len(target) + 1 for _, target in ids],
        (too_long[0], too_long[1]),
    )


def decode_pieces(vocabulary: Vocabulary, lines: Iterable[str]) -> list[str]:
    """The texts of lines of pieces, separated by spaces. Raises KeyError: not a piece of the vocabulary."""
    ids = {piece: i for i, piece in enumerate(vocabulary.Pieces(range(vocabulary.size)))}
    return [vocabulary.Decode(ids[piece] for piece in line.split()) for line in lines]


def _write_json(path: Path, content: object) -> None:
    files.write_atomic(str(path), json.dumps(content, ensure_ascii=False).encode())


def _write_pieces(
    path: Path, pairs: Iterable[Sequence[Sequence[int] | np.ndarray]], vocabs: Sequence[Vocabulary]
) -> None:
    """Writes `path`.source and `path`.target.

    Raises:
        ValueError: a piece holds a space or a newline, so that another system would read other tokens.
    """
    pairs = list(pairs)
    for number, (side, vocabulary) in enumerate(zip(SIDES, vocabs)):
        lines = []
        for pair in pairs:
            pieces = vocabulary.Pieces([int(i) for i in pair[number]])
            if any(" " in piece or "\n" in piece for piece in pieces):
                raise ValueError(f"a piece of the {side} vocabulary holds a space: {pieces}")
            lines.append(" ".join(pieces) + "\n")
        files.write_atomic(f"{path}.{side}", "".join(lines).encode())
