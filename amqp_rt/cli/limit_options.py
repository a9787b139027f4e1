"""Limits and token settings from operators: ``--limit NAME=VALUE``, ``[limits]``, ``--cbs``, ``[cbs]``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import click
import msgspec
from msgspec import Struct
from msgspec.structs import fields

from ..config_files import suggestion
from ..errors import AmqpError
from ..limits import KIB, MIB, Limits
from ..security.access import rights_of
from ..security.identities import read_secret_file, secret_of
from ..security.jwts import Jwt
from ..security.tokens import Cbs, SasKey, SasKeys, Swt, Validator
from .configured import mistake_in, table_of
from .tables import plain

_TYPES: Final = {field.name: field.type for field in fields(Limits)}
_UNITS: Final = {"KiB": KIB, "MiB": MIB, "GiB": 1024 * MIB}


def limit_value(name: str, given: object) -> int | float:
    """Return the value of the limit *name*, given as a number or a text.

    Whole numbers may have the unit KiB, MiB or GiB.

    Raises:
        ValueError: There is no such limit, or *given* is not a valid value for it.
    """
    if name not in _TYPES:
        meant = suggestion(name, list(_TYPES)) or "; 'amqp-rt limits' lists all"
        raise ValueError(f"there is no limit {name!r:.60}{meant}")
    value = _number(given) if isinstance(given, str) else given
    if value is None:
        raise ValueError(f"{name} must be a number, got {given!r:.60}")
    found: int | float = getattr(Limits(**{name: value}), name)  # type: ignore[arg-type]
    return found


def _number(text: str) -> int | float | None:
    digits, unit = text.strip(), 1
    for suffix, factor in _UNITS.items():
        if digits.endswith(suffix):
            digits, unit = digits.removesuffix(suffix).rstrip(), factor
    try:
        return int(digits) * unit
    except ValueError:
        pass
    try:
        size = float(digits) * unit
    except ValueError:
        return None
    return int(size) if unit > 1 and size.is_integer() else size


#: The table ``[limits]``: every field of :class:`Limits`, so that no limit can be left out.
LimitsTable: Final = msgspec.defstruct(
    "LimitsTable",
    [(name, int | float | str | None, None) for name in _TYPES],
    forbid_unknown_fields=True,
    frozen=True,
    omit_defaults=True,
)


def limits_of(context: click.Context, texts: Iterable[str]) -> Limits:
    """Return the limits in the table ``[limits]``, overridden by ``NAME=VALUE`` *texts*.

    Raises:
        click.UsageError: A limit is unknown, or its value is invalid.
    """
    values: dict[str, Any] = {}
    for name, value in table_of(context, "limits").items():
        try:
            values[name] = limit_value(name, value)
        except ValueError as error:
            raise mistake_in(context, ("limits", name), str(error)) from None
    for text in texts:
        name, equals, given = text.partition("=")
        try:
            if not equals:
                raise ValueError(f"{text!r:.60} is not NAME=VALUE, such as idle_timeout_s=30")
            values[name] = limit_value(name, given)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--limit") from None
    return Limits(**values)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def limits(as_json: bool) -> None:
    """List the limits of a broker, each as --limit takes it, with its default.

    The operators' guide describes each of them.
    """
    for field in fields(Limits):
        if as_json:
            click.echo(json.dumps({"name": field.name, "default": plain(field.default)}))
        else:
            click.echo(f"{field.name}={field.default}")


class SasRule(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rule of shared access: keys as texts or ``@FILE``."""

    keys: tuple[str, ...]
    rights: tuple[str, ...] = ("send", "listen")
    address: str = ""


class JwtTable(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Arguments of :class:`Jwt`; ``keys`` are files with public keys, ``secret`` is a text or ``@FILE``."""

    audience: str | list[str]
    issuer: str | None = None
    keys: dict[str, str] = {}
    secret: str | None = None
    jwks: str | None = None
    cafile: str | None = None
    leeway_s: float = 0.0
    refresh_s: float = 300.0


class SwtTable(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Arguments of :class:`Swt`; ``key`` is a text or ``@FILE``."""

    key: str
    issuer: str | None = None


class CbsTable(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Accepted tokens: one table for each kind."""

    sas: dict[str, SasRule | str] = {}
    jwt: JwtTable | None = None
    swt: SwtTable | None = None


def cbs_of(context: click.Context, texts: Iterable[str], limits: Limits) -> Cbs | None:
    """Return the validators in the table ``[cbs]``, overridden by ``NAME=VALUE`` *texts*.

    Raises:
        click.BadParameter: A setting cannot be used.
    """
    wanted = table_of(context, "cbs")
    try:
        for text in texts:
            path, equals, value = text.partition("=")
            if not equals:
                raise ValueError(f"{text!r:.60} is not NAME=VALUE, such as jwt.audience=shop")
            _set(wanted, path.split("."), value)
        if not wanted:
            return None
        found = msgspec.convert(wanted, CbsTable, strict=False)
        validators: list[Validator] = []
        if found.sas:
            validators.append(SasKeys({name: _sas(rule) for name, rule in found.sas.items()}))
        if found.jwt is not None:
            given = found.jwt
            validators.append(
                Jwt(
                    audience=given.audience,
                    issuer=given.issuer,
                    keys={
                        name: read_secret_file(path, "a key") for name, path in given.keys.items()
                    },
                    secret=None if given.secret is None else secret_of(given.secret).encode(),
                    jwks=given.jwks,
                    cafile=given.cafile,
                    leeway_s=given.leeway_s,
                    refresh_s=given.refresh_s,
                    limits=limits,
                )
            )
        if found.swt is not None:
            validators.append(Swt(secret_of(found.swt.key).encode(), issuer=found.swt.issuer))
        return Cbs(validators)
    except (ValueError, AmqpError) as error:
        said = getattr(error, "description", str(error))
        raise click.BadParameter(said, param_hint="--cbs") from None


#: Fields that are lists: on the command line they are repeated for each item.
_LISTS: Final = ("audience", "keys", "rights")


def _set(wanted: dict[str, Any], path: list[str], value: str) -> None:
    """Set the entry at *path* to *value*, or append *value* if it is a list."""
    *tables, last = path
    for name in tables:
        inner = wanted.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{'.'.join(path)}: {name!r} has a value already, and no parts")
        wanted = inner
    if last in _LISTS:
        known = wanted.get(last, [])
        wanted[last] = [*([known] if isinstance(known, str) else known), value]
    else:
        wanted[last] = value


def _sas(rule: SasRule | str) -> SasKey:
    if isinstance(rule, str):
        return SasKey((secret_of(rule),))
    for word in rule.rights:
        if not rights_of([word]):
            raise ValueError(f"rights are send, listen and manage, not {word!r:.60}")
    return SasKey(tuple(secret_of(key) for key in rule.keys), rights_of(rule.rights), rule.address)
