"""TLS for listeners and dialling: certificates, policies, and the layer itself.

TLS 1.2 and 1.3 (Part 5 §5.2). Nothing here falls back to plain TCP: what cannot be encrypted as
asked is refused with one sentence. Renegotiation, compression and session tickets are off.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import trio

from ..errors import AmqpError, ConnectFailed
from ..events import Certificate
from .carrier import READ_SIZE
from .layers import LayeredStream

#: The first octet of a ClientHello: a TLS handshake record (RFC 8446 §5.1).
CLIENT_HELLO: Final = b"\x16"
#: Why a handshake fails with a peer that answered in clear.
NO_TLS: Final = "the peer does not speak TLS there"
#: What is spoken inside, for servers that choose by it (RFC 7301).
ALPN: Final = ("amqp", "http/1.1")
_PATH: TypeAlias = str | Path
_MINIMUM: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class TlsError(AmqpError):
    """A certificate, a key or an authority cannot be used; the sentence says which and why."""

    default_condition = "amqp:invalid-field"


class ServerTls:
    """The certificates of a listener, and what it asks of clients.

    Args:
        certificate: PEM file: the certificate, then those that lead to a root.
        key: PEM file with its private key; None if *certificate* has it too.
        key_password: Of the key.
        client_ca: PEM file of the authorities that sign clients' certificates; with it clients are
            asked for one, and may log in with EXTERNAL.
        client_certificate: ``"required"`` turns clients without one away.
        names: Further certificates by the host name that the client asks for (SNI): pairs of
            PEM files; ``*.example.org`` stands for one more label.
        alpn: Protocols to agree on (RFC 7301); a client that knows none of them is let in.
        minimum: The lowest version of TLS.

    Raises:
        TlsError: A file is missing, or is not what it should be.
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
        """Read the files again, for connections that come from now on; the others stay as they are.

        Raises:
            TlsError: A file cannot be used: everything stays as it was.
        """
        self._context = self._load()

    def layer(self) -> TlsLayer:
        """TLS for one connection."""
        return TlsLayer(self._context, server_side=True)

    def _load(self) -> ssl.SSLContext:
        context = self._context_of(*self._pair)
        by_name = {
            name.lower(): self._context_of(certificate, key)
            for name, (certificate, key) in self._names.items()
        }

        def choose(tls: _Asked, asked: str | None, _: ssl.SSLContext) -> None:
            tls.name = name = (asked or "").lower()
            found = by_name.get(name) or by_name.get(f"*.{name.partition('.')[2]}")
            if found is not None:
                tls.context = found

        context.sslobject_class = _Asked
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


class _Asked(ssl.SSLObject):
    """The server's side of TLS, which remembers the name that the client asked for."""

    name = ""


class ClientTls:
    """Whom a client believes, and how it proves who it is.

    The peer's certificate is always verified, its name too unless told otherwise. For anything
    else give ``connect`` an ``ssl.SSLContext`` of your own.

    Args:
        ca: PEM file of the authorities that are believed; None for those of the system.
        certificate: Ours, in a PEM file, for servers that ask for one (see ``External``).
        key: Its private key; None if *certificate* has it too.
        key_password: Of the key.
        server_name: The name to ask for and to verify, instead of the URL's host.
        verify_name: False believes every certificate of the authorities, whatever its name.
        alpn: Protocols to offer; some servers refuse those they do not know, so by default none.
        minimum: The lowest version of TLS.

    Raises:
        TlsError: A file is missing, or is not what it should be.
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
        #: We can say who we are by it.
        self.has_certificate = certificate is not None

    def __repr__(self) -> str:
        return f"ClientTls(server_name={self.server_name!r})"


def client_layer(tls: ClientTls | ssl.SSLContext | None, host: str) -> TlsLayer:
    """TLS for one connection to *host*."""
    if tls is None:
        tls = ClientTls()
    if isinstance(tls, ssl.SSLContext):
        return TlsLayer(tls, server_hostname=host)
    return TlsLayer(tls.context, server_hostname=tls.server_name or host)


class TlsLayer:
    """One TLS connection over memory (:class:`ssl.SSLObject`); see :class:`~.layers.Layer`."""

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

    def shake_hands(self, data: bytes | None) -> bool:
        """Go on with the handshake, with what has come from below; whether it is done.

        Raises:
            OSError: It failed; the sentence says why.
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
        """Decrypt all that can be.

        A stream that ends without ``close_notify`` just ends: what may have been cut off is
        told by AMQP's own close.
        """
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()
        return self.pending()

    def pending(self) -> bytes:
        """What can be decrypted of what has come: data may follow the handshake at once."""
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
        """Encrypt."""
        if data:
            self._tls.write(data)

    def outgoing(self) -> bytes:
        """Records that are ready."""
        return self._outgoing.read()

    def end(self) -> None:
        """Say ``close_notify`` (RFC 8446 §6.1)."""
        try:
            self._tls.unwrap()
        except ssl.SSLError:
            pass  # The peer has not said it yet, or never will.

    @property
    def certificate(self) -> Certificate | None:
        """The peer's certificate, if it showed one that we believe."""
        found = self._tls.getpeercert()
        return None if not found else _certificate(found)

    @property
    def server_name(self) -> str:
        """The name that the client asked for (RFC 6066 §3), in lower case; empty if it named none."""
        return self._tls.name if isinstance(self._tls, _Asked) else ""

    @property
    def version(self) -> str:
        """Such as ``TLSv1.3``."""
        return self._tls.version() or ""

    @property
    def alpn(self) -> str | None:
        """The protocol that was agreed on (RFC 7301)."""
        return self._tls.selected_alpn_protocol()


#: A peer that does not speak TLS ends the connection, and so does one that admits no more of them:
#: TLS need not be the cause.
ENDED: Final = "the peer closed the connection during the TLS handshake and did not say why"
#: What a client may add to that.
MAYBE: Final = "; it may not speak TLS there, or may refuse this connection"


async def encrypt(
    stream: trio.abc.Stream, layer: TlsLayer, *, received: bytes = b"", within: float
) -> LayeredStream:
    """Shake hands on *stream*; returns it with TLS on it. After a failure it is closed.

    Args:
        stream: A connected stream.
        layer: TLS that has not begun.
        received: What was read from the stream already.
        within: Seconds for the handshake.

    Raises:
        ConnectFailed: The handshake failed; one clause says why.
    """
    why = f"the TLS handshake took longer than {within:g} s"
    condition = None
    data = received
    try:
        with trio.move_on_after(within):
            while True:
                try:
                    done = layer.shake_hands(data)
                finally:
                    if made := layer.outgoing():
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
            # What the two sides want of each other will not be otherwise next time.
            condition = "amqp:not-allowed"
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        why = "the peer broke the TLS handshake off"
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    with trio.CancelScope(shield=True):
        await trio.aclose_forcefully(stream)
    raise ConnectFailed(why, condition=condition)


#: OpenSSL's name of a failure → what it means to people. Alerts come from the peer.
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
    """Why TLS failed, in one clause."""
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
        # Without a password OpenSSL would ask for one at the terminal.
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
