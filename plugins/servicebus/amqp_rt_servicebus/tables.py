"""Structs with the options of declarations, for files that spell them in different ways."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import fields

from .declarations import TIMES, Hub, Queue, Subscription, Topic

#: The option that the error of a declaration names.
_OPTION: Final = re.compile(r": (\w+)(?::| is )")


def _options(kind: type[Struct], *left_out: str) -> list[tuple[str, Any, Any]]:
    """Return optional fields with the names of the options of *kind*, but for those *left_out*."""
    forms: dict[str, Any] = {**dict.fromkeys(TIMES, float | str), "consumer_groups": list[str]}
    return [
        (each.name, forms.get(each.name, each.type) | UnsetType, UNSET)
        for each in fields(kind)
        if each.name not in ("name", *left_out)
    ]


#: Kind of declaration → its options as fields of a table, each of which may be missing.
OPTIONS: Final[dict[type[Struct], list[tuple[str, Any, Any]]]] = {
    Queue: _options(Queue),
    Topic: _options(Topic, "subscriptions"),
    Subscription: _options(Subscription, "rules"),
    Hub: _options(Hub),
}


def table(name: str, options: list[tuple[str, Any, Any]], rename: Any = None) -> Any:
    """Return a Struct without unknown fields."""
    return msgspec.defstruct(
        name,
        options,
        rename=rename,
        frozen=True,
        forbid_unknown_fields=True,
        kw_only=True,
        module=__name__,
    )


def given(found: Struct) -> dict[str, Any]:
    """Return the options that a table has."""
    values = {name: getattr(found, name) for name in found.__struct_fields__}
    return {name: value for name, value in values.items() if value is not UNSET}


def option_of(error: ValueError) -> tuple[str, ...]:
    """Return the option that the error of a declaration names, if it names one."""
    at = _OPTION.search(str(error))
    return () if at is None else (at[1],)
