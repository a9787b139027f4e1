"""SCRAM against the exchanges of its RFCs, and against those who cheat."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import scramp

from amqp_rt.errors import AuthenticationFailed
from amqp_rt.events import Peer
from amqp_rt.security import scram
from amqp_rt.security.identities import Users
from amqp_rt.security.mechanisms import Challenge, Failure, Success
from amqp_rt.security.scram import (
    HASHES,
    Scram,
    ScramSecret,
    ScramServer,
    make_secret,
    read_secret,
    saslprep,
)

PEER = Peer()

#: RFC 5802 §5, RFC 7677 §3: hash, nonces of both sides, salt, challenge, response, proof.
EXCHANGES = [
    (
        "SHA-1",
        "fyko+d2lbbFgONRv9qkxdawL",
        "3rfcNHYJY1ZVvWVs7j",
        "QSXCR+Q6sek8bf92",
        "v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
        "rmF9pqV8S7suAoZWja4dJRkFsKQ=",
    ),
    (
        "SHA-256",
        "rOprNGfwEbeRWgbNEkqO",
        "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0",
        "W22ZaJ0SNY7soEsUEjb6gQ==",
        "dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
        "6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
    ),
]


@pytest.mark.req("SE3")
@pytest.mark.parametrize(
    ("hash_name", "ours", "theirs", "salt", "proof", "verifier"),
    EXCHANGES,
    ids=["SHA-1", "SHA-256"],
)
async def test_the_exchange_of_the_rfc(
    hash_name: str,
    ours: str,
    theirs: str,
    salt: str,
    proof: str,
    verifier: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = make_secret("pencil", hash_name, iterations=4096, salt=base64.b64decode(salt))

    async def find(user: str, wanted: str) -> ScramSecret | None:
        assert (user, wanted) == ("user", hash_name)
        return secret

    nonces = iter([ours, theirs])
    monkeypatch.setattr(scram.secrets, "token_urlsafe", lambda size: next(nonces))
    client = Scram("user", "pencil", hash_name)
    server = ScramServer(hash_name, find).begin()
    first = client.initial()
    assert first == f"n,,n=user,r={ours}".encode()
    challenge = await server.respond(first, PEER)
    assert challenge == Challenge(f"r={ours}{theirs},s={salt},i=4096".encode())
    final = client.respond(challenge.data)
    assert final == f"c=biws,r={ours}{theirs},p={proof}".encode()
    success = await server.respond(final, PEER)
    assert success == Success("user", "user", f"v={verifier}".encode())
    client.finish(success.data)


def server_of(users: Users, hash_name: str) -> Any:
    async def find(user: str, wanted: str) -> ScramSecret | None:
        return users.scram(user, wanted)

    return ScramServer(hash_name, find, iterations=users.scram_iterations)


async def exchange(client: Scram, server: Any) -> Any:
    running = server.begin()
    step = await running.respond(client.initial(), PEER)
    if isinstance(step, Failure):
        return step
    step = await running.respond(client.respond(step.data), PEER)
    if isinstance(step, Success):
        client.finish(step.data)
    return step


@pytest.mark.req("SE3", "SE2")
@pytest.mark.parametrize("change", ["delete", "password"])
async def test_a_user_that_changes_between_the_steps_of_a_login_is_not_let_in(change: str) -> None:
    users = Users({"ada": "pw"})
    client = Scram("ada", "pw", "SHA-256")
    running = server_of(users, "SHA-256").begin()
    step = await running.respond(client.initial(), PEER)
    if change == "delete":
        users.remove("ada")
    else:
        users.add("ada", "new")
    step = await running.respond(client.respond(step.data), PEER)
    assert isinstance(step, Failure)
    assert "has changed" in step.why


@pytest.mark.req("SE3")
@pytest.mark.parametrize("hash_name", HASHES)
@pytest.mark.parametrize("user", ["ada", "a,b=c", "Zo\u00eb", "\u2168"])
async def test_who_knows_the_password_gets_in(hash_name: str, user: str) -> None:
    server = server_of(Users({saslprep(user): "p\u00e4ss"}), hash_name)
    client = Scram(user, "p\u00e4ss", hash_name)
    for _ in range(2):
        step = await exchange(client, server)
        assert isinstance(step, Success)
        assert step.user == saslprep(user)
    wrong = await exchange(Scram(user, "guess", hash_name), server)
    assert isinstance(wrong, Failure)
    assert "wrong user or password" in wrong.why


@pytest.mark.req("SE3")
async def test_nobody_is_told_from_somebody() -> None:
    server = server_of(Users({"ada": "pw"}), "SHA-256")
    shown = []
    for user in ("nobody", "nobody", "other", "ada"):
        step = await server.begin().respond(f"n,,n={user},r=abc".encode(), PEER)
        assert isinstance(step, Challenge)
        nonce, salt, count = step.data.decode().split(",")
        shown.append((nonce[:5], len(salt), salt, count))
    assert len({(nonce, size, count) for nonce, size, _, count in shown}) == 1
    # The same salt when asked again, another one for another name.
    assert shown[0] == shown[1]
    assert len({salt for _, _, salt, _ in shown}) == 3
    failed = await exchange(Scram("nobody", "pw"), server)
    assert failed == Failure("wrong user or password for 'nobody'", "nobody")


@pytest.mark.req("SE3")
def test_what_is_kept_does_not_let_anybody_in() -> None:
    for hash_name in HASHES:
        secret = make_secret("s3cret", hash_name, iterations=4096)
        assert read_secret(str(secret)) == secret
        assert "s3cret" not in str(secret)
        assert str(secret) not in repr(secret)
    for text in (
        "",
        "scram-md5$4096$AAAA$AAAA$AAAA",
        "scram-sha-1$0$AAAA$AAAA$AAAA",
        "scram-sha-1$x$AAAA$AAAA$AAAA",
        "scram-sha-1$4096$!$AAAA$AAAA",
        "scram-sha-1$4096$AAAA$AAAA",
        "scram-sha-1$4096$AAAA$AAAA$AAAA",
    ):
        assert read_secret(text) is None


@pytest.mark.req("SE3", "SE1")
@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"n,,",
        b"n,,r=abc",
        b"n,,n=ada",
        b"n,,n=ada,r=",
        b"n,,n=,r=abc",
        b"p=tls-unique,,n=ada,r=abc",
        b"x,,n=ada,r=abc",
        b"n,a=bob,n=ada,r=abc",
        b"n,,m=more,n=ada,r=abc",
        b"n,,n=a=41,r=abc",
        b"n,,n=\x07,r=abc",
        b"\xff\xff",
        b"n,,n=ada,r=abc" * 500 + b"\xff",
    ],
)
async def test_a_bad_beginning_fails(first: bytes) -> None:
    step = await server_of(Users({"ada": "pw"}), "SHA-1").begin().respond(first, PEER)
    assert isinstance(step, Failure)


@pytest.mark.req("SE3", "SE1")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda final: b"",
        lambda final: final.replace(b"c=biws", b"c=eSws"),
        lambda final: final.replace(b",r=", b",r=x"),
        lambda final: final[:-8] + b"AAAAAAA=",
        lambda final: final.rpartition(b",p=")[0],
        lambda final: final.rpartition(b",p=")[0] + b",p=!!",
        lambda final: final.rpartition(b",p=")[0] + b",p=AAAA",
        lambda final: b"\xff" + final,
    ],
)
async def test_a_bad_end_fails(spoil: Any) -> None:
    running = server_of(Users({"ada": "pw"}), "SHA-256").begin()
    client = Scram("ada", "pw")
    step = await running.respond(client.initial(), PEER)
    assert isinstance(await running.respond(spoil(client.respond(step.data)), PEER), Failure)


# --- servers that cheat ----------------------------------------------------------------------------


def challenged(client: Scram, text: str) -> bytes:
    nonce = (client.initial() or b"").decode().rpartition("r=")[2]
    return client.respond(text.replace("NONCE", nonce).encode())


@pytest.mark.req("SE3")
@pytest.mark.parametrize(
    ("challenge", "why"),
    [
        ("r=NONCE,s=AAAA,i=4096", "does not answer ours"),
        ("r=other,s=AAAA,i=4096", "does not answer ours"),
        ("r=NONCEx,s=AAAA,i=x", "malformed"),
        ("r=NONCEx,s=!,i=4096", "malformed"),
        ("r=NONCEx,s=AAAA", "malformed"),
        ("", "does not answer ours"),
    ],
)
def test_a_bad_challenge_is_not_answered(challenge: str, why: str) -> None:
    with pytest.raises(AuthenticationFailed, match=why):
        challenged(Scram("ada", "pw"), challenge)


@pytest.mark.req("SE3", "SE18")
def test_the_work_that_a_server_asks_for() -> None:
    client = Scram("ada", "pw", iterations_max=5_000)
    assert challenged(client, "r=NONCEx,s=AAAA,i=4096")
    assert challenged(client, "r=NONCEx,s=AAAA,i=5000")
    for count in (5_001, 999_999_999, 4_095, 0):
        with pytest.raises(AuthenticationFailed, match="4096 to 5000 are allowed"):
            challenged(client, f"r=NONCEx,s=AAAA,i={count}")


@pytest.mark.req("SE3")
@pytest.mark.parametrize("proof", [None, b"", b"v=", b"v=AAAA", b"e=other-error"])
def test_a_server_that_does_not_prove_itself_is_left(proof: bytes | None) -> None:
    client = Scram("ada", "pw")
    client.initial()
    with pytest.raises(AuthenticationFailed, match="has not proved that it knows the password"):
        client.finish(proof)
    challenged(client, "r=NONCEx,s=AAAA,i=4096")
    with pytest.raises(AuthenticationFailed, match="has not proved that it knows the password"):
        client.finish(proof)


@pytest.mark.req("SE3")
async def test_the_proof_may_come_as_a_challenge() -> None:
    """Some servers say it before the outcome."""
    running = server_of(Users({"ada": "pw"}), "SHA-256").begin()
    client = Scram("ada", "pw")
    step = await running.respond(client.initial(), PEER)
    success = await running.respond(client.respond(step.data), PEER)
    assert client.respond(success.data) == b""
    client.finish(None)


def test_nothing_shows_the_password() -> None:
    assert "s3cret" not in repr(Scram("ada", "s3cret"))
    for user, password, hash_name in (
        ("", "pw", "SHA-1"),
        ("a\x07", "pw", "SHA-1"),
        ("a", "pw", "MD5"),
    ):
        with pytest.raises(AuthenticationFailed):
            Scram(user, password, hash_name)


def test_names_in_one_form() -> None:
    """The examples of RFC 4013 §3."""
    assert saslprep("I\u00adX") == "IX"
    assert saslprep("user") == "user"
    assert saslprep("\u00aa") == "a"
    assert saslprep("\u2168") == "IX"
    assert saslprep("a\u00a0b") == "a b"
    for text in ("\u0007", "\u0627\u0031"):
        with pytest.raises(ValueError, match="characters"):
            saslprep(text)


@pytest.mark.req("SE3")
@pytest.mark.parametrize("hash_name", HASHES)
@pytest.mark.parametrize(("user", "password"), [("user", "pencil"), ("a=b,c", "pässword")])
async def test_another_client_logs_in(hash_name: str, user: str, password: str) -> None:
    secret = make_secret(password, hash_name, iterations=4096)

    async def find(name: str, wanted: str) -> ScramSecret | None:
        return secret if (name, wanted) == (user, hash_name) else None

    for given, succeeds in ((password, True), ("wrong", False)):
        client = scramp.ScramClient([f"SCRAM-{hash_name}"], user, given)
        server = ScramServer(hash_name, find).begin()
        challenge = await server.respond(client.get_client_first().encode(), PEER)
        assert isinstance(challenge, Challenge)
        client.set_server_first(challenge.data.decode())
        step = await server.respond(client.get_client_final().encode(), PEER)
        if succeeds:
            assert isinstance(step, Success)
            # Raises unless the server has proved that it knows the password.
            client.set_server_final((step.data or b"").decode())
        else:
            assert isinstance(step, Failure)


@pytest.mark.req("SE3")
@pytest.mark.parametrize("hash_name", HASHES)
def test_another_server_lets_our_client_in(hash_name: str) -> None:
    mechanism = scramp.ScramMechanism(f"SCRAM-{hash_name}")
    stored = mechanism.make_auth_info("pässword", iteration_count=4096)
    server = mechanism.make_server({"a=b,c": stored}.__getitem__)
    client = Scram("a=b,c", "pässword", hash_name)
    server.set_client_first(client.initial().decode())
    final = client.respond(server.get_server_first().encode())
    server.set_client_final(final.decode())
    client.finish(server.get_server_final().encode())
