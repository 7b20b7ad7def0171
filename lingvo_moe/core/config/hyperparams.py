"""Params: named, documented, typo-proof hyperparameters, in Lingvo's vocabulary.

A layer's `Params()` defines names with defaults and help; a user copies and sets them by dotted
path; a program freezes them. `InstantiableParams` also knows the class that it configures.

Every parameter has a check (core/config/checks.py): a range where it is defined, else the type of its default.
A value is checked whenever it is set. The default itself may always be set, even out of range: then it
means that a parent sets the value. `Instantiate` checks all values again, including defaults.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from lingvo_moe.core.config import checks
from lingvo_moe.core.config.checks import ParamError as ParamError
from lingvo_moe.core.config.class_names import any_class
from lingvo_moe.core.config.param_text import (
    as_comment,
    chosen,
    classes_first,
    from_text,
    item_at,
    leaves,
    nested_params,
    no_parameter,
    parse_indices,
    shown,
    to_text,
    with_item,
)

_NEVER_CHANGED = frozenset({bool, int, float, str, type(None)})


@dataclass
class _Param:
    """One defined name."""

    value: Any
    default: Any
    description: str
    choices: Mapping[str, type] | None  # classes that it may be set to by name
    check: checks.Check
    parent_sets: str  # why a parent sets it; '' if none does

    def With(self, value: Any) -> "_Param":
        """A copy with another value; a model makes thousands, and dataclasses.replace is three times slower."""
        return _Param(
            value, self.default, self.description, self.choices, self.check, self.parent_sets
        )

    def WhyNot(self, value: Any) -> str:
        """The range or choices that a value violates, as a phrase for errors; '' if it is allowed."""
        why = self.check(value)
        is_default = why and type(value) is type(self.default) and value == self.default
        return "" if is_default else why


class Params:
    """A set of named values that can only be set once they are defined.

    Example:
        >>> p = Params()
        >>> p.Define("hidden_dim", 64, "H, the width of the hidden layer.")
        >>> p.Set(hidden_dim=128).hidden_dim
        128
    """

    def __init__(self) -> None:
        self.__dict__["_params"] = {}
        self.__dict__["_derived"] = {}
        self.__dict__["_conditions"] = {}
        self.__dict__["_frozen"] = False

    # --- defining and reading

    def Define(
        self,
        name: str,
        default: Any,
        description: str,
        check: checks.Check | None = None,
        choices: Mapping[str, type] | None = None,
        parent_sets: str = "",
    ) -> None:
        """Adds a name with its default and help.

        Args:
            default: any value; Params, where the parameter configures a class.
            check: the values that it may have; None: those of the default's type (any, for None). The
                default itself need not pass.
            choices: the classes that such a parameter may configure, by the names that SetFromText
                takes in place of Params.
            parent_sets: why Params of a class with these Params as a part set it, as a phrase; '' if they do not.

        Raises:
            AttributeError: the name is defined already, is not an identifier, or the Params are
                frozen.
        """
        self._check_mutable(name)
        if not name.isidentifier() or name.startswith("_") or hasattr(type(self), name):
            raise AttributeError(f"{name!r} cannot name a parameter: use a new identifier")
        if name in self._params:
            raise AttributeError(f"parameter {name!r} is defined already")
        check = check or _check_for(default, choices)
        value = copy.deepcopy(default)
        self._params[name] = _Param(default, value, description, choices, check, parent_sets)

    def Derive(self, path: str, *sources: str) -> None:
        """Declares that the class which these Params configure sets a parameter of one of its parts.

        What the user sets there would have no effect, so it is refused, and texts leave it out.

        Args:
            path: of the parameter, below these Params; it need not be there.
            sources: names of the parameters that it is set from.
        """
        self._derived[path] = sources

    def OnlyWith(self, names: str, why_not: Callable[["Params"], str]) -> None:
        """Declares that parameters have an effect only with some values of others.

        An override that sets one of them without effect is refused; an experiment may leave it as it is.

        Args:
            names: of the parameters, with spaces between them. Those of a part stand for all within.
            why_not: returns the others' values without which they have none, e.g. 'stages=1', or ''. Its argument are
                these Params.
        """
        self._conditions.update(dict.fromkeys(names.split(), why_not))

    def WhyUnused(self, path: str) -> str:
        """Says in a phrase why a parameter has no effect beside the others; '' if OnlyWith says nothing against it."""
        for owner, before, rest in self._along(path):
            why_not = owner._conditions.get(parse_indices(rest.partition(".")[0])[0])
            if why_not is not None and (why := why_not(owner)):
                return f"has no effect with {_joined(before, why)}"
        return ""

    def WhyDerived(self, path: str) -> str:
        """Says in a phrase why a parameter cannot be set from here; '' for one that can."""
        sources = self._sources(path)
        if sources is None:
            return ""
        if not sources:
            return f"has no effect: {self._param(path).parent_sets}"
        origins = " or ".join(sources)
        return f"has no effect: the model sets it from {origins}; set that"

    def Delete(self, *paths: str) -> Self:
        """Removes names, by dotted path. Returns self."""
        for path in paths:
            owner, name = self._resolve(path)
            owner._check_mutable(name)
            del owner._params[name]
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._params[name].value
        except KeyError:
            raise AttributeError(self._unknown(name)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_mutable(name)
        if name not in self._params:
            raise AttributeError(self._unknown(name))
        param = self._params[name]
        why = param.WhyNot(value)
        if why:
            raise ParamError(name, shown(value), why)
        param.value = value

    def __contains__(self, name: str) -> bool:
        return name in self._params

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._params})

    def Get(self, path: str) -> Any:
        """Reads a dotted path, `a.b[1].c`."""
        owner, name = self._resolve(path)
        name, indices = parse_indices(name)
        return item_at(getattr(owner, name), indices, path)

    def Help(self, path: str) -> str:
        """The description given to Define."""
        return self._param(path).description

    def Range(self, path: str) -> checks.Check:
        """The check that values of a parameter pass; its string describes them."""
        return self._param(path).check

    def Default(self, path: str) -> Any:
        """The value that Define gave, a copy."""
        return _copy_value(self._param(path).default)

    def IsDefault(self, path: str) -> bool:
        """Whether the value there is the one that Define gave."""
        param = self._param(path)
        return to_text(param.value) == to_text(param.default)

    def Set(self, **values: Any) -> Self:
        """Sets several names at once; a dotted path can be passed as `**{'a.b': 1}`. Returns self.

        Raises:
            AttributeError: unknown name (with the nearest known ones), or frozen Params.
            ParamError: a value that the parameter cannot have.
        """
        for path, value in values.items():
            self._assign(path, value)
        return self

    def IterParams(self) -> Iterator[tuple[str, Any]]:
        """The `(name, value)` pairs, by name."""
        for name in sorted(self._params):
            yield name, self._params[name].value

    # --- copying and freezing

    def Copy(self) -> Self:
        """A deep copy that can be changed."""
        out = type(self).__new__(type(self))
        fresh = {name: param.With(_copy_value(param.value)) for name, param in self._params.items()}
        derived, conditions = dict(self._derived), dict(self._conditions)
        out.__dict__.update(
            self.__dict__, _params=fresh, _derived=derived, _conditions=conditions, _frozen=False
        )
        return out

    def __deepcopy__(self, memo: dict) -> Self:
        return self.Copy()

    def Freeze(self) -> Self:
        """Forbids any further change, here and in nested Params. Returns self."""
        self.__dict__["_frozen"] = True
        for _, value in self.IterParams():
            for inner in nested_params(value):
                inner.Freeze()
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Params) and self.ToText() == other.ToText()

    __hash__ = None  # type: ignore[assignment]

    # --- text

    def ToText(self, with_help: bool = False) -> str:
        """One `path : value` line per parameter that can be set, sorted; FromText reads it back.

        `with_help`: before each line its help and its range as a comment, and after it an empty line.
        """
        settable = [leaf for leaf in sorted(leaves(self, "")) if self._sources(leaf[0]) is None]
        lines = [(path, f"{path} : {to_text(value)}\n") for path, value in settable]
        if with_help:
            return "\n".join(self._comment(path) + line for path, line in lines)
        return "".join(line for _, line in lines)

    def _comment(self, path: str) -> str:
        """The help and the range of a parameter; for the class of a part, those of the part."""
        path = path.removesuffix(".cls")
        return as_comment(f"{self.Help(path)} ({self.Range(path)})")

    def FromText(self, text: str) -> Self:
        """Sets values from `path : value` (or `path = value`) lines; `#` starts a comment line.
        Returns self.

        Classes (`path.cls`) come first, the outermost before those within: they decide which other
        names there are.

        Raises:
            ValueError: a line that is not of that form, or (ParamError) a value that the parameter
                cannot have, with its number.
            AttributeError: an unknown path, with the nearest known names.
        """
        values = []
        for number, raw in enumerate(text.splitlines(), start=1):
            line = raw.strip()
            if not line or line.startswith("#"):
                continue
            cut = min((i for i in (line.find(":"), line.find("=")) if i >= 0), default=-1)
            if cut <= 0:
                raise ValueError(f"line {number}: expected 'path : value', got {raw!r}")
            path, value = line[:cut].strip(), line[cut + 1 :].strip()
            values.append((path, value, f"line {number}: "))
        for path, value, where in sorted(values, key=lambda v: classes_first(v[0])):
            self.SetFromText(path, value, where)
        return self

    def SetFromText(
        self, path: str, text: str, where: str = "", find_class: Callable[[str], type] = any_class
    ) -> None:
        """Sets one dotted path from text, read as the type of the value that is there.

        A parameter with `choices` takes one of their names, and becomes the Params of that class (or
        the name, where it holds a name); `path.cls` takes a class, whose Params keep the values that
        both classes have names for, and the same types.

        Args:
            where: goes before the message of a ValueError.
            find_class: gives the class that 'type/module/Class' names.

        Raises:
            AttributeError: unknown path. ParamError: text that does not read as that type, or a value
                that the parameter cannot have.
        """
        parent, _, last = path.rpartition(".")
        try:
            if why := self.WhyDerived(path):
                raise ParamError(path, text, why)
            if last == "cls" and parent and text.startswith("type/"):
                self._set_class(parent, find_class(text))
                return
            owner, name = self._resolve(path)
            param = owner._params.get(name)
            if param is not None and param.choices is not None:
                value = chosen(text, param.choices, isinstance(param.value, str))
            elif isinstance(param and param.check, checks.READ_THEIR_TEXT):
                value = param.check.Read(text)
            else:
                value = from_text(text, self.Get(path), find_class)
            self._assign(path, value)
        except ParamError as e:
            raise e.At(path, text, where) from None
        except ValueError as e:
            raise ParamError(path, text, str(e), where) from None

    def _set_class(self, path: str, cls: type) -> None:
        """Replaces the Params, None or choice at a path by Params of another class."""
        current = self.Get(path)
        owner, last = self._resolve(path)
        is_params = isinstance(current, InstantiableParams)
        may_become = current is None or (last in owner._params and owner._params[last].choices)
        if not is_params and not may_become:
            raise ValueError(f"{path!r} holds no Params, but {current!r}")
        if is_params and current.cls is cls:
            return
        if not hasattr(cls, "Params"):
            raise ValueError(f"{cls.__name__} has no Params")
        fresh = cls.Params()
        for name, value in current.IterParams() if is_params else ():
            if name not in fresh or name == "cls" or type(value) is not type(getattr(fresh, name)):
                continue
            if not fresh._params[name].WhyNot(value):
                setattr(fresh, name, value)
        self._assign(path, fresh)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(\n{self.ToText()})"

    # --- helpers

    def _check_mutable(self, name: str) -> None:
        if self._frozen:
            raise AttributeError(
                f"cannot change {name!r}: these Params are frozen; Copy() them first"
            )

    def _unknown(self, name: str) -> str:
        return no_parameter(name, self._params)

    def _assign(self, path: str, value: Any) -> None:
        if why := self.WhyDerived(path):
            raise ParamError(path, shown(value), why)
        owner, last = self._resolve(path)
        name, indices = parse_indices(last)
        item_at(getattr(owner, name), indices, path)
        try:
            setattr(owner, name, with_item(getattr(owner, name), indices, value))
        except ParamError as e:
            raise e.At(path, shown(value)) from None

    def _param(self, path: str) -> _Param:
        owner, name = self._resolve(path)
        return owner._params[parse_indices(name)[0]]

    def _sources(self, path: str) -> tuple[str, ...] | None:
        """The parameters that the one at a path is set from, none for a part's name; None where it can be set."""
        owner, of_class = self, False
        try:
            for inner, before, rest in self._along(path):
                if rest in inner._derived:
                    sources = [_joined(before, source) for source in inner._derived[rest]]
                    return tuple(
                        s for source in sources for s in self._sources(source) or (source,)
                    )
                owner, of_class = inner, bool(before) and isinstance(owner, InstantiableParams)
        except AttributeError:
            return None
        param = owner._params.get(rest)
        return () if param is not None and param.parent_sets and of_class else None

    def _resolve(self, path: str) -> tuple["Params", str]:
        """The Params that own the last part of a dotted path, and that part."""
        *_, (owner, before, last) = self._along(path)
        if parse_indices(last)[0] not in owner._params:
            choices = self._param(before).choices if before else None
            raise AttributeError(no_parameter(path, owner._params, choices))
        return owner, last

    def _along(self, path: str) -> Iterator[tuple["Params", str, str]]:
        """Yields the Params along a dotted path, with the path to them and the path below them.

        Raises AttributeError: there are none.
        """
        parts, owner = path.split("."), self
        for i, part in enumerate(parts):
            yield owner, ".".join(parts[:i]), ".".join(parts[i:])
            if i < len(parts) - 1:
                name, indices = parse_indices(part)
                owner = item_at(getattr(owner, name), indices, path)
                if not isinstance(owner, Params):
                    before = ".".join(parts[: i + 1])
                    raise AttributeError(f"{before!r} in {path!r} holds no Params, but {owner!r}")


class InstantiableParams(Params):
    """Params of a class: `Instantiate()` makes it."""

    def __init__(self, cls: type):
        super().__init__()
        self.Define("cls", cls, "The class that these Params configure.")

    def Instantiate(self, **kwargs: Any) -> Any:
        """`cls(self, **kwargs)`, once all values are checked, defaults included.

        Raises ParamError: a value that cannot be, or one that would have no effect. Nested Params are checked when
        they are instantiated.
        """
        owner = self.name if "name" in self and self.name else self.cls.__name__
        for name, param in self._params.items():
            why = param.check(param.value)
            if why:
                raise ParamError(f"{owner}.{name}", shown(param.value), why)
        for path in self._derived:
            with contextlib.suppress(AttributeError):  # it need not be there
                if not self.IsDefault(path):
                    raise ParamError(
                        f"{owner}.{path}", shown(self.Get(path)), self.WhyDerived(path)
                    )
        return self.cls(self, **kwargs)


def _joined(before: str, path: str) -> str:
    """A path below another, which may be ''."""
    return f"{before}.{path}" if before else path


def _check_for(default: Any, choices: Mapping[str, type] | None) -> checks.Check:
    """The check of a parameter that was defined without one."""
    params = checks.Kind((Params,), "Params of a class")
    if choices is None:
        return params if isinstance(default, Params) else checks.of_type(default)
    names = checks.one_of(sorted(choices))
    if isinstance(default, str):
        return checks.AnyOf((names, params))
    set_by_name = checks.Kind((Params,), f"{names}, or Params of a class")
    return checks.or_none(set_by_name) if default is None else set_by_name


def _copy_value(value: Any) -> Any:
    if type(value) in _NEVER_CHANGED:
        return value
    if isinstance(value, Params):
        return value.Copy()
    if isinstance(value, (list, tuple)):
        return type(value)(_copy_value(v) for v in value)
    if isinstance(value, dict):
        return type(value)({k: _copy_value(v) for k, v in value.items()})
    return value if isinstance(value, type) else copy.deepcopy(value)
