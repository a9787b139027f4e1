"""Prepared branches and the store: what they survive, and what happens if the store refuses them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from branching import XaSession, xid_of
from brokers import client_of
from crashed import Photographed
from stalls import Stalls

from amqp_rt import Broker
from amqp_rt.broker import Log, Queue, Topic
from amqp_rt.broker.branches.endings import BranchEndings
from amqp_rt.broker.durable import facts
from amqp_rt.codec.composites import encode_composite
from amqp_rt.errors import AmqpError
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.stores.base import Store, StoreFull
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.stores.sqlite import SQLiteStore
from amqp_rt.transactions import XaStatus, Xid

XID = xid_of(1)
OK, RB = XaStatus.OK, XaStatus.ROLLED_BACK
QUEUES = (Queue("from"), Queue("to"))
NOT_FOUND = "amqp:not-found"


@asynccontextmanager
async def running(store: Store, *declared: Any, **options: Any) -> AsyncIterator[Broker]:
    async with Broker(store=store, **options) as broker:
        await broker.declare(*(declared or QUEUES))
        yield broker


def put(broker: Broker, *bodies: Any, address: str = "from", durable: bool = True) -> None:
    for body in bodies:
        broker.publish(address, Message(body, durable=durable).encode())


async def left(broker: Broker, address: str) -> list[Any]:
    await broker.host.wait_kept()
    return [Message.decode(each).body for each in await broker.peek(address, 100)]


async def prepare(broker: Broker, xid: Xid = XID, *posts: Any, consume: int = 1) -> XaSession:
    """Prepare a branch that consumes from ``from`` and posts to ``to``."""
    session = XaSession(broker.host)
    session.branches.start(xid)
    for _ in range(consume):
        session.consume("from")
    for body in posts or ("new",):
        session.post("to", body)
    session.branches.end(xid)
    assert await session.ended("prepare", xid) is OK
    return session


def nothing_stored(store: Store) -> bool:
    """Return whether *store*, which is open, has nothing of branches."""
    known = {facts.number_of(key) for key, _ in store.facts("node")}
    others = [number for number in range(1, 60) if number not in known]
    return not store.facts("dtx-branch") and not any(
        store.messages(number, 0, 10, 10) for number in others
    )


@pytest.mark.req("R13")
@pytest.mark.parametrize("end", ["commit", "roll_back"])
async def test_a_prepared_branch_survives_a_restart(kept: Callable[[], Store], end: str) -> None:
    async with running(kept()) as broker:
        put(broker, "a", "b", "c")
        await broker.host.wait_kept()
        await prepare(broker, XID, "x", "y", consume=2)
    for _ in range(2):
        # Before any link attaches the retired messages are held, and so is the room of the posts.
        async with running(kept()) as broker:
            assert (await left(broker, "from"), await left(broker, "to")) == (["c"], [])
            assert broker.stats("from").acquired == 2
            assert broker.stats("to").bytes > 0
            assert XaSession(broker.host).recovered() == [XID]
            with pytest.raises(AmqpError, match="distributed transactions"):
                await broker.delete("to")
    async with running(store := kept()) as broker:
        session = XaSession(broker.host)
        assert session.now("prepare", XID) == "amqp:illegal-state"
        assert await session.ended(end, XID) is OK
        expected = (["c"], ["x", "y"]) if end == "commit" else (["a", "b", "c"], [])
        assert (await left(broker, "from"), await left(broker, "to")) == expected
        assert session.now("commit", XID) == NOT_FOUND
        assert broker.stats("from").acquired == 0
        assert nothing_stored(store)
    async with running(kept()) as broker:
        assert (await left(broker, "from"), await left(broker, "to")) == expected
        assert XaSession(broker.host).recovered() == []


@pytest.mark.req("R13")
async def test_work_that_is_not_prepared_does_not_survive(kept: Callable[[], Store]) -> None:
    async with running(kept()) as broker:
        put(broker, "a")
        await broker.host.wait_kept()
        session = XaSession(broker.host)
        session.branches.start(XID)
        session.consume("from")
        session.post("to", "new")
        session.branches.end(XID)
    async with running(kept()) as broker:
        assert (await left(broker, "from"), await left(broker, "to")) == (["a"], [])
        assert XaSession(broker.host).now("commit", XID) == NOT_FOUND


@pytest.mark.req("R13")
async def test_what_is_not_durable_is_lost_with_the_process_and_the_branch_is_not(
    kept: Callable[[], Store],
) -> None:
    async with running(kept()) as broker:
        put(broker, "gone", durable=False)
        session = XaSession(broker.host)
        session.branches.start(XID)
        session.consume("from")
        session.post("to", "lost", durable=False)
        session.post("to", "kept")
        session.branches.end(XID)
        assert await session.ended("prepare", XID) is OK
    async with running(kept()) as broker:
        session = XaSession(broker.host)
        assert session.recovered() == [XID]
        assert await session.ended("commit", XID) is OK
        assert (await left(broker, "from"), await left(broker, "to")) == ([], ["kept"])


@pytest.mark.req("R13")
async def test_an_empty_branch_survives_too(kept: Callable[[], Store]) -> None:
    async with running(kept()) as broker:
        session = XaSession(broker.host)
        session.branches.start(XID)
        session.branches.end(XID)
        assert await session.ended("prepare", XID) is OK
    async with running(kept()) as broker:
        session = XaSession(broker.host)
        assert session.recovered() == [XID]
        assert await session.ended("commit", XID) is OK
        assert session.recovered() == []


@pytest.mark.req("R13")
async def test_many_branches_return_in_their_order(kept: Callable[[], Store]) -> None:
    async with running(kept()) as broker:
        put(broker, *range(20))
        await broker.host.wait_kept()
        for number in range(20):
            await prepare(broker, xid_of(number), f"new-{number}")
    async with running(kept()) as broker:
        session = XaSession(broker.host)
        assert session.recovered() == [xid_of(number) for number in range(20)]
        for number in range(0, 20, 2):
            assert await session.ended("commit", xid_of(number)) is OK
        for number in range(1, 20, 2):
            assert await session.ended("roll_back", xid_of(number)) is OK
        assert await left(broker, "from") == list(range(1, 20, 2))
        assert await left(broker, "to") == [f"new-{number}" for number in range(0, 20, 2)]


@pytest.mark.req("R13")
async def test_a_branch_may_be_started_again_after_its_end(kept: Callable[[], Store]) -> None:
    async with running(kept()) as broker:
        put(broker, "a", "b")
        await broker.host.wait_kept()
        for _ in range(2):
            session = await prepare(broker)
            assert await session.ended("commit", XID) is OK
        assert (await left(broker, "from"), await left(broker, "to")) == ([], ["new", "new"])


@pytest.mark.req("R13")
async def test_posts_to_topics_and_logs_survive(kept: Callable[[], Store]) -> None:
    nodes = (Topic("news"), Log("log", partitions=2))
    durable: dict[str, Any] = {"name": "mine", "durable": 1}
    async with running(kept(), *nodes) as broker:
        async with client_of_broker(broker) as peer:
            kept_link = peer.receiver("news", credit=0, **durable)
            await kept_link.wait_attached()
            await kept_link.suspend()
        session = XaSession(broker.host)
        session.branches.start(XID)
        for address in ("news", "log", "log/partitions/1"):
            session.post(address, address)
        session.branches.end(XID)
        assert await session.ended("prepare", XID) is OK
    async with running(kept(), *nodes) as broker:
        log = broker.host.log("log")
        assert [each.next for each in log.partitions] == [0, 0]
        session = XaSession(broker.host)
        assert await session.ended("commit", XID) is OK
        assert log.partitions[1].next >= 1
        assert sum(each.next for each in log.partitions) == 2
        async with (
            client_of_broker(broker) as peer,
            peer.receiver("news", credit=5, **durable) as inbox,
        ):
            assert (await inbox.receive(within=5)).body == "news"


@asynccontextmanager
async def client_of_broker(broker: Broker) -> AsyncIterator[Any]:
    await broker.listen("memory://b")
    async with client_of(broker) as peer:
        yield peer


@pytest.mark.req("R13")
async def test_retirements_from_a_subscription_survive(kept: Callable[[], Store]) -> None:
    durable: dict[str, Any] = {"name": "mine", "durable": 1}

    async with (
        running(kept(), Topic("news")) as broker,
        client_of_broker(broker) as peer,
        peer.receiver("news", credit=0, **durable) as inbox,
    ):
        await inbox.wait_attached()
        put(broker, "a", "b", address="news")
        await broker.host.wait_kept()
        queue = next(iter(broker.host.space().get("news").termini)).queue
        assert queue is not None
        # Only links of its connection consume from it.
        work = broker.host.services.branches.open("", XID, "user").work
        assert work.restore_retirement(queue, 0, encode_composite(ACCEPTED))
        assert await XaSession(broker.host).ended("prepare", XID) is OK
        await inbox.suspend()
    async with running(kept(), Topic("news")) as broker, client_of_broker(broker) as peer:
        assert await XaSession(broker.host).ended("commit", XID) is OK
        async with peer.receiver("news", credit=5, **durable) as inbox:
            assert (await inbox.receive(within=5)).body == "b"


@pytest.mark.req("R13")
async def test_a_retired_message_that_was_paged_out_is_held_again(
    kept: Callable[[], Store],
) -> None:
    small = Limits(queue_memory_messages_max=4)
    async with running(kept(), limits=small) as broker:
        put(broker, *range(100))
        await broker.host.wait_kept()
        session = XaSession(broker.host)
        session.branches.start(XID)
        for _ in range(60):
            with trio.fail_after(10):
                while (delivery := session.take("from")) is None:  # noqa: ASYNC110 - the queue reads
                    await trio.sleep(0.01)
            session.accept(delivery)
        session.branches.end(XID)
        assert await session.ended("prepare", XID) is OK
    async with running(kept(), limits=small) as broker:
        session = XaSession(broker.host)
        stats = broker.stats("from")
        assert (stats.available, stats.acquired) == (40, 60)
        assert await session.ended("roll_back", XID) is OK
        assert await left(broker, "from") == list(range(100))


@pytest.mark.req("R13")
async def test_duplicates_of_posts_are_dropped_at_the_commit(kept: Callable[[], Store]) -> None:
    nodes = (Queue("to", duplicate_window_s=1_000),)
    async with running(kept(), *nodes) as broker:
        session = XaSession(broker.host)
        session.branches.start(XID)
        session.post("to", "in the branch", message_id="one")
        session.post("to", "other", message_id="two")
        session.branches.end(XID)
        assert await session.ended("prepare", XID) is OK
    async with running(kept(), *nodes) as broker:
        session = XaSession(broker.host)
        session.post("to", "outside", message_id="one")
        # The first message with this id is still being stored.
        assert await session.ended("commit", XID) is OK
        assert await left(broker, "to") == ["outside", "other"]
        assert broker.stats("to").acquired == 0


@pytest.mark.req("R13")
async def test_a_duplicate_that_begins_to_be_written_while_a_topic_examines_a_post_is_waited_for() -> (
    None
):
    nodes = (Queue("to", duplicate_window_s=1_000), Topic("news"))
    async with running(MemoryStore(), *nodes) as broker, client_of_broker(broker) as peer:
        durable: dict[str, Any] = {"name": "mine", "durable": 1, "selector": "true = true"}
        inbox = peer.receiver("news", credit=5, **durable)
        await inbox.wait_attached()
        session = XaSession(broker.host)
        session.branches.start(XID)
        session.post("to", "in the branch", message_id="one")
        session.post("news", "published")
        session.branches.end(XID)
        assert await session.ended("prepare", XID) is OK
        answers: list[Any] = []
        # The filter of the subscription has to wait for the next turn.
        broker.host.memory.work = 0
        session.branches.commit(XID, answers.append)
        session.post("to", "outside", message_id="one")
        assert not answers
        with trio.fail_after(20):
            while not answers:
                await trio.lowlevel.checkpoint()
        assert answers == [OK]
        assert await left(broker, "to") == ["outside"]
        assert (await inbox.receive(within=5)).body == "published"
        assert session.recovered() == []


# --- Decisions of operators ---


async def decide(broker: Broker, *, commit: bool) -> XaStatus | AmqpError:
    branch = broker.host.services.branches.find("", XID)
    assert branch is not None
    answers: list[Any] = []
    decided = trio.Event()

    def done(answer: Any) -> None:
        answers.append(answer)
        decided.set()

    BranchEndings(broker.host.services.branches).decide(branch, commit=commit, done=done)
    await decided.wait()
    found: XaStatus | AmqpError = answers[0]
    return found


@pytest.mark.req("R13")
@pytest.mark.parametrize("commit", [True, False])
async def test_a_decision_of_an_operator_survives(kept: Callable[[], Store], commit: bool) -> None:
    status = XaStatus.HEURISTIC_COMMIT if commit else XaStatus.HEURISTIC_ROLLBACK
    expected = ([], ["new"]) if commit else (["a"], [])
    async with running(kept()) as broker:
        put(broker, "a")
        await broker.host.wait_kept()
        session = await prepare(broker)
        assert await decide(broker, commit=commit) is status
        assert (await left(broker, "from"), await left(broker, "to")) == expected
        assert await session.ended("commit", XID) is status
    async with running(store := kept()) as broker:
        session = XaSession(broker.host)
        assert session.recovered() == [XID]
        assert await session.ended("roll_back", XID) is status
        assert (await left(broker, "from"), await left(broker, "to")) == expected
        assert await session.ended("forget", XID) is OK
        assert nothing_stored(store)
    async with running(kept()) as broker:
        assert XaSession(broker.host).recovered() == []


# --- A store that refuses, or is slow ---


@pytest.mark.req("R13")
async def test_a_branch_that_cannot_be_kept_is_rolled_back() -> None:
    stalls = Stalls()
    async with running(MemoryStore(), executor=stalls) as broker:
        put(broker, "a")
        await broker.host.wait_kept()
        session = XaSession(broker.host)
        session.branches.start(XID)
        session.consume("from")
        session.post("to", "new")
        session.branches.end(XID)
        for _ in range(2):
            stalls.at("commit", error=StoreFull("the disk is full")).released.set()
        assert await session.ended("prepare", XID) is RB
        assert (await left(broker, "from"), await left(broker, "to")) == (["a"], [])
        assert broker.stats("to").bytes == 0
        assert session.now("roll_back", XID) is OK


@pytest.mark.req("R13")
@pytest.mark.parametrize("end", ["commit", "roll_back"])
@pytest.mark.parametrize("restarted", [False, True])
async def test_an_end_that_cannot_be_kept_leaves_the_branch_prepared(
    end: str, restarted: bool
) -> None:
    store = MemoryStore()
    if restarted:
        async with running(store) as broker:
            put(broker, "a")
            await broker.host.wait_kept()
            await prepare(broker, XID, "x", "y")
    stalls = Stalls()
    async with running(store, executor=stalls) as broker:
        if not restarted:
            put(broker, "a")
            await broker.host.wait_kept()
            await prepare(broker, XID, "x", "y")
        session = XaSession(broker.host)
        before = broker.stats("to").bytes
        for _ in range(3):
            for _ in range(2):
                stalls.at("commit", error=StoreFull("the disk is full")).released.set()
            assert await session.ended(end, XID) == "amqp:resource-limit-exceeded"
            assert session.recovered() == [XID]
            assert (await left(broker, "from"), await left(broker, "to")) == ([], [])
            assert broker.stats("to").bytes == before > 0
        assert await session.ended(end, XID) is OK
        expected = ([], ["x", "y"]) if end == "commit" else (["a"], [])
        assert (await left(broker, "from"), await left(broker, "to")) == expected
        if end == "roll_back":
            assert broker.stats("to").bytes == 0
        else:
            assert session.consume("to") == "x"
            assert session.consume("to") == "y"
            assert broker.stats("to").bytes == 0


@pytest.mark.req("R13")
@pytest.mark.parametrize("second", ["commit", "roll_back", "prepare", "forget"])
@pytest.mark.parametrize("first", ["prepare", "commit", "roll_back"])
async def test_a_request_waits_for_the_one_that_is_being_stored(first: str, second: str) -> None:
    """A coordinator that has lost its connection asks again on another one."""
    stalls = Stalls()
    async with running(MemoryStore(), executor=stalls) as broker:
        put(broker, "a")
        await broker.host.wait_kept()
        session = XaSession(broker.host)
        session.branches.start(XID)
        session.consume("from")
        session.post("to", "new")
        session.branches.end(XID)
        if first != "prepare":
            assert await session.ended("prepare", XID) is OK
        answers: dict[str, Any] = {}
        stall = stalls.at("commit")
        getattr(session.branches, first)(XID, lambda answer: answers.setdefault("first", answer))
        other = XaSession(broker.host)
        recovered: list[list[Xid]] = []
        async with stall:
            getattr(other.branches, second)(
                XID, lambda answer: answers.setdefault("second", answer)
            )
            other.branches.recover(recovered.append)
            await trio.testing.wait_all_tasks_blocked()
            assert not answers
            assert not recovered
            # The session that asked first has gone meanwhile.
            session.close()
        await broker.host.wait_kept()
        await trio.testing.wait_all_tasks_blocked()
        await broker.host.wait_kept()
        answer = answers["second"]
        condition = answer.condition if isinstance(answer, AmqpError) else answer
        if first != "prepare":
            assert condition == NOT_FOUND
        else:
            assert condition == (OK if second in {"commit", "roll_back"} else "amqp:illegal-state")
        assert answers["first"] is OK
        committed = first == "commit" or (first, second) == ("prepare", "commit")
        undone = first == "roll_back" or (first, second) == ("prepare", "roll_back")
        assert await left(broker, "to") == (["new"] if committed else [])
        assert await left(broker, "from") == (["a"] if undone else [])
        assert len(recovered) == 1


@pytest.mark.req("R13")
async def test_of_a_store_that_is_given_up_nothing_is_claimed() -> None:
    class Failing(MemoryStore):
        broken = False

        def commit(self, batch: Any) -> None:
            if self.broken:
                raise OSError("the disk is gone")
            super().commit(batch)

    store = Failing()
    async with running(store) as broker:
        put(broker, "a")
        await broker.host.wait_kept()
        await prepare(broker)
        session = XaSession(broker.host)
        store.broken = True
        assert await session.ended("commit", XID) is XaStatus.HEURISTIC_HAZARD
        assert await session.ended("commit", XID) is XaStatus.HEURISTIC_HAZARD
        store.broken = False
    async with running(store) as broker:
        # The store tells: it was not.
        assert XaSession(broker.host).recovered() == [XID]


@pytest.mark.req("R13")
@pytest.mark.parametrize("stored", [False, True])
async def test_a_prepare_in_a_store_that_is_given_up_is_in_doubt_until_the_restart(
    stored: bool,
) -> None:
    """Nothing can be written any more, not even a rollback: the next start reads what there is."""

    class Failing(MemoryStore):
        broken = False

        def commit(self, batch: Any) -> None:
            if not self.broken:
                super().commit(batch)
                return
            if stored:
                super().commit(batch)
            raise OSError("the disk is gone")

    store = Failing()
    async with running(store) as broker:
        put(broker, "a")
        await broker.host.wait_kept()
        session = XaSession(broker.host)
        session.branches.start(XID)
        session.consume("from")
        session.post("to", "new")
        session.branches.end(XID)
        store.broken = True
        assert await session.ended("prepare", XID) not in {OK, RB}
        for operation in ("prepare", "commit", "roll_back"):
            answer = await session.ended(operation, XID)
            assert answer in {XaStatus.HEURISTIC_HAZARD, "amqp:illegal-state"}, operation
        assert session.recovered() == [XID]
        store.broken = False
    async with running(store) as broker:
        session = XaSession(broker.host)
        assert session.recovered() == ([XID] if stored else [])
        if stored:
            assert await session.ended("commit", XID) is OK
        expected = ([], ["new"]) if stored else (["a"], [])
        assert (await left(broker, "from"), await left(broker, "to")) == expected


# --- Crashes ---


@pytest.mark.req("R13")
@pytest.mark.parametrize("end", ["commit", "roll_back"])
async def test_after_a_crash_at_any_commit_of_the_store_a_branch_is_whole(end: str) -> None:
    store = Photographed()
    states: list[tuple[str, MemoryStore]] = []
    async with running(store) as broker:
        put(broker, "a", "b")
        await broker.host.wait_kept()
        store.copies.clear()
        session = XaSession(broker.host)
        session.branches.start(XID)
        session.consume("from")
        session.post("to", "new")
        session.branches.end(XID)
        await broker.host.wait_kept()
        states += [("before", copy) for copy in store.copies]
        store.copies = []
        assert await session.ended("prepare", XID) is OK
        assert len(store.copies) == 1, "prepare is one unit"
        states += [("prepared", copy) for copy in store.copies]
        store.copies = []
        assert await session.ended(end, XID) is OK
        # So is the end: the first copy has all of it. A message that returns may have been updated since.
        assert 1 <= len(store.copies) <= (1 if end == "commit" else 2)
        states += [("ended", copy) for copy in store.copies]
    for state, copy in states:
        async with running(copy) as broker:
            session = XaSession(broker.host)
            assert session.recovered() == ([XID] if state == "prepared" else [])
            found = (await left(broker, "from"), await left(broker, "to"))
            if state == "before":
                assert found == (["a", "b"], [])
            elif state == "prepared":
                assert found == (["b"], [])
                assert await session.ended(end, XID) is OK
                found = (await left(broker, "from"), await left(broker, "to"))
            if state != "before":
                assert found == ((["b"], ["new"]) if end == "commit" else (["a", "b"], []))


@pytest.mark.req("R13")
async def test_a_store_without_branches_has_no_trace_of_them(tmp_path: Path) -> None:
    path = tmp_path / "broker.db"
    async with running(SQLiteStore(path)) as broker:
        put(broker, "a")
        session = XaSession(broker.host)
        session.work(XID, "b")
        assert await session.ended("commit", XID, one_phase=True) is OK
        numbers = broker.host.services.number
    store = SQLiteStore(path)
    store.open()
    assert store.facts("dtx-branch") == []
    assert numbers == 3
    store.close()
