"""Faults of a payload that is not of its type: all of them, where msgspec stops at the first."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec

#: Faults of one payload that are reported, and octets of their paths and messages together.
FAULTS_MAX: Final = 20
FAULTS_OCTETS_MAX: Final = 2 * 1024
#: Characters of one path, and of one message.
_PATH_MAX: Final = 200
_MESSAGE_MAX: Final = 300
#: Values of a payload that are tried one by one, and depth at which they are: a malformed message must not
#: cost much more than a valid one.
_LOOKS_MAX: Final = 1_000
_DEPTH_MAX: Final = 16
#: Octets of a payload beyond which only its first fault is reported.
SEARCHED_MAX: Final = 256 * 1024

#: One fault: ``path`` (``$.items[2].price``) and ``message``.
Fault: TypeAlias = dict[str, str]
#: Path, value and type of a part of a value.
_Part: TypeAlias = tuple[str, Any, Any]

#: Exceptions of msgspec for bad input. The last two come from types that cannot hold the value.
INPUT_ERRORS: Final = (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError)


def fault(path: str, message: str) -> Fault:
    """Return a fault, its texts cut to their limits."""
    return {"path": _cut(path, _PATH_MAX), "message": _cut(message, _MESSAGE_MAX)}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"


def bounded(faults: Iterable[Fault]) -> list[Fault]:
    """Return the first *faults*, as many as an error may carry."""
    kept: list[Fault] = []
    room = FAULTS_OCTETS_MAX
    for each in faults:
        room -= len(each["path"].encode()) + len(each["message"].encode())
        if room < 0 or len(kept) >= FAULTS_MAX:
            break
        kept.append(each)
    return kept


def info_of(faults: Iterable[Fault]) -> dict[object, object]:
    """Return the ``info`` of an error with *faults*; empty without any."""
    kept = bounded(faults)
    return {"errors": kept} if kept else {}


def find_faults(value: Any, kind: Any) -> list[Fault]:
    """Return where *value*, as decoded without a type, is not a *kind*, in the order of its type.

    Parts of Structs, dataclasses, typed dicts, lists and maps are tried one by one.
    """
    found: list[Fault] = []
    try:
        _Search(found).look("$", value, kind, 0)
    except (*INPUT_ERRORS, NameError):
        pass  # A type that cannot be taken apart: the first fault is known already.
    return found


class _Search:
    """Search for faults, bounded in all directions."""

    def __init__(self, found: list[Fault]) -> None:
        self._found = found
        self._looks = _LOOKS_MAX

    def look(self, path: str, value: Any, kind: Any, depth: int) -> None:
        """Add the faults of *value*, at *path*."""
        self._looks -= 1
        if len(self._found) >= FAULTS_MAX or self._looks < 0:
            return
        try:
            msgspec.convert(value, kind, str_keys=True)
        except INPUT_ERRORS as error:
            before = len(self._found)
            if depth < _DEPTH_MAX:
                for part in self._parts(path, value, _only(kind)):
                    self.look(*part, depth + 1)
            if len(self._found) == before:
                self._found.append(_fault_of(path, error))

    def _parts(self, path: str, value: Any, kind: Any) -> Iterator[_Part]:
        """Iterate over the parts of *value*, and add its missing fields to the faults."""
        plain = get_origin(kind) or kind
        args = get_args(kind)
        if isinstance(value, Mapping):
            fields = _fields_of(kind, plain)
            if fields is not None:
                for name, wanted, required in fields:
                    if name in value:
                        yield f"{path}.{name}", value[name], wanted
                    elif required:
                        missing = f"Object missing required field `{name}`"
                        self._found.append(fault(path, missing))
            elif isinstance(plain, type) and issubclass(plain, Mapping) and len(args) == 2:
                for key, item in value.items():
                    yield f"{path}[{key!r:.50}]", item, args[1]
        elif isinstance(value, list) and isinstance(plain, type):
            if plain is tuple and not (len(args) == 2 and args[1] is ...):
                wants: Iterable[Any] = args if len(args) == len(value) else ()
            elif issubclass(plain, list | set | frozenset | tuple | Sequence) and args:
                wants = (args[0] for _ in value)
            else:
                return
            for at, (item, wanted) in enumerate(zip(value, wants, strict=False)):
                yield f"{path}[{at}]", item, wanted


def _fault_of(path: str, error: Exception) -> Fault:
    """Return the fault that msgspec has found at *path*, or within the value there."""
    text = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    message, at, inner = text.rpartition(" - at `$")
    return fault(path + inner.removesuffix("`"), message) if at else fault(path, text)


def _only(kind: Any) -> Any:
    """Return *kind* without ``Annotated``, and without ``| None`` if one type is left."""
    if get_origin(kind) is Annotated:
        return _only(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        rest = [each for each in get_args(kind) if each is not type(None)]
        if len(rest) == 1:
            return _only(rest[0])
    return kind


def _fields_of(kind: Any, plain: Any) -> list[tuple[str, Any, bool]] | None:
    """Return name, type and whether it is required of each field of a class with fields; None for any other."""
    if not isinstance(plain, type):
        return None
    if issubclass(plain, msgspec.Struct):
        return [
            (each.encode_name, each.type, each.required) for each in msgspec.structs.fields(kind)
        ]
    if dataclasses.is_dataclass(plain):
        hints = get_type_hints(plain, include_extras=True)
        nothing = dataclasses.MISSING
        return [
            (each.name, hints[each.name], each.default is each.default_factory is nothing)
            for each in dataclasses.fields(plain)
            if each.init
        ]
    required = getattr(plain, "__required_keys__", None)
    if required is not None:
        hints = get_type_hints(plain)
        return [(name, wanted, name in required) for name, wanted in hints.items()]
    return None
