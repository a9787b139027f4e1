"""Header that a proxy sends first on a connection to us: the PROXY protocol, versions 1 and 2. No I/O.

As HAProxy's document ``proxy-protocol.txt`` defines it; its sections are cited. The header says for whom the
connection was opened, so a listener reads it only where it was told to, and only from addresses that it was told
to trust: §2 forbids to guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

from msgspec import Struct

from ..errors import ConnectFailed, DecodeError

#: First octets of version 2 (§2.2).
_SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
_V1: Final = b"PROXY "
#: Octets of the shortest header of version 1, ``PROXY UNKNOWN`` with its line end, and of the longest (§2.1).
_V1_MIN: Final = 15
_V1_MAX: Final = 107
#: Octets of version 2 before its addresses.
_V2_FIXED: Final = 16
#: Family and protocol of TCP over IPv4 and IPv6 and of Unix streams, with the octets of their addresses (§2.2).
_UNIX: Final = 0x31
_ADDRESSES: Final = {0x00: 0, 0x11: 12, 0x21: 36, _UNIX: 216}
#: Type of the TLV with the host name that the client requested (§2.2.2), and octets of the longest.
_AUTHORITY: Final = 0x02
_AUTHORITY_MAX: Final = 255


class ProxyHeader(Struct, frozen=True):
    """Client of a proxy, as the proxy names it."""

    #: IP address and port of the client; None if the connection is the proxy's own, such as a check of its, or
    #: if it does not know.
    source: tuple[str, int] | None = None
    #: Host name that the client requested, such as that of TLS; empty if it is not said.
    authority: str = ""
    #: The connection comes from the machine of the proxy: it is the proxy's own, or that of a client at a Unix socket.
    own: bool = False


class ProxyProtocol(Struct, frozen=True):
    """Policy of a listener behind proxies: each connection begins with a header of the PROXY protocol.

    Args:
        trusted: Addresses and networks of the proxies, such as ``10.0.0.0/8``. Connections from elsewhere are
            closed.

    Raises:
        ConnectFailed: There is none, or one is malformed.
    """

    trusted: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.trusted:
            raise ConnectFailed(
                "proxy_protocol goes with trusted: the addresses of the proxies, such as 10.0.0.0/8",
                condition="amqp:invalid-field",
            )
        for each in self.trusted:
            try:
                ip_network(each)
            except ValueError as error:
                raise ConnectFailed(
                    f"trusted: {each!r:.60} is no address or network: {error}",
                    condition="amqp:invalid-field",
                ) from None


def trusts(networks: Sequence[str], host: str) -> bool:
    """Return whether *host*, an IP address, is in one of *networks*."""
    address = _plain(ip_address(host.partition("%")[0]))
    return any(address in ip_network(each) for each in networks)


def _plain(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return the address of IPv4 that *address* stands for on a socket for both, if it does."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def octets_missing(begun: bytes, most: int) -> int:
    """Return how many octets after *begun* surely belong to the header; 0 once it is complete.

    Reading that many at a time never reads what follows the header.

    Raises:
        DecodeError: It is no header, or it has more than *most* octets.
    """
    if _SIGNATURE.startswith(begun[: len(_SIGNATURE)]):
        size = _V2_FIXED
        if len(begun) >= size:
            size += int.from_bytes(begun[14:16], "big")
            if size > most:
                raise DecodeError(f"the header has {size} octets; proxy_header_max allows {most}")
        # Until an octet has come, it may be of the other version, whose shortest header is shorter.
        return max(0, size - len(begun)) if begun else _V1_MIN
    if not _V1.startswith(begun[: len(_V1)]):
        raise DecodeError(f"no header of the PROXY protocol: it begins with {begun[:12]!r}")
    if begun.endswith(b"\r\n"):
        return 0
    if len(begun) >= min(_V1_MAX, most):
        raise DecodeError(f"the line of the header does not end within {min(_V1_MAX, most)} octets")
    return max(1, _V1_MIN - len(begun))


def parse_header(header: bytes) -> ProxyHeader:
    """Parse a whole header, of which :func:`octets_missing` says 0.

    Raises:
        DecodeError: It is malformed.
    """
    return _parse_v2(header) if header.startswith(_SIGNATURE) else _parse_v1(header)


def _parse_v1(line: bytes) -> ProxyHeader:
    words = line[:-2].split(b" ")
    if words[1:2] == [b"UNKNOWN"]:
        # Whatever follows it up to the end of the line is to be ignored (§2.1).
        return ProxyHeader()
    if len(words) != 6:
        raise DecodeError(f"a header with {len(words)} words instead of 6")
    version = {b"TCP4": 4, b"TCP6": 6}.get(words[1])
    if version is None:
        raise DecodeError(f"a header for the protocol {words[1]!r}")
    try:
        source, _ = (ip_address(word.decode("ascii")) for word in words[2:4])
        port, _ = (_port(word) for word in words[4:])
    except ValueError as error:
        raise DecodeError("a header with a malformed address or port") from error
    if source.version != version or b"%" in line:
        raise DecodeError("a header with an address of another family")
    return ProxyHeader((str(_plain(source)), port))


def _port(word: bytes) -> int:
    if not word.isdigit() or len(word) > 5 or (word[:1] == b"0" and word != b"0"):
        raise ValueError("no port")
    port = int(word)
    if port > 0xFFFF:
        raise ValueError("no port")
    return port


def _parse_v2(header: bytes) -> ProxyHeader:
    command, kind = header[12], header[13]
    if command not in (0x20, 0x21):
        raise DecodeError(f"a header with the unknown version and command 0x{command:02x}")
    if command == 0x20:
        # The proxy's own connection: the rest is to be skipped (§2.2).
        return ProxyHeader(own=True)
    size = _ADDRESSES.get(kind)
    if size is None:
        raise DecodeError(f"a header for the family and protocol 0x{kind:02x}")
    rest = header[_V2_FIXED:]
    if len(rest) < size:
        raise DecodeError(f"a header with {len(rest)} octets of addresses instead of {size}")
    source = None
    if kind == 0x11:
        source = (str(IPv4Address(rest[:4])), int.from_bytes(rest[8:10], "big"))
    elif kind == 0x21:
        source = (str(_plain(IPv6Address(rest[:16]))), int.from_bytes(rest[32:34], "big"))
    return ProxyHeader(source, _authority(rest[size:]), own=kind == _UNIX)


def _authority(vectors: bytes) -> str:
    """Return the host name in the TLVs *vectors* (§2.2.1).

    Raises:
        DecodeError: A TLV ends after the header, or the name is malformed.
    """
    found = ""
    at = 0
    while at < len(vectors):
        value = at + 3
        end = value + int.from_bytes(vectors[at + 1 : value], "big")
        if value > len(vectors) or end > len(vectors):
            raise DecodeError("a header with a TLV that ends after it")
        if vectors[at] == _AUTHORITY:
            name = vectors[value:end]
            if len(name) > _AUTHORITY_MAX:
                raise DecodeError(f"a header with a host name of {len(name)} octets")
            try:
                found = name.decode()
            except UnicodeDecodeError as error:
                raise DecodeError("a header with a host name that is not UTF-8") from error
            if not found.isprintable():
                raise DecodeError("a header with control characters in the host name")
        at = end
    return found.lower()
