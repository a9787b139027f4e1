"""Tokens while other things happen, at each point where one is awaited."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from stalls import beside

from amqp_rt.container.cbs import TokenWatch, answer_cbs
from amqp_rt.container.tokens import TokenKeeper
from amqp_rt.errors import AuthenticationFailed, ConnectionLost
from amqp_rt.events import Peer
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.loglimit import LogLimiter
from amqp_rt.message import Message
from amqp_rt.security.access import Rights
from amqp_rt.security.tokens import Token, TokenRefused


class Connection:
    """What tokens need of a connection."""

    limits = DEFAULT_LIMITS

    def __init__(self) -> None:
        self.container = self.attaching = self
        self.peer = Peer(user="new", address="192.0.2.1:50000")
        self.log_limiter = LogLimiter()

    def reauthorize(self, connection: object, why: str) -> None: ...


class Slow:
    """Judges tokens when a test says so; the text of a token is its subject."""

    def __init__(self) -> None:
        self.clock = self
        self.now = 0.0
        self.begun: list[str] = []
        self.done = {name: trio.Event() for name in ("old", "new")}

    async def validate(self, kind: Any, text: str, audience: Any, limits: Any) -> Token:
        self.begun.append(text)
        await self.done[text].wait()
        return Token(scope="q", grants=((("*",), Rights.SEND),), expires_at=1e12, subject=text)

    def wall(self) -> float:
        return self.now


def put(text: str) -> Message:
    given = {"operation": "put-token", "type": "jwt", "name": "q"}
    return Message(text, application_properties=given)


DELETE = Message(None, application_properties={"operation": "delete-token", "name": "q"})


@pytest.mark.req("SE14")
@pytest.mark.parametrize("after", ["put", "delete"])
async def test_a_token_that_is_judged_slowly_does_not_outlive_what_came_after_it(
    after: str,
) -> None:
    slow = Slow()
    watch = TokenWatch(Connection(), slow, bool)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        first = beside(nursery, answer_cbs, put("old"), watch)
        await trio.testing.wait_all_tasks_blocked()
        second = beside(nursery, answer_cbs, put("new") if after == "put" else DELETE, watch)
        await trio.testing.wait_all_tasks_blocked()
        slow.done["new"].set()
        await trio.testing.wait_all_tasks_blocked()
        slow.done["old"].set()
        for answer in (first, second):
            assert (await answer.get()).application_properties["status-code"] == 202
    kept = [token.subject for token, _ in watch.tokens._kept.values()]
    assert kept == (["new"] if after == "put" else [])


@pytest.mark.req("SE12")
async def test_a_token_that_expires_while_it_is_judged_is_refused() -> None:
    slow = Slow()
    watch = TokenWatch(Connection(), slow, bool)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        answer = beside(nursery, answer_cbs, put("old"), watch)
        await trio.testing.wait_all_tasks_blocked()
        slow.now = 1e12
        slow.done["old"].set()
        assert (await answer.get()).application_properties["status-code"] == 401
    assert not len(watch.tokens)


@pytest.mark.req("SE14", "G4")
@pytest.mark.parametrize("expired", [False, True])
async def test_a_renewal_that_is_judged_slowly_replaces_what_was_put_before_it(
    expired: bool,
) -> None:
    slow = Slow()
    watch = TokenWatch(Connection(), slow, bool)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        put_first = beside(nursery, answer_cbs, put("old"), watch)
        await trio.testing.wait_all_tasks_blocked()
        renewed = beside(nursery, watch.renew, "new")
        await trio.testing.wait_all_tasks_blocked()
        # The renewal waits for its turn, whichever check would be the faster one.
        slow.done["new"].set()
        await trio.testing.wait_all_tasks_blocked()
        assert slow.begun == ["old"]
        slow.done["old"].set()
        assert (await put_first.get()).application_properties["status-code"] == 202
        if expired:
            slow.now = 1e12
        found = await renewed.get()
    # A refused one changes nothing.
    assert found == (TokenRefused.default_condition if expired else None)
    [(token, _)] = watch.tokens._kept.values()
    assert token.subject == ("old" if expired else "new")


@pytest.mark.req("SE10")
async def test_a_token_that_fails_while_another_task_begins_to_wait_for_it_answers_both() -> None:
    keeper = TokenKeeper(None, lambda uri: None)  # type: ignore[arg-type, return-value]
    async with trio.open_nursery() as nursery:
        answer = beside(nursery, keeper.authorize, "q")
        nursery.start_soon(_fail_at_once, keeper)
        await trio.testing.wait_all_tasks_blocked()
        # Requests without an answer wait for the next try.
        for audience in list(keeper._audiences.values()):
            keeper._failed(audience, AuthenticationFailed("no"))
        assert await answer.get() == AuthenticationFailed.default_condition


async def _fail_at_once(keeper: TokenKeeper) -> None:
    while not keeper._audiences:
        await trio.lowlevel.checkpoint()
    (audience,) = keeper._audiences.values()
    if not audience.asked:
        keeper._failed(audience, AuthenticationFailed("no"))


@pytest.mark.req("SE10")
async def test_a_connection_that_ends_while_a_task_begins_to_wait_for_a_token() -> None:
    keeper = TokenKeeper(None, lambda uri: None)  # type: ignore[arg-type, return-value]
    async with trio.open_nursery() as nursery:
        answer = beside(nursery, keeper.authorize, "q")
        nursery.start_soon(_stop_at_once, keeper)
        assert await answer.get() == ConnectionLost.default_condition


async def _stop_at_once(keeper: TokenKeeper) -> None:
    while not keeper._audiences:
        await trio.lowlevel.checkpoint()
    keeper.stop()
