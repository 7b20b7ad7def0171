"""Finds parallel text: which files of a directory hold pairs, in which form, of which language.

    de.tsv  de.jsonl                one language, named by the file
    pairs.jsonl                     mixed: each line names its language
    Europarl.de-en.de  .en          two files, line by line, as Moses and OPUS have them
    de.csv  de.parquet              tables, whose header names columns as the fields of JSON
    memory.tmx                      a translation memory
    data-00000-of-00001.arrow       a saved data set of Hugging Face, in its directory
    en.txt                          texts without a translation, one a line, for a language model
    dev/...                         held-out pairs, in any of these forms

Each may be compressed: .gz or .zst.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lingvo_moe.tasks.text.data.errors import DataError
from lingvo_moe.tasks.text.data.file_list import LIST_KINDS, PREPARED_LIST, FileList
from lingvo_moe.tasks.text.data.opening import COMPRESSIONS
from lingvo_moe.tasks.text.data.tsv import hidden_files
from lingvo_moe.tasks.text.preparing.formats import FORMATS
from lingvo_moe.tasks.text.preparing.lines import Fields, Source, is_language

_OURS = "|".join(
    rf"{re.escape(name)}\Z" for kind in LIST_KINDS for name in (kind.summary, kind.name)
)
# Of saved data sets of Hugging Face; the first has several splits.
_HF = ("dataset_dict.json", "dataset_info.json", "state.json")
_IGNORED = re.compile(
    rf"(?i)\.|readme|license|copying|{_OURS}|{'|'.join(map(re.escape, _HF))}|.*\.md\Z|cache-.*\.arrow\Z"
)
# Endings that look like codes of languages and are none.
_NO_LANGUAGES = ("bz2", "doc", "htm", "lzma", "pdf", "rar", "tar", "tgz", "txt", "xml", "xz", "zip")
_FORMS = (
    "known are <lang>.tsv, .jsonl, .csv, .tmx, .parquet, .arrow and pairs <name>.<lang> + <name>.{target}, plain, .gz "
    "or .zst; and <lang>.txt, texts alone, with --model of a language model"
)


@dataclasses.dataclass
class TextSources:
    """Sources of training pairs and of held-out pairs, and what was left out, in words."""

    train: list[Source]
    dev: list[Source]
    notes: list[str]


def find_sources(inputs: Sequence[str | os.PathLike], fields: Fields) -> TextSources:
    """The sources of files and directories; those in `<directory>/dev` are held-out pairs.

    Raises DataError: a file or directory does not exist or is given twice, a file is of an unknown form or lacks its
    other side, or two files of a directory hold the same; or a directory that tools.prepare or tools.build_corpus made
    is damaged.
    """
    sources = TextSources([], [], [])
    paths: dict[Path, str] = {}
    for path in map(Path, inputs):
        if not path.exists():
            raise DataError(
                f"--input={path} does not exist; name a file or directory of parallel text"
            )
        if first := paths.get(path.resolve()):
            raise DataError(f"--input={path} is given twice (also as {first})")
        paths[path.resolve()] = str(path)
        if path.is_file():
            sources.train += _classify([path], path.parent, fields)
            continue
        splits = ("train", "validation") if (path / _HF[0]).is_file() else ("", "dev")
        train, dev = _of_directory(path / splits[0], fields, sources.notes), []
        if (path / splits[1]).is_dir():
            dev = _of_directory(path / splits[1], fields, sources.notes)
        _verify(path, {"": train, "dev": dev})
        sources.train += train
        sources.dev += dev
    _check_once(sources.train + sources.dev)
    return sources


def _of_directory(directory: Path, fields: Fields, notes: list[str]) -> list[Source]:
    if not directory.is_dir():
        raise DataError(f"--input={directory.parent} has no split {directory.name!r}")
    entries = sorted(p for p in directory.iterdir() if not _IGNORED.match(p.name))
    notes += filter(None, [hidden_files(directory)])
    parts = (
        ("dev", "vocab", "records") if (directory / PREPARED_LIST.summary).is_file() else ("dev",)
    )
    for path in entries:
        if path.is_dir() and path.name not in parts:
            notes.append(f"{path}: a directory within an input is not read; give it as --input too")
    sources = _classify([p for p in entries if p.is_file()], directory, fields)
    if not sources:
        forms = _FORMS.format(target=fields.target_lang)
        raise DataError(f"no parallel text in {str(directory)!r}: {forms}")
    return sources


def _verify(directory: Path, sources: Mapping[str, Sequence[Source]]) -> None:
    """Raises DataError where a tool listed the files of a directory and its folders are not as it wrote them."""
    if listed := FileList.Open(directory):
        for folder, of_folder in sources.items():
            files = [path for source in of_folder for path in source.files]
            listed.CheckLanguages(files, folder)
            listed.Verify(files)


def _classify(paths: list[Path], directory: Path, fields: Fields) -> list[Source]:
    sources, seen, targets = [], dict[str, Path](), list[Path]()
    for path in paths:
        stem = path.name
        for ending in COMPRESSIONS:
            stem = stem.removesuffix(ending)
        base, _, extension = stem.rpartition(".")
        of_ending = (name for name, form in FORMATS.items() if extension in form.endings)
        form = next(of_ending, "lines")
        if FORMATS[form].texts and not fields.texts:
            form = "lines"
        if form == "lines" and extension == fields.target_lang:
            targets.append(path)
            continue
        what = base if form != "lines" else stem
        if what in seen:
            raise DataError(
                f"{directory}: both {seen[what].name} and {path.name}; keep one of them"
            )
        seen[what] = path
        if form == "lines":
            sources.append(_two_files(path, directory, base, extension, fields))
            continue
        code = base if is_language(base) else None
        if form == "arrow" and is_language(directory.name):  # its files have numbers
            code = directory.name
        if form == "tsv" and "lang" in fields.columns:
            code = None
        elif code is None and not FORMATS[form].mixed:
            columns = ", or, where a column of each line names the language, say --columns=lang,source,target"
            raise DataError(
                f"{path}: {base!r} is no code of a language; name the file such as de.{form}{columns * (form == 'tsv')}"
            )
        sources.append(Source(form, str(path), code))
    if targets and not any(source.form == "lines" for source in sources) and len(paths) > 1:
        raise DataError(
            f"{targets[0]}: no file of another language beside it, such as {targets[0].stem}.de"
        )
    return sources


def _two_files(path: Path, directory: Path, base: str, extension: str, fields: Fields) -> Source:
    """The source of a file of lines and the one with its translations."""
    endings = ("", *COMPRESSIONS)
    target = f"{base}.{fields.target_lang}"
    beside = [p for p in (directory / f"{target}{ending}" for ending in endings) if p.is_file()]
    if len(beside) > 1:
        raise DataError(
            f"{directory}: both {beside[0].name} and {beside[1].name}; keep one of them"
        )
    is_code = is_language(extension) and extension.lower() not in _NO_LANGUAGES
    if is_code and base and beside:
        return Source("lines", str(path), extension, str(beside[0]))
    if is_code and base and (len(extension) == 2 or not extension.isalpha()):
        raise DataError(
            f"{path}: no file in the target language beside it: expected {target} (or .gz, .zst);"
            f" --target_lang names another one than {fields.target_lang!r}"
        )
    raise DataError(
        f"{path}: no known form of parallel text; {_FORMS.format(target=fields.target_lang)};"
        " move it away, or name the files to read with --input"
    )


def _check_once(sources: Iterable[Source]) -> None:
    seen: dict[Path, Path] = {}
    for source in sources:
        path = source.files[0]
        if path.resolve() in seen:
            raise DataError(f"{path} is given twice (also as {seen[path.resolve()]})")
        seen[path.resolve()] = path
