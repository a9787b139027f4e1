"""Discovery: the URLs at which other members of a mesh listen, from seeds.

A seed is a URL, ``dns+a://HOST:PORT`` for all addresses of a name, such as a headless service of
Kubernetes, ``dns+srv://_amqps._tcp.example.org`` for its SRV records (RFC 2782), or an async iterable
of collections of URLs, such as one that browses the local network. Names are resolved again and again;
while that fails, what was found last stays.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Callable, Collection, Iterable, Sequence
from typing import Final, TypeAlias
from urllib.parse import parse_qs, urlsplit

import trio
from msgspec import Struct

from ..addresses import PORTS, Url, parse_url
from ..errors import ConnectFailed
from ..loglimit import LogLimiter

log = logging.getLogger("amqp_rt.mesh")

#: A seed as applications give it.
Seed: TypeAlias = str | AsyncIterable[Collection[str]]

#: Seconds between two resolutions of a name, and before the second try if one fails; doubled with each
#: further failure.
RESOLVED_S: Final = 30.0
RETRIED_S: Final = 1.0
#: URLs taken from one seed: as many as a mesh has nodes.
FOUND_MAX: Final = 1_024

#: Schemes by port, unless the seed names one.
_PORTS: Final = {5671: "amqps", 443: "wss", 80: "ws"}
#: Schemes by the service of SRV records.
_SERVICES: Final = {"_amqp": "amqp", "_amqps": "amqps"}
_SCHEMES: Final = ("amqp", "amqps", "ws", "wss")


class Found(Struct, frozen=True):
    """Place at which a member may listen."""

    url: Url
    #: Name that its certificate has, if that is not the host of the URL; None for that host.
    server_name: str | None = None


class Discovery:
    """Places that the seeds of a mesh name now.

    :meth:`run` keeps it current.

    Args:
        seeds: The seeds.
        on_change: Called when the places have changed.
        limiter: Limits the lines that are logged about a seed that fails.

    Raises:
        ConnectFailed: A seed is no URL, or has options that are not known.
    """

    def __init__(
        self, seeds: Sequence[Seed], on_change: Callable[[], None], limiter: LogLimiter
    ) -> None:
        self._on_change = on_change
        self._limiter = limiter
        self._found: dict[int, frozenset[Found]] = {}
        self._sources: list[_Names | AsyncIterable[Collection[str]]] = []
        #: Numbers of the seeds that are followed, by their number in the list of these.
        self._numbers: dict[int, int] = {}
        for number, seed in enumerate(seeds):
            if not isinstance(seed, str):
                self._numbers[len(self._sources)] = number
                self._sources.append(seed)
            elif seed.startswith("dns+"):
                self._numbers[len(self._sources)] = number
                self._sources.append(_names(seed))
            else:
                self._found[-1 - number] = frozenset((Found(parse_url(seed)),))

    @property
    def places(self) -> frozenset[Found]:
        """All places that the seeds name."""
        return frozenset().union(*self._found.values())

    def in_order(self) -> list[tuple[int, Found]]:
        """Return the places, each with the number of its seed."""
        found = []
        for number, places in self._found.items():
            found += [(self._numbers.get(number, -1 - number), each) for each in places]
        # A place that several seeds name counts with the first.
        return sorted(found, key=lambda each: each[0], reverse=True)

    async def run(self) -> None:
        """Follow the seeds until cancelled."""
        async with trio.open_nursery() as nursery:
            for number, source in enumerate(self._sources):
                if isinstance(source, _Names):
                    nursery.start_soon(self._resolve, number, source)
                else:
                    nursery.start_soon(self._follow, number, source)

    async def _resolve(self, number: int, names: _Names) -> None:
        pause_s = RETRIED_S
        while True:
            try:
                self._set(number, await names.resolve())
            except OSError as error:
                self._log(names.seed, error)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, RESOLVED_S)
            else:
                pause_s = RETRIED_S
                await trio.sleep(RESOLVED_S)

    async def _follow(self, number: int, source: AsyncIterable[Collection[str]]) -> None:
        name = f"seed {source!r:.100}"
        try:
            async for urls in source:
                self._set(number, self._known(name, urls))
        except Exception as error:
            self._log(name, error)

    def _known(self, name: str, urls: Iterable[str]) -> set[Found]:
        found = set()
        for url in urls:
            try:
                found.add(Found(parse_url(url)))
            except ConnectFailed as error:
                self._log(name, error)
        return found

    def _set(self, number: int, found: Collection[Found]) -> None:
        kept = frozenset(sorted(found, key=lambda each: str(each.url))[:FOUND_MAX])
        if self._found.get(number, frozenset()) != kept:
            before = self.places
            self._found[number] = kept
            if self.places != before:
                self._on_change()

    def _log(self, name: str, error: Exception) -> None:
        text = self._limiter.admit(("mesh seed", name), trio.current_time())
        if text is not None:
            why = f"{type(error).__name__}: {error}"
            log.warning("no members found by %s: %s%s", name, why[:500], text)


class _Names:
    """Seed that is resolved by DNS."""

    def __init__(self, seed: str, host: str, scheme: str) -> None:
        self.seed = seed
        self.host = host
        self.scheme = scheme

    async def resolve(self) -> set[Found]:
        """Return the places that the name stands for now.

        Raises:
            OSError: The name cannot be resolved.
        """
        raise NotImplementedError


class _Addresses(_Names):
    """``dns+a://``: all IPv4 and IPv6 addresses of a host, at one port."""

    def __init__(self, seed: str, host: str, scheme: str, port: int, path: str) -> None:
        super().__init__(seed, host, scheme)
        self._port = port
        self._path = path

    async def resolve(self) -> set[Found]:
        found = await trio.socket.getaddrinfo(self.host, self._port, type=trio.socket.SOCK_STREAM)
        name = self.host if self.scheme in ("amqps", "wss") else None
        return {
            Found(_url(self.scheme, str(address[0]), self._port, self._path), name)
            for *_, address in found
        }


class _Services(_Names):
    """``dns+srv://``: hosts and ports of a service. Weights are ignored: members differ in nothing."""

    async def resolve(self) -> set[Found]:
        import dns.asyncresolver
        import dns.exception

        try:
            answer = await dns.asyncresolver.resolve(self.host, "SRV", lifetime=RESOLVED_S / 3)
        except dns.exception.DNSException as error:
            raise OSError(str(error) or type(error).__name__) from error
        found = set()
        for record in answer:
            target = record.target.to_text(omit_final_dot=True)
            # A lone dot: the service is decidedly not available (RFC 2782).
            if target not in ("", "."):
                found.add(Found(_url(self.scheme, target, record.port, "")))
        return found


def _url(scheme: str, host: str, port: int, path: str) -> Url:
    return parse_url(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{path}")


def _names(seed: str) -> _Names:
    """Return the names that *seed*, which begins with ``dns+``, asks to resolve.

    Raises:
        ConnectFailed: It is malformed, or the library that it takes is missing.
    """
    try:
        parts = urlsplit(seed)
        port = parts.port
    except ValueError as error:
        raise _malformed(seed, str(error)) from None
    kind = parts.scheme.partition("+")[2]
    options = parse_qs(parts.query)
    scheme = options.pop("scheme", [None])[-1]
    if options:
        raise _malformed(seed, f"there is no option {min(options)!r}, only 'scheme'")
    if scheme is not None and scheme not in _SCHEMES:
        raise _malformed(seed, f"its scheme is one of {', '.join(_SCHEMES)}")
    host = parts.hostname
    if not host or parts.username is not None:
        raise _malformed(seed, "it names a host, and no user")
    if kind == "a":
        scheme = scheme or _PORTS.get(port or 0, "amqp")
        port = port or PORTS[scheme] or 0
        return _Addresses(seed, host, scheme, port, parts.path)
    if kind != "srv":
        raise _malformed(seed, "names are resolved by dns+a:// and dns+srv://")
    if port is not None:
        raise _malformed(seed, "SRV records have the ports: leave out that of the seed")
    scheme = scheme or _SERVICES.get(host.partition(".")[0])
    if scheme is None:
        raise _malformed(seed, "it begins with _amqp._tcp. or _amqps._tcp., or has ?scheme=")
    try:
        import dns.asyncresolver  # noqa: F401
    except ModuleNotFoundError:
        raise ConnectFailed(
            f"{seed} takes dnspython: pip install 'amqp-rt[srv]'", condition="amqp:not-implemented"
        ) from None
    return _Services(seed, host, scheme)


def _malformed(seed: str, why: str) -> ConnectFailed:
    return ConnectFailed(f"{seed!r:.200} is no seed: {why}", condition="amqp:invalid-field")
