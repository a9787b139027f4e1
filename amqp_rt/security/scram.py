"""SCRAM with SHA-1, SHA-256 and SHA-512, both sides (RFC 5802, RFC 7677).

Passwords are neither sent nor stored, and the server proves that it knows them too.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import stringprep
import unicodedata
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from msgspec import Struct

from ..errors import AuthenticationFailed
from ..events import Peer
from ..limits import DEFAULT_LIMITS
from .mechanisms import Challenge, Failure, Step, Success

#: Hash names at the end of mechanism names → names in hashlib; the strongest first.
HASHES: Final = {"SHA-512": "sha512", "SHA-256": "sha256", "SHA-1": "sha1"}
#: Least number of iterations that servers must ask for (RFC 5802 §5.1): with fewer, a false server
#: could guess the password quickly.
ITERATIONS_MIN: Final = 4_096
#: Iterations of stored secrets: some 10 ms for a client, once per login.
ITERATIONS: Final = 32_768
_SALT_SIZE: Final = 16
_NO_BINDING: Final = ("n", "y")


class ScramSecret(Struct, frozen=True):
    """Secret that a server stores for a password: enough to check it, not enough to log in with."""

    hash: str
    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    def __str__(self) -> str:
        parts = (_b64(part) for part in (self.salt, self.stored_key, self.server_key))
        return "$".join((f"scram-{self.hash.lower()}", str(self.iterations), *parts))

    def __repr__(self) -> str:
        return f"<ScramSecret {self.hash}>"


#: ``await find(user, hash)``: the user's secret for *hash*, such as ``SHA-256``, or None.
FindSecret: TypeAlias = Callable[[str, str], Awaitable[ScramSecret | None]]


def make_secret(
    password: str, hash_name: str, *, iterations: int = ITERATIONS, salt: bytes | None = None
) -> ScramSecret:
    """Return the secret to store for *password* and ``SCRAM-`` *hash_name*. Slow by design.

    Raises:
        ValueError: The password has forbidden characters (RFC 4013).
    """
    salt = secrets.token_bytes(_SALT_SIZE) if salt is None else salt
    algorithm = HASHES[hash_name]
    salted = hashlib.pbkdf2_hmac(algorithm, saslprep(password).encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", algorithm)
    return ScramSecret(
        hash=hash_name,
        iterations=iterations,
        salt=salt,
        stored_key=hashlib.new(algorithm, client_key).digest(),
        server_key=hmac.digest(salted, b"Server Key", algorithm),
    )


def read_secret(text: str) -> ScramSecret | None:
    """Parse *text*, the ``str`` of a secret; None if it is malformed."""
    kind, *parts = text.split("$")
    name = kind.removeprefix("scram-").upper()
    if not kind.startswith("scram-") or name not in HASHES or len(parts) != 4:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,8}", parts[0]):
        return None
    try:
        salt, stored, server = (base64.b64decode(part, validate=True) for part in parts[1:])
    except ValueError:
        return None
    size = hashlib.new(HASHES[name]).digest_size
    if not salt or len(stored) != size or len(server) != size:
        return None
    return ScramSecret(name, int(parts[0]), salt, stored, server)


def saslprep(text: str) -> str:
    """Return *text* in the normal form in which names and passwords are compared (RFC 4013).

    Raises:
        ValueError: The text has forbidden characters.
    """
    if text.isascii() and text.isprintable():
        return text
    mapped = (
        " " if stringprep.in_table_c12(each) else each
        for each in text
        if not stringprep.in_table_b1(each)
    )
    found = unicodedata.normalize("NFKC", "".join(mapped))
    right_to_left = any(map(stringprep.in_table_d1, found))
    if any(map(_prohibited, found)) or (
        right_to_left
        and (
            any(map(stringprep.in_table_d2, found))
            or not (stringprep.in_table_d1(found[0]) and stringprep.in_table_d1(found[-1]))
        )
    ):
        raise ValueError("it has characters that names and passwords cannot have")
    return found


def _prohibited(each: str) -> bool:
    return (
        stringprep.in_table_a1(each)
        or stringprep.in_table_c12(each)
        or stringprep.in_table_c21_c22(each)
        or stringprep.in_table_c3(each)
        or stringprep.in_table_c4(each)
        or stringprep.in_table_c5(each)
        or stringprep.in_table_c6(each)
        or stringprep.in_table_c7(each)
        or stringprep.in_table_c8(each)
        or stringprep.in_table_c9(each)
    )


class Scram:
    """Client side of SCRAM. The password never appears in a repr or a log.

    Args:
        user: Our user name.
        password: The password, which is not sent.
        hash_name: ``SHA-1``, ``SHA-256`` or ``SHA-512``.
        authorize_as: User to act for, where the server allows it.
        iterations_max: Maximum number of iterations; a server that asks for more is refused.

    Raises:
        AuthenticationFailed: User or password cannot be sent in SCRAM, or the hash is unknown.
    """

    def __init__(
        self,
        user: str,
        password: str,
        hash_name: str = "SHA-256",
        *,
        authorize_as: str = "",
        iterations_max: int = DEFAULT_LIMITS.scram_iterations_max,
    ) -> None:
        if hash_name not in HASHES:
            raise AuthenticationFailed(
                f"SCRAM is with {', '.join(HASHES)}, not {hash_name!r}",
                condition="amqp:invalid-field",
            )
        try:
            self._user = saslprep(user)
            self._password = saslprep(password)
        except ValueError as error:
            raise AuthenticationFailed(
                f"SCRAM cannot represent this user or password: {error}",
                condition="amqp:invalid-field",
            ) from None
        if not user:
            raise AuthenticationFailed("SCRAM needs a user", condition="amqp:invalid-field")
        self.name = f"SCRAM-{hash_name}"
        self.user = user
        self._hash = hash_name
        self._header = f"n,{'a=' + _escape(authorize_as) if authorize_as else ''},"
        self._iterations_max = iterations_max
        self._nonce = ""
        self._bare = ""
        #: The server's proof, once it can be computed.
        self._expected: bytes | None = None
        self._proved = False

    def initial(self) -> bytes | None:
        """Return the client-first-message; begins an exchange."""
        self._nonce = secrets.token_urlsafe(24)
        self._bare = f"n={_escape(self._user)},r={self._nonce}"
        self._expected = None
        self._proved = False
        return (self._header + self._bare).encode()

    def respond(self, challenge: bytes) -> bytes:
        """Return the client-final-message, or an empty response to the server's proof.

        Raises:
            AuthenticationFailed: The server does not know the password, or its challenge is malformed
                or asks for too many or too few iterations.
        """
        if self._expected is not None:
            self.finish(challenge)
            return b""
        fields = _fields(challenge)
        nonce, salt, count = (fields.get(name, "") for name in "rsi")
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce):
            raise AuthenticationFailed("the peer's SCRAM challenge does not answer ours")
        if not count.isascii() or not count.isdecimal() or len(count) > 9:
            raise AuthenticationFailed("the peer's SCRAM challenge is malformed")
        if not ITERATIONS_MIN <= int(count) <= self._iterations_max:
            raise AuthenticationFailed(
                f"the peer asks for {int(count)} iterations of SCRAM; "
                f"{ITERATIONS_MIN} to {self._iterations_max} are allowed"
            )
        try:
            octets = base64.b64decode(salt, validate=True)
        except ValueError:
            raise AuthenticationFailed("the peer's SCRAM challenge is malformed") from None
        algorithm = HASHES[self._hash]
        salted = hashlib.pbkdf2_hmac(algorithm, self._password.encode(), octets, int(count))
        client_key = hmac.digest(salted, b"Client Key", algorithm)
        stored_key = hashlib.new(algorithm, client_key).digest()
        server_key = hmac.digest(salted, b"Server Key", algorithm)
        final = f"c={_b64(self._header.encode())},r={nonce}"
        message = b",".join((self._bare.encode(), challenge, final.encode()))
        signature = hmac.digest(stored_key, message, algorithm)
        self._expected = hmac.digest(server_key, message, algorithm)
        return f"{final},p={_b64(_xor(client_key, signature))}".encode()

    def finish(self, data: bytes | None) -> None:
        """Check, when the server reports success, that it has proved to know the password.

        Raises:
            AuthenticationFailed: The proof is missing or wrong.
        """
        if self._proved and not data:
            return
        proof = "v=" + _b64(self._expected or b"")
        if self._expected is None or not hmac.compare_digest(data or b"", proof.encode()):
            raise AuthenticationFailed("the peer has not proved that it knows the password")
        self._proved = True

    def __repr__(self) -> str:
        return f"Scram({self.user!r}, ***, {self._hash!r})"


class ScramServer:
    """Server side of SCRAM. An unknown user gets a challenge like a known one.

    Args:
        hash_name: ``SHA-1``, ``SHA-256`` or ``SHA-512``.
        find: Finds stored secrets.
        iterations: Returns the usual iteration count, which unknown users present too.
    """

    def __init__(
        self,
        hash_name: str,
        find: FindSecret,
        *,
        iterations: Callable[[], int] = lambda: ITERATIONS,
    ) -> None:
        self.name = f"SCRAM-{hash_name}"
        self._hash = hash_name
        self._find = find
        self._iterations = iterations
        self._key = secrets.token_bytes(32)

    def begin(self) -> _Exchange:
        """Begin an exchange of several steps."""
        return _Exchange(self.name, self._hash, self._find, self._key, self._iterations())

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        """Refuse; use the exchange of :meth:`begin` instead."""
        return Failure("SCRAM takes several steps")


class _Exchange:
    """Server's side of one login."""

    def __init__(
        self, name: str, hash_name: str, find: FindSecret, key: bytes, iterations: int
    ) -> None:
        self.name = name
        self._hash = hash_name
        self._find = find
        self._key = key
        self._iterations = iterations
        self._user = ""
        self._known = False
        self._secret: ScramSecret | None = None
        self._header = b""
        self._said = b""
        self._nonce = ""

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        if self._secret is not None:
            step = self._verify(response or b"")
            if (
                isinstance(step, Success)
                and await self._find(self._user, self._hash) != self._secret
            ):
                # The user was deleted or the password changed during the exchange.
                return Failure(f"the password of {self._user!r:.100} has changed", self._user)
            return step
        if response is None:
            return Challenge(b"")
        try:
            text = response.decode()
            flag, acting, bare = text.split(",", 2)
            fields = _fields(bare.encode())
            user = saslprep(_unescape(fields["n"]))
            acting = _unescape(acting.removeprefix("a="))
        except (ValueError, KeyError):
            return Failure("a malformed SCRAM response")
        nonce = fields.get("r", "")
        if flag not in _NO_BINDING or "m" in fields or not nonce or not user:
            return Failure("the SCRAM response uses a feature that is not offered", user)
        if acting and acting != user:
            return Failure(f"{user!r:.100} may not act for another user", user)
        found = await self._find(user, self._hash)
        self._known = found is not None
        self._secret = found or self._fake_secret(user)
        self._user = user
        self._header = f"{text.partition(',')[0]},{text.split(',', 2)[1]},".encode()
        self._nonce = nonce + secrets.token_urlsafe(24)
        secret = self._secret
        challenge = f"r={self._nonce},s={_b64(secret.salt)},i={secret.iterations}".encode()
        self._said = bare.encode() + b"," + challenge
        return Challenge(challenge)

    def _verify(self, response: bytes) -> Step:
        secret = self._secret
        assert secret is not None
        final, _, proof = response.rpartition(b",p=")
        fields = _fields(final)
        wrong = Failure(f"wrong user or password for {self._user!r:.100}", self._user)
        try:
            octets = base64.b64decode(proof, validate=True)
        except ValueError:
            return wrong
        if fields.get("c") != _b64(self._header) or fields.get("r") != self._nonce:
            return Failure("a SCRAM response that belongs to another exchange", self._user)
        algorithm = HASHES[self._hash]
        message = self._said + b"," + final
        signature = hmac.digest(secret.stored_key, message, algorithm)
        if len(octets) != len(signature):
            return wrong
        client_key = hashlib.new(algorithm, _xor(octets, signature)).digest()
        right = hmac.compare_digest(client_key, secret.stored_key)
        if not right or not self._known:
            return wrong
        proved = hmac.digest(secret.server_key, message, algorithm)
        return Success(self._user, self._user, f"v={_b64(proved)}".encode())

    def _fake_secret(self, user: str) -> ScramSecret:
        """Return a secret for an unknown *user*.

        Salt and iterations are the same each time: a change would reveal that the user is unknown.
        """
        size = hashlib.new(HASHES[self._hash]).digest_size
        salt = hmac.digest(self._key, f"{self._hash} {user}".encode(), "sha256")[:_SALT_SIZE]
        return ScramSecret(
            self._hash, self._iterations, salt, secrets.token_bytes(size), secrets.token_bytes(size)
        )


def _fields(message: bytes) -> dict[str, str]:
    try:
        parts = message.decode().split(",")
    except UnicodeDecodeError:
        return {}
    return {part[0]: part[2:] for part in parts if part[1:2] == "="}


def _escape(name: str) -> str:
    return name.replace("=", "=3D").replace(",", "=2C")


def _unescape(name: str) -> str:
    if re.search("=(?!2C|3D)", name):
        raise ValueError("'=' must be written as =3D")
    return name.replace("=2C", ",").replace("=3D", "=")


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
