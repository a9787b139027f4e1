"""TLS for listeners and dialling: certificates, policies, and the layer itself.

TLS 1.2 and 1.3 (Part 5 §5.2). There is no fallback to plain TCP: a connection that cannot be
encrypted as requested fails with an error. Renegotiation, compression and session tickets are
disabled.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import trio

from ..errors import AmqpError, ConnectFailed
from ..events import Certificate
from .carrier import READ_SIZE
from .layers import LayeredStream

#: First octet of a ClientHello: a TLS handshake record (RFC 8446 §5.1).
CLIENT_HELLO: Final = b"\x16"
#: Failure of a handshake with a peer that answered in clear.
NO_TLS: Final = "the peer does not speak TLS there"
#: Protocols inside TLS, for servers that select by them (RFC 7301).
ALPN: Final = ("amqp", "http/1.1")
_PATH: TypeAlias = str | Path
_MINIMUM: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class TlsError(AmqpError):
    """A certificate, key or authority is unusable; the message names it and the reason."""

    default_condition = "amqp:invalid-field"


class ServerTls:
    """Certificates of a listener, and its requirements for clients.

    Args:
        certificate: PEM file: the certificate, then those of the chain to a root.
        key: PEM file with its private key; None if *certificate* contains it too.
        key_password: Password of the key.
        client_ca: PEM file of the authorities that sign clients' certificates; with it clients are
            asked for one, and may log in with EXTERNAL.
        client_certificate: ``"required"`` refuses clients without one.
        names: Further certificates by the host name that the client requests (SNI): pairs of PEM
            files; ``*.example.org`` matches one more label.
        alpn: Protocols to negotiate (RFC 7301); a client that offers none of them is accepted.
        minimum: The lowest version of TLS.

    Raises:
        TlsError: A file is missing or invalid.
    """

    def __init__(
        self,
        certificate: _PATH,
        key: _PATH | None = None,
        *,
        key_password: str | None = None,
        client_ca: _PATH | None = None,
        client_certificate: Literal["optional", "required"] = "required",
        names: Mapping[str, tuple[_PATH, _PATH | None]] | None = None,
        alpn: Sequence[str] = ALPN,
        minimum: Literal["1.2", "1.3"] = "1.2",
    ) -> None:
        if client_certificate not in ("optional", "required"):
            raise TlsError(
                f"client_certificate is 'optional' or 'required', not {client_certificate!r}"
            )
        self._pair = (certificate, key)
        self._key_password = key_password
        self._client_ca = client_ca
        self._required = client_certificate == "required"
        self._names = dict(names or {})
        self._alpn = alpn
        self._minimum = minimum
        self._context = self._load()

    def reload(self) -> None:
        """Read the files again, for future connections; existing ones keep their certificates.

        Raises:
            TlsError: A file cannot be used: everything remains as it was.
        """
        self._context = self._load()

    def layer(self) -> TlsLayer:
        """Create the TLS layer of one connection."""
        return TlsLayer(self._context, server_side=True)

    def _load(self) -> ssl.SSLContext:
        context = self._context_of(*self._pair)
        by_name = {
            name.lower(): self._context_of(certificate, key)
            for name, (certificate, key) in self._names.items()
        }

        def choose(tls: _NamedSSLObject, asked: str | None, _: ssl.SSLContext) -> None:
            tls.name = name = (asked or "").lower()
            found = by_name.get(name) or by_name.get(f"*.{name.partition('.')[2]}")
            if found is not None:
                tls.context = found

        context.sslobject_class = _NamedSSLObject
        context.sni_callback = choose  # type: ignore[assignment]  # it gets sslobject_class
        return context

    def _context_of(self, certificate: _PATH, key: _PATH | None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _harden(context, self._minimum, self._alpn)
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
        context.num_tickets = 0
        _load_pair(context, certificate, key, self._key_password)
        if self._client_ca is not None:
            _load_authorities(context, self._client_ca)
            context.verify_mode = ssl.CERT_REQUIRED if self._required else ssl.CERT_OPTIONAL
        return context

    def __repr__(self) -> str:
        return f"ServerTls({str(self._pair[0])!r})"


class _NamedSSLObject(ssl.SSLObject):
    """Server side of TLS that stores the server name requested by the client."""

    name = ""


class ClientTls:
    """Authorities that a client trusts, and its own certificate.

    The peer's certificate is always verified, also its name unless *verify_name* is False. For
    anything else, pass ``connect`` an ``ssl.SSLContext`` of your own.

    Args:
        ca: PEM file of the trusted authorities; None for those of the system.
        certificate: Our certificate, in a PEM file, for servers that ask for one (see
            ``External``).
        key: Its private key; None if *certificate* contains it too.
        key_password: Password of the key.
        server_name: The name to request and to verify, instead of the URL's host.
        verify_name: False accepts every certificate of the authorities, with any name.
        alpn: Protocols to offer; none by default, since some servers refuse unknown ones.
        minimum: The lowest version of TLS.

    Raises:
        TlsError: A file is missing or invalid.
    """

    def __init__(
        self,
        ca: _PATH | None = None,
        *,
        certificate: _PATH | None = None,
        key: _PATH | None = None,
        key_password: str | None = None,
        server_name: str | None = None,
        verify_name: bool = True,
        alpn: Sequence[str] = (),
        minimum: Literal["1.2", "1.3"] = "1.2",
    ) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _harden(context, minimum, alpn)
        context.check_hostname = verify_name
        if ca is None:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        else:
            _load_authorities(context, ca)
        if certificate is not None:
            _load_pair(context, certificate, key, key_password)
        self.context = context
        self.server_name = server_name
        #: Whether we have a certificate to authenticate with.
        self.has_certificate = certificate is not None

    def __repr__(self) -> str:
        return f"ClientTls(server_name={self.server_name!r})"


def with_name(tls: ClientTls | ssl.SSLContext | None, server_name: str) -> ClientTls:
    """Return a copy of *tls* that requests and verifies *server_name*, unless it names another one itself."""
    if isinstance(tls, ssl.SSLContext):
        named = ClientTls.__new__(ClientTls)
        named.context, named.server_name, named.has_certificate = tls, None, False
    else:
        named = copy(tls or ClientTls())
    named.server_name = named.server_name or server_name
    return named


def client_layer(tls: ClientTls | ssl.SSLContext | None, host: str) -> TlsLayer:
    """Create the TLS layer of one connection to *host*."""
    if tls is None:
        tls = ClientTls()
    if isinstance(tls, ssl.SSLContext):
        return TlsLayer(tls, server_hostname=host)
    return TlsLayer(tls.context, server_hostname=tls.server_name or host)


class TlsLayer:
    """TLS connection over memory (:class:`ssl.SSLObject`); see :class:`~.channels.Layer`."""

    appetite = READ_SIZE
    half_closes = True

    def __init__(
        self,
        context: ssl.SSLContext,
        *,
        server_side: bool = False,
        server_hostname: str | None = None,
    ) -> None:
        self.ended = False
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_side,
            server_hostname=server_hostname,
        )

    def handshake(self, data: bytes | None) -> bool:
        """Continue the handshake with *data* from below; return whether it is complete.

        Raises:
            OSError: The handshake failed; the message gives the reason.
        """
        if data:
            self._incoming.write(data)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except (ssl.SSLError, ssl.CertificateError) as error:
            raise ConnectionError(reason(error)) from error
        return True

    def receive(self, data: bytes) -> bytes:
        """Decrypt all complete records.

        A stream that ends without ``close_notify`` is treated as ended: AMQP's own close shows
        whether anything was cut off.

        Raises:
            OSError: The peer broke a rule of TLS.
        """
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        return self.pending()

    def pending(self) -> bytes:
        """Decrypt input that has arrived already: data may follow the handshake at once."""
        pieces: list[bytes] = []
        try:
            while piece := self._tls.read(READ_SIZE):
                pieces.append(piece)
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self.ended = True
        except ssl.SSLError as error:
            self.ended = True
            raise ConnectionError(reason(error)) from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def send(self, data: bytes | memoryview) -> None:
        """Encrypt *data*."""
        if data:
            self._tls.write(data)

    def outgoing(self) -> list[bytes | memoryview]:
        """Take the records to send."""
        return [self._outgoing.read()] if self._outgoing.pending else []

    def end(self) -> None:
        """Send ``close_notify`` (RFC 8446 §6.1)."""
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass  # The peer has not sent its own yet, or never will.

    @property
    def certificate(self) -> Certificate | None:
        """The peer's certificate, if it presented one that was verified."""
        found = self._tls.getpeercert()
        return None if not found else _certificate(found)

    @property
    def server_name(self) -> str:
        """Server name that the client requested (RFC 6066 §3), in lower case; empty if none."""
        return self._tls.name if isinstance(self._tls, _NamedSSLObject) else ""

    @property
    def version(self) -> str:
        """Version of TLS, such as ``TLSv1.3``."""
        return self._tls.version() or ""

    @property
    def alpn(self) -> str | None:
        """Negotiated protocol (RFC 7301)."""
        return self._tls.selected_alpn_protocol()


#: A peer that does not use TLS ends the connection, and so does one that accepts no more
#: connections: TLS need not be the cause.
ENDED: Final = "the peer closed the connection during the TLS handshake without a reason"
#: Addition to that for clients.
MAYBE: Final = "; it may not speak TLS there, or may refuse this connection"


async def encrypt(
    stream: trio.abc.Stream, layer: TlsLayer, *, received: bytes = b"", within: float
) -> LayeredStream:
    """Perform the handshake on *stream*; return it with TLS on it. A failure closes *stream*.

    Args:
        stream: A connected stream.
        layer: A TLS layer whose handshake has not begun.
        received: Octets that were read from the stream already.
        within: Seconds for the handshake.

    Raises:
        ConnectFailed: The handshake failed; the message is one clause.
    """
    why = f"the TLS handshake took longer than {within:g} s"
    condition = None
    data = received
    try:
        with trio.move_on_after(within):
            while True:
                try:
                    done = layer.handshake(data)
                finally:
                    for made in layer.outgoing():
                        await stream.send_all(made)
                if done:
                    return LayeredStream(stream, layer, received=layer.pending())
                data = bytes(await stream.receive_some(READ_SIZE))
                if not data:
                    why = ENDED
                    break
    except OSError as error:
        why = str(error)
        if isinstance(error.__cause__, ssl.SSLError):
            # A disagreement between the configurations of both sides persists at the next attempt.
            condition = "amqp:not-allowed"
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        why = "the peer broke the TLS handshake off"
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    with trio.CancelScope(shield=True):
        await trio.aclose_forcefully(stream)
    raise ConnectFailed(why, condition=condition)


#: OpenSSL's name of a failure → description. Alerts come from the peer.
_WORDS: Final = {
    "WRONG_VERSION_NUMBER": NO_TLS,
    "HTTP_REQUEST": "the peer spoke HTTP, not TLS",
    "UNSUPPORTED_PROTOCOL": "the peer speaks no version of TLS that is allowed",
    "NO_PROTOCOLS_AVAILABLE": "no version of TLS is allowed",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the peer refuses our versions of TLS",
    "NO_SHARED_CIPHER": "there is no cipher that both sides allow",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer has shown no certificate, and must",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the peer requires a certificate of ours",
    "TLSV1_ALERT_UNKNOWN_CA": "the peer does not believe who signed our certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the peer refuses our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the peer refuses our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our certificate has expired",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "the peer refused the TLS handshake",
    "TLSV1_ALERT_NO_APPLICATION_PROTOCOL": "the peer knows none of our ALPN protocols",
}


def reason(error: OSError) -> str:
    """Describe a failure of TLS in one clause."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is not believed: {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError):
        name = error.reason or ""
        return _WORDS.get(name) or f"TLS: {name.lower().replace('_', ' ') or error}"
    return str(error)


def _harden(context: ssl.SSLContext, minimum: Literal["1.2", "1.3"], alpn: Sequence[str]) -> None:
    if minimum not in _MINIMUM:
        raise TlsError(f"the lowest version of TLS is '1.2' or '1.3', not {minimum!r}")
    context.minimum_version = _MINIMUM[minimum]
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    if alpn:
        context.set_alpn_protocols(list(alpn))


def _load_pair(
    context: ssl.SSLContext, certificate: _PATH, key: _PATH | None, password: str | None
) -> None:
    for path in (certificate, key):
        if path is not None:
            _readable(path, "the certificate" if path is certificate else "its key")
    try:
        # Without a password OpenSSL would prompt for one at the terminal.
        context.load_cert_chain(certificate, key, password=password or "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"the key {key or certificate} does not belong to the certificate {certificate}"
        elif key is None:
            why = f"{certificate} is no PEM file with a certificate and its private key"
        else:
            why = (
                f"{certificate} and {key} are no PEM files of a certificate and its key, "
                "or the key's password is wrong"
            )
        raise TlsError(why) from None


def _load_authorities(context: ssl.SSLContext, path: _PATH) -> None:
    _readable(path, "the authorities")
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise TlsError(f"{path} is no PEM file of certificates") from None


def _readable(path: _PATH, what: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise TlsError(f"cannot read {what} from {path}: {error.strerror}") from None


def _certificate(found: Mapping[str, Any]) -> Certificate:
    subject = {name: value for part in found.get("subject", ()) for name, value in part}
    names: dict[str, list[str]] = {}
    for kind, value in found.get("subjectAltName", ()):
        names.setdefault(kind, []).append(str(value))
    return Certificate(
        subject=subject,
        dns_names=tuple(names.get("DNS", ())),
        emails=tuple(names.get("email", ())),
        uris=tuple(names.get("URI", ())),
        serial_number=str(found.get("serialNumber", "")),
        not_after=ssl.cert_time_to_seconds(found["notAfter"]),
    )
