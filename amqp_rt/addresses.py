"""Addresses: patterns with captures, wildcards, and URLs (pure).

What a client sends is only ever compared with what the application declared; no regular
expression is built from it, and matching takes time in proportion to the address.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Generic, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from msgspec import Struct

from .errors import AmqpError, ConnectFailed

T = TypeVar("T")

#: Ports by scheme.
PORTS: Final = {"amqp": 5672, "amqps": 5671, "ws": 80, "wss": 443}
#: Schemes that a connection URL may have.
SCHEMES: Final = (*PORTS, "amqp+unix", "memory")


class AddressError(AmqpError, ValueError):
    """A declared address or pattern is malformed, or taken."""

    default_condition = "amqp:invalid-field"


class Pattern:
    """An address with captures: ``orders/{region}/raw``, ``files/{path:rest}``.

    ``{name}`` takes one or more characters up to the next ``/``, ``{name:rest}`` everything to the
    end. Everything else is literal.

    Raises:
        AddressError: A brace is out of place, or a name is no identifier or given twice.
    """

    __slots__ = ("_rest", "_segments", "captures", "rank", "text")

    def __init__(self, text: str) -> None:
        if not text:
            raise AddressError("an address must not be empty")
        self.text = text
        captures: list[str] = []
        #: Per segment the literal before, the capture and the literal after it.
        segments: list[tuple[str, str | None, str]] = []
        self._rest = False
        parts = text.split("/")
        for index, part in enumerate(parts):
            before, brace, inner = part.partition("{")
            if not brace:
                if "}" in part:
                    raise AddressError(f"{text!r}: a }} without its {{")
                segments.append((part, None, ""))
                continue
            name, brace, after = inner.partition("}")
            if not brace or "}" in before or "{" in after or "}" in after:
                raise AddressError(f"{text!r}: one {{name}} at most between two slashes")
            name, colon, kind = name.partition(":")
            if not name.isidentifier():
                raise AddressError(f"{text!r}: {{{name}}} is no name for a capture")
            if name in captures:
                raise AddressError(f"{text!r}: {{{name}}} is captured twice")
            if colon:
                if kind != "rest" or index != len(parts) - 1 or after:
                    raise AddressError(f"{text!r}: only {{name:rest}} at the end is known")
                self._rest = True
            captures.append(name)
            segments.append((before, name, after))
        self._segments = tuple(segments)
        self.captures: tuple[str, ...] = tuple(captures)
        literal = sum(len(before) + len(after) for before, _, after in segments)
        #: Sorts the most specific pattern first: fewest captures, then most literal characters.
        self.rank: tuple[bool, int, int, str] = (self._rest, len(captures), -literal, text)

    @property
    def literal(self) -> str:
        """The address itself, of a pattern without captures."""
        return self.text

    def match(self, address: str) -> Mapping[str, str] | None:
        """What *address* puts into the captures, or None if it does not match."""
        if not self.captures:
            return {} if address == self.text else None
        count = len(self._segments)
        parts = address.split("/", count - 1) if self._rest else address.split("/")
        if len(parts) != count:
            return None
        found: dict[str, str] = {}
        for part, (before, name, after) in zip(parts, self._segments, strict=True):
            if name is None:
                if part != before:
                    return None
                continue
            if len(part) <= len(before) + len(after):
                return None
            if not part.startswith(before) or not part.endswith(after):
                return None
            found[name] = part[len(before) : len(part) - len(after)]
        return found

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"


class AddressTable(Generic[T]):
    """Values by address or pattern.

    An address without captures is found by itself, however many there are; patterns are tried one
    after the other, the most specific first.
    """

    def __init__(self) -> None:
        self._exact: dict[str, T] = {}
        self._patterns: list[tuple[Pattern, T]] = []

    def add(self, pattern: Pattern | str, value: T) -> None:
        """Add a value.

        Raises:
            AddressError: There is one for the same text.
        """
        if isinstance(pattern, str):
            pattern = Pattern(pattern)
        if pattern.text in self._exact or any(p.text == pattern.text for p, _ in self._patterns):
            raise AddressError(f"{pattern.text!r} is taken already")
        if pattern.captures:
            self._patterns.append((pattern, value))
            self._patterns.sort(key=lambda entry: entry[0].rank)
        else:
            self._exact[pattern.text] = value

    def remove(self, pattern: Pattern | str) -> None:
        """Take a value away; nothing happens if there is none."""
        text = pattern if isinstance(pattern, str) else pattern.text
        self._exact.pop(text, None)
        self._patterns = [entry for entry in self._patterns if entry[0].text != text]

    def find(self, address: str) -> tuple[T, Mapping[str, str]] | None:
        """The value for *address* and what its pattern captured, or None."""
        if address in self._exact:
            return self._exact[address], {}
        for pattern, value in self._patterns:
            captures = pattern.match(address)
            if captures is not None:
                return value, captures
        return None

    def __len__(self) -> int:
        return len(self._exact) + len(self._patterns)


class Wildcards(Generic[T]):
    """Values by address, where ``*`` in a key stands for any characters.

    A key without ``*`` is found by itself. Of the others that match, the one with the most literal
    characters wins.
    """

    def __init__(self) -> None:
        self._exact: dict[str, T] = {}
        self._wild: list[tuple[tuple[str, ...], T]] = []

    def add(self, key: str, value: T) -> None:
        """Add *key*; an equal one is replaced."""
        if "*" not in key:
            self._exact[key] = value
            return
        parts = tuple(key.split("*"))
        self._wild = [(known, old) for known, old in self._wild if known != parts]
        self._wild.append((parts, value))
        self._wild.sort(key=lambda entry: (-sum(map(len, entry[0])), entry[0]))

    def find(self, address: str) -> T | None:
        """The value for *address*, or None."""
        if address in self._exact:
            return self._exact[address]
        for parts, value in self._wild:
            if _wild_match(parts, address):
                return value
        return None

    def __iter__(self) -> Iterator[str]:
        yield from self._exact
        for parts, _ in self._wild:
            yield "*".join(parts)


def _wild_match(parts: tuple[str, ...], address: str) -> bool:
    """Whether the parts stand in *address* in order, the first and the last at its ends."""
    first, *middle, last = parts
    if len(address) < len(first) + len(last):
        return False
    if not address.startswith(first) or not address.endswith(last):
        return False
    at = len(first)
    end = len(address) - len(last)
    for part in middle:
        at = address.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def address_of(text: str) -> str:
    """A link address as we know it: of a whole URI its path, anything else as it stands.

    ``amqps://host:5671/q1`` and ``sb://ns/q1/`` are ``q1``.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or not scheme.isalnum():
        return text
    path = rest.partition("/")[2].rstrip("/")
    return unquote(path) if path else text


class Url(Struct, frozen=True, kw_only=True):
    """Where to connect to. Its text and repr never show the password."""

    scheme: str = "amqp"
    #: Host, or the name of a ``memory://`` URL.
    host: str = ""
    port: int = 0
    #: Of a Unix socket, or of a WebSocket.
    path: str = ""
    user: str | None = None
    password: str | None = None
    #: The virtual host that the URL's path names, None if it names none.
    virtual_host: str | None = None

    def __str__(self) -> str:
        if self.scheme == "amqp+unix":
            return f"amqp+unix://{self.path}"
        if self.scheme == "memory":
            return f"memory://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        user = f"{self.user}@" if self.user is not None else ""
        path = self.path or (f"/{self.virtual_host}" if self.virtual_host else "")
        return f"{self.scheme}://{user}{host}:{self.port}{path}"

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"


def parse_url(text: str, *, listening: bool = False) -> Url:
    """The parts of a connection URL; *listening* allows no host, which is every address.

    ``amqp://USER:PASSWORD@HOST:PORT/VHOST``; user and password are percent-decoded, and a host
    alone stands for ``amqp://HOST``. ``amqp+unix:///PATH`` and ``memory://NAME`` have no port.

    Raises:
        ConnectFailed: It is no such URL; the sentence says what is wrong with it, without the
            password.
    """
    given = text.strip()
    if "://" not in given:
        given = f"amqp://{given}"
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError:
        raise _bad(
            text, "its port is not a number up to 65535, or its brackets do not close"
        ) from (None)
    scheme = parts.scheme
    if scheme not in SCHEMES:
        raise _bad(text, f"{scheme!r} is none of the schemes {', '.join(SCHEMES)}")
    if parts.query or parts.fragment:
        raise _bad(text, "options after ? or # are not known")
    if scheme == "amqp+unix":
        if not parts.path or parts.netloc:
            raise _bad(text, "a Unix socket is amqp+unix:///PATH, with three slashes")
        return Url(scheme=scheme, path=unquote(parts.path))
    if scheme == "memory":
        name = parts.netloc + parts.path
        if not name:
            raise _bad(text, "memory:// needs a name")
        return Url(scheme=scheme, host=name)
    if not parts.hostname and not listening:
        raise _bad(text, "it has no host")
    websocket = scheme in ("ws", "wss")
    return Url(
        scheme=scheme,
        host=parts.hostname or "",
        port=PORTS[scheme] if port is None else port,
        path=parts.path if websocket else "",
        user=None if parts.username is None else unquote(parts.username),
        password=None if parts.password is None else unquote(parts.password),
        virtual_host=None if websocket else _virtual_host(parts),
    )


def _virtual_host(parts: SplitResult) -> str | None:
    path = parts.path.removeprefix("/")
    return unquote(path) if path else None


def parse_urls(urls: str | Sequence[str]) -> list[Url]:
    """A failover list: several URLs, or one text with commas between them.

    Raises:
        ConnectFailed: One of them is no URL, or there is none.
    """
    texts = urls.split(",") if isinstance(urls, str) else list(urls)
    found = [parse_url(text) for text in texts if text.strip()]
    if not found:
        raise ConnectFailed("there is no URL to connect to", condition="amqp:invalid-field")
    return found


def _bad(text: str, why: str) -> ConnectFailed:
    return ConnectFailed(f"{_without_password(text)!r}: {why}", condition="amqp:invalid-field")


def _without_password(text: str) -> str:
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    if at:
        authority = f"{user.partition(':')[0]}@{host}"
    return f"{scheme}{separator}{authority}{slash}{path}"
