"""SASL mechanisms: what they say, what they judge, and where a password may go."""

from __future__ import annotations

from typing import Any

import pytest

from amqp_rt.core.engine import Engine
from amqp_rt.errors import AuthenticationFailed
from amqp_rt.events import ConnectionFailed, Event, LoginRequested, Opened, Peer
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import ServerOptions
from amqp_rt.security.mechanisms import (
    Anonymous,
    AnonymousServer,
    Challenge,
    Failure,
    Plain,
    PlainServer,
    ServerMechanism,
    Success,
    may_send_in_clear,
    offered,
)

PEER = Peer(address="192.0.2.1:4711")


class Directory:
    """An application's users."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Peer]] = []

    async def __call__(self, user: str, password: str, peer: Peer) -> Any:
        self.asked.append((user, password, peer))
        return {"id": 7} if (user, password) == ("bob", "s3cret:\u20ac") else None


@pytest.mark.req("SE1", "SE2")
@pytest.mark.parametrize(
    ("mechanism", "initial"),
    [
        (Plain("bob", "pw"), b"\0bob\0pw"),
        (Plain("bob", "pw", authorize_as="alice"), b"alice\0bob\0pw"),
        (Plain("b\u00f6b", "\u20ac"), b"\0b\xc3\xb6b\0\xe2\x82\xac"),
        (Plain("bob", ""), b"\0bob\0"),
        (Anonymous(), b""),
        (Anonymous("trace@example"), b"trace@example"),
    ],
)
def test_what_clients_say(mechanism: amqp10.ClientMechanism, initial: bytes) -> None:
    assert mechanism.initial() == initial


def test_a_server_that_asks_again_hears_plain_again() -> None:
    assert Plain("bob", "pw").respond(b"") == b"\0bob\0pw"
    assert Anonymous("x").respond(b"who?") == b""


@pytest.mark.parametrize(
    ("user", "password", "other"),
    [("", "p", ""), ("a\0b", "p", ""), ("a", "p\0", ""), ("a", "p", "\0")],
)
def test_what_plain_cannot_say_is_refused_here(user: str, password: str, other: str) -> None:
    with pytest.raises(AuthenticationFailed, match="NUL"):
        Plain(user, password, authorize_as=other)


def test_no_repr_shows_a_password() -> None:
    mechanism = Plain("bob", "s3cret")
    assert "s3cret" not in repr(mechanism) + str(mechanism) + f"{[mechanism]}"
    assert "bob" in repr(mechanism)


@pytest.mark.req("SE2")
async def test_plain_asks_the_verifier() -> None:
    directory = Directory()
    server = PlainServer(directory)
    step = await server.respond("\0bob\0s3cret:\u20ac".encode(), PEER)
    assert step == Success("bob", {"id": 7})
    assert directory.asked == [("bob", "s3cret:\u20ac", PEER)]


@pytest.mark.req("SE1", "SE2")
async def test_plain_without_initial_response_is_asked_for_it() -> None:
    assert await PlainServer(Directory()).respond(None, PEER) == Challenge(b"")


@pytest.mark.req("SE2")
@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"bob",
        b"bob\0pw",
        b"\0\0",
        b"\0bob\0",
        b"\0\0pw",
        b"\0bob\0pw\0",
        b"\0bob\0pw\0more",
        b"\0\xff\xfe\0pw",
        b"\0bob\0\x80",
        b"\0" * 8192,
    ],
)
async def test_malformed_plain_fails_without_asking(response: bytes) -> None:
    directory = Directory()
    step = await PlainServer(directory).respond(response, PEER)
    assert isinstance(step, Failure)
    assert not directory.asked


@pytest.mark.req("SE2")
@pytest.mark.parametrize(
    "response", [b"\0bob\0wrong", b"\0nobody\0pw", "alice\0bob\0s3cret:\u20ac".encode()]
)
async def test_whoever_is_not_who_it_says_fails(response: bytes) -> None:
    step = await PlainServer(Directory()).respond(response, PEER)
    assert isinstance(step, Failure)
    assert "s3cret" not in step.why
    assert "wrong" not in step.why.replace("wrong user or password", "")


@pytest.mark.req("SE2")
async def test_acting_for_oneself_is_allowed() -> None:
    step = await PlainServer(Directory()).respond("bob\0bob\0s3cret:\u20ac".encode(), PEER)
    assert step == Success("bob", {"id": 7})


@pytest.mark.req("SE2")
@pytest.mark.parametrize("response", [None, b"", b"trace", b"\xff"])
async def test_anonymous_lets_everybody_in_as_nobody(response: bytes | None) -> None:
    assert await AnonymousServer().respond(response, PEER) == Success(None)


@pytest.mark.req("SE9")
@pytest.mark.parametrize(
    ("secure", "local", "allowed", "may"),
    [
        (False, False, False, False),
        (True, False, False, True),
        (False, True, False, True),
        (False, False, True, True),
    ],
)
def test_passwords_cross_in_clear_only_where_that_is_meant(
    secure: bool, local: bool, allowed: bool, may: bool
) -> None:
    servers: list[ServerMechanism] = [PlainServer(Directory()), AnonymousServer()]
    assert may_send_in_clear(secure=secure, local=local, allowed=allowed) is may
    names = offered(servers, secure=secure, local=local, plain_in_clear=allowed)
    assert names == (("PLAIN", "ANONYMOUS") if may else ("ANONYMOUS",))


async def log_in(
    client: amqp10.ClientMechanism, server: ServerMechanism
) -> tuple[list[Event], list[Event], Engine]:
    """A whole exchange between two engines; events of the client and of the server."""
    ours = amqp10.client(amqp10.ClientOptions(container_id="c", mechanisms=(client,)), 0.0)
    theirs = amqp10.Front().server(
        ServerOptions(container_id="s", mechanisms=(server.name,), sasl_required=True), 0.0
    )
    heard: list[Event] = []
    happened: list[Event] = []
    for _ in range(20):
        pending = theirs.receive(b"".join(ours.take()), 0.0)
        while pending:
            event = pending.pop(0)
            happened.append(event)
            if isinstance(event, LoginRequested):
                step = await server.respond(event.response, theirs.peer)
                if isinstance(step, Challenge):
                    event.exchange.challenge(step.data)
                elif isinstance(step, Success):
                    pending += event.exchange.succeed(step.user, step.identity)
                else:
                    event.exchange.fail()
        heard += ours.receive(b"".join(theirs.take()), 0.0)
    return heard, happened, theirs


@pytest.mark.req("SE1", "SE2")
async def test_a_login_over_the_wire_says_who_the_peer_is() -> None:
    heard, happened, engine = await log_in(Plain("bob", "s3cret:\u20ac"), PlainServer(Directory()))
    assert [type(event) for event in heard] == [Opened]
    assert [type(event) for event in happened] == [LoginRequested, Opened]
    peer = engine.peer
    assert (peer.user, peer.identity, peer.mechanism) == ("bob", {"id": 7}, "PLAIN")


class Shy(Plain):
    """Says nothing until it is asked."""

    def initial(self) -> bytes | None:
        return None

    def respond(self, challenge: bytes) -> bytes:
        return super().initial() or b""


@pytest.mark.req("SE1", "SE2")
async def test_a_login_in_two_steps() -> None:
    heard, happened, engine = await log_in(Shy("bob", "s3cret:\u20ac"), PlainServer(Directory()))
    assert [type(event) for event in happened] == [LoginRequested, LoginRequested, Opened]
    assert [type(event) for event in heard] == [Opened]
    assert engine.peer.user == "bob"


@pytest.mark.req("SE1", "SE2")
async def test_a_failed_login_ends_both_sides() -> None:
    heard, happened, engine = await log_in(Plain("bob", "wrong"), PlainServer(Directory()))
    assert [type(event) for event in heard] == [ConnectionFailed]
    assert heard[0].error.condition == "amqp:unauthorized-access"  # type: ignore[union-attr]
    assert [type(event) for event in happened] == [LoginRequested]
    assert engine.finished
    assert engine.peer.user is None


@pytest.mark.req("SE1", "SE2")
async def test_an_anonymous_login() -> None:
    heard, happened, engine = await log_in(Anonymous("x"), AnonymousServer())
    assert [type(event) for event in heard] == [Opened]
    assert [type(event) for event in happened] == [LoginRequested, Opened]
    assert (engine.peer.user, engine.peer.mechanism) == (None, "ANONYMOUS")
