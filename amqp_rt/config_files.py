"""TOML files that people write, checked against a Struct; errors give the line of the mistake."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import inspect

from .errors import AmqpError

T = TypeVar("T")

#: A path of keys and indices; None stands for an unspecified key.
Where: TypeAlias = tuple[str | int | None, ...]

_UNKNOWN: Final = re.compile(r"Object contains unknown field `([^`]*)`")
_WHERE: Final = re.compile(r" - at `\$([^`]*)`$")
_PARTS: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_WRONG_VALUE: Final = re.compile(r"Invalid enum value '([^']*)'")
_TOML_LINE: Final = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


class SettingsError(AmqpError):
    """A file cannot be used; the text has its name, the line and the mistake."""

    default_condition = "amqp:invalid-field"


def sync_folder(path: Path) -> None:
    """Write the directory entry of the file at *path*, created or renamed before, to the disk.

    Otherwise a power failure may bring back the previous file of that name.
    """
    if os.name != "nt":  # Windows does not support this, and does not need it.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_settings(path: str | Path, kind: type[T]) -> tuple[T, str]:
    """Read the file at *path* as a *kind*; return it and its text, for :func:`mistake`.

    Raises:
        SettingsError: The file cannot be read, or does not match *kind*.
    """
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingsError(f"cannot read {path}: it is not UTF-8") from None
    return parse_settings(text, kind, str(path)), text


def parse_settings(text: str, kind: type[T], name: str) -> T:
    """Convert *text*, the contents of the file *name*, to *kind*, a Struct without unknown fields.

    Raises:
        SettingsError: *text* is not TOML, or does not match *kind*.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        said = str(error)
        at = _TOML_LINE.search(said)
        line = at[1] if at is not None and at[1] else str(len(text.splitlines()) or 1)
        raise SettingsError(f"{name}, line {line}: {_TOML_LINE.sub('', said)}") from None
    except RecursionError:
        raise SettingsError(f"{name}: its values are nested too deeply") from None
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise mistake(name, text, *explain(error, kind)) from None


def mistake(name: str, text: str, where: Where, what: str) -> SettingsError:
    """Return the error for the mistake *what* at *where*."""
    return SettingsError(f"{name}, line {line_of(text, where)}: {what}")


def suggestion(wrong: str, known: Iterator[str] | list[str]) -> str:
    """Return ``; did you mean 'x'?`` if a *known* word resembles *wrong*, else an empty text."""
    close = get_close_matches(wrong, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def explain(error: msgspec.ValidationError, kind: type) -> tuple[Where, str]:
    """Return the place that *error* of a conversion to *kind* complains about, and its sentence."""
    said = str(error)
    at = _WHERE.search(said)
    where: Where = ()
    if at is not None:
        where = tuple(
            key or (None if index == "..." else int(index)) for key, index in _PARTS.findall(at[1])
        )
    said = _WHERE.sub("", said)
    if unknown := _UNKNOWN.match(said):
        key = unknown[1]
        said = f"there is no {key!r} here{suggestion(key, _words(kind))}"
        where = (*where, key)
    elif wrong := _WRONG_VALUE.match(said):
        said = f"{wrong[1]!r} is not known here{suggestion(wrong[1], _words(kind))}"
    else:
        said = said[:1].lower() + said[1:]
    return where, said


def _words(kind: Any) -> Iterator[str]:
    """Yield the keys and the literal values that *kind* and the types in it accept."""
    pending = [inspect.type_info(kind)]
    while pending:
        each = pending.pop()
        if isinstance(each, inspect.StructType):
            for field in each.fields:
                yield field.encode_name
                pending.append(field.type)
        elif isinstance(each, inspect.LiteralType):
            yield from (str(value) for value in each.values)
        elif isinstance(each, inspect.UnionType):
            pending += each.types
        elif isinstance(each, inspect.DictType):
            pending.append(each.value_type)
        elif isinstance(each, inspect.CollectionType):
            pending.append(each.item_type)


def line_of(text: str, where: Where) -> int:
    """Return the line of *text*, a TOML file, that matches most of *where*; tomllib gives no lines."""
    best, found = 0, 1
    table: tuple[str | int, ...] = ()
    #: Arrays of tables → the index of the last one.
    last: dict[tuple[str | int, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("["):
            keys, is_array = _keys(line)
            if not keys:
                continue
            here: tuple[str | int, ...] = ()
            for at, key in enumerate(keys, 1):
                here = (*here, key)
                if is_array and at == len(keys):
                    last[here] = last.get(here, -1) + 1
                if here in last:
                    here = (*here, last[here])
            table = here
        elif keys := _key_of(line):
            here = (*table, *keys)
        else:
            continue
        common = 0
        for each, wanted in zip(here, where, strict=False):
            if wanted is not None and each != wanted:
                break
            common += 1
        if common > best:
            best, found = common, number
    return found


def _key_of(line: str) -> tuple[str, ...]:
    """Return the keys that *line* assigns a value to, if any. A quoted key may hold a ``=``."""
    at = line.find("=")
    while at >= 0:
        if keys := _keys(line[:at] + "= 0")[0]:
            return keys
        at = line.find("=", at + 1)
    return ()


def _keys(line: str) -> tuple[tuple[str, ...], bool]:
    """Parse *line* on its own: its keys, and whether they name an array of tables.

    There are no keys if the line is part of a longer construct.
    """
    try:
        found: Any = tomllib.loads(line)
    except (tomllib.TOMLDecodeError, RecursionError):
        return (), False
    keys: list[str] = []
    while isinstance(found, dict) and found:
        ((key, found),) = found.items()
        keys.append(key)
    return tuple(keys), isinstance(found, list)
