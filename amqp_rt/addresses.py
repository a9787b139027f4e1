"""Addresses of nodes, patterns of addresses, and URLs (pure).

An address is the name of the node that a link attaches to. Applications declare addresses literally
or as a :class:`Pattern` with captures; brokers create nodes on first use by :class:`Wildcards`. Where
several match, the most specific one wins, which is the one with the most literal characters.

Addresses from clients are only ever compared with those that the application declared; no regular
expression is built from them, and matching takes time in proportion to the length of the address.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from ipaddress import AddressValueError, IPv6Address, IPv6Network
from keyword import iskeyword
from typing import Final, Generic, TypeVar
from urllib.parse import unquote

from msgspec import Struct

from .errors import AmqpError, ConnectFailed

T = TypeVar("T")

_NO_CAPTURES: Final[Mapping[str, str]] = {}


class AddressError(AmqpError, ValueError):
    """A declared address or pattern is malformed, or already taken."""

    default_condition = "amqp:invalid-field"


# --- Patterns ----------------------------------------------------------------------------------


class Pattern:
    """Literal address or one with captures: ``orders/{region}/raw``, ``files/{path:rest}``.

    ``{name}`` matches one or more characters up to the next ``/``, and literal text may come before
    and after it. ``{name:rest}`` ends a pattern and matches one or more characters of any kind.
    Braces themselves are written ``{{`` and ``}}``.

    Raises:
        AddressError: A brace is out of place, or a name is not an identifier or is used twice.
    """

    __slots__ = ("_rest", "_segments", "captures", "literal", "rank", "shape", "text")

    def __init__(self, text: str) -> None:
        if not text:
            raise AddressError("an address must not be empty")
        self.text = text
        segments: list[_PatternSegment] = []
        begin = 0
        while (end := text.find("/", begin)) >= 0:
            segments.append(_parse_segment(text, begin, end))
            begin = end + 1
        segments.append(_parse_segment(text, begin, len(text)))
        for segment in segments[:-1]:
            if segment.rest:
                raise AddressError(f"{text!r}: {{{segment.name}:rest}} must be at the end")
        self._rest: bool = segments[-1].rest
        self._segments = tuple(segments)
        #: Names of the captures, in order.
        self.captures: tuple[str, ...] = tuple(part.name for part in segments if part.name)
        for name in self.captures:
            if self.captures.count(name) > 1:
                raise AddressError(f"{text!r}: {{{name}}} is captured twice")
        #: The only matching address, if the pattern has no captures, else None.
        self.literal: str | None = (
            None if self.captures else "/".join(part.before for part in segments)
        )
        size = len(segments) - 1 + sum(len(part.before) + len(part.after) for part in segments)
        #: Sorts the most specific pattern first: most literal characters, then fewest captures.
        self.rank: tuple[int, bool, int] = (-size, self._rest, len(self.captures))
        #: Equal for patterns that match the same addresses, independent of the names of the captures.
        self.shape: object = tuple(
            (part.before, bool(part.name), part.rest, part.after) for part in segments
        )

    @property
    def wild(self) -> str:
        """The pattern with ``*`` for each capture: it matches these addresses, and more."""
        return "/".join(
            f"{part.before}*{part.after}" if part.name else part.before for part in self._segments
        )

    def match(self, address: str) -> Mapping[str, str] | None:
        """Return the captures of *address* by name, or None if it does not match."""
        if self.literal is not None:
            return _NO_CAPTURES if address == self.literal else None
        count = len(self._segments)
        parts = address.split("/", count - 1 if self._rest else count)
        if len(parts) != count:
            return None
        found: dict[str, str] = {}
        for part, segment in zip(parts, self._segments, strict=True):
            before = segment.before
            if not segment.name:
                if part != before:
                    return None
                continue
            end = len(part) - len(segment.after)
            # The capture needs at least one character between the literal texts, so they cannot overlap.
            if end <= len(before) or not part.startswith(before):
                return None
            if not part.endswith(segment.after):
                return None
            found[segment.name] = part[len(before) : end]
        return found

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"


class _PatternSegment(Struct, frozen=True):
    """Text between two slashes of a pattern: literal text, a capture, literal text."""

    before: str
    name: str
    rest: bool
    after: str


def _parse_segment(text: str, begin: int, end: int) -> _PatternSegment:
    literals = ["", ""]
    name = ""
    rest = False
    at = begin
    while at < end:
        two = text[at : min(at + 2, end)]
        if two in ("{{", "}}"):
            literals[bool(name)] += two[0]
            at += 2
        elif two[0] == "{":
            if name:
                raise AddressError(f"{text!r}: a second capture before the next slash")
            close = text.find("}", at, end)
            if close < 0:
                raise AddressError(f"{text!r}: the {{ at character {at + 1} is not closed")
            name, colon, kind = text[at + 1 : close].partition(":")
            if not name.isidentifier() or iskeyword(name):
                raise AddressError(f"{text!r}: {name!r} is no name for a capture")
            if colon and kind != "rest":
                raise AddressError(
                    f"{text!r}: {kind!r} is no kind of capture, there is only ':rest'"
                )
            rest = bool(colon)
            at = close + 1
        elif two[0] == "}":
            raise AddressError(f"{text!r}: the }} at character {at + 1} was not opened")
        else:
            literals[bool(name)] += two[0]
            at += 1
    if rest and literals[1]:
        raise AddressError(f"{text!r}: {{{name}:rest}} must be at the end")
    return _PatternSegment(literals[0], name, rest, literals[1])


class AddressTable(Generic[T]):
    """Table of values by address or pattern.

    An address without captures is found by one look-up, however many there are. Patterns
    are tried one after the other, the most specific first, and the oldest first among equally specific ones.
    """

    def __init__(self) -> None:
        self._literals: dict[str, T] = {}
        self._patterns: list[tuple[Pattern, T]] = []

    def add(self, pattern: Pattern | str, value: T) -> None:
        """Add *value* under *pattern*.

        Raises:
            AddressError: There is a value for the same addresses already.
        """
        if isinstance(pattern, str):
            pattern = Pattern(pattern)
        if pattern.literal is not None:
            if pattern.literal in self._literals:
                raise AddressError(f"{pattern.text!r} is taken already")
            self._literals[pattern.literal] = value
            return
        for other, _ in self._patterns:
            if other.shape == pattern.shape:
                raise AddressError(f"{pattern.text!r} is taken already, by {other.text!r}")
        self._patterns.append((pattern, value))
        self._patterns.sort(key=lambda entry: entry[0].rank)

    def remove(self, pattern: Pattern | str) -> None:
        """Remove the value of *pattern*, if there is one."""
        if isinstance(pattern, str):
            pattern = Pattern(pattern)
        if pattern.literal is not None:
            self._literals.pop(pattern.literal, None)
        else:
            shape = pattern.shape
            self._patterns = [entry for entry in self._patterns if entry[0].shape != shape]

    def find(self, address: str) -> tuple[T, Mapping[str, str]] | None:
        """Return the value for *address* and the captures of its pattern, or None."""
        if address in self._literals:
            return self._literals[address], _NO_CAPTURES
        for pattern, value in self._patterns:
            captures = pattern.match(address)
            if captures is not None:
                return value, captures
        return None

    def __len__(self) -> int:
        return len(self._literals) + len(self._patterns)

    def __repr__(self) -> str:
        return f"AddressTable({len(self._literals)} addresses, {len(self._patterns)} patterns)"


class Wildcards(Generic[T]):
    """Table of values by address, where ``*`` in a key matches any number of characters.

    A key without ``*`` is found by a look-up. Of the other keys that match, the one with the most
    literal characters wins.
    """

    def __init__(self) -> None:
        self._exact: dict[str, T] = {}
        self._wild: list[tuple[tuple[str, ...], T]] = []

    def add(self, key: str, value: T) -> None:
        """Add *value* under *key*, replacing that of an equal key."""
        if "*" not in key:
            self._exact[key] = value
            return
        parts = wild_parts(key)
        self._wild = [(known, old) for known, old in self._wild if known != parts]
        self._wild.append((parts, value))
        self._wild.sort(key=lambda entry: (-sum(map(len, entry[0])), entry[0]))

    def find(self, address: str) -> T | None:
        """Return the value for *address*, or None."""
        if address in self._exact:
            return self._exact[address]
        for parts, value in self._wild:
            if wild_match(parts, address):
                return value
        return None

    def __iter__(self) -> Iterator[str]:
        yield from self._exact
        for parts, _ in self._wild:
            yield "*".join(parts)


def wild_parts(key: str) -> tuple[str, ...]:
    """Return *key* split at each ``*``, for :func:`wild_match`."""
    return tuple(key.split("*"))


def wild_match(parts: tuple[str, ...], address: str) -> bool:
    """Return whether *address* holds the parts in order, the first and the last at its ends."""
    if len(parts) == 1:
        return address == parts[0]
    first, *middle, last = parts
    at = len(first)
    end = len(address) - len(last)
    if end < at or not address.startswith(first) or not address.endswith(last):
        return False
    for part in middle:
        # The leftmost match leaves the most text for the parts that follow.
        at = address.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


#: Prefix of a queue's percent-encoded name in addresses of RabbitMQ 4 (address format v2).
QUEUES: Final = "/queues/"
#: Prefix of an exchange's name, which a slash and the routing key may follow.
EXCHANGES: Final = "/exchanges/"
#: RabbitMQ's pseudo-queue for replies to requests. As a capability of a dynamic source, it asks for an address
#: that begins with it and a dot: one of the container, also beside a broker.
REPLY_TO: Final = "amq.rabbitmq.reply-to"
#: Prefix of such addresses.
DIRECT_REPLY: Final = f"{REPLY_TO}."
#: Prefix of the names of queues that have been deleted and still move their messages to their dead-letter
#: address; a number and the name of the queue follow.
LEAVING: Final = "$deleted/"


def is_direct_reply(address: str) -> bool:
    """Return whether *address* is that of a consumer of RabbitMQ's direct replies, which may have ended."""
    return address.startswith(DIRECT_REPLY)


def address_of(text: str) -> str:
    """Return the node address in *text*: the path of a whole URI, anything else unchanged.

    ``amqps://host:5671/q1`` and ``sb://ns/q1/`` give ``q1``. Query and fragment are dropped, and
    percent-encoding is decoded. ``/queues/q1``, as in RabbitMQ 4, gives ``q1`` too.
    """
    if text.startswith(QUEUES):
        try:
            return unquote(text.removeprefix(QUEUES), errors="strict") or text
        except UnicodeDecodeError:
            return text
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() not in PORTS:
        return text
    path = rest.partition("#")[0].partition("?")[0].partition("/")[2].rstrip("/")
    try:
        return unquote(path, errors="strict")
    except UnicodeDecodeError:
        return path


# --- URLs --------------------------------------------------------------------------------------

#: Scheme → its default port, None for schemes without ports.
PORTS: Final[dict[str, int | None]] = {
    "amqp": 5672,
    "amqps": 5671,
    "sb": 5671,
    "ws": 80,
    "wss": 443,
    "amqp+unix": None,
    "memory": None,
}

#: Parameters after the ``?`` of a URL, with their names in errors.
_DIALLING: Final = {"vhost": "virtual host"}
_LISTENING: Final = {
    **_DIALLING,
    "profile": "profile",
    "proxy_protocol": "proxy_protocol",
    "trusted": "list of proxies",
}

#: Separator of URLs: a comma before a scheme. Any other comma is part of a URL.
_BETWEEN_URLS: Final = re.compile(r",\s*(?=[A-Za-z][A-Za-z0-9+.\-]*://)")
_HOST: Final = re.compile(r"\*|[\w.~\-]+")
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_FORBIDDEN: Final = re.compile(r"[\x00-\x20\x7f]")


class Url(Struct, frozen=True, kw_only=True):
    """URL to connect to or to listen on. Its text and repr never show the password."""

    scheme: str = "amqp"
    #: Host, or the name of a ``memory://`` URL; an empty one listens on every interface.
    host: str = ""
    #: Port; 0 for schemes without ports, and to listen on any free port.
    port: int = 0
    #: Path of a Unix socket, a WebSocket or an ``sb`` URL.
    path: str = ""
    user: str | None = None
    password: str | None = None
    #: The virtual host in the URL, None if there is none.
    virtual_host: str | None = None
    #: Addresses of the proxies whose connections a listener accepts; None if it is not behind proxies.
    trusted_proxies: tuple[str, ...] | None = None
    #: Name of a profile that a plug-in provides for the connections of a listener; None if it has none.
    profile: str | None = None

    @property
    def tls(self) -> bool:
        """Whether the scheme uses TLS from the first byte."""
        return self.scheme in ("amqps", "sb", "wss")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        user = f"{self.user}@" if self.user is not None else ""
        port = f":{self.port}" if PORTS.get(self.scheme) or self.port else ""
        path = self.path
        if self.virtual_host and self.scheme in ("amqp", "amqps"):
            path = f"/{self.virtual_host}"
        return f"{self.scheme}://{user}{host}{port}{path}"

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"


def parse_url(text: str, *, listening: bool = False) -> Url:
    """Parse a URL: ``scheme://[user[:password]@]host[:port][/path][?vhost=name]``.

    The schemes are ``amqp`` and ``amqps``, whose path is the virtual host, ``sb``, ``ws``, ``wss``,
    ``amqp+unix:///PATH``, ``memory://NAME`` and those of plug-ins (:func:`transport_plugins`), which may
    leave out host and port; a host alone stands for ``amqp://HOST``.
    Characters with a meaning in URLs are percent-encoded in a user name, password or path.
    When *listening*, an empty host before a port means every interface, port 0 any free one, and a
    user is not allowed; ``?proxy_protocol=required&trusted=NETWORK`` is a listener behind proxies, and
    ``?profile=NAME`` one for the clients of another product.

    Raises:
        ConnectFailed: *text* is not such a URL; the error gives the reason without the password.
    """
    given = text.strip()
    if forbidden := _FORBIDDEN.search(given):
        raise _bad("a URL", f"a space or control character at character {forbidden.start() + 1}")
    if "://" not in given:
        given = f"amqp://{given}"
    scheme, _, rest = given.partition("://")
    scheme = scheme.lower()
    safe = _without_secrets(given)
    plugin = scheme not in PORTS
    if plugin and scheme not in transport_plugins():
        known = ", ".join((*PORTS, *transport_plugins()))
        raise _bad(safe, f"there is no such scheme; there are {known}")
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    if "@" in path or "@" in query:
        raise _bad(
            safe,
            "an '@' after the host; in a user name, password or path "
            "write '/' as %2F, '?' as %3F and '@' as %40",
        )
    if "#" in given:
        raise _bad(safe, "'#' is written as %23")
    who, at, authority = authority.rpartition("@")
    user, password = _parse_user(who, safe) if at else (None, None)
    if listening and at:
        raise _bad(safe, "a URL to listen on has no user")
    host, port = _parse_host(authority, safe)
    path = _unquoted(slash + path, "path", safe)
    parameters = _parse_query(query, safe, listening=listening)
    virtual_host = parameters.get("vhost")
    standard = PORTS.get(scheme)
    if plugin:
        # Its transport knows what the other parts have to be.
        pass
    elif standard is None and port is not None:
        raise _bad(safe, f"{scheme} has no ports")
    elif scheme == "amqp+unix":
        if host or len(path) < 2:
            raise _bad(safe, "a Unix socket is amqp+unix:///PATH, with three slashes")
    elif scheme == "memory":
        if not host or path:
            raise _bad(safe, "it is memory://NAME")
    elif not listening:
        if host in ("", "*"):
            raise _bad(safe, "it has no host")
        if port == 0:
            raise _bad(safe, "port 0 is for listening only")
    elif not host and port is None:
        # An empty setting must not expose the listener to the network.
        raise _bad(
            safe,
            "it has no host; 127.0.0.1 is this machine only, 0.0.0.0 every IPv4 address of it",
        )
    if scheme in ("amqp", "amqps"):
        if len(path) > 1:
            if virtual_host is not None:
                raise _bad(safe, "the virtual host is given twice, in the path and as vhost")
            virtual_host = path[1:]
        path = ""
    return Url(
        scheme=scheme,
        host=host,
        port=(standard or 0) if port is None else port,
        path="" if path == "/" else path,
        user=user,
        password=password,
        virtual_host=virtual_host,
        trusted_proxies=_trusted_proxies(parameters, safe),
        profile=parameters.get("profile"),
    )


@lru_cache(maxsize=1)
def transport_plugins() -> Mapping[str, EntryPoint]:
    """Return the transports of installed plug-ins by the scheme of their URLs.

    They are the entry points of the group ``amqp_rt.transports`` (:mod:`amqp_rt.net.transports`). Our own schemes
    cannot be replaced: a URL must not mean less security because of what is installed.
    """
    return {
        each.name.lower(): each
        for each in entry_points(group="amqp_rt.transports")
        if each.name.lower() not in PORTS
    }


@lru_cache(maxsize=128)
def _parse_once(text: str) -> Url:
    return parse_url(text)


def parse_urls(urls: str | Url | Iterable[str | Url]) -> list[Url]:
    """Parse a failover list: several URLs, or one text with commas between them.

    Raises:
        ConnectFailed: One of them is malformed, or there is none.
    """
    given: list[str | Url] = []
    for entry in [urls] if isinstance(urls, str | Url) else urls:
        if isinstance(entry, Url):
            given.append(entry)
        else:
            given += [part for part in _BETWEEN_URLS.split(entry.strip()) if part]
    found: list[Url] = []
    for one in given:
        try:
            if isinstance(one, Url):
                found.append(one)
            else:
                # Clients connect to few URLs, and often. Those with a password are not kept.
                keeps = one.startswith("amqp://") and "@" not in one
                found.append(_parse_once(one) if keeps else parse_url(one))
        except ConnectFailed as error:
            if len(given) == 1:
                raise
            place = f"URL {len(found) + 1} of {len(given)}"
            raise ConnectFailed(
                f"{place}: {error.description}", condition=error.condition
            ) from None
    if not found:
        raise ConnectFailed("there is no URL to connect to", condition="amqp:invalid-field")
    return found


def _bad(safe: str, why: str) -> ConnectFailed:
    return ConnectFailed(f"{safe}: {why}", condition="amqp:invalid-field")


def _without_secrets(text: str) -> str:
    """Return scheme and host, the parts that hold no secret wherever an '@' may stand."""
    scheme, _, rest = text.partition("://")
    before, _, rest = rest.rpartition("@")
    host = rest.partition("]")[0] + "]" if rest[:1] == "[" else re.split("[:/?#]", rest)[0]
    return f"{scheme[:20]}://{'***@' if before else ''}{host[:80]}"


def _parse_user(who: str, safe: str) -> tuple[str, str | None]:
    user, colon, password = who.partition(":")
    if not user:
        raise _bad(safe, "there is no user name before '@'")
    if "@" in who:
        raise _bad(safe, "an '@' in a user name or password is written as %40")
    if ":" in password:
        raise _bad(safe, "a ':' in a password is written as %3A")
    user = _unquoted(user, "user name", safe)
    return user, _unquoted(password, "password", safe) if colon else None


def _parse_host(authority: str, safe: str) -> tuple[str, int | None]:
    if authority.startswith("["):
        host, bracket, after = authority[1:].partition("]")
        host = host.replace("%25", "%")  # before the zone of a link-local address
        try:
            IPv6Address(host)
        except AddressValueError:
            bracket = ""
        if not bracket:
            raise _bad(safe, "between '[' and ']' stands no IPv6 address")
        colon, port = after[:1], after[1:]
        if colon not in ("", ":"):
            raise _bad(safe, "after the brackets comes ':' and the port")
    else:
        host, colon, port = authority.partition(":")
        if ":" in port:
            raise _bad(safe, "an IPv6 address is written in brackets: [::1]")
        if host and not _HOST.fullmatch(host):
            raise _bad(safe, "the host has characters that no host name has")
    if not colon:
        return host, None
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 0xFFFF):
        raise _bad(safe, "the port is no number up to 65535")
    return host, int(port)


def _parse_query(query: str, safe: str, *, listening: bool) -> dict[str, str]:
    """Return the parameters in *query* by name: ``vhost``, and those of listeners."""
    allowed = _LISTENING if listening else _DIALLING
    found: dict[str, str] = {}
    for each in query.split("&") if query else ():
        name, equals, value = each.partition("=")
        if name not in allowed or not equals or name in found:
            shown = "vhost=NAME"
            if listening:
                shown += ", profile=NAME and proxy_protocol=required&trusted=NETWORK"
            raise _bad(safe, f"after '?' there is nothing but {shown}")
        found[name] = _unquoted(value, allowed[name], safe)
    return found


def _trusted_proxies(parameters: Mapping[str, str], safe: str) -> tuple[str, ...] | None:
    """Return the networks of proxies that *parameters* of a listener name; None if there is no proxy."""
    required, trusted = parameters.get("proxy_protocol"), parameters.get("trusted")
    if required is None and trusted is None:
        return None
    if required != "required" or not trusted:
        raise _bad(
            safe, "a listener behind proxies has proxy_protocol=required&trusted=NETWORK[,NETWORK]"
        )
    return tuple(each.strip() for each in trusted.split(","))


def _unquoted(text: str, what: str, safe: str) -> str:
    if _BAD_ESCAPE.search(text):
        raise _bad(safe, f"a '%' in the {what} is written as %25")
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise _bad(safe, f"the percent-encoded characters in the {what} are not UTF-8") from None


# --- Web pages ---------------------------------------------------------------------------------

#: Host as browsers send it: names beyond ASCII come in their encoded form (RFC 5891).
_WEB_HOST: Final = re.compile(r"[a-z0-9_.~\-]+")
_ORIGIN: Final = re.compile(
    rf"(?P<scheme>[a-z][a-z0-9+.\-]*)://(?P<host>{_WEB_HOST.pattern}|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{{1,5}}))?/?"
)


#: Schemes of pages that browsers load from a server.
WEB_SCHEMES: Final = ("http", "https")


def origin_of(text: str, *, schemes: Collection[str] = ()) -> str:
    """Return the origin *text* of web pages as browsers write it, without the default port of its scheme.

    A text that no browser sends would refuse all pages without a reason.

    Args:
        text: Such as ``https://example.org`` or ``https://example.org:8443``.
        schemes: Schemes that it may have; by default any.

    Raises:
        AddressError: It is no origin.
    """
    parts = _ORIGIN.fullmatch(text.lower())
    if parts is None or (schemes and parts["scheme"] not in schemes):
        raise AddressError(
            f"{text!r:.200} is no origin of pages: it is https://HOST or https://HOST:PORT"
        )
    scheme, host, port = parts.groups()
    default = {"http": 80, "https": 443}.get(scheme)
    return f"{scheme}://{host}" + ("" if port is None or int(port) == default else f":{int(port)}")


def host_name_of(text: str) -> str:
    """Return the name *text* of a host as browsers write it.

    Raises:
        AddressError: It is none, but a URL or a name with a port.
    """
    if _WEB_HOST.fullmatch(text.lower()) is None:
        raise AddressError(f"{text!r:.200} is no name of a host: it has no scheme and no port")
    return text.lower()


# --- Addresses of peers ------------------------------------------------------------------------


def host_in(address: str) -> str:
    """Return the host of a peer's address as text, such as ``[::1]:5672``."""
    return address.rpartition(":")[0].strip("[]")


def network_of(host: str) -> str:
    """Return the part of *host* that counts as one address.

    For IPv6 this is the /64 network, since its owner can choose the rest freely.
    """
    if ":" not in host:
        return host
    try:
        address = IPv6Address(host.partition("%")[0])
    except AddressValueError:
        # A name in memory.
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((address, 64), strict=False))
