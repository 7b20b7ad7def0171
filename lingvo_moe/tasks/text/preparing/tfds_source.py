"""Reads pairs from a TensorFlow Datasets builder, e.g. TranslateFolder over local files.

tensorflow_datasets is imported when a builder is named, and not before.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from lingvo_moe.core.config.checks import did_you_mean
from lingvo_moe.core.console.quiet import quiet
from lingvo_moe.tasks.text.data.encodings import START, check_start
from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.preparing.lines import (
    TFDS_FOLDER,
    Fields,
    ReadLine,
    Source,
    pairs_of_item,
)


def read_builder(name: str, fields: Fields) -> Iterator[ReadLine]:
    """Streams the pairs of a builder's split `train`.

    `name` is a registered builder with its config, as tfds.builder takes it, or 'TranslateFolder:DIR'.

    Raises:
        DataError: TFDS is not installed, there is no such builder, it has no such split or no translations, or its
            data is not there and cannot be got.
    """
    for path in Source("tfds", name, None).files:
        with open(path, "rb") as file:
            check_start(path, file.read(START))
    builder = _builder(name)
    languages = _languages(builder)
    if fields.target_lang not in languages:
        what = (
            f"only of {sorted(languages)}" if languages else "for it is no data set of translations"
        )
        raise DataError(
            f"--tfds={name}: no translations into {fields.target_lang!r} (--target_lang), {what}"
        )
    _prepare(name, builder)
    splits = list(builder.info.splits)
    if "train" not in splits:
        raise DataError(f"--tfds={name} has no split 'train'{did_you_mean('train', splits)}")
    import tensorflow_datasets as tfds

    dataset = builder.as_dataset(split="train")
    if name.startswith(TFDS_FOLDER):
        _check_lines(name, len(dataset))
    number = 0
    for example in tfds.as_numpy(dataset):
        for item in _texts(example):
            number += 1
            yield from pairs_of_item(number, {"translation": item}, None, fields)


def _builder(name: str) -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        with quiet():
            import tensorflow_datasets as tfds
    except ImportError as e:
        raise DataError(
            f"--tfds={name} needs TensorFlow Datasets, which is not here ({e}): pip install tensorflow-datasets"
        ) from e
    if name.startswith(TFDS_FOLDER):
        folder = name.removeprefix(TFDS_FOLDER)
        if not os.path.isdir(folder):
            raise DataError(
                f"--tfds={name}: there is no directory {folder!r}; it holds <lang>.train.txt and en.train.txt"
            )
        try:
            with _temporary_files_removed():
                return tfds.TranslateFolder(folder)
        except Exception as e:
            raise DataError(
                f"--tfds={name}: the directory must hold <lang>.train.txt and en.train.txt, of as many lines, and"
                f" nothing else: {e}"
            ) from e
    try:
        with _temporary_files_removed():
            return tfds.builder(name)
    except Exception as e:
        builders = tfds.list_builders(with_community_datasets=False)
        near = did_you_mean(name.partition("/")[0], builders) if name not in builders else ""
        raise DataError(f"--tfds={name}: no such builder{near}: {str(e).splitlines()[0]}") from e


@contextlib.contextmanager
def _temporary_files_removed() -> Iterator[None]:
    """Removes the temporary files that the block leaves: TFDS makes a directory for each builder without
    prepared data, and never removes it."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory() as directory:
        tempfile.tempdir = directory
        try:
            yield
        finally:
            tempfile.tempdir = before


def _prepare(name: str, builder: Any) -> None:
    """Gets the data of a builder, where it is not there yet."""
    if name.startswith(TFDS_FOLDER):
        return
    try:
        builder.download_and_prepare()
    except Exception as e:
        raise DataError(
            f"--tfds={name}: its data is not in {builder.data_dir} and could not be got: {e}"
        ) from e


def _check_lines(name: str, examples: int) -> None:
    """TFDS ends a line of a folder's files at U+2028 and the like too, which shifts all lines below it."""
    for path in Source("tfds", name, None).files:
        with open(path, "rb") as file:
            lines = sum(1 for _ in file)
        if lines != examples:
            raise DataError(
                f"--tfds={name}: {path.name} has {lines:,} lines, but TensorFlow Datasets makes {examples:,} of them:"
                " to it U+2028, U+0085, a form feed and others end a line too, so that pairs would be mixed up; take"
                " them out, or name the files such as web.de and web.en and give them as --input"
            )


def _languages(builder: Any) -> set[str]:
    """The languages of a builder's translations."""
    import tensorflow_datasets as tfds

    features = builder.info.features
    kinds = (tfds.features.Translation, tfds.features.TranslationVariableLanguages)
    for feature in (features, *dict(features).values()):
        if isinstance(feature, kinds):
            return set(feature.languages)
    if isinstance(builder, tfds.TranslateFolder):
        return set(features)
    return set()


def _texts(example: dict[str, Any]) -> Iterator[dict[str, str]]:
    """`{language: text}` of each translation in an example, whichever feature it is of."""
    for value in (example, *example.values()):
        if not isinstance(value, dict):
            continue
        if set(value) == {"language", "translation"}:  # a varying set of languages
            codes, texts = (value[key].tolist() for key in ("language", "translation"))
            yield {_text(code): _text(text) for code, text in zip(codes, texts)}
        elif all(isinstance(text, bytes) for text in value.values()):
            yield {code: _text(text) for code, text in value.items()}


def _text(value: bytes) -> str:
    return value.decode("utf-8", errors="surrogateescape")  # which pairs_of_item tells
