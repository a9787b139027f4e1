"""Arguments of bindings in a form that can be compared and hashed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

#: Arguments of a binding.
Frozen: TypeAlias = tuple[tuple[str, object], ...]


def frozen_arguments(arguments: Mapping[str, object]) -> Frozen:
    """Return the arguments of a binding in their form for comparisons."""
    return tuple(sorted((name, frozen_value(value)) for name, value in arguments.items()))


def thawed_arguments(arguments: Frozen) -> dict[str, object]:
    """Return arguments as they were given, numbers with their widths."""
    return {name: _thawed(value) for name, value in arguments}


def frozen_value(value: object) -> object:
    """Return a hashable form of *value*. Numbers of any width are equal if their values are."""
    if isinstance(value, bool):
        return ("bit", value)  # in Python True equals 1, in AMQP it does not
    if isinstance(value, Mapping):
        return (
            "table",
            tuple(sorted((str(key), frozen_value(each)) for key, each in value.items())),
        )
    if isinstance(value, list | tuple):
        return ("array", *map(frozen_value, value))
    return value


def _thawed(value: object) -> object:
    """Return what :func:`frozen_value` was given for *value*."""
    if not isinstance(value, tuple):
        return value
    kind, *rest = value
    if kind == "bit":
        return rest[0]
    if kind == "table":
        return {name: _thawed(each) for name, each in rest[0]}
    return [_thawed(each) for each in rest]
