"""Tokens of RabbitMQ's clients: the password of a login, and its renewal at ``/auth/tokens``."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import jwt
import pytest
import trio
from brokers import client_of
from rabbit_requests import Managing, managing, request

from amqp_rt import Broker, Connection, Plain, Rights, Rule
from amqp_rt.broker import Queue
from amqp_rt.errors import AmqpError, AuthenticationFailed, LinkDetached
from amqp_rt.events import Peer
from amqp_rt.limits import Limits
from amqp_rt.security.access import Access
from amqp_rt.security.jwts import Jwt
from amqp_rt.security.tokens import Cbs, Claims, TokenRefused

pytestmark = pytest.mark.req("G4")

SECRET = b"a secret of at least 32 octets, for HS256"
EPOCH = 1_600_000_000
URL = "memory://rabbit"


class Following:
    """Wall clock that advances with the clock of the tests."""

    def wall(self) -> float:
        return EPOCH + trio.current_time()

    def monotonic(self) -> float:
        return trio.current_time()


def token(scope: str = "manage:q", seconds: float = 600, **claims: Any) -> str:
    said = {"aud": "shop", "sub": "ada", "exp": int(Following().wall() + seconds), "scope": scope}
    return jwt.encode({**said, **claims}, SECRET, "HS256")


async def verified(user: str, password: str, peer: Peer) -> str | None:
    """Verify a password at once: a hash takes a thread, which the clock of the tests does not wait for."""
    return user if password == "pw" else None


@asynccontextmanager
async def shop(**options: Any) -> AsyncIterator[Broker]:
    """Run a broker with the queues ``q`` and ``r``, which accepts tokens."""
    cbs = Cbs([Jwt(audience="shop", secret=SECRET)], clock=Following())
    async with Broker("b", volatile=True, **{"cbs": cbs, **options}) as broker:
        for name in ("q", "r"):
            await broker.declare(Queue(name))
        await broker.listen(f"{URL}?profile=rabbitmq")
        await broker.listen("memory://plain")
        yield broker


@asynccontextmanager
async def logged_in(broker: Broker, text: str) -> AsyncIterator[tuple[Connection, Managing]]:
    """Log in as RabbitMQ's clients do, with *text* as the password of a user that does not matter."""
    async with (
        client_of(broker, url=URL, auth=Plain("no", text)) as peer,
        managing(peer) as manage,
    ):
        yield peer, manage


async def test_a_new_token_replaces_the_rights_of_the_old_one(autojump_clock: Any) -> None:
    async with shop() as broker, logged_in(broker, token("manage:q send:r")) as (peer, manage):
        assert broker.container.connections[0].peer.user == "ada"
        async with peer.sender("/queues/r") as out:
            await out.send(b"by the old token")
            text = token("manage:q listen:r")
            assert await manage("PUT", "/auth/tokens", text.encode()) == ("204", None)
            with pytest.raises(LinkDetached):
                await out.send(b"by the new one")
        async with peer.receiver("/queues/r") as inbox, await inbox.receive() as delivery:
            assert delivery.body == b"by the old token"
        assert (await manage("GET", "/queues/q"))[0] == "200"
        # What neither gives is refused.
        with pytest.raises(AmqpError):
            async with peer.sender("/queues/r") as out:
                await out.wait_attached()


async def test_a_renewed_connection_outlives_its_first_token(autojump_clock: Any) -> None:
    async with shop() as broker, logged_in(broker, token(seconds=60)) as (peer, manage):
        for _ in range(5):
            await trio.sleep(50)
            assert (await manage("PUT", "/auth/tokens", token(seconds=60).encode()))[0] == "204"
        async with peer.sender("/queues/q") as out:
            await trio.sleep(59)
            await out.send(b"in time")
            # The last token expires, and nothing is left of it.
            await trio.sleep(2)
            with pytest.raises(LinkDetached, match="expired"):
                await out.send(b"too late")


async def test_a_connection_without_a_valid_token_is_closed_in_time(autojump_clock: Any) -> None:
    limits = Limits(token_deadline_s=30)
    async with shop(limits=limits) as broker:
        closed = -1.0
        with suppress(AmqpError):
            async with logged_in(broker, token(seconds=60)) as (peer, _):
                began = trio.current_time()
                await peer.wait_closed()
                closed = trio.current_time() - began
        assert closed == pytest.approx(90, abs=2)
        assert not broker.container.connections


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sub": "eve"}, "another user"),
        ({"aud": "another shop"}, ""),
        ({"seconds": -1}, ""),
        ({"scope": "nothing"}, "no rights"),
    ],
)
async def test_a_refused_token_changes_nothing(
    autojump_clock: Any, change: dict[str, Any], why: str
) -> None:
    async with shop() as broker, logged_in(broker, token()) as (peer, manage):
        status, said = await manage("PUT", "/auth/tokens", token(**change).encode())
        assert status == "403"
        assert why in said
        async with peer.sender("/queues/q") as out:
            await out.send(b"by the old token")


async def test_a_publisher_may_renew_its_token(autojump_clock: Any) -> None:
    """Links to the management take no right to manage, since every client renews its token there."""
    async with shop() as broker, logged_in(broker, token("send:q")) as (peer, manage):
        assert (await manage("GET", "/queues/r"))[0] == "403"
        assert (await manage("PUT", "/auth/tokens", token("send:r").encode()))[0] == "204"
        async with peer.sender("/queues/r") as out:
            await out.send(b"x")


async def test_tokens_of_other_forms_are_refused(autojump_clock: Any) -> None:
    async with shop() as broker, logged_in(broker, token()) as (_, manage):
        for body, status in (
            (None, "400"),
            ("a text", "400"),
            (b"\xff", "400"),
            (b"", "403"),
            (b"a.b.c", "403"),
            (b"x" * 100_000, "403"),
        ):
            assert (await manage("PUT", "/auth/tokens", body))[0] == status, body


class Slow:
    """Validator that waits before it answers; its tokens are names of users."""

    types = frozenset({"swt"})

    def __init__(self) -> None:
        self.waiting = 0
        self.may = trio.Event()
        self.fails = False

    async def validate(self, text: str, now: float) -> Claims:
        self.waiting += 1
        await self.may.wait()
        if text not in ("ada", "eve"):
            raise TokenRefused("not a token")
        if self.fails:
            raise RuntimeError("a fault of the validator")
        return Claims(expires_at=now + 600, subject=text, rights=Rights.MANAGE)


async def test_later_requests_of_the_pair_wait_for_the_check(autojump_clock: Any) -> None:
    slow = Slow()
    rules = Access([Rule("*", Rights.MANAGE, users=("ada",))])
    async with shop(cbs=Cbs([slow], clock=Following()), access=rules, users=verified) as broker:
        slow.may.set()
        async with (
            client_of(broker, url=URL, auth=Plain("ada", "pw")) as peer,
            managing(peer) as manage,
        ):
            slow.may, slow.waiting = trio.Event(), 0
            await manage.sender.send(request("PUT", "/auth/tokens", b"ada", message_id=1))
            await manage.sender.send(request("GET", "/queues/q", message_id=2))
            await trio.sleep(60)
            assert slow.waiting == 1
            slow.may.set()
            for number, status in ((1, "204"), (2, "200")):
                answer = (await manage.receiver.receive()).message
                assert (answer.correlation_id, answer.subject) == (number, status)


async def test_a_connection_may_end_while_its_token_is_checked(autojump_clock: Any) -> None:
    slow = Slow()
    rules = Access([Rule("*", Rights.MANAGE, users=("ada",))])
    options: dict[str, Any] = {"access": rules, "users": verified}
    async with shop(cbs=Cbs([slow], clock=Following()), **options) as broker:
        slow.may.set()
        async with (
            client_of(broker, url=URL, auth=Plain("ada", "pw")) as peer,
            managing(peer) as manage,
        ):
            slow.may = trio.Event()
            await manage.sender.send(request("PUT", "/auth/tokens", b"ada"))
            await trio.sleep(1)
        slow.may.set()
        await trio.sleep(1)
        # The broker goes on.
        async with (
            client_of(broker, url=URL, auth=Plain("ada", "pw")) as peer,
            managing(peer) as manage,
        ):
            assert (await manage("GET", "/queues/q"))[0] == "200"


async def test_a_fault_of_a_validator_is_answered(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow()
    rules = Access([Rule("*", Rights.MANAGE, users=("ada",))])
    options: dict[str, Any] = {"access": rules, "users": verified}
    async with shop(cbs=Cbs([slow], clock=Following()), **options) as broker:
        slow.may.set()
        async with (
            client_of(broker, url=URL, auth=Plain("ada", "pw")) as peer,
            managing(peer) as manage,
        ):
            slow.fails = True
            with caplog.at_level(logging.CRITICAL, "amqp_rt.rabbitmq"):
                status, said = await manage("PUT", "/auth/tokens", b"ada")
            assert (status, said) == ("500", "the token could not be checked")


async def test_passwords_and_tokens_are_told_apart(autojump_clock: Any) -> None:
    rules = Access([Rule("q", Rights.SEND, users=("bob",))])
    options: dict[str, Any] = {"users": verified, "access": rules}
    async with shop(limits=Limits(failed_login_delay_s=0), **options) as broker:
        for user, password, good in (
            ("bob", "pw", True),
            ("bob", "guess", False),
            ("", token("send:q"), True),
            ("bob", token("send:q"), True),
            ("bob", token("send:q", aud="another shop"), False),
            ("bob", token("send:q", seconds=-1), False),
        ):
            login = Plain(user or "-", password)
            login.user = user
            if not good:
                with pytest.raises(AuthenticationFailed):
                    async with client_of(broker, url=URL, auth=login):
                        pass
                continue
            async with client_of(broker, url=URL, auth=login) as peer:
                [found] = broker.container.connections
                assert found.peer.user == ("bob" if password == "pw" else "ada")
                async with peer.sender("/queues/q") as out:
                    await out.send(b"x")
        # Only this listener takes tokens as passwords.
        with pytest.raises(AuthenticationFailed):
            async with client_of(broker, url="memory://plain", auth=Plain("no", token("send:q"))):
                pass


async def test_without_users_a_password_is_a_token(autojump_clock: Any) -> None:
    async with shop() as broker:
        for password in ("pw", token(seconds=-1), "not ascii: ä"):
            with pytest.raises(AuthenticationFailed):
                async with client_of(broker, url=URL, auth=Plain("no", password)):
                    pass
        async with logged_in(broker, token()) as (_, manage):
            assert (await manage("GET", "/queues/q"))[0] == "200"


async def test_a_broker_without_tokens_says_so() -> None:
    async with Broker("b", volatile=True) as broker:
        await broker.listen(f"{URL}?profile=rabbitmq")
        async with client_of(broker, url=URL) as peer, managing(peer) as manage:
            status, why = await manage("PUT", "/auth/tokens", b"x.y.z")
            assert (status, why) == ("400", "this connection needs no tokens")
