"""Posts that have come and cannot be taken yet: a discharge that comes behind them waits for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from brokers import client_of

from amqp_rt import Broker, Connection, Message
from amqp_rt.broker import Queue
from amqp_rt.container.sending import Receipt
from amqp_rt.events import Peer
from amqp_rt.limits import Limits
from amqp_rt.outcomes import Outcome, Rejected
from amqp_rt.security.access import Access, Rights, Rule
from amqp_rt.security.mechanisms import Plain
from amqp_rt.transactions import Discharge

UNKNOWN = "amqp:transaction:unknown-id"
ROLLBACK = "amqp:transaction:rollback"


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


def discharge(transaction: Any, *, fail: bool = False) -> Receipt:
    """Discharge at once, behind what was sent so far, as a client does that awaits no outcomes."""
    receipt: Receipt = transaction._control.request(Discharge(transaction._id, fail))
    transaction._end()
    return receipt


def outcome_of(receipt: Receipt) -> str:
    said: Outcome | None = receipt.known_outcome
    if isinstance(said, Rejected):
        return str(said.error and said.error.condition)
    return "none" if said is None else type(said).__name__.lower()


class Judge:
    """An ``authorize`` that answers for ``q`` when a test says so."""

    def __init__(self) -> None:
        self.asked = trio.Event()
        self.answered = trio.Event()
        self.allows = True

    async def __call__(self, peer: Peer, address: str, role: str) -> bool:
        if address == "q":
            self.asked.set()
            await self.answered.wait()
            return self.allows
        return True

    async def answer(self, *, allows: bool) -> None:
        self.allows = allows
        self.answered.set()
        await settle()


@asynccontextmanager
async def judged(judge: Judge, **options: Any) -> AsyncIterator[tuple[Broker, Connection]]:
    broker = Broker("b", users={"u": "p"}, plain_in_clear=True, authorize=judge, **options)
    async with broker:
        await broker.declare(Queue("q"), Queue("other"))
        await broker.listen("memory://b")
        async with client_of(broker, "u", auth=Plain("u", "p")) as peer:
            yield broker, peer


async def bodies(broker: Broker, address: str = "q") -> list[Any]:
    return [Message.decode(each).body for each in await broker.peek(address, 100)]


@pytest.mark.req("R3", "R4", "SE17")
@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("allows", [False, True])
@pytest.mark.parametrize("settled", [False, True])
async def test_a_discharge_waits_for_posts_whose_rights_are_being_judged(
    settled: bool, allows: bool, fail: bool
) -> None:
    judge = Judge()
    async with judged(judge) as (broker, peer):
        txn = await peer.transaction().__aenter__()
        relay = await peer.sender(None, settled=settled).__aenter__()
        relay.send_nowait("o", to="other", transaction=txn)
        await settle()
        post = relay.send_nowait("x", to="q", transaction=txn)
        await judge.asked.wait()
        late = discharge(txn, fail=fail)
        again = txn._control.request(Discharge(txn._id, False))
        await settle()
        assert outcome_of(late) == "none"
        assert outcome_of(again) == UNKNOWN
        assert await bodies(broker) == await bodies(broker, "other") == []
        await judge.answer(allows=allows)
        if not settled:
            assert outcome_of(post) == ("accepted" if allows else "amqp:unauthorized-access")
        if fail:
            assert outcome_of(late) == "accepted"
            assert await bodies(broker) == await bodies(broker, "other") == []
        elif allows:
            assert outcome_of(late) == "accepted"
            assert (await bodies(broker), await bodies(broker, "other")) == (["x"], ["o"])
        elif settled:
            # The sender cannot hear that one was refused, so that none of it happens.
            assert outcome_of(late) == ROLLBACK
            assert await bodies(broker) == await bodies(broker, "other") == []
        else:
            assert outcome_of(late) == "accepted"
            assert (await bodies(broker), await bodies(broker, "other")) == ([], ["o"])
        there = [broker.stats(name).bytes for name in ("q", "other")]
        assert broker.host.memory.held == sum(there)
        assert relay.attached
        relay.abandon()


@pytest.mark.req("R4")
async def test_a_post_that_comes_after_the_discharge_is_in_no_transaction() -> None:
    judge = Judge()
    async with judged(judge) as (broker, peer):
        txn = await peer.transaction().__aenter__()
        relay = await peer.sender(None).__aenter__()
        other = await peer.sender("other").__aenter__()
        relay.send_nowait("x", to="q", transaction=txn)
        await judge.asked.wait()
        state = txn.state()
        late = discharge(txn)
        assert other.link.send(Message("y").encode(), other, state=state) is not None
        await settle()
        assert not other.attached
        await judge.answer(allows=True)
        assert outcome_of(late) == "accepted"
        assert (await bodies(broker), await bodies(broker, "other")) == (["x"], [])
        relay.abandon()


@pytest.mark.req("R4")
async def test_a_discharge_that_waits_too_long_is_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    judge = Judge()
    limits = Limits(transaction_s=5)
    async with judged(judge, limits=limits) as (broker, peer):
        txn = await peer.transaction().__aenter__()
        relay = await peer.sender(None).__aenter__()
        post = relay.send_nowait("x", to="q", transaction=txn)
        await judge.asked.wait()
        late = discharge(txn)
        await trio.sleep(8)
        assert outcome_of(late) == "amqp:transaction:timeout"
        await judge.answer(allows=True)
        assert outcome_of(post) == "amqp:transaction:timeout"
        assert await bodies(broker) == []
        assert (broker.host.memory.held, len(broker.host.transactions)) == (0, 0)
        relay.abandon()


@pytest.mark.req("R4")
@pytest.mark.parametrize("gone", ["relay", "control", "connection"])
async def test_links_that_go_while_a_discharge_waits_leave_it_whole(gone: str) -> None:
    judge = Judge()
    async with judged(judge) as (broker, peer):
        txn = await peer.transaction().__aenter__()
        relay = await peer.sender(None).__aenter__()
        relay.send_nowait("o", to="other", transaction=txn)
        await settle()
        relay.send_nowait("x", to="q", transaction=txn)
        await judge.asked.wait()
        late = discharge(txn)
        await settle()
        if gone == "relay":
            relay.abandon()
        elif gone == "control":
            txn._control.abandon()
        else:
            peer.close()
        await settle()
        await judge.answer(allows=True)
        if gone == "relay":
            assert outcome_of(late) == "accepted"
            assert (await bodies(broker), await bodies(broker, "other")) == (["x"], ["o"])
        else:
            assert await bodies(broker) == await bodies(broker, "other") == []
        there = [broker.stats(name).bytes for name in ("q", "other")]
        assert (broker.host.memory.held, len(broker.host.transactions)) == (sum(there), 0)
        relay.abandon()


@pytest.mark.req("R4", "SE11")
async def test_a_settled_post_without_the_right_fails_its_transaction() -> None:
    access = Access([Rule("other", Rights.SEND, users=("u",))])
    broker = Broker("b", users={"u": "p"}, plain_in_clear=True, access=access)
    async with broker:
        await broker.declare(Queue("q"), Queue("other"))
        await broker.listen("memory://b")
        async with client_of(broker, "u", auth=Plain("u", "p")) as peer:
            txn = await peer.transaction().__aenter__()
            relay = await peer.sender(None, settled=True).__aenter__()
            relay.send_nowait("o", to="other", transaction=txn)
            relay.send_nowait("x", to="q", transaction=txn)
            late = discharge(txn)
            await settle()
            assert outcome_of(late) == ROLLBACK
            assert await bodies(broker, "other") == []
            assert relay.attached
            relay.abandon()
