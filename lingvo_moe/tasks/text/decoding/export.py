"""Writes a model and its functions of strings as a SavedModel."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import tensorflow as tf

from lingvo_moe.core.files.copies import upload
from lingvo_moe.core.files.files import not_written, replaced_directory, write_atomic
from lingvo_moe.core.files.manifest import write_manifest
from lingvo_moe.core.files.store import check_place, is_address
from lingvo_moe.core.runs.directories import EXPORTED, check_replaceable
from lingvo_moe.core.version import VERSION
from lingvo_moe.tasks.text.decoding.saved_functions import ABOUT, MANIFEST, quiet_absl


class Exportable(tf.Module):
    """A model and its functions of strings. NAME is the one that users call, a key of ABOUT."""

    NAME: ClassVar[str]
    options: Any

    @property
    def languages(self) -> tuple[str, ...]:
        """Source languages in the order of their task ids; empty for a model that does not route by language."""
        return ()

    @property
    def by_direction(self) -> bool:
        """Whether the language of a line is SOURCE-TARGET, of two of the languages."""
        return False

    def Assets(self) -> Mapping[str, bytes]:
        """Further files, by path in the export."""
        return {}


def export(
    exported: Exportable, output: str | os.PathLike, about: dict[str, Any] | None = None
) -> None:
    """Writes a SavedModel atomically, with the signature 'serving_default' and its alias 'predict'.

    Inputs and outputs are those of the function: see Translator._Translate and Generator._Generate. It needs
    TensorFlow, and TensorFlow Text imported for its ops; nothing of this package. `assets.extra` says what it is, and
    lists all files with their SHA-256, which SavedFunctions verifies.

    At an address it is written here first; the list of files comes last. A server may load it once that is there.

    `output` may hold a SavedModel, which is replaced; `about` is kept in the SavedModel, with the options.

    Raises:
        OutputError: `output` holds something else, or lies inside a run, data or another model.
        PathError: a path from which TensorFlow could not load a model.
        OSError: it cannot be written; it is named.
    """
    check_place(output, "--output")
    check_replaceable(output, EXPORTED)
    if is_address(output):
        with tempfile.TemporaryDirectory(prefix="lingvo_moe.") as temporary:
            made = Path(temporary, "model")
            export(exported, made, about)
            upload(made, os.fspath(output), MANIFEST)
        return
    output = Path(output)
    with replaced_directory(output.absolute()) as directory, quiet_absl():
        signature = getattr(exported, exported.NAME).get_concrete_function()
        try:
            tf.saved_model.save(
                exported,
                str(directory),
                signatures={"serving_default": signature, "predict": signature},
                # Models define gradients of their own; nobody differentiates a search.
                options=tf.saved_model.SaveOptions(experimental_custom_gradients=False),
            )
        except tf.errors.OpError as e:
            raise not_written(e, output) from e
        file = directory / ABOUT[exported.NAME]
        file.parent.mkdir()
        content = {
            **(about or {}),
            "version": VERSION,
            "languages": exported.languages,
            "by_direction": exported.by_direction,
            "options": vars(exported.options),
        }
        write_atomic(file, (json.dumps(content, indent=2) + "\n").encode())
        for name, data in exported.Assets().items():
            write_atomic(directory / name, data)
        write_manifest(directory, MANIFEST)
