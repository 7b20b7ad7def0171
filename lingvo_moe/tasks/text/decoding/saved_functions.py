"""An exported model, verified and loaded."""

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import tensorflow as tf
import tensorflow_text  # noqa: F401 - registers the ops of exported tokenizers

from lingvo_moe.core.console.quiet import quiet
from lingvo_moe.core.files.copies import local
from lingvo_moe.core.files.manifest import ManifestError, verify_manifest
from lingvo_moe.core.files.store import check_place
from lingvo_moe.core.kernels import eight_bit
from lingvo_moe.core.version import VERSION

# TensorFlow Serving hands what lies in assets.extra through and does not look at it.
ABOUT = {"generate": "assets.extra/generator.json", "translate": "assets.extra/translator.json"}
MANIFEST = "assets.extra/manifest.sha256"


class SavedFunctions:
    """An exported model. Every file of it is verified before any is used.

    Attributes:
        NAME: what it does, by which it is used.
        about: what the exporter said of it: model, params_override, step, version (of the package), languages.
        options: how it does it, e.g. with the attributes of TranslateOptions.
        languages: source languages by task id, of a model that routes by them; those of a model that translates from
            any language to any; none of others.
        by_direction: whether the language of a line is SOURCE-TARGET.

    Raises:
        ManifestError: a file was changed, is missing or was added since it was exported.
        PathError: a path from which TensorFlow cannot load a model.
        ValueError: there is no SavedModel, or one that is not by tools.export, or weights of 8 bits where they cannot
            be; or one that does something else, or takes other inputs than this version gives.
    """

    NAME: ClassVar[str]

    def __init__(self, path: str | os.PathLike):
        check_place(path, "--saved_model")
        path = local(path)
        _verify(path)
        if (does := use_of(path)) != self.NAME:
            raise ValueError(
                f"--saved_model={path}: this model does not {self.NAME}, it is for tools.{does}"
            )
        self.about = json.loads((path / ABOUT[does]).read_text("utf-8"))
        self.options = SimpleNamespace(**self.about.pop("options", {}))
        self.languages = tuple(self.about.get("languages", ()))
        self.by_direction = bool(self.about.get("by_direction"))
        if self.about.get("weights") == "int8":
            eight_bit.check_supported()
        with quiet_absl(), quiet():  # see tokenizer.py
            self._loaded = tf.saved_model.load(str(path))
        self._path = path
        self._CheckNames(self.Names() if vars(self.options) else ["options"])

    def _CheckNames(self, names: Iterable[str]) -> None:
        """Raises ValueError unless the function has inputs or outputs of these names."""
        call = self._loaded.signatures["serving_default"]
        self._CheckThere(names, {*call.structured_input_signature[1], *call.structured_outputs})

    def _CheckThere(self, names: Iterable[str], there: Iterable[str]) -> None:
        """Raises ValueError where a name is not among those of the model."""
        if lacking := sorted({*names} - {*there}):
            version = self.about.get("version", "an older version")
            raise ValueError(
                f"--saved_model={self._path}: has no {', '.join(lacking)}: it was exported by lingvo_moe {version}, "
                f"and this is {VERSION}; export it again (tools.export)"
            )

    def Names(self) -> Iterable[str]:
        """The names of the function's inputs and outputs that are used."""
        return ["text"]


def use_of(path: str | os.PathLike) -> str:
    """The use of an exported model, a key of ABOUT: 'translate' also where nothing says it."""
    return next((use for use, file in ABOUT.items() if (local(path) / file).is_file()), "translate")


def _verify(path: Path) -> None:
    """Raises ManifestError, or ValueError where nothing was exported, unless `path` is as it was exported."""
    if (path / MANIFEST).is_file():
        verify_manifest(path, MANIFEST)
    elif not tf.saved_model.contains_saved_model(str(path)):
        raise ValueError(f"{path}: no SavedModel there (no saved_model.pb); see tools.export")
    else:
        raise ManifestError(
            f"{path}: {MANIFEST}, the list of its files, is missing, so nothing says that they are whole:"
            " it is damaged, or not by this version of tools.export; export the model again"
        )


@contextlib.contextmanager
def quiet_absl() -> Iterator[None]:
    """Keeps TensorFlow from warning, for every function of a SavedModel, that it has no gradient or name there."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
