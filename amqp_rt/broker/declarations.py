"""Declarations of nodes in a line of a command, or in a file.

A file is TOML, or YAML if PyYAML is installed (``pip install 'amqp-rt[yaml]'``)::

    [queues.work]
    priorities = 5
    dead_letter = "work/dead"

    [logs.clicks]
    partitions = 3

    [virtual_hosts.berlin.queues.work]

Errors in a file name the line.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl

from ..config_files import line_of
from ..errors import AmqpError
from .nodes import KINDS, LOG, QUEUE, SCHEDULE, TOPIC, Declaration, declaration_of, similar

#: Virtual host → its nodes. "" is the default one.
Declarations: TypeAlias = dict[str, list[Declaration]]

#: Sections of a file, and the kind of node that each declares.
_SECTIONS: Final = {"queues": QUEUE, "topics": TOPIC, "logs": LOG, "schedules": SCHEDULE}
_VIRTUAL_HOSTS: Final = "virtual_hosts"


class _Wrong(Exception):
    """Error in a declaration, with the keys that lead to it."""

    def __init__(self, path: tuple[str, ...], sentence: str) -> None:
        super().__init__(sentence)
        self.path = path
        self.sentence = sentence


def declared_by(text: str) -> Declaration:
    """Return the declaration for ``KIND:NAME?OPTION=VALUE&OPTION=VALUE``; options may be omitted.

    Option names are those of the declaration; values are percent-encoded as in a URL.

    Raises:
        AmqpError: The kind is missing or unknown, or an option is invalid.
    """
    kind, colon, rest = text.partition(":")
    name, _, query = rest.partition("?")
    if not colon or not name or kind not in KINDS:
        raise AmqpError(
            f"{text!r:.80} is not KIND:NAME with queue, topic, log or schedule as its kind, such as queue:orders",
            condition="amqp:invalid-field",
        )
    try:
        options = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        return declaration_of({**dict(options), "kind": kind, "name": name}, strict=False)
    except ValueError as error:
        raise AmqpError(f"{text!r:.80}: {error}", condition="amqp:invalid-field") from error


def declarations_of(document: Mapping[str, Any]) -> Declarations:
    """Return the declarations in a mapping that has the structure of a file.

    Raises:
        AmqpError: A declaration is invalid.
    """
    try:
        return _declarations(document)
    except _Wrong as wrong:
        where = ".".join(wrong.path)
        raise AmqpError(f"{where}: {wrong.sentence}", condition="amqp:invalid-field") from None


def declarations_in(file: str | Path) -> Declarations:
    """Return the declarations in *file*, whose name ends in ``.toml``, ``.yaml`` or ``.yml``.

    Raises:
        AmqpError: The file cannot be read, or a declaration is invalid; the text names the line.
    """
    path = Path(file)
    readers = {".toml": _read_toml, ".yaml": _read_yaml, ".yml": _read_yaml}
    read = readers.get(path.suffix.lower())
    if read is None:
        raise AmqpError(
            f"{path}: nodes are declared in a file whose name ends in .toml or .yaml",
            condition="amqp:invalid-field",
        )
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise AmqpError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise AmqpError(f"{path} is not UTF-8: {error}", condition="amqp:invalid-field") from error
    document, line_of = read(path, text)
    try:
        return _declarations(document)
    except _Wrong as wrong:
        raise AmqpError(
            f"{path}, line {line_of(wrong.path)}: {wrong.sentence}", condition="amqp:invalid-field"
        ) from None


def _declarations(document: Any) -> Declarations:
    found: Declarations = {"": list(_nodes((), document, (*_SECTIONS, _VIRTUAL_HOSTS)))}
    hosts = document.get(_VIRTUAL_HOSTS) if isinstance(document, Mapping) else None
    for name, section in _entries((_VIRTUAL_HOSTS,), hosts):
        found[name] = list(_nodes((_VIRTUAL_HOSTS, name), section, tuple(_SECTIONS)))
    return found


def _nodes(path: tuple[str, ...], section: Any, known: tuple[str, ...]) -> Iterator[Declaration]:
    names: set[str] = set()
    for key, nodes in _entries(path, section):
        if key not in known:
            raise _Wrong((*path, key), f"there is no section {key!r:.50}{similar(key, known)}")
        kind = _SECTIONS.get(key)
        if kind is None:
            continue
        for name, options in _entries((*path, key), nodes):
            at = (*path, key, name)
            if name in names:
                raise _Wrong(at, f"{name!r:.50} is a node of another kind already")
            names.add(name)
            yield _node(at, kind, name, dict(_entries(at, options)))


def _node(path: tuple[str, ...], kind: str, name: str, options: dict[str, Any]) -> Declaration:
    for own in ("kind", "name"):
        if own in options:
            raise _Wrong((*path, own), f"the {own} of a node is set by its section")
    try:
        return declaration_of({**options, "kind": kind, "name": name})
    except ValueError as error:
        sentence = str(error)
        # Find the option that the text mentions, if any, to report its line.
        at = next((key for key in options if key in sentence), None)
        raise _Wrong(path if at is None else (*path, at), f"{name}: {sentence}") from None


def _entries(path: tuple[str, ...], section: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of *section*; none if it is empty."""
    if section is None:
        return
    if not isinstance(section, Mapping):
        what = ".".join(path) or "a file"
        raise _Wrong(path, f"{what} is a table of names, not {section!r:.50}")
    for key, value in section.items():
        if not isinstance(key, str):
            raise _Wrong((*path, str(key)), f"{key!r:.50} is no name: put it into quotes")
        yield key, value


# --- TOML ------------------------------------------------------------------------------------


def _read_toml(path: Path, text: str) -> tuple[Any, Callable[[tuple[str, ...]], int]]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise AmqpError(f"{path}: {error}", condition="amqp:invalid-field") from error
    except RecursionError:
        raise AmqpError(
            f"{path}: its values are nested too deeply", condition="amqp:invalid-field"
        ) from None
    return document, lambda keys: line_of(text, keys)


# --- YAML ------------------------------------------------------------------------------------


def _read_yaml(path: Path, text: str) -> tuple[Any, Callable[[tuple[str, ...]], int]]:
    try:
        import yaml  # an optional dependency
    except ImportError:
        raise AmqpError(
            f"{path} is YAML, which needs PyYAML: pip install 'amqp-rt[yaml]', or write TOML",
            condition="amqp:not-implemented",
        ) from None
    try:
        document = yaml.safe_load(text)
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise AmqpError(f"{path}: {said}", condition="amqp:invalid-field") from error
    except RecursionError:
        raise AmqpError(
            f"{path}: its values are nested too deeply", condition="amqp:invalid-field"
        ) from None

    def line_of(keys: tuple[str, ...]) -> int:
        node = root
        line = 1
        for key in keys:
            # The last one of equal keys is effective.
            pairs = reversed(node.value) if isinstance(node, yaml.MappingNode) else ()
            found = next(((name, value) for name, value in pairs if name.value == key), None)
            if found is None:
                break
            line = found[0].start_mark.line + 1
            node = found[1]
        return line

    return document, line_of
