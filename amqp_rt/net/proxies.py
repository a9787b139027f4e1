"""Connections through proxies: SOCKS (RFC 1928, RFC 1929, SOCKS 4a) and CONNECT of HTTP (RFC 9110 §9.3.6).

python-socks speaks SOCKS. CONNECT is spoken here with h11, which trio-websocket brings: its answer is read
octet by octet, so that nothing after it, which belongs to the peer behind the proxy, is taken away.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

import h11
import trio
from msgspec import Struct

from ..addresses import PORTS, Url
from ..errors import ConnectFailed
from .endpoints import reason

#: Schemes of proxies: whether the proxy looks up host names; otherwise we do.
_SCHEMES: Final = {"socks5h": True, "socks5": False, "socks4a": True, "socks4": False, "http": True}
#: Octets of a user name and of a password of SOCKS 5 (RFC 1929 §2).
_SECRET_MAX: Final = 255
#: Setting that looks for the proxy in the environment.
FROM_ENVIRONMENT: Final = "env"
#: Reply codes of SOCKS 5 (RFC 1928 §6) and of SOCKS 4, as clauses.
_REPLIES: Final = {
    1: "the proxy failed",
    2: "the proxy does not allow this connection",
    3: "the proxy cannot reach the network",
    4: "the proxy cannot reach the host",
    5: "nothing listens there, says the proxy",
    6: "the host does not answer the proxy",
    7: "the proxy does not open connections",
    8: "the proxy does not support this kind of address",
    0x5B: "the proxy refused this connection, or it failed",
    0x5C: "the proxy wants to ask this machine who connects (identd)",
    0x5D: "the proxy wants to ask this machine who connects (identd)",
}
_UNPRINTABLE: Final = re.compile(r"[^ -~]")


class Proxy(Struct, frozen=True, kw_only=True):
    """Proxy to connect through. Its text and repr never show the password."""

    scheme: str
    host: str
    port: int
    user: str = ""
    password: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        user = f"{self.user}@" if self.user else ""
        return f"{self.scheme}://{user}{host}:{self.port}"

    def __repr__(self) -> str:
        return f"Proxy({str(self)!r})"


def parse_proxy(text: str, *, what: str = "proxy") -> Proxy:
    """Parse the URL of a proxy, ``scheme://[user:password@]host:port``.

    The schemes are ``socks5h`` and ``socks4a``, whose proxies look up host names, ``socks5`` and
    ``socks4``, for which we do, and ``http``.

    Args:
        text: The URL.
        what: Name of the setting, for errors.

    Raises:
        ConnectFailed: *text* is no such URL; the error gives the reason without the password.
    """
    # Everything between the scheme and the last '@' may be secret.
    safe = re.sub(r"^([^:/]*://)?.*@", r"\1***@", text)[:200]

    def bad(why: str) -> ConnectFailed:
        return ConnectFailed(f"{what} {safe!r}: {why}", condition="amqp:invalid-field")

    try:
        parts: SplitResult = urlsplit(text.strip())
        host, port = parts.hostname, parts.port
        user, password = (
            unquote(each or "", errors="strict") for each in (parts.username, parts.password)
        )
    except ValueError as error:
        raise bad("it is no URL") from error
    scheme = parts.scheme
    if scheme not in _SCHEMES:
        raise bad(f"its scheme is one of {', '.join(_SCHEMES)}")
    if not host or not port:
        raise bad("it is SCHEME://HOST:PORT, or SCHEME://USER:PASSWORD@HOST:PORT")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise bad("nothing follows the port")
    if scheme.startswith("socks"):
        if not (user.isascii() and password.isascii()):
            raise bad("SOCKS has user names and passwords of ASCII characters only")
        if max(len(user), len(password)) > _SECRET_MAX:
            raise bad(f"SOCKS has user names and passwords of at most {_SECRET_MAX} characters")
        if scheme.startswith("socks4"):
            if password:
                raise bad("SOCKS 4 has user names without passwords")
            if "\0" in user:
                raise bad("its user name has an octet 0")
        elif bool(user) != bool(password):
            raise bad("SOCKS 5 has a user name and a password, or neither")
    elif ":" in user:
        raise bad("user names of HTTP have no ':'")
    return Proxy(scheme=scheme, host=host, port=port, user=user, password=password)


def proxy_for(url: Url, setting: str | None, environment: Mapping[str, str]) -> Proxy | None:
    """Return the proxy for a connection to *url*; None to connect directly.

    Args:
        url: Where to connect to.
        setting: URL of a proxy, None for none, or ``env``, which reads *environment* as other programs do:
            ``https_proxy`` for URLs with TLS and ``http_proxy`` for others, else ``all_proxy``, unless
            ``no_proxy`` lists the host. Upper case serves too; lower case wins. Unix sockets,
            memory and the transports of plug-ins are reached directly.
        environment: Variables of the process.

    Raises:
        ConnectFailed: The setting or the variable is malformed, or *url* has no host to reach through a proxy.
    """
    by_proxy = PORTS.get(url.scheme) is not None
    if setting is None:
        return None
    if setting != FROM_ENVIRONMENT:
        if not by_proxy:
            raise ConnectFailed(
                f"cannot connect to {url}: {url.scheme}:// is reached without a proxy",
                condition="amqp:invalid-field",
            )
        return parse_proxy(setting)
    if not by_proxy:
        return None
    for name in ("https_proxy" if url.tls else "http_proxy", "all_proxy"):
        for each in (name, name.upper()):
            # A CGI program gets its clients' header Proxy under this name, so no program should trust it there.
            if each == "HTTP_PROXY" and "REQUEST_METHOD" in environment:
                continue
            if found := environment.get(each, "").strip():
                if is_exempt(url.host, url.port, environment):
                    return None
                # curl and others take a proxy without a scheme as one of HTTP.
                return parse_proxy(found if "://" in found else f"http://{found}", what=f"${each}")
    return None


def is_exempt(host: str, port: int, environment: Mapping[str, str]) -> bool:
    """Return whether ``no_proxy`` of *environment* lists *host*.

    Its entries, between commas, are ``*`` for all hosts, a domain, with or without a dot before it, which
    stands for its hosts too, an address, or a network such as ``10.0.0.0/8``; a port may follow.
    """
    listed = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    name = host.lower().rstrip(".")
    try:
        address = ip_address(name.partition("%")[0])
    except ValueError:
        address = None
    for entry in listed.lower().split(","):
        entry = entry.strip()
        if entry == "*":
            return True
        before, colon, after = entry.rpartition(":")
        if colon and after.isdecimal() and (before.startswith("[") or ":" not in before):
            if int(after) != port:
                continue
            entry = before
        entry = entry.strip("[]").removeprefix("*").strip(".")
        if not entry:
            continue
        if address is None:
            if name == entry or name.endswith(f".{entry}"):
                return True
            continue
        try:
            network = ip_network(entry, strict=False)
        except ValueError:
            continue
        if address in network:
            return True
    return False


async def open_through(proxy: Proxy, host: str, port: int) -> trio.SocketStream:
    """Connect to *host* through *proxy*.

    The caller limits the time. If cancelled, nothing stays open.

    Raises:
        ConnectFailed: The message is one clause.
    """
    if proxy.scheme == "http":
        return await _by_http(proxy, host, port)
    return await _by_socks(proxy, host, port)


async def _by_socks(proxy: Proxy, host: str, port: int) -> trio.SocketStream:
    try:
        from python_socks import ProxyConnectionError, ProxyError, ProxyType
        from python_socks.async_.trio.v2 import Proxy as Socks
    except ModuleNotFoundError:
        raise ConnectFailed(
            "proxies of SOCKS take python-socks: pip install 'amqp-rt[proxy]'",
            condition="amqp:not-implemented",
        ) from None
    kind = ProxyType.SOCKS5 if proxy.scheme.startswith("socks5") else ProxyType.SOCKS4
    socks = Socks(
        kind, proxy.host, proxy.port, proxy.user, proxy.password, rdns=_SCHEMES[proxy.scheme]
    )
    try:
        stream = (await socks.connect(host, port, timeout=float("inf"))).trio_stream
    except ProxyConnectionError as error:
        cause = error.__cause__
        why = reason(cause) if isinstance(cause, OSError) else str(error)
        raise ConnectFailed(f"the proxy cannot be reached: {why}") from error
    except ProxyError as error:
        raise _socks_failure(proxy, error.error_code, str(error)) from error
    except trio.BrokenResourceError as error:
        raise ConnectFailed("the proxy closed the connection") from error
    except OSError as error:
        raise ConnectFailed(reason(error)) from error
    except ValueError as error:
        # A host that SOCKS cannot express: too long, or no IDNA name, or of IPv6 for SOCKS 4.
        raise ConnectFailed(
            f"{proxy.scheme} cannot name this host", condition="amqp:invalid-field"
        ) from error
    assert isinstance(stream, trio.SocketStream)
    return stream


def _socks_failure(proxy: Proxy, code: int | None, text: str) -> ConnectFailed:
    """Return the error for the reply *code* of the proxy, or for python-socks' *text*."""
    if code in _REPLIES:
        return ConnectFailed(_REPLIES[code])
    if "authentication" in text.lower():
        return _login_refused(proxy)
    if "closed" in text:
        return ConnectFailed("the proxy closed the connection")
    return ConnectFailed(f"the answer is none of a {proxy.scheme} proxy: {_printable(text)}")


def _login_refused(proxy: Proxy) -> ConnectFailed:
    why = (
        "refused the user name and password"
        if proxy.user
        else "requires a user name and a password"
    )
    # Another attempt would fail in the same way, unlike most failures of proxies.
    return ConnectFailed(f"the proxy {why}", condition="amqp:unauthorized-access")


async def _by_http(proxy: Proxy, host: str, port: int) -> trio.SocketStream:
    try:
        stream = await trio.open_tcp_stream(proxy.host, proxy.port)
    except OSError as error:
        raise ConnectFailed(f"the proxy cannot be reached: {reason(error)}") from error
    try:
        await _request_tunnel(
            stream, proxy, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        )
    except BaseException as error:
        await trio.aclose_forcefully(stream)
        if isinstance(error, trio.BrokenResourceError):
            raise ConnectFailed("the proxy closed the connection") from error
        raise
    return stream


async def _request_tunnel(stream: trio.SocketStream, proxy: Proxy, target: str) -> None:
    http = h11.Connection(h11.CLIENT)
    headers = [("Host", target)]
    if proxy.user:
        secret = b64encode(f"{proxy.user}:{proxy.password}".encode()).decode()
        headers.append(("Proxy-Authorization", f"Basic {secret}"))
    try:
        request = http.send(h11.Request(method="CONNECT", target=target, headers=headers))
        assert request is not None
        await stream.send_all(request + (http.send(h11.EndOfMessage()) or b""))
        while True:
            # h11 bounds the size of the answer.
            event = http.next_event()
            if isinstance(event, h11.Response):
                break
            if event is h11.NEED_DATA:
                octet = await stream.receive_some(1)
                if not octet:
                    raise ConnectFailed("the proxy closed the connection")
                http.receive_data(octet)
    except h11.LocalProtocolError as error:
        raise ConnectFailed("HTTP cannot name this host", condition="amqp:invalid-field") from error
    except h11.RemoteProtocolError as error:
        raise ConnectFailed(
            f"the answer is none of a proxy of HTTP: {_printable(str(error))}"
        ) from error
    code = event.status_code
    if 200 <= code < 300:
        return
    # tinyproxy answers 401 to a wrong password, and 407 to none.
    if code in (401, 407):
        raise _login_refused(proxy)
    raise ConnectFailed(
        f"the proxy answered {code} {_printable(event.reason.decode('latin-1'))}".rstrip()
    )


def _printable(text: str) -> str:
    """Return the beginning of *text*, with other characters than those of ASCII replaced."""
    return _UNPRINTABLE.sub("?", text[:100])
