"""Vocabularies of published translators for many languages, whose codes are tokens: SentencePiece's files and what says
the ids. Out comes a SentencePiece model with these ids, which graphs read as any other.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.files.files import read_object
from lingvo_moe.tasks.text.data.errors import DataError

PIECES, IDS, NAME = "sentencepiece.bpe.model", "vocab.json", "tokenizer.json"
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_PLACES = "added_tokens_decoder"  # of newer files, where each token's id stands
_CODE_LISTS = ("additional_special_tokens", "extra_special_tokens")
# What transformers reads, the last in the place of the others.
VOCABULARY_FILES = (PIECES, IDS, *_CONFIGS, NAME)
# fairseq's marks, whose ids come first.
_MARKS = ("<s>", "<pad>", "</s>", "<unk>")
_CODE = re.compile(r"__(\w+)__|([a-z]{3}_[A-Z][a-z]{3})")  # of M2M-100, or of NLLB


@dataclass(frozen=True)
class LanguageCodes:
    """The languages of a model that translates from any to any, and the places of their codes."""

    ids: Mapping[str, int]  # the id of each language's code, e.g. "eng_Latn"
    is_last: bool  # whether the source's code follows the mark of a text's end; else it comes before the text
    start_id: int  # the token before the target's code, which is the first of each translation

    def Direction(self, name: str) -> tuple[int, int]:
        """The ids of the codes of SOURCE-TARGET. Raises DataError: it is none, or names an unknown language."""
        codes = name.split("-", 1)
        if wrong := [code for code in codes if code not in self.ids]:
            hint = did_you_mean(wrong[0], list(self.ids))
            raise DataError(f"{name!r}: this model has no language {wrong[0]!r}{hint}")
        if len(codes) == 1:
            raise DataError(
                f"{name!r}: this model needs SOURCE-TARGET, e.g. {name}-{[*self.ids][-1]}"
            )
        return self.ids[codes[0]], self.ids[codes[1]]


def read_language_codes(directory: Path, start_id: int) -> tuple[bytes, LanguageCodes]:
    """The vocabulary of a checkpoint, serialized, and its languages. Raises DataError: a file is missing or damaged."""
    settings: dict[str, Any] = {}
    for name in _CONFIGS:
        if (directory / name).exists():
            settings |= read_object(directory / name, DataError)
    tokens: list[Any] = next((settings[name] for name in _CODE_LISTS if settings.get(name)), [])
    if not isinstance(tokens, list):
        raise DataError(f"{directory}: {' and '.join(_CODE_LISTS)} must be lists: {tokens!r:.60}")
    tokens = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    path, model = directory / PIECES, sentencepiece_model_pb2.ModelProto()
    if not path.exists() and (directory / NAME).exists():
        model, added = _from_json(directory / NAME)
        settings.setdefault(_PLACES, added)
    else:
        try:
            model.ParseFromString(path.read_bytes())
        except OSError as e:
            raise DataError(f"{path}: {e.strerror or e}; expected it, or {NAME}") from e
        except DecodeError as e:
            raise DataError(f"{path}: no SentencePiece model, or damaged: {e}") from e
    by_name = {piece.piece: piece for piece in model.pieces}
    names = [*_MARKS, *(name for name in by_name if name not in _MARKS)]
    if (directory / IDS).exists():
        names = _in_order(directory / IDS, names)
    try:
        places = {int(i): str(one["content"]) for i, one in settings.get(_PLACES, {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DataError(f"{directory / _CONFIGS[0]}: {_PLACES} must be objects by id") from None
    places = places or dict(enumerate(map(str, tokens), len(names)))
    ids: dict[str, int] = {}
    for number, token in sorted(places.items()):
        if number == len(names):
            names.append(token)
        elif names[number : number + 1] != [token]:
            raise DataError(f"{directory}: the token {token!r} cannot have the id {number}")
        if match := _CODE.fullmatch(token):
            ids[match[1] or match[2]] = number
    if not ids:
        raise DataError(
            f"{directory}: {' and '.join(_CONFIGS)} list no codes of languages; expected {_CODE_LISTS[0]}"
        )
    if type(start_id) is not int or start_id not in range(len(names)):
        raise DataError(f"{directory}: a translation begins with {start_id!r}, which is no id")
    return _model(model, by_name, names), LanguageCodes(
        ids, bool(settings.get("legacy_behaviour")), start_id
    )


def _from_json(path: Path) -> tuple[Any, dict[str, Any]]:
    """The SentencePiece model that a tokenizer.json was made of by `transformers`, and the added tokens by id.

    A piece with a higher score is merged first; there it has rules of its own, one for each two pieces that it is of.
    Raises DataError: it is no such file.
    """
    content, proto = read_object(path, DataError), sentencepiece_model_pb2.ModelProto()
    try:
        about = content["model"]
        rules = [tuple(r.split(" ") if isinstance(r, str) else r) for r in about["merges"]]
        added = {str(t["id"]): {"content": t["content"]} for t in content["added_tokens"]}
        tokens = {token["content"] for token in added.values()}
        names = [n for n in sorted(about["vocab"], key=about["vocab"].get) if n not in tokens]
        merged = list(dict.fromkeys(a + b for a, b in rules))
        pieces = {*names}
        splits = ((n[:i], n[i:]) for n in names for i in range(1, len(n)))
        assert {(a, b) for a, b in splits if {a, b} <= pieces} == {*rules}, "merges"
        # All rules of a piece follow one another.
        assert len(merged) == 1 + sum(a + b != c + d for (a, b), (c, d) in pairwise(rules)), "order"
        assert about["type"] == "BPE" and not about.get("byte_fallback"), "model"
        assert content["pre_tokenizer"]["type"] == "Metaspace", "pre_tokenizer"
        normalizer = content.get("normalizer") or {}
        steps = {step["type"]: step for step in normalizer.get("normalizers", [normalizer]) if step}
        assert steps.keys() <= {"Precompiled", "Replace", "Strip"}, "normalizer"
        charsmap = steps.get("Precompiled", {}).get("precompiled_charsmap", "")
        proto.normalizer_spec.precompiled_charsmap = base64.b64decode(charsmap)
        score_of = {name: -float(i) for i, name in enumerate(merged)}
        for name in names:
            proto.pieces.add(piece=name, score=score_of.get(name, -float(len(merged))))
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as e:
        raise DataError(
            f"{path}: is not one that was made of a SentencePiece model ({e}); put {PIECES} beside it, from where the "
            "model was published"
        ) from None
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    return proto, added


def _model(model: Any, by_name: Mapping[str, Any], names: Sequence[str]) -> bytes:
    """The model with pieces of these names in order; those that it lacks are no text, and split nothing."""
    kind = sentencepiece_model_pb2.ModelProto.SentencePiece
    pieces = []
    for name in names:
        piece = kind(piece=name, score=0.0, type=kind.CONTROL)
        if name in by_name and name not in _MARKS:
            piece = by_name[name]
        pieces.append(piece)
    pieces[_MARKS.index("<unk>")].type = kind.UNKNOWN
    del model.pieces[:]
    model.pieces.extend(pieces)
    spec = model.trainer_spec
    spec.vocab_size = len(pieces)
    spec.bos_id, spec.pad_id, spec.eos_id, spec.unk_id = range(4)
    spec.bos_piece, spec.pad_piece, spec.eos_piece, spec.unk_piece = _MARKS
    return model.SerializeToString(deterministic=True)


def _in_order(path: Path, names: Sequence[str]) -> list[str]:
    """The names in the order of a file of ids. Raises DataError: it has gaps, or lacks a piece."""
    number_of = read_object(path, DataError)
    order = {i: name for name, i in number_of.items() if isinstance(i, int)}
    if missing := [name for name in names if name not in number_of]:
        raise DataError(f"{path}: has no id of the piece {missing[0]!r}")
    if sorted(order) != list(range(len(number_of))) or [order[i] for i in range(4)] != list(_MARKS):
        raise DataError(f"{path}: ids must be 0, 1, ... and begin with {', '.join(_MARKS)}")
    return [order[i] for i in range(len(order))]
