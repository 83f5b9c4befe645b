"""Frozen dataclasses filled from TOML tables, with errors that name the entry to correct."""

from __future__ import annotations

import difflib
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedbranch.errors import InvalidExperiment

__all__ = ["fill", "require"]

T = TypeVar("T")

LARGEST = 10**15  # beyond any sensible setting, and exact as a float


def require(name: str, value: object, is_allowed: bool, allowed: str) -> None:
    """Raise ValueError unless a setting has an allowed value."""
    if not is_allowed:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


def fill(cls: type[T], table: object, where: str = "") -> T:
    """Make a dataclass from a TOML table, or say which entry is wrong and why.

    Parameters
    ----------
    cls
        A dataclass whose fields are whole numbers, numbers, truth values, literals, lists of
        those, or dataclasses of the same kind. Of several dataclasses that a field may be, the
        one that knows most of the table's entries is meant.
    table
        What tomllib or JSON gave.
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
        name
        for name, item in known.items()
        if name not in table and item.default is MISSING and item.default_factory is MISSING
    ]
    if missing:
        raise InvalidExperiment(f"{prefix}{missing[0]} is missing; it has no default")
    values = {key: _typed(hints[key], value, prefix + key) for key, value in table.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise InvalidExperiment(f"{prefix}{error}") from error


def _typed(hint: Any, value: Any, where: str) -> Any:
    """Check a TOML value against a field's type; give it as the dataclass wants it."""
    origin = get_origin(hint)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return fill(hint, value, where)
    if origin in (Union, UnionType):
        options = [option for option in get_args(hint) if option is not NoneType]
        chosen = max(options, key=lambda option: _num_known(option, value))
        for other in options:
            for entry in (_known(other) - _known(chosen)) & set(_entries(value)):
                raise InvalidExperiment(
                    f"{where}.{entry} belongs to {other.__name__} and others to {chosen.__name__}; "
                    "give the settings of one of them"
                )
        return _typed(chosen, value, where)
    if origin is Literal:
        if value in get_args(hint):
            return value
        allowed = "one of " + ", ".join(repr(option) for option in get_args(hint))
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_typed(get_args(hint)[0], item, where) for item in value)
        allowed = "a list"
    elif hint is bool:
        if isinstance(value, bool):
            return value
        allowed = "true or false"
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST:
            return float(value)
        allowed = "a finite number"
    else:
        assert hint is int
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST:
            return value
        allowed = "a whole number, of at most 15 digits"
    shown = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "far too large"
    raise InvalidExperiment(f"{where} is {shown}; it must be {allowed}")


def _num_known(option: Any, table: object) -> int:
    """Count a table's entries that a dataclass has fields for; half for what is only similar."""
    known = _known(option)
    return sum(
        2 * (entry in known) or bool(difflib.get_close_matches(entry, known, n=1))
        for entry in _entries(table)
    )


def _known(option: Any) -> set[str]:
    return {item.name for item in fields(option)} if is_dataclass(option) else set()


def _entries(table: object) -> list[str]:
    return list(table) if isinstance(table, dict) else []
