"""JSON web tokens, verified by PyJWT (the extra ``jwt``): RS256, ES256 and HS256.

The key determines the algorithm, never the token: a key is of one type, and a token whose header
names another algorithm is refused. So ``none`` is refused, and a public key is never used as a secret.
"""

from __future__ import annotations

import json
import logging
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final

import trio
from msgspec import Struct

from ..errors import AmqpError
from ..limits import DEFAULT_LIMITS, Limits, check_seconds
from .tokens import JWT_TYPES, Claims, TokenRefused, granted_words

_log = logging.getLogger("amqp_rt.security")

#: Octets of a secret for HS256 (RFC 7518 §3.2).
_SECRET_MIN: Final = 32
#: Seconds that fetching keys may take.
_FETCH_S: Final = 10.0
#: Claims that deployed issuers put rights into.
_RIGHTS_CLAIMS: Final = ("scope", "scp", "roles", "rights")


class JwtError(AmqpError):
    """Keys cannot be used; the text names them and the reason."""

    default_condition = "amqp:invalid-field"


class _Key(Struct, frozen=True):
    """Key with the one algorithm that it is used for."""

    algorithm: str
    key: Any


class Jwt:
    """Validator of JSON web tokens.

    ``exp`` and ``aud`` are required and checked; ``nbf`` is checked if present, ``iss`` if *issuer* is
    given. Rights are the words of ``scope``, ``scp``, ``roles`` and ``rights``: ``send``, ``listen``
    and ``manage``, or ``send:orders/*`` for some addresses only; a policy of
    :class:`~amqp_rt.security.tokens.Cbs` may use other claims.

    Args:
        audience: Required value of ``aud``, or several of which it must name one.
        issuer: Required value of ``iss``; None accepts any.
        keys: Key id → public key in PEM form, RSA (RS256) or P-256 (ES256).
        secret: Secret for HS256, at least 32 octets.
        jwks: A file with a JSON web key set, or an ``https://`` URL of one. The URL is fetched when
            it is first needed, and again for an unknown key id, at most every *refresh_s*.
        cafile: Certificates to verify the host of the URL with; by default the system's.
        leeway_s: Seconds by which the clocks of issuers may differ from ours.
        refresh_s: Minimum number of seconds between two fetches of *jwks*.
        limits: Maximum size of the key set.

    Raises:
        JwtError: A key cannot be used, or there is none.
    """

    types = JWT_TYPES

    def __init__(
        self,
        *,
        audience: str | Sequence[str],
        issuer: str | None = None,
        keys: Mapping[str, str | bytes] | None = None,
        secret: bytes | None = None,
        jwks: str | Path | None = None,
        cafile: str | Path | None = None,
        leeway_s: float = 0.0,
        refresh_s: float = 300.0,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        try:
            import jwt
        except ImportError:
            raise JwtError(
                "JSON web tokens need PyJWT: pip install 'amqp-rt[jwt]'",
                condition="amqp:not-implemented",
            ) from None
        self._jwt: Any = jwt
        self._audience = [audience] if isinstance(audience, str) else list(audience)
        self._issuer = issuer
        check_seconds("leeway_s", leeway_s)
        check_seconds("refresh_s", refresh_s)
        self._leeway_s = leeway_s
        self._refresh_s = refresh_s
        self._limits = limits
        self._fixed = {name: _public_key(name, pem) for name, pem in (keys or {}).items()}
        self._secret: _Key | None = None
        if secret is not None:
            if len(secret) < _SECRET_MIN:
                raise JwtError(f"a secret for HS256 has at least {_SECRET_MIN} octets")
            self._secret = _Key("HS256", secret)
        self._fetched: dict[str, _Key] = {}
        self._url: str | None = None
        self._context: ssl.SSLContext | None = None
        self._lock = trio.Lock()
        self._next_fetch = -inf
        if isinstance(jwks, str) and "://" in jwks:
            if not jwks.lower().startswith("https://"):
                raise JwtError(f"{jwks}: keys are fetched by https:// only, or read from a file")
            self._url = jwks
            try:
                self._context = ssl.create_default_context(cafile=cafile)
            except OSError as error:
                raise JwtError(f"cannot read the certificates of {cafile}: {error}") from error
        elif jwks is not None:
            self._fetched = self._key_set(_file(jwks, limits), str(jwks))
        if not (self._fixed or self._secret or self._fetched or self._url):
            raise JwtError("no key to verify tokens with: give keys, a secret or jwks")

    async def validate(self, token: str, now: float) -> Claims:
        """Validate *token*; see :meth:`amqp_rt.security.tokens.Validator.validate`."""
        jwt = self._jwt
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise TokenRefused("the token is no JSON web token") from None
        if "crit" in header or "b64" in header:
            raise TokenRefused("the token asks for an extension that is not known here")
        key = await self._find(header.get("kid"), header.get("alg"))
        if key is None:
            raise TokenRefused("the token is not signed by a key that is known here")
        try:
            values = jwt.decode(
                token,
                key.key,
                algorithms=[key.algorithm],
                audience=self._audience,
                issuer=self._issuer,
                # Times are checked below: PyJWT would accept a text as a number.
                options={
                    "require": ["exp", "aud"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.InvalidAudienceError:
            raise TokenRefused("the token has another audience") from None
        except jwt.InvalidIssuerError:
            raise TokenRefused("the token has another issuer") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            raise TokenRefused("the token is malformed, incomplete or not rightly signed") from None
        expires_at = _time(values, "exp") + self._leeway_s
        if "nbf" in values and _time(values, "nbf") - self._leeway_s > now:
            raise TokenRefused("the token is not valid yet")
        subject = values.get("sub")
        return Claims(
            expires_at=expires_at,
            subject=subject if isinstance(subject, str) else None,
            rights=granted_words(_words(values)),
            values=values,
        )

    async def _find(self, kid: object, algorithm: object) -> _Key | None:
        """Return the key with which a token of this header must be signed, or None."""
        found = self._known(kid, algorithm)
        if found is None and self._url is not None and algorithm != "HS256":
            async with self._lock:
                found = self._known(kid, algorithm)
                if found is None and trio.current_time() >= self._next_fetch:
                    self._next_fetch = trio.current_time() + self._refresh_s
                    await self._fetch()
                    found = self._known(kid, algorithm)
        return found

    def _known(self, kid: object, algorithm: object) -> _Key | None:
        if algorithm == "HS256":
            return self._secret
        keys = {**self._fetched, **self._fixed}
        found = keys.get(kid) if isinstance(kid, str) else None
        if found is None and kid is None and len(keys) == 1:
            found = next(iter(keys.values()))
        return found if found is not None and found.algorithm == algorithm else None

    async def _fetch(self) -> None:
        url, context = self._url, self._context
        assert url is not None
        assert context is not None
        try:
            text = await trio.to_thread.run_sync(_get, url, context, self._limits)
            self._fetched = self._key_set(text, url)
        except JwtError as error:
            # The keys fetched before stay valid.
            _log.error("%s", error.description)

    def _key_set(self, text: bytes, name: str) -> dict[str, _Key]:
        """Return the usable public keys of a key set by their ids."""
        try:
            found = json.loads(text)["keys"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise JwtError(f"{name} is no JSON web key set") from None
        keys: dict[str, _Key] = {}
        for index, each in enumerate(found if isinstance(found, list) else []):
            if not isinstance(each, dict) or each.get("use", "sig") != "sig":
                continue
            algorithm = _ALGORITHMS.get((each.get("kty"), each.get("crv")))
            if algorithm is None or each.get("alg", algorithm) != algorithm:
                continue
            try:
                key = self._jwt.PyJWK(each, algorithm).key
            except (self._jwt.PyJWTError, ValueError, TypeError):
                raise JwtError(f"{name}: key {index + 1} is malformed") from None
            keys[str(each.get("kid", f"#{index}"))] = _Key(algorithm, key)
        if not keys:
            raise JwtError(f"{name} has no key for RS256 or ES256")
        return keys

    def __repr__(self) -> str:
        return f"<Jwt for {', '.join(self._audience)}>"


#: ``kty`` and ``crv`` → the only algorithm used with it.
_ALGORITHMS: Final[Mapping[tuple[object, object], str]] = {
    ("RSA", None): "RS256",
    ("EC", "P-256"): "ES256",
}


def _public_key(name: str, pem: str | bytes) -> _Key:
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem.encode() if isinstance(pem, str) else pem)
    except ValueError:
        raise JwtError(f"the key {name!r} is no public key in PEM form") from None
    if isinstance(key, rsa.RSAPublicKey):
        return _Key("RS256", key)
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return _Key("ES256", key)
    raise JwtError(f"the key {name!r} is neither RSA nor P-256")


def _words(values: Mapping[str, Any]) -> list[str]:
    """Return the words of all claims that hold rights."""
    found: list[str] = []
    for name in _RIGHTS_CLAIMS:
        value = values.get(name)
        if isinstance(value, str):
            found += value.split()
        elif isinstance(value, list):
            found += [each for each in value if isinstance(each, str)]
    return found


def _time(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TokenRefused(f"{name} is no number of seconds")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = inf
    if not isfinite(seconds):
        raise TokenRefused(f"{name} is no number of seconds")
    return seconds


def _file(path: str | Path, limits: Limits) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return _bounded(file.read(limits.jwks_size_max + 1), str(path), limits)
    except OSError as error:
        raise JwtError(f"cannot read keys from {path}: {error.strerror}") from error


def _bounded(text: bytes, name: str, limits: Limits) -> bytes:
    if len(text) > limits.jwks_size_max:
        raise JwtError(f"{name} has more than {limits.jwks_size_max} bytes")
    return text


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that refuses redirects, which could lead away from TLS."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _get(url: str, context: ssl.SSLContext, limits: Limits) -> bytes:
    """Fetch *url*; blocks, so call it in a worker thread."""
    opener = urllib.request.build_opener(
        urllib.request.HTTPSHandler(context=context), _NoRedirect()
    )
    try:
        with opener.open(url, timeout=_FETCH_S) as answer:
            return _bounded(answer.read(limits.jwks_size_max + 1), url, limits)
    except urllib.error.HTTPError as error:
        with error:  # closes the connection
            raise JwtError(f"cannot fetch keys from {url}: {error.code} {error.reason}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise JwtError(f"cannot fetch keys from {url}: {why}") from error
