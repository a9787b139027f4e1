"""JSON web tokens: the key decides the algorithm, and everything else is looked at."""

from __future__ import annotations

import base64
import datetime
import hmac
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from amqp_rt.limits import Limits
from amqp_rt.security.access import Rights
from amqp_rt.security.jwts import Jwt, JwtError
from amqp_rt.security.tokens import Cbs, TokenRefused

jwt = pytest.importorskip("jwt")

SEND, LISTEN, MANAGE = Rights.SEND, Rights.LISTEN, Rights.MANAGE
NOW = 1_600_000_000.0
SECRET = b"0123456789abcdef0123456789abcdef"

RSA = rsa.generate_private_key(65537, 2048)
OTHER_RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())


def pem(key: Any) -> bytes:
    found: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return found


KEYS = {"r": pem(RSA), "e": pem(EC)}
CLAIMS: dict[str, Any] = {
    "aud": "shop",
    "iss": "https://login",
    "sub": "ann",
    "exp": int(NOW) + 60,
    "scope": "openid send:orders/* listen:news",
}


def signed(key: Any, algorithm: str, kid: str | None = None, **changes: Any) -> str:
    claims = {name: value for name, value in {**CLAIMS, **changes}.items() if value is not None}
    headers = {} if kid is None else {"kid": kid}
    token: str = jwt.encode(claims, key, algorithm=algorithm, headers=headers)
    return token


def part(value: Any) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def by_hand(header: Any, claims: Any = CLAIMS, key: bytes = SECRET) -> str:
    """A token that no library would make, with an HMAC by *key*."""
    text = f"{part(header)}.{part(claims)}"
    return f"{text}.{part(hmac.digest(key, text.encode(), 'sha256'))}"


def all_keys(**options: Any) -> Jwt:
    options = {"audience": "shop", "issuer": "https://login", "keys": KEYS, **options}
    return Jwt(secret=SECRET, **options)


@pytest.mark.req("SE15")
@pytest.mark.parametrize(
    "token",
    [signed(RSA, "RS256", "r"), signed(EC, "ES256", "e"), signed(SECRET, "HS256")],
    ids=["RS256", "ES256", "HS256"],
)
async def test_what_is_accepted(token: str) -> None:
    claims = await all_keys().validate(token, NOW)
    assert claims.subject == "ann"
    assert claims.expires_at == NOW + 60
    assert claims.rights == {"orders/*": SEND, "news": LISTEN}
    assert claims.scope is None
    found = await Cbs([all_keys()], clock=_At()).validate("jwt", token, "orders", Limits())
    assert found.rights("orders/1") == SEND
    assert found.rights("news") == Rights.NONE  # outside the audience that it was put for


class _At:
    def wall(self) -> float:
        return NOW

    def monotonic(self) -> float:
        return 0.0


NONE = part({"alg": "none"}) + "." + part(CLAIMS) + "."
BAD: dict[str, str] = {
    "nothing": "",
    "no token": "a.b.c",
    "two parts": "a.b",
    "none": NONE,
    "NONE": NONE.replace(part({"alg": "none"}), part({"alg": "NoNe"})),
    "no algorithm": by_hand({}),
    "number as algorithm": by_hand({"alg": 256}),
    "the public key as secret": by_hand({"alg": "HS256", "kid": "r"}, key=KEYS["r"]),
    "empty secret": by_hand({"alg": "HS256"}, key=b""),
    "HS256 with the id of an RSA key": by_hand({"alg": "HS512", "kid": "r"}),
    "RS256 by another key": signed(OTHER_RSA, "RS256", "r"),
    "RS512": signed(RSA, "RS512", "r"),
    "PS256": signed(RSA, "PS256", "r"),
    "RS256 with the id of the EC key": signed(RSA, "RS256", "e"),
    "no key id": signed(RSA, "RS256"),
    "unknown key id": signed(RSA, "RS256", "x"),
    "key id that is a path": signed(RSA, "RS256", "../../dev/null"),
    "an extension": by_hand({"alg": "HS256", "crit": ["b64"], "b64": False}),
    "expired": signed(SECRET, "HS256", exp=int(NOW) - 1),
    "without expiry": signed(SECRET, "HS256", exp=None),
    "expiry as text": by_hand({"alg": "HS256"}, {**CLAIMS, "exp": "99999999999"}),
    "expiry as true": by_hand({"alg": "HS256"}, {**CLAIMS, "exp": True}),
    "expiry as NaN": by_hand({"alg": "HS256"}, {**CLAIMS, "exp": float("nan")}),
    "expiry as infinity": by_hand({"alg": "HS256"}, {**CLAIMS, "exp": float("inf")}),
    "expiry beyond all floats": by_hand({"alg": "HS256"}, {**CLAIMS, "exp": 10**400}),
    "not yet": signed(SECRET, "HS256", nbf=int(NOW) + 10),
    "not before as text": by_hand({"alg": "HS256"}, {**CLAIMS, "nbf": "1"}),
    "for others": signed(SECRET, "HS256", aud="other"),
    "for nobody": signed(SECRET, "HS256", aud=None),
    "audience as number": by_hand({"alg": "HS256"}, {**CLAIMS, "aud": 5}),
    "from others": signed(SECRET, "HS256", iss="https://else"),
    "from nobody": signed(SECRET, "HS256", iss=None),
    "claims are a list": by_hand({"alg": "HS256"}, [1]),
    "claims are deep": by_hand({"alg": "HS256"}, b"[" * 5000 + b"]" * 5000),
    "header is deep": by_hand(b"[" * 3000 + b"]" * 3000),
    "no rights": signed(SECRET, "HS256", scope="openid"),
}


@pytest.mark.req("SE15")
@pytest.mark.parametrize("token", BAD.values(), ids=BAD)
async def test_what_is_not_accepted(token: str) -> None:
    cbs = Cbs([all_keys()], clock=_At())
    with pytest.raises(TokenRefused):
        await cbs.validate("jwt", token, "q", Limits(token_size_max=100_000))


@pytest.mark.req("SE15")
async def test_an_audience_of_several_and_clocks_that_differ() -> None:
    validator = all_keys(audience=["a", "b"], issuer=None, leeway_s=5.0)
    token = signed(SECRET, "HS256", aud=["x", "b"], iss=None, nbf=int(NOW) + 4, exp=int(NOW) - 4)
    assert (await validator.validate(token, NOW)).expires_at == NOW + 1


@pytest.mark.req("SE15")
@pytest.mark.parametrize(
    ("claims", "rights"),
    [
        ({"scp": "send"}, {"*": SEND}),
        ({"scp": ["send", "listen", 5]}, {"*": SEND | LISTEN}),
        ({"roles": ["manage:q"]}, {"q": MANAGE}),
        ({"rights": ["send"], "scope": "listen"}, {"*": SEND | LISTEN}),
        ({"scope": 7}, {}),
    ],
)
async def test_where_rights_are_read(claims: dict[str, Any], rights: dict[str, Rights]) -> None:
    token = signed(SECRET, "HS256", **{"scope": None, **claims})
    assert (await all_keys().validate(token, NOW)).rights == rights


def jwk(key: Any, kid: str, **more: Any) -> dict[str, Any]:
    algorithm = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else None
    algorithm = algorithm or jwt.algorithms.ECAlgorithm
    found: dict[str, Any] = algorithm.to_jwk(key.public_key(), as_dict=True)
    return {**found, "kid": kid, **more}


@pytest.mark.req("SE15")
async def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    secret = {"kty": "oct", "k": part(SECRET), "kid": "s"}
    keys = [jwk(RSA, "r"), jwk(EC, "e", alg="ES256"), jwk(OTHER_RSA, "x", use="enc"), secret]
    file.write_text(json.dumps({"keys": keys}))
    validator = Jwt(audience="shop", jwks=file)
    for token in (signed(RSA, "RS256", "r"), signed(EC, "ES256", "e")):
        assert (await validator.validate(token, NOW)).subject == "ann"
    for token in (signed(OTHER_RSA, "RS256", "x"), signed(SECRET, "HS256", "s")):
        with pytest.raises(TokenRefused):
            await validator.validate(token, NOW)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is no JSON web key set"),
        ("[1]", "is no JSON web key set"),
        ("[" * 100_000, "is no JSON web key set"),
        ('{"keys": 5}', "has no key for RS256 or ES256"),
        ('{"keys": [5, {"kty": "oct", "k": "AAAA"}]}', "has no key for RS256 or ES256"),
        ('{"keys": [{"kty": "RSA", "n": "!", "e": "AQAB"}]}', "key 1 is malformed"),
        ('{"keys": [{"kty": "RSA"}]}', "key 1 is malformed"),
    ],
)
def test_key_sets_that_cannot_be_used(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(text)
    with pytest.raises(JwtError, match=f"keys.json:? {sentence}"):
        Jwt(audience="shop", jwks=file)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "no key to verify tokens with"),
        ({"secret": b"short"}, "at least 32 octets"),
        ({"keys": {"a": "no pem"}}, "the key 'a' is no public key"),
        ({"keys": {"a": pem(ec.generate_private_key(ec.SECP384R1()))}}, "neither RSA nor P-256"),
        ({"jwks": "http://login/keys"}, "by https:// only"),
        ({"jwks": "no/such/file"}, "cannot read keys from no/such/file"),
        ({"jwks": "https://x", "cafile": "no/such/file"}, "certificates of no/such/file"),
    ],
)
def test_keys_that_cannot_be_used(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(JwtError, match=sentence):
        Jwt(audience="shop", **options)
    assert "01234" not in repr(all_keys())


def test_the_size_of_a_key_set(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    text = json.dumps({"keys": [jwk(RSA, "r")]})
    file.write_text(text)
    Jwt(audience="shop", jwks=file, limits=Limits(jwks_size_max=len(text)))
    with pytest.raises(JwtError, match="has more than"):
        Jwt(audience="shop", jwks=file, limits=Limits(jwks_size_max=len(text) - 1))


# --- over HTTPS ----------------------------------------------------------------------------------


class Issuer:
    """An HTTPS server with keys, in a thread."""

    def __init__(self, folder: Path) -> None:
        self.keys: list[dict[str, Any]] = []
        self.asked = 0
        self.redirects = False
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "issuer")])
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
                critical=False,
            )
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        self.cafile = folder / "ca.pem"
        self.cafile.write_bytes(certificate.public_bytes(Encoding.PEM))
        private = folder / "key.pem"
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cafile, private)
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                if issuer.redirects:
                    self.send_response(302)
                    self.send_header("Location", "http://127.0.0.1:1/keys")
                    self.end_headers()
                    return
                body = json.dumps({"keys": issuer.keys}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        class Server(HTTPServer):
            def get_request(self) -> Any:
                stream, address = super().get_request()
                return context.wrap_socket(
                    stream, server_side=True, do_handshake_on_connect=False
                ), address

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # who does not trust us goes away

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"https://127.0.0.1:{self.server.server_port}/keys"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def issuer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Issuer]:
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    found = Issuer(tmp_path)
    yield found
    found.close()


@pytest.mark.req("SE15")
async def test_keys_are_fetched_and_fetched_again(issuer: Issuer) -> None:
    issuer.keys = [jwk(RSA, "r")]
    validator = Jwt(audience="shop", jwks=issuer.url, cafile=issuer.cafile, refresh_s=0.0)
    for _ in range(2):
        await validator.validate(signed(RSA, "RS256", "r"), NOW)
    assert issuer.asked == 1
    issuer.keys = [jwk(EC, "e")]
    await validator.validate(signed(EC, "ES256", "e"), NOW)
    assert issuer.asked == 2
    # A key that is not there any more signs nothing any more.
    with pytest.raises(TokenRefused):
        await validator.validate(signed(RSA, "RS256", "r"), NOW)


@pytest.mark.req("SE15")
async def test_unknown_key_ids_do_not_make_us_fetch_all_the_time(issuer: Issuer) -> None:
    issuer.keys = [jwk(RSA, "r")]
    validator = Jwt(audience="shop", jwks=issuer.url, cafile=issuer.cafile)
    for number in range(20):
        with pytest.raises(TokenRefused):
            await validator.validate(signed(RSA, "RS256", f"x{number}"), NOW)
    assert issuer.asked == 1


@pytest.mark.req("SE15")
@pytest.mark.parametrize("fault", ["certificate", "redirect", "size", "gone"])
async def test_keys_that_cannot_be_fetched(
    issuer: Issuer, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    issuer.keys = [jwk(RSA, "r")]
    options: dict[str, Any] = {"cafile": issuer.cafile, "refresh_s": 0.0}
    url = issuer.url
    if fault == "certificate":
        options["cafile"] = None
    elif fault == "redirect":
        issuer.redirects = True
    elif fault == "size":
        options["limits"] = Limits(jwks_size_max=10)
    else:
        url = "https://127.0.0.1:1/keys"
    validator = Jwt(audience="shop", jwks=url, **options)
    with pytest.raises(TokenRefused):
        await validator.validate(signed(RSA, "RS256", "r"), NOW)
    assert any("keys" in each.getMessage() for each in caplog.records)


async def test_what_is_known_goes_on_being_good(issuer: Issuer) -> None:
    issuer.keys = [jwk(RSA, "r")]
    validator = Jwt(audience="shop", jwks=issuer.url, cafile=issuer.cafile, refresh_s=0.0)
    await validator.validate(signed(RSA, "RS256", "r"), NOW)
    issuer.redirects = True
    with pytest.raises(TokenRefused):
        await validator.validate(signed(EC, "ES256", "e"), NOW)
    await validator.validate(signed(RSA, "RS256", "r"), NOW)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(JwtError, match=r"pip install 'amqp-rt\[jwt\]'"):
        Jwt(audience="shop", secret=SECRET)
