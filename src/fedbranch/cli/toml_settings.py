"""Frozen dataclasses filled from TOML tables, with errors that name the entry to correct.

TOML has no null. Where None is a field's default, the entry is left out; where None is another
value than the default, the entry is the word ``"none"``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedbranch.errors import InvalidExperiment
from fedbranch.types import JSON

__all__ = ["default_of", "fill", "require", "table_of"]

T = TypeVar("T")

LARGEST = 10**15  # beyond any sensible setting, and exact as a float
LONGEST_SHOWN = 10**30  # whole numbers above are not written out in messages
NONE = "none"


def require(name: str, value: object, is_allowed: bool, allowed: str) -> None:
    """Raise ValueError unless a setting has an allowed value."""
    if not is_allowed:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


def fill(cls: type[T], table: object, where: str = "") -> T:
    """Make a dataclass from a TOML table, or name the wrong entry and the reason.

    Parameters
    ----------
    cls
        A dataclass whose fields are whole numbers, numbers, truth values, texts, literals, lists
        of those, dataclasses of the same kind, or a choice of these. Of several dataclasses, the
        one is meant whose first field is the literal that the table has; without such a field,
        the one that knows most of the table's entries.
    table
        What tomllib or JSON returned.
    where
        The table's name in the file, for messages.

    Raises
    ------
    InvalidExperiment
        Naming the field, its value and what is allowed.
    """
    if not isinstance(table, dict):
        raise InvalidExperiment(f"{where or 'the file'} is {table!r}; it must be a table")
    prefix = f"{where}." if where else ""
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]  # T is a dataclass
    hints = get_type_hints(cls)
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(known)}"
            shown = key if key.isidentifier() else repr(key)
            raise InvalidExperiment(f"{prefix}{shown} = {table[key]!r} is not a setting; {hint}")
    missing = [
        name for name, item in known.items() if name not in table and default_of(item) is MISSING
    ]
    if missing:
        raise InvalidExperiment(f"{prefix}{missing[0]} is missing; it has no default")
    values = {
        key: None
        if value == NONE and _has_none(known[key], hints[key])
        else _typed(hints[key], value, prefix + key, or_none=_has_none(known[key], hints[key]))
        for key, value in table.items()
    }
    try:
        return cls(**values)
    except ValueError as error:
        raise InvalidExperiment(f"{prefix}{error}") from error


def table_of(settings: Any) -> JSON:
    """Return the table from which :func:`fill` makes the same dataclass."""
    table: JSON = {}
    for item in fields(settings):
        value = getattr(settings, item.name)
        if value is None and default_of(item) is None:
            continue
        table[item.name] = (
            NONE if value is None else table_of(value) if is_dataclass(value) else value
        )
    return table


def default_of(item: Field[Any]) -> Any:
    """Return the default of a dataclass's field; MISSING if it has none."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def _has_none(item: Field[Any], hint: Any) -> bool:
    """Return whether a field can be None, and is not by default."""
    return NoneType in get_args(hint) and default_of(item) is not None


def _typed(hint: Any, value: Any, where: str, *, or_none: bool = False) -> Any:
    """Check a TOML value against a field's type; return it as the dataclass has it."""
    origin = get_origin(hint)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return fill(hint, value, where)
    if origin in (Union, UnionType):
        options = [option for option in get_args(hint) if option is not NoneType]
        if len(options) > 1:
            return _chosen(options, value, where)
        return _typed(options[0], value, where, or_none=or_none)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_typed(get_args(hint)[0], item, where) for item in value)
    is_allowed, allowed = _checked(hint, value)
    if is_allowed:
        return float(value) if hint is float else value
    is_short = not isinstance(value, int) or abs(value) < LONGEST_SHOWN
    shown = repr(value) if is_short else "far too large"
    allowed += f', or "{NONE}"' if or_none else ""
    raise InvalidExperiment(f"{where} is {shown}; it must be {allowed}")


def _checked(hint: Any, value: Any) -> tuple[bool, str]:
    """Return whether a value has a simple type, and what is allowed, in words."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if get_origin(hint) is Literal:
        return value in get_args(hint), f"one of {_list_of(get_args(hint))}"
    if get_origin(hint) is tuple:
        return False, "a list"
    if hint is bool:
        return isinstance(value, bool), "true or false"
    if hint is str:
        return isinstance(value, str) and bool(value), "a text"
    if hint is float:
        return is_number and abs(value) < LARGEST, "a finite number"
    assert hint is int
    is_whole = is_number and isinstance(value, int) and abs(value) < LARGEST
    return is_whole, "a whole number, of at most 15 digits"


def _chosen(options: list[Any], value: Any, where: str) -> Any:
    """Fill one of several tables, or take one of the words that may stand in their place."""
    tables: list[Any] = [option for option in options if is_dataclass(option)]
    words = [word for option in options if option not in tables for word in get_args(option)]
    tags = {literal: option for option in tables for literal in get_args(_first_hint(option))}
    if not isinstance(value, dict):
        if value in words:
            return value
        expected = f"one of {_list_of(words)}, or a table" if words else "a table"
        if tags:
            expected += f" with {_first_name(tables[0])} = {_list_of(tags, ' or ')}"
        raise InvalidExperiment(f"{where} is {value!r}; it must be {expected}")
    if tags:
        name = _first_name(tables[0])
        if name not in value:
            raise InvalidExperiment(f"{where}.{name} is missing; it is one of {_list_of(tags)}")
        chosen = tags.get(value[name]) if isinstance(value[name], str) else None
        if chosen is None:
            raise InvalidExperiment(
                f"{where}.{name} is {value[name]!r}; it must be one of {_list_of(tags)}"
            )
        return fill(chosen, value, where)
    chosen = max(tables, key=lambda option: _num_known(option, value))
    for other in tables:
        for entry in (_known(other) - _known(chosen)) & set(value):
            raise InvalidExperiment(
                f"{where}.{entry} belongs to {other.__name__} and others to {chosen.__name__}; "
                "give the settings of one of them"
            )
    return fill(chosen, value, where)


def _first_name(option: Any) -> str:
    return fields(option)[0].name


def _first_hint(option: Any) -> Any:
    """Return the type of the first field if it is a literal, which tells tables apart."""
    hint = get_type_hints(option)[_first_name(option)]
    return hint if get_origin(hint) is Literal else None


def _num_known(option: Any, table: Mapping[str, Any]) -> int:
    """Count the entries that a dataclass has fields for; half for one that is only similar."""
    known = _known(option)
    return sum(
        2 * (entry in known) or bool(difflib.get_close_matches(entry, known, n=1))
        for entry in table
    )


def _known(option: Any) -> set[str]:
    return {item.name for item in fields(option)}


def _list_of(values: Iterable[object], separator: str = ", ") -> str:
    return separator.join(repr(value) for value in values)
