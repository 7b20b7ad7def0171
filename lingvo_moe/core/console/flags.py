"""Command-line flags, with absl: each command has a table of its own.

absl keeps the flags of a process in one global table. Here several commands run in one process (in tests, in a demo),
and many of them have a flag of the same name. So each command defines its flags in a `Flags`, an absl `FlagValues`:

    def define_flags() -> Flags:
        flags = Flags("python -m tools.export", __doc__)
        flags.DEFINE_path("logdir", None, "the run to export", required=True)
        flags.DEFINE_integer("top_k", 1, "translations of each line", checks.SIZE)
        return flags

    def main(argv: Sequence[str] | None = None) -> int:
        args = define_flags().Parse(argv)
        print(args.logdir, args.top_k)

What users of absl know works: `--top_k=4` and `--top_k 4`, `--quiet` and `--noquiet`, `--flagfile=FILE`, `--undefok`,
`--help`, `--helpfull`, `--helpxml`, and validators. A mistake ends the process with one line and status 2; `--help`
ends it with status 0. Each command also has `--traceback`; see mistakes.py.
"""

import contextlib
import copy
import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Self

from absl import flags

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.checks import did_you_mean, either, nearest
from lingvo_moe.core.console.command import as_typed, say
from lingvo_moe.core.console.mistakes import show_tracebacks
from lingvo_moe.core.files.paths import PathError, check_local, check_portable
from lingvo_moe.core.files.store import check_place

_HELP = "help"  # the section of the flags that every command has
_COMMON = ("flagfile", "help", "helpfull", "traceback")  # what one may look for in every command
_KINDS = {int: "int", float: "float"}

# Names the checkpoint with the lowest held-out loss, where a flag takes a step.
BEST, NEWEST = "best", "newest"
BEST_HELP = f"'{BEST}': the one with the lowest held-out loss while it trained"


def names(text: str) -> tuple[str, ...]:
    """Splits comma-separated names; spaces around them and empty ones are dropped."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def join_overrides(*overrides: str) -> str:
    """Joins texts `path=value;path=value` to one; empty ones are dropped."""
    # Otherwise a backslash at the end would escape the semicolon that follows.
    spaced = [f"{text} " if text.endswith("\\") else text for text in overrides[:-1]]
    return ";".join(text for text in (*spaced, *overrides[-1:]) if text)


def same_place(paths: Mapping[str, str]) -> str:
    """The reason against two flags that name one place to write to, for `Flags.Refuse`; '' where none do."""
    for (flag, path), (other, other_path) in itertools.combinations(paths.items(), 2):
        if path and other_path and os.path.realpath(path) == os.path.realpath(other_path):
            return f"--{flag} and --{other} are both {other_path}; name two places"
    return ""


class Flags(flags.FlagValues):
    """The flags of one command: their definitions and, after `Parse`, their values as attributes.

    The DEFINE methods take absl's arguments: the name without dashes, the default (None: no value), and the help text.
    """

    # FlagValues sends assignments to attributes to flags, so these are set in __dict__.
    command: str  # how to call it
    _about: str
    _prefix: str
    _section: str
    _alone: dict[str, Callable[[], None]]

    def __init__(self, command: str, about: str | None, prefix: str = ""):
        """Makes a table with the help flags alone.

        Args:
            command: how to call it, e.g. "python -m tools.export".
            about: what --help shows above the flags; the docstring of the command's module.
            prefix: the first word of error messages; by default the last part of the module's name.
        """
        super().__init__()
        self.__dict__.update(command=command, _about=(about or "").strip("\n"), _alone={})
        self.__dict__.update(_prefix=prefix or command.rpartition(".")[2], _section=_HELP)

        def show_all() -> None:
            print(self.Help(full=True))

        for name, short, text, show in (
            ("help", "h", "show this help", lambda: print(self.Help())),
            ("helpshort", "?", "the same as --help", lambda: print(self.Help())),
            ("helpfull", "", "also show the flags that every command has", show_all),
            ("helpxml", "", "show all flags as XML", self.write_help_in_xml_format),
        ):
            flags.DEFINE_flag(_ShowFlag(name, text, show, short), self, _HELP)
        self.DEFINE_boolean("traceback", False, "show the whole traceback of an error")
        self.__dict__["_section"] = "flags"

    @contextlib.contextmanager
    def Section(self, title: str) -> Iterator[None]:
        """Flags that are defined inside appear under this title in the help."""
        before = self._section
        self.__dict__["_section"] = title
        try:
            yield
        finally:
            self.__dict__["_section"] = before

    def DEFINE_string(
        self, name: str, default: str | None, help: str, required: bool = False
    ) -> None:
        """Defines a flag that takes any text."""
        self._Define(name, default, help, _checked(str, checks.TEXT), required)

    def DEFINE_integer(
        self, name: str, default: int | None, help: str, check: checks.Check
    ) -> None:
        """Defines a flag that takes an integer in the range of `check`."""
        self._Define(name, default, help, _checked(int, check))

    def DEFINE_float(
        self, name: str, default: float | None, help: str, check: checks.Check
    ) -> None:
        """Defines a flag that takes a number in the range of `check`."""
        self._Define(name, default, help, _checked(float, check))

    def DEFINE_boolean(self, name: str, default: bool, help: str) -> None:
        """Defines a switch: `--name`, `--noname`, `--name=true`."""
        flags.DEFINE(_Boolean(), name, default, help, self, None, self._section, boolean=True)

    def DEFINE_enum(
        self, name: str, default: str | None, enum_values: Sequence[str], help: str
    ) -> None:
        """Defines a flag that takes one of some values; with the default "" also "", which leaves the choice open."""
        parser = _checked(str, checks.one_of(enum_values), may_be_empty=default == "")
        self._Define(name, default, help, parser)

    def DEFINE_step(self, name: str, help: str, words: Sequence[str] = (BEST,)) -> None:
        """Defines a flag that takes the step of a checkpoint, an integer, or a word; None where it is not given."""
        allowed = f"{checks.COUNT}, or {' or '.join(map(repr, words))}"

        def read(text: str) -> int | str:
            if text not in words and not re.fullmatch("[0-9]{1,18}", text):
                raise ValueError(f"must be {allowed}")
            return text if text in words else int(text)

        self.DEFINE_parsed(name, None, help, read, allowed)

    def DEFINE_list(
        self, name: str, default: Sequence[str] | None, help: str, allowed: Collection[str] = ()
    ) -> None:
        """Defines a flag that takes comma-separated names; its value is a tuple, empty only where the default is.

        `allowed` are the names that it takes; () for any.
        """

        def read(text: str) -> tuple[str, ...]:
            chosen = names(text)
            if default and not chosen:
                raise ValueError("must name at least one")
            for name in chosen:
                if allowed and name not in allowed:
                    raise ValueError(f"no {name!r}{did_you_mean(name, allowed)}")
            return chosen

        self.DEFINE_parsed(name, default, help, read, "comma-separated")

    def DEFINE_numbers(
        self, name: str, default: Sequence[float], help: str, check: checks.Integer | checks.Number
    ) -> None:
        """Defines a flag that takes comma-separated numbers in the range of `check`; its value is a tuple.

        On the command line it takes at least one.
        """
        number = _checked(int if isinstance(check, checks.Integer) else float, check)

        def read(text: str) -> tuple[float, ...]:
            return tuple(number.parse(part) for part in names(text) or ("",))

        self.DEFINE_parsed(name, default, help, read, f"comma-separated; each {check}")

    def DEFINE_override(self, help: str = "path=value;path=value, as for the trainer") -> None:
        """Defines `--model_params_override`. Given several times, all of them apply, a later value of a path last."""
        parser = _checked(str, checks.TEXT)
        flag = _OverrideFlag(parser, _Serializer(), "model_params_override", "", help)
        flags.DEFINE_flag(flag, self, self._section)

    def DEFINE_parsed(
        self, name: str, default: Any, help: str, parse: Callable[[str], Any], syntax: str = ""
    ) -> None:
        """Defines a flag with a syntax of its own.

        Args:
            default: the value itself, not its text; None for no value.
            parse: returns the value of a text; raises ValueError with what would be right.
            syntax: a phrase for the help.
        """

        def read(value: Any) -> Any:
            return parse(value) if isinstance(value, str) else tuple(value)

        self._Define(name, default, help, _Parser(read=read, syntax=syntax))

    def DEFINE_path(
        self,
        name: str,
        default: str | None,
        help: str,
        required: bool = False,
        portable: bool = False,
        address: bool = False,
    ) -> None:
        """Defines a flag that names a file or a directory, checked by lingvo_moe.core.files.paths.

        Args:
            portable: True for a run or an exported model, which TensorStore and TensorFlow read and write.
            address: whether it may also name a place in a bucket.
        """
        self._Define(name, default, help, _checked(str, checks.TEXT), required)
        check = check_portable if portable else check_local
        self._CheckPaths(name, partial(check_place, portable=portable) if address else check)

    def DEFINE_multi_path(self, name: str, help: str) -> None:
        """Defines a flag that names a file or a directory each time it is given; its value is a list."""
        self.DEFINE_multi_string(name, help)
        self._CheckPaths(name, check_local)

    def DEFINE_multi_string(self, name: str, help: str) -> None:
        """Defines a flag that may be given several times; its value is a list of texts."""
        parser = _checked(str, checks.TEXT)
        serializer = flags.ArgumentSerializer[str]()
        flags.DEFINE_multi(parser, serializer, name, [], help, self, self._section)

    def OnlyWith(self, names: str, because: str = "", **needed: Any) -> None:
        """Declares that flags have an effect only with others; one that is given without these is refused.

        Args:
            names: of the flags, with spaces between them. Only a value other than the default counts as given.
            because: a phrase that ends the message.
            needed: by the name of another flag, whether it must be given, or its value, or a tuple of possible values.
        """

        def why(values: Mapping[str, Any]) -> str:
            changed = (name for name in names.split() if values[name] != self[name].default)
            for name, (other, wanted) in itertools.product(changed, needed.items()):
                if lacks := self._Lacks(other, values[other], wanted):
                    return f"{self._Shown(name)} {lacks}{because and ': '}{because}"
            return ""

        self.Refuse([*names.split(), *needed], why)

    def Refuse(self, names: Sequence[str], why: Callable[[Mapping[str, Any]], str]) -> None:
        """Refuses these flags where `why`, which gets their values by name, returns a reason; '' is none."""

        def check(values: Mapping[str, Any]) -> bool:
            if said := why(values):
                raise flags.IllegalFlagValueError(said)
            return True

        flags.register_multi_flags_validator(names, check, flag_values=self)

    def _Lacks(self, name: str, value: Any, wanted: Any) -> str:
        """Says how a flag fails the requirement of OnlyWith; '' if it meets it."""
        if isinstance(wanted, bool):
            if (value != self[name].default) is wanted:
                return ""
            shown = f"--{name}, which is not given" if wanted else self._Shown(name)
            return f"{'goes' if wanted else 'does not go'} with {shown}"
        allowed = wanted if isinstance(wanted, tuple) else (wanted,)
        if value in allowed:
            return ""
        shown = either(f"--{name}={one}" for one in allowed if one is not None)
        return f"goes with {shown}, not with {self._Shown(name)}"

    def _Shown(self, name: str) -> str:
        """A flag with its value, as a user gives it."""
        value = self[name].value
        if self[name].boolean:
            return f"--{'' if value else 'no'}{name}"
        return f"--{name}={','.join(map(str, value)) if isinstance(value, list | tuple) else value}"

    def WhenAlone(self, name: str, show: Callable[[], None]) -> None:
        """Makes `--name` without a value, as the last argument, call `show`, and end the process with status 0."""
        self.__dict__["_alone"] = {**self._alone, f"--{name}": show}

    def Parse(self, argv: Sequence[str] | None = None) -> Self:
        """Reads the flags' values; they are attributes afterwards.

        `argv` are the arguments after the command's name; None: those of this process.

        Returns:
            This object.

        Raises:
            SystemExit: with status 2 after one line on standard error, for a flag that does not exist, a value that a
                flag cannot have, or an argument that is no flag; with status 0 after --help.
        """
        arguments = sys.argv[1:] if argv is None else argv
        if arguments and (show := self._alone.get(arguments[-1])):
            show()
            raise SystemExit(0)
        try:
            _, *rest = self([self.command, *arguments])
        except flags.UnrecognizedFlagError as e:
            flag = str(e.flagvalue).partition("=")[0]
            self.Fail(f"no flag {flag}{self._Instead(flag)}")
        except flags.Error as e:
            self.Fail(str(e).removeprefix("flag ").removeprefix("ERROR:: "))
        except UnicodeDecodeError as e:
            self.Fail(f"--flagfile names a file that is no text: {e}")
        except ValueError as e:  # absl's, for --noname=value
            self.Fail(str(e))
        show_tracebacks(bool(self["traceback"].value))
        if rest:
            self.Fail(f"unexpected argument {rest[0]!r}: values are given as --flag=value")
        return self

    def With(self, **values: Any) -> Self:
        """A copy of the parsed flags, some of which have other values."""
        new = copy.deepcopy(self)
        for name, value in values.items():
            new[name].value = value
        return new

    def Fail(self, message: str) -> NoReturn:
        """Ends the process with status 2 and this line: flags that do not go together."""
        say(f"{self._prefix}: {message}")
        raise SystemExit(2)

    def Values(self) -> dict[str, Any]:
        """Returns the values of the command's own flags by name, without those of the help."""
        return {name: self[name].value for name in self.Names()}

    def Names(self) -> list[str]:
        """Returns the names of the command's own flags, in the order of their definition."""
        sections = self.flags_by_module_dict().items()
        return [flag.name for section, members in sections if section != _HELP for flag in members]

    def Help(self, full: bool = False) -> str:
        """Returns what --help prints or, where `full`, --helpfull, with commands as typed."""
        if full:
            return as_typed(f"{self._about}\n{self.get_help()}")
        sections = self.flags_by_module_dict()
        text = "\n".join(self.module_help(name) for name in sections if name != _HELP)
        more = "--helpfull also shows --flagfile, --traceback and what else every command takes."
        return as_typed(f"{self._about}\n{text}\n\n{more}")

    def _Define(
        self, name: str, default: Any, help: str, parser: "_Parser", required: bool = False
    ) -> None:
        text = f"{help} (required)" if required else help
        flags.DEFINE(parser, name, default, text, self, _Serializer(), self._section)
        if required:
            alone = f"; --{name} alone lists all"

            def why(values: Mapping[str, Any]) -> str:
                said = f"--{name} is required{alone * (f'--{name}' in self._alone)}"
                return said if values[name] is None else ""

            self.Refuse([name], why)

    def _CheckPaths(self, name: str, check: Callable[[str, str], None]) -> None:
        """Checks the value, or each of them, once all flags are known: a default may be unsuitable too."""

        def why(values: Mapping[str, Any]) -> str:
            value = values[name]
            try:
                for path in [value] if isinstance(value, str) else value or ():
                    check(path, f"--{name}")
            except PathError as e:
                return str(e)
            return ""

        self.Refuse([name], why)

    def _Instead(self, flag: str) -> str:
        """A hint that is added to the error about a flag that does not exist."""
        spellings = self._Spellings(flag)
        if "model_params_override" in self.Names() and not nearest(flag, spellings):
            return (
                "; a parameter of the experiment is set by its path, --model_params_override='path=value': "
                "python -m lingvo_moe.trainer --model=... --mode=inspect_params prints all paths"
            )
        return did_you_mean(flag, spellings)

    def _Spellings(self, flag: str) -> list[str]:
        """Existing flags that a misspelt one may mean."""
        defined = self.Names()
        spellings = [f"--{name}" for name in (*defined, *_COMMON)]
        if flag.startswith("--no"):
            spellings += [f"--no{name}" for name in defined if self[name].boolean]
        return spellings


class _Parser(flags.ArgumentParser[Any]):
    """Reads a flag's text with a function, which raises ValueError with what would be right."""

    # Given by name, or absl would keep every parser for ever.
    def __init__(self, *, read: Callable[[Any], Any], syntax: str, kind: str = "string"):
        self._read, self._kind = read, kind
        self.syntactic_help = syntax

    def parse(self, argument: Any) -> Any:
        return self._read(argument)

    def flag_type(self) -> str:
        return self._kind


def _checked(convert: type, check: checks.Check, may_be_empty: bool = False) -> _Parser:
    """The parser of one value of a type, in a range."""

    def read(argument: Any) -> Any:
        if may_be_empty and argument == "":
            return argument
        try:
            value = convert(argument)
        except (ValueError, OverflowError):
            raise ValueError(f"must be {check}") from None
        if why := check(value):
            raise ValueError(why)
        return value

    syntax = "" if check is checks.TEXT else str(check)
    return _Parser(read=read, syntax=syntax, kind=_KINDS.get(convert, "string"))


class _Boolean(flags.BooleanParser):
    """Parses a switch as absl does, and words its error like those of our other flags."""

    def parse(self, argument: str | int | bool) -> bool:
        try:
            return super().parse(argument)
        except ValueError:
            raise ValueError("must be true or false") from None


class _Serializer(flags.ArgumentSerializer[Any]):
    """Writes a value as a user would: names with commas between them."""

    def serialize(self, value: Any) -> str:
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


class _OverrideFlag(flags.Flag[str]):
    """A flag whose texts are joined where it is given several times."""

    def parse(self, argument: str) -> None:
        before = (self.value or "") if self.present else ""
        super().parse(join_overrides(before, argument))


class _ShowFlag(flags.BooleanFlag):
    """A switch that prints something and ends the process with status 0."""

    def __init__(self, name: str, help: str, show: Callable[[], None], short_name: str = ""):
        self._show = show
        super().__init__(name, False, help, short_name=short_name or None)

    def parse(self, argument: str | bool) -> None:
        super().parse(argument)
        if self.value:
            self._show()
            raise SystemExit(0)
