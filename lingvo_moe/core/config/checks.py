"""Checks: objects that test the value of a parameter or flag and describe the allowed range; and words for errors:
lists of choices, and the known names nearest to an unknown one.

`Params.Define(..., check=SIZE)` runs the check whenever the parameter is set; `core/console/flags.py` runs the
same checks on the flags of the command lines.
"""

import ast
import contextlib
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

# Sizes, steps and seeds are int32 in every program; numbers with a fraction are float32.
LARGEST_INTEGER = 2**31 - 1
LARGEST_NUMBER = 3.4028234663852886e38
SMALLEST_NUMBER = 1.1754943508222875e-38
_SHOWN = 80  # characters of a value in a message


def either(choices: Iterable[object]) -> str:
    """Returns '1', '1 or 2', or '1, 2 or 4'. There is at least one choice."""
    *first, last = map(str, choices)
    return f"{', '.join(first)} or {last}" if first else last


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns ' (did you mean ...?)' with the nearest known names, else the list of known names,
    else ''."""
    names = sorted(names)
    if hint := nearest(name, names):
        return hint
    if names and len(names) <= 30:
        return f" (known: {', '.join(names)})"
    return ""


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns ' (did you mean ...?)' with the nearest known names, else ''."""
    near = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(repr(n) for n in near)}?)" if near else ""


class ParamError(ValueError):
    """A value that a parameter cannot have: 'path=value: what would be right'."""

    def __init__(self, path: str, value: str, why: str, where: str = ""):
        self._parts = path, value, why
        shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
        super().__init__(f"{where}{path}={shown}: {why}")

    def Within(self, parent: str) -> "ParamError":
        """The same error for a parameter below `parent`."""
        path, value, why = self._parts
        return ParamError(f"{parent}.{path}", value, why)

    def At(self, path: str, value: str | None = None, where: str = "") -> "ParamError":
        """The same error with the full path, the value as the user wrote it, and where it was written."""
        return ParamError(path, self._parts[1] if value is None else value, self._parts[2], where)


class Check:
    """A range of values. `check(value)` returns '' for a value in it, else what would be right, as a phrase
    that begins with 'must be'; `str(check)` describes the range."""

    def __call__(self, value: Any) -> str:
        return "" if self.Allows(value) else f"must be {self}{self.Hint(value)}"

    def Allows(self, value: Any) -> bool:
        """Whether the value is in the range."""
        raise NotImplementedError(f"{type(self).__name__}.Allows")

    def Hint(self, value: Any) -> str:
        """A hint that is added to the message about a value outside the range; '' for none."""
        return ""


def _is_a(kind: type, value: Any) -> bool:
    """Whether a value is a number of that kind, which True and False are not."""
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True)
class Integer(Check):
    """An integer of at least `least` (None: any) and at most `most`. True and False are no integers."""

    least: int | None = None
    most: int = LARGEST_INTEGER

    def Allows(self, value: Any) -> bool:
        if not _is_a(Integral, value):
            return False
        return (self.least is None or value >= self.least) and value <= self.most

    def Hint(self, value: Any) -> str:
        is_large = _is_a(Integral, value) and value > self.most
        return f" and at most {self.most}" if is_large and str(self.most) not in str(self) else ""

    def __str__(self) -> str:
        if self.least is None:
            return "an integer"
        if self.most == LARGEST_INTEGER:
            return f"an integer of at least {self.least}"
        return f"an integer from {self.least} to {self.most}"


@dataclass(frozen=True)
class Number(Check):
    """A finite number between `low` and `high` that float32 can hold, so not so small that it becomes 0."""

    # `low`, `high`: the ends; None: no end on that side.
    low: float | None = None
    high: float | None = None
    # `open_low`, `open_high`: whether that end itself is outside.
    open_low: bool = False
    open_high: bool = False

    def Allows(self, value: Any) -> bool:
        if not _is_a(Real, value):
            return False
        if value and not SMALLEST_NUMBER <= abs(value) <= LARGEST_NUMBER:  # NaN too
            return False
        if self.low is not None and not (value > self.low if self.open_low else value >= self.low):
            return False
        return self.high is None or bool(
            value < self.high if self.open_high else value <= self.high
        )

    def Hint(self, value: Any) -> str:
        if not _is_a(Real, value):
            return ""
        if not abs(value) <= LARGEST_NUMBER:
            return ", finite in float32"
        return ", not so small that float32 makes it 0" if 0 < abs(value) < SMALLEST_NUMBER else ""

    def __str__(self) -> str:
        low, high = self.low, self.high
        if low is not None and high is not None:
            return f"a number in {'(' if self.open_low else '['}{low:g}, {high:g}{')' if self.open_high else ']'}"
        if low is not None:
            if not self.open_low:
                return f"a number of at least {low:g}"
            return f"a number above {low:g}" if low else "a positive number"
        if high is not None:
            return f"a number {'below' if self.open_high else 'of at most'} {high:g}"
        return "a number"


@dataclass(frozen=True)
class OneOf(Check):
    """One of some names."""

    names: tuple[str, ...]
    # Words that are none of these, with what to say of them.
    refused: Mapping[str, str] = field(default_factory=dict)

    def Allows(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.names

    def Hint(self, value: Any) -> str:
        why = self.refused.get(str(value))
        return f"; {why}" if why else nearest(str(value), self.names)

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"


@dataclass(frozen=True)
class Kind(Check):
    """A value of one of some types, with a phrase for them. True and False are no integers."""

    types: tuple[type, ...]
    phrase: str

    def Allows(self, value: Any) -> bool:
        return isinstance(value, self.types) and (bool in self.types or not isinstance(value, bool))

    def __str__(self) -> str:
        return self.phrase


@dataclass(frozen=True)
class FlagOr(Check):
    """True, False, or a word for a choice that is made later, e.g. 'auto'."""

    word: str

    def Allows(self, value: Any) -> bool:
        return isinstance(value, bool) or (isinstance(value, str) and value == self.word)

    def Read(self, text: str) -> bool | str:
        """The value that a text means; the text itself where it means none."""
        bare = text.strip("'\"")
        return {"true": True, "false": False}.get(bare.lower(), bare)

    def Hint(self, value: Any) -> str:
        return nearest(str(value), ("True", "False", self.word))

    def __str__(self) -> str:
        return f"True, False or {self.word}"


@dataclass(frozen=True)
class SizeOr(Check):
    """An integer of at least 1, or one of some words."""

    words: tuple[str, ...]

    def Allows(self, value: Any) -> bool:
        return value in self.words if isinstance(value, str) else SIZE.Allows(value)

    def Read(self, text: str) -> int | str:
        """The value that a text means; the text itself where it means none."""
        bare = text.strip("'\"")
        return int(bare) if bare.isdecimal() else bare

    def Hint(self, value: Any) -> str:
        return nearest(str(value), self.words)

    def __str__(self) -> str:
        return either((*self.words, str(SIZE)))


@dataclass(frozen=True)
class Steps(Check):
    """The first and the last of some steps of training, '10-15', or one of them, '10'; '' for none."""

    def Allows(self, value: Any) -> bool:
        return value == "" or (isinstance(value, str) and bool(steps_of(value)))

    def __str__(self) -> str:
        return "the first and the last step, e.g. 10-15, from 1 on; or '' for none"


def steps_of(value: str) -> range:
    """The steps that a value of Steps means; none for '' and for what is no such value."""
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", value, re.ASCII)
    first, last = (int(n) for n in (match[1], match[2] or match[1])) if match else (1, 0)
    return range(first, last + 1) if first else range(0)


@dataclass(frozen=True)
class AnyOf(Check):
    """A value that one of several checks allows."""

    checks: tuple[Check, ...]

    def Allows(self, value: Any) -> bool:
        return any(check.Allows(value) for check in self.checks)

    def Hint(self, value: Any) -> str:
        return next(filter(None, (check.Hint(value) for check in self.checks)), "")

    def __str__(self) -> str:
        return ", or ".join(map(str, self.checks))


@dataclass(frozen=True)
class ListOf(Check):
    """A list or tuple of values that another check allows."""

    item: Check
    phrase: str

    def Allows(self, value: Any) -> bool:
        return isinstance(value, list | tuple) and all(map(self.item.Allows, value))

    def Hint(self, value: Any) -> str:
        if not isinstance(value, str):
            return ""
        return f", e.g. {[part.strip() for part in value.split(',') if part.strip()]}"

    def __str__(self) -> str:
        return self.phrase


@dataclass(frozen=True)
class NamesOr(Check):
    """One of some words, or a list of names."""

    words: tuple[str, ...]  # the words; () for none
    items: tuple[str, ...]  # the names that a list may have; () for any
    # Words that are none of these, with what to say of them.
    refused: Mapping[str, str] = field(default_factory=dict)
    # Whether a list may also have patterns of variables' paths, in which * stands for any characters.
    patterns: bool = False

    def Allows(self, value: Any) -> bool:
        if isinstance(value, str):
            return value in self.words
        return isinstance(value, list | tuple) and not self._Unknown(value)

    def _Unknown(self, value: Iterable[Any]) -> list[Any]:
        allowed = self.items or [item for item in value if isinstance(item, str)]
        return [item for item in value if item not in allowed and not self._IsPattern(item)]

    def _IsPattern(self, value: Any) -> bool:
        return self.patterns and isinstance(value, str) and "*" in value

    def Read(self, text: str) -> str | list[Any]:
        """The value that a text means; the text itself where it means none."""
        bare = text.strip()
        if bare[:1] in ("[", "("):
            with contextlib.suppress(
                ValueError, SyntaxError, TypeError, MemoryError, RecursionError
            ):
                value = ast.literal_eval(bare)
                return list(value) if isinstance(value, list | tuple) else [value]
            return [part.strip(" '\"") for part in bare.strip("[]()").split(",") if part.strip()]
        return bare.strip("'\"")

    def Hint(self, value: Any) -> str:
        listing = f"; the names are {', '.join(self.items)}" if self.items else ""
        if self.patterns:
            listing += ", or a pattern of variables' paths with a *"
        if isinstance(value, list | tuple):
            wrong = self._Unknown(value)[0]
            return f"; there is no {wrong!r}{nearest(str(wrong), self.items)}{listing}"
        if not isinstance(value, str):
            return listing
        if value in self.refused:
            return f"; {self.refused[value]}"
        if value in self.items or self._IsPattern(value):
            return f", e.g. {[value]}"
        return nearest(value, self.words) + listing or f", e.g. {[value]}"

    def __str__(self) -> str:
        return either((*self.words, f"a list of names{' and patterns' if self.patterns else ''}"))


@dataclass(frozen=True)
class Letters(Check):
    """A map from letters to mesh axes. `meanings` holds the letters with what each means; it may grow."""

    meanings: Mapping[str, str]

    def Allows(self, value: Any) -> bool:
        return isinstance(value, Mapping) and not self._unknown(value) and not self._no_axes(value)

    def _unknown(self, value: Mapping[Any, Any]) -> list[Any]:
        return [key for key in value if str(key).rpartition(".")[2] not in self.meanings]

    def _no_axes(self, value: Mapping[Any, Any]) -> list[Any]:
        return [key for key, axis in value.items() if not _is_axis(axis)]

    def Hint(self, value: Any) -> str:
        if not isinstance(value, Mapping):
            return ""
        if unknown := self._unknown(value):
            return f"; unknown letter {unknown[0]!r}{did_you_mean(str(unknown[0]), self.meanings)}"
        key = self._no_axes(value)[0]
        return f"; {value[key]!r}, for {key!r}, is no axis, tuple of different axes or None"

    def __str__(self) -> str:
        return "a map from letters to mesh axes, e.g. {'E': 'expert'}"


def _is_axis(axis: Any) -> bool:
    """Whether a letter may be mapped to this: a mesh axis, several different ones, or None."""
    axes = axis if isinstance(axis, list | tuple) else () if axis is None else (axis,)
    are_names = all(isinstance(a, str) and a.isidentifier() for a in axes)
    return are_names and len(set(axes)) == len(axes)


def check_one_of(
    name: str, value: str, names: Iterable[str], error: type[ValueError] = ValueError
) -> None:
    """Raises `error`, which says the flag or argument `name`, the value and what would be right, unless the value is
    one of the names."""
    if why := one_of(names)(value):
        raise error(f"{name}={value}: {why}")


def check_fields(options: Any, ranges: Mapping[str, Check]) -> None:
    """Raises ParamError for the first attribute of `options` that is not in its range; None is never refused."""
    for name, check in ranges.items():
        value = getattr(options, name)
        why = "" if value is None else check(value)
        if why:
            raise ParamError(name, str(value), why)


READ_THEIR_TEXT = (FlagOr, NamesOr, SizeOr)
ANYTHING = Kind((object, bool), "anything")
NONE = Kind((type(None),), "None")
FLAG = Kind((bool,), "True or False")
TEXT = Kind((str,), "a string")
SIZE = Integer(1)
COUNT = Integer(0)
SEED = Integer(0)
LAYERS = Integer(1, 10_000)
IDS = Integer(1, 2**24)  # of a vocabulary; some routers make a table of them where they are traced
SHARE = Number(0, 1, open_high=True)  # of a whole, or a probability
POSITIVE = Number(0, open_low=True)
NOT_NEGATIVE = Number(0)
# What of a training state is sharded (sharding/letters.py says how); each includes those before it.
STATE_LEVELS = ("none", "slots", "gradients", "weights")
# What is in the memory of the hosts (offload.py says how); patterns of variables' paths are more.
NO_OFFLOAD, OFFLOADS = "none", ("slots", "master", "experts", "activations")

OFFLOAD = NamesOr((NO_OFFLOAD, *OFFLOADS), OFFLOADS, patterns=True)


def one_of(names: Iterable[str]) -> OneOf:
    """The check for one of some names."""
    return OneOf(tuple(names))


def or_none(check: Check) -> AnyOf:
    """The check that also allows None."""
    return AnyOf((check, NONE))


def of_type(default: Any) -> Check:
    """The check of a parameter without a range: the type of its default; None allows anything."""
    for types, check in (
        (bool, FLAG),
        (int, Integer()),
        (float, Number()),
        (str, TEXT),
        (Mapping, Kind((Mapping,), "a map")),
        ((list, tuple), Kind((list, tuple), "a list")),
        (type, Kind((type,), "a class")),
    ):
        if isinstance(default, types):
            return check
    return ANYTHING
