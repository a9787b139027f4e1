"""Publishing by epochs: the parts that count are published once, despite failures before."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from brokers import commit_epoch, committed_epoch
from crashed import Photographed
from paged import Gate, in_line

from amqp_rt import Broker, Connection, Message
from amqp_rt.broker import Log, Queue, Topic
from amqp_rt.broker.durable import facts
from amqp_rt.broker.nodes import Declaration
from amqp_rt.broker.staging.attempts import (
    ATTEMPT,
    COMMITTED,
    EPOCH,
    EPOCH_PUBLISH,
    PART,
    PRODUCER,
    PUBLISHED,
    RESUMES,
    RUN,
    WRITE,
    Part,
)
from amqp_rt.broker.staging.epochs import DIFFERENT
from amqp_rt.errors import (
    AmqpError,
    CallFailed,
    DeliveryRejected,
    LinkDetached,
    LinkRefused,
)
from amqp_rt.limits import Limits
from amqp_rt.stores.base import ChangeSet, Store, StoreFailed, StoreFull
from amqp_rt.stores.memory import MemoryStore
from amqp_rt.stores.sqlite import SQLiteStore
from amqp_rt.values import Described, Symbol

pytestmark = pytest.mark.req("K3")


def claim(
    epoch: int = 0, part: int = 0, attempt: int = 0, run: str = "one", write: str = ""
) -> dict[Any, Any]:
    found = {PRODUCER: "job", RUN: run, EPOCH: epoch, PART: part, ATTEMPT: attempt}
    return {**found, WRITE: write} if write else found


async def stage(
    peer: Connection,
    bodies: Sequence[Any],
    *,
    address: str = "out",
    durable: bool = False,
    **said: Any,
) -> Part:
    """Stage *bodies*; return the part for their commit."""
    claimed = claim(**said)
    crc = 0
    async with peer.sender(address, properties=claimed) as out:
        for body in bodies:
            message = Message(body, durable=durable)
            crc = zlib.crc32(message.encode(), crc)
            await out.send(message)
    return Part(claimed[PART], claimed[ATTEMPT], len(bodies), crc)


async def ask(peer: Connection, operation: str, body: Any = None, **given: Any) -> Any:
    """Return the answer to a request, or the condition of its refusal."""
    asked = Message(
        body, body_kind="value", application_properties={"operation": operation, **given}
    )
    try:
        reply = await peer.call("out/$management", asked, reply=Message, within=60)
    except CallFailed as error:
        return error.condition
    return reply.body


async def commit(
    peer: Connection, parts: Sequence[Part], epoch: int = 0, run: str = "one", **identity: Any
) -> Any:
    """Commit; return whether messages were published, or the condition of the refusal."""
    body = {
        "producer": "job",
        "run": run,
        "epoch": epoch,
        "parts": [[each.part, each.attempt, each.count, each.crc] for each in parts],
        **identity,
    }
    answer = await ask(peer, "COMMIT-EPOCH", body)
    return answer["published"] if isinstance(answer, dict) else answer


async def bodies(broker: Broker, address: str = "out") -> list[Any]:
    return [Message.decode(each).body for each in await broker.peek(address, 10_000)]


async def test_an_epoch_is_published_once_and_in_order(
    kept_or_not: Callable[[], Store | None],
) -> None:
    async with Broker(store=kept_or_not()) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        second = await stage(peer, ["c", "d"], part=1)
        first = await stage(peer, ["a", "b"], part=0)
        # An attempt that failed half-way, and was repeated.
        await stage(peer, ["a"], part=0, attempt=7)
        assert await bodies(broker) == []
        assert await commit(peer, [first, second]) is True
        assert await bodies(broker) == ["a", "b", "c", "d"]
        assert await commit(peer, [first, second]) is False
        # Other attempts with the same content, in another order.
        again = [await stage(peer, ["c", "d"], part=1, attempt=9), first]
        assert await commit(peer, again, run="one") is False
        # A producer that learned from its link that the epoch is committed, and sent nothing.
        assert await commit(peer, [], run="two") is False
        assert await commit(peer, [Part(0, 1, 0, 0)], run="two") is False
        again = [await stage(peer, ["c", "d"], part=1, run="two"), first]
        assert await commit(peer, again, run="two") is False
        fewer = await stage(peer, ["a", "b"], run="two")
        assert await commit(peer, [fewer], run="two") == DIFFERENT
        assert await bodies(broker) == ["a", "b", "c", "d"]
        later = await stage(peer, ["e"], epoch=5, run="two")
        assert await commit(peer, [later], epoch=5, run="two") is True
        assert await commit(peer, [], epoch=6, run="two") is True
        assert await commit(peer, [later], epoch=5, run="two") == DIFFERENT
        assert await bodies(broker) == ["a", "b", "c", "d", "e"]
        assert broker.host.staging.area.bytes == 0
        assert await ask(peer, "EPOCH", producer="job") == {"epoch": 6, "query": ""}


@pytest.mark.parametrize(
    ("identity", "answer"),
    [
        ({"query": "q", "plan": "p", "content": "c"}, False),
        # Messages that differ each time they are made, with the range planned before.
        ({"query": "q", "plan": "p", "content": "another"}, False),
        # A range that was planned again, or is unknown, with the same messages.
        ({"query": "q", "plan": "wider", "content": "c"}, False),
        ({"query": "q", "content": "c"}, False),
        ({"query": "q", "plan": "wider", "content": "another"}, DIFFERENT),
        ({"query": "q", "content": "another"}, DIFFERENT),
        # Another query, with a checkpoint of its own.
        ({"query": "other", "plan": "p", "content": "c"}, DIFFERENT),
        ({"content": "c"}, DIFFERENT),
        ({"query": "other", "plan": "p", "content": "c", "skip_different": True}, False),
    ],
)
async def test_an_epoch_is_known_by_what_it_held(
    kept_or_not: Callable[[], Store | None], identity: dict[str, Any], answer: Any
) -> None:
    store = kept_or_not()
    async with Broker(store=store, volatile=True) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        part = await stage(peer, ["a"], durable=True, write="w1")
        first = {"write": "w1", "query": "q", "plan": "p", "content": "c"}
        assert await commit(peer, [part], **first) is True
        # The answer was lost, and the same request is repeated.
        assert await commit(peer, [part], write="w1", content="whatever") is False
        async with peer.sender("out", properties=claim(run="two", write="w2")) as out:
            assert out.link.properties[PUBLISHED] is True
        assert await commit(peer, [], run="two", write="w2", **identity) == answer
        # Refused writes have changed nothing, and skipped ones are recognized from then on.
        again = identity if answer is False else first
        identified = {key: again[key] for key in again if key != "skip_different"}
        assert await commit(peer, [], run="three", **{**identified, "write": "w3"}) is False
        assert await ask(peer, "EPOCH", producer="job") == {
            "epoch": 0,
            "query": identified.get("query", ""),
        }
        assert await bodies(broker) == ["a"]
        assert broker.host.staging.area.bytes == 0


async def test_an_epoch_has_several_writes(tmp_path: Path) -> None:
    def store() -> Store:
        return SQLiteStore(tmp_path / "broker.db")

    async def write(peer: Connection, run: str, number: int, body: str, content: str) -> Any:
        name = f"{run} {number}"
        said = claim(run=run, write=name, attempt=number)
        async with peer.sender("out", properties=said) as out:
            there = bool(out.link.properties[PUBLISHED])
        part = Part(0, number, 0, 0)
        if not there:
            part = await stage(peer, [body], durable=True, run=run, write=name, attempt=number)
        done = await commit(peer, [part], run=run, write=name, query="q", content=content)
        assert done is (not there) or done == DIFFERENT
        return done

    async with Broker(store=store()) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        # The second is staged while the first is committed.
        second = await stage(peer, ["b"], durable=True, write="one 2", attempt=2)
        assert await write(peer, "one", 1, "a", "A")
        assert await commit(peer, [second], write="one 2", query="q", content="B") is True
    async with Broker(store=store()) as broker, broker.local() as peer:
        assert await write(peer, "one", 3, "b", "B") is True
        assert await bodies(broker) == ["a", "b", "b"]
        # The driver starts again: two writes are repeated, with a restart of the broker in between.
        assert await write(peer, "two", 1, "a", "A") is False
    async with Broker(store=store()) as broker, broker.local() as peer:
        assert await write(peer, "two", 2, "x", "X") == DIFFERENT
        assert await write(peer, "two", 2, "b", "B") is False
        assert await write(peer, "two", 3, "b", "B") is False
        assert await write(peer, "two", 4, "c", "C") is True
        assert await bodies(broker) == ["a", "b", "b", "c"]
        assert broker.host.staging.area.bytes == 0


async def test_what_was_committed_before_identities_were_kept_is_skipped() -> None:
    store = MemoryStore()
    async with Broker(store=store, executor=in_line) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        assert await commit(peer, [await stage(peer, ["a"], durable=True)])
        await broker.host.wait_kept()
        ((key, known),) = store.facts(facts.PRODUCERS.name)
        older = ChangeSet()
        *fields, _writes = msgspec.msgpack.decode(known)
        older.facts[facts.PRODUCERS.name, key] = msgspec.msgpack.encode(fields)
        store.commit(older)
    async with Broker(store=store, executor=in_line) as broker, broker.local() as peer:
        assert await ask(peer, "EPOCH", producer="job") == {"epoch": 0, "query": ""}
        given = {"write": "w", "query": "q", "content": "c"}
        assert await commit(peer, [], run="two", **given) is False
        assert await commit(peer, [], run="three", **{**given, "content": "d"}) == DIFFERENT
        assert await bodies(broker) == ["a"]


async def test_the_link_hears_what_has_been_committed() -> None:
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        for epoch, known in ((3, -1), (4, 3)):
            async with peer.sender("out", properties=claim(epoch)) as out:
                assert out.link.properties[COMMITTED] == known
                assert EPOCH_PUBLISH in out.link.offered_capabilities
            assert await commit(peer, [Part(0, 0, 0, 0)], epoch)


@pytest.mark.parametrize("durable", [False, True])
async def test_what_is_staged_and_committed_outlives_the_broker(
    tmp_path: Path, durable: bool
) -> None:
    def store() -> Store:
        return SQLiteStore(tmp_path / "broker.db")

    async with Broker(store=store()) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        done = await stage(peer, ["first"], durable=True)
        assert await commit(peer, [done])
        staged = await stage(peer, ["a", "b"], epoch=1, durable=durable)
        held = broker.host.staging.area.bytes
    async with Broker(store=store()) as broker, broker.local() as peer:
        assert broker.host.staging.area.bytes == held
        assert await commit(peer, [done]) is False
        assert await commit(peer, [staged], epoch=1) is True
        assert await bodies(broker) == ["first", "a", "b"]
        assert broker.host.staging.area.bytes == 0
    async with Broker(store=store()) as broker, broker.local() as peer:
        # Messages that are not durable were published, and are in memory only from then on.
        assert await bodies(broker) == (["first", "a", "b"] if durable else ["first"])
        assert await commit(peer, [staged], epoch=1) is False


@pytest.mark.parametrize(
    "node", [Queue("out"), Queue("out", priorities=3), Log("out", partitions=2), Topic("out")]
)
async def test_epochs_go_to_every_kind_of_node(
    node: Declaration, kept_or_not: Callable[[], Store | None]
) -> None:
    async with Broker(store=kept_or_not(), volatile=True) as broker, broker.local() as peer:
        await broker.declare(node)
        begin = (
            {"filter": {"at": Described(Symbol("rabbitmq:stream-offset-spec"), "first")}}
            if isinstance(node, Log)
            else {}
        )
        async with peer.receiver("out", credit=100, **begin) as messages:
            part = await stage(peer, list(range(20)), durable=True)
            assert await messages.get() is None
            assert await commit(peer, [part])
            found = [(await messages.receive(within=5)).body for _ in range(20)]
        assert sorted(found) == list(range(20))
        if not isinstance(node, Log):
            assert found == list(range(20))


async def test_a_large_epoch_is_published_in_parts(tmp_path: Path) -> None:
    async with Broker(store=SQLiteStore(tmp_path / "broker.db")) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        claimed = claim()
        crc = 0
        async with peer.sender("out", properties=claimed, max_pending=2_500) as out:
            for number in range(2_500):
                message = Message(number, durable=True)
                crc = zlib.crc32(message.encode(), crc)
                out.send_nowait(message)
            await out.flush()
        assert await commit(peer, [Part(0, 0, 2_500, crc)])
        assert await bodies(broker) == list(range(2_500))


# --- Refusals --------------------------------------------------------------------------------


async def test_what_was_not_sent_is_not_committed(kept_or_not: Callable[[], Store | None]) -> None:
    async with Broker(store=kept_or_not()) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        part = await stage(peer, ["a", "b"])
        for wrong in (
            [Part(0, 0, 3, part.crc)],
            [Part(0, 0, 2, part.crc ^ 1)],
            [part, Part(1, 0, 0, 0)],
            [Part(0, 1, 2, part.crc)],
        ):
            assert await commit(peer, wrong) == "amqp:precondition-failed"
        assert await commit(peer, [part, part]) == "amqp:invalid-field"
        assert await bodies(broker) == []
        assert await commit(peer, [part]) is True


async def test_a_later_run_replaces_an_earlier_one(kept_or_not: Callable[[], Store | None]) -> None:
    async with Broker(store=kept_or_not()) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        async with peer.sender("out", properties=claim()) as zombie:
            await zombie.send("old")
            new = await stage(peer, ["new"], run="two")
            with pytest.raises(LinkDetached) as caught:
                await zombie.send("old")
            assert caught.value.condition == "amqp:link:stolen"
        with pytest.raises(LinkRefused) as refused:
            await stage(peer, ["old"])
        assert refused.value.condition == "amqp:link:stolen"
        assert await commit(peer, [new]) == "amqp:link:stolen"
        assert await commit(peer, [new], run="two") is True
        assert await bodies(broker) == ["new"]


@pytest.mark.parametrize(
    "wrong",
    [
        {EPOCH: -1},
        {EPOCH: "one"},
        {PART: None},
        {ATTEMPT: True},
        {RUN: ""},
        {PRODUCER: "x" * 257},
        {WRITE: "x" * 257},
        {WRITE: 1},
    ],
)
async def test_a_claim_has_to_be_whole(wrong: dict[Any, Any]) -> None:
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("out"), Log("log"))
        with pytest.raises(LinkRefused) as caught:
            async with peer.sender("out", properties={**claim(), **wrong}):
                pass
        assert caught.value.condition == "amqp:invalid-field"
        with pytest.raises(LinkRefused, match="not to one of its partitions"):
            await stage(peer, [], address="log/partitions/0")


async def test_producers_and_runs_have_names_of_1_to_256_characters() -> None:
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        for name in ("x", "x" * 256):
            async with peer.sender("out", properties={**claim(run=name), PRODUCER: name}) as out:
                await out.send("kept")


async def test_a_restart_drops_facts_without_a_node_and_restores_the_others() -> None:
    store = MemoryStore()
    async with Broker(store=store, executor=in_line) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        await commit(peer, [await stage(peer, [], durable=True)])
        part = await stage(peer, ["a"], epoch=1, durable=True)
        await broker.host.wait_kept()
        ((key, staged),) = store.facts(facts.STAGES.name)
        ((producer_key, produced),) = store.facts(facts.PRODUCERS.name)
        nowhere = ChangeSet()
        # Before and behind the others, in the order in which they are read; the earlier number was that
        # of the stage that is published.
        for number in (int.from_bytes(key, "big") - 1, 99):
            gone = number.to_bytes(len(key), "big")
            _, *known = msgspec.msgpack.decode(staged)
            nowhere.facts[facts.STAGES.name, gone] = msgspec.msgpack.encode([77, *known])
        for number in (0, 99):
            gone = number.to_bytes(len(key), "big")
            nowhere.facts[facts.PRODUCERS.name, gone + b"job"] = produced
        store.commit(nowhere)
    async with Broker(store=store, executor=in_line) as broker, broker.local() as peer:
        await broker.host.wait_kept()
        assert [found for found, _ in store.facts(facts.STAGES.name)] == [key]
        assert [found for found, _ in store.facts(facts.PRODUCERS.name)] == [producer_key]
        assert committed_epoch(broker.host, "out", "job") == 0
        assert await commit(peer, [part], epoch=1)
        assert await bodies(broker) == ["a"]


async def test_a_commit_that_makes_no_sense_is_refused() -> None:
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        assert await ask(peer, "COMMIT-EPOCH", {"producer": 1}) == "amqp:invalid-field"
        assert await ask(peer, "EPOCH") == "amqp:invalid-field"
        assert await ask(peer, "STAGE", {"producer": "job"}) == "amqp:invalid-field"


async def test_an_attempt_that_attaches_again_begins_anew() -> None:
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        async with peer.sender("out", properties=claim()) as lost:
            await lost.send("half")
            part = await stage(peer, ["whole"])
            with pytest.raises(LinkDetached) as caught:
                await lost.send("more")
            assert caught.value.condition == "amqp:link:stolen"
        assert await commit(peer, [part]) is True
        assert await bodies(broker) == ["whole"]


def resuming(**said: Any) -> dict[Any, Any]:
    return {**claim(**said), RESUMES: True}


async def staged(peer: Connection, **said: Any) -> Any:
    """Return the number of staged messages of an attempt, and their checksum; or the condition."""
    body = {str(key).removeprefix("amqp_rt:"): value for key, value in claim(**said).items()}
    answer = await ask(peer, "STAGE", body)
    return (answer["count"], answer["crc"]) if isinstance(answer, dict) else answer


def crc_of(*sent: Any, durable: bool = False) -> int:
    return zlib.crc32(b"".join(Message(each, durable=durable).encode() for each in sent))


async def test_a_link_goes_on_with_what_an_earlier_one_has_staged(
    kept_or_not: Callable[[], Store | None],
) -> None:
    async with Broker(store=kept_or_not()) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        assert await staged(peer) == "amqp:precondition-failed"
        await stage(peer, ["a", "b"])
        assert await staged(peer) == (2, crc_of("a", "b"))
        async with peer.sender("out", properties=resuming()) as out:
            await out.send("c")
        assert await staged(peer) == (3, crc_of("a", "b", "c"))
        assert await commit(peer, [Part(0, 0, 3, crc_of("a", "b", "c"))]) is True
        assert await bodies(broker) == ["a", "b", "c"]
        # An attempt that was not begun resumes with nothing.
        async with peer.sender("out", properties=resuming(epoch=1)):
            assert await staged(peer, epoch=1) == (0, 0)
        # An earlier run may neither resume nor ask.
        async with peer.sender("out", properties=resuming(epoch=1, run="two")):
            assert await staged(peer, epoch=1, run="one") == "amqp:link:stolen"


async def test_a_link_that_goes_on_ends_the_one_before() -> None:
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        async with peer.sender("out", properties=claim()) as lost:
            await lost.send("a")
            async with peer.sender("out", properties=resuming()) as out:
                with pytest.raises(LinkDetached) as caught:
                    await lost.send("lost")
                assert caught.value.condition == "amqp:link:stolen"
                await out.send("b")
                (kept,) = broker.host.staging.producers.stages
                assert kept.link is not None
        assert await commit(peer, [Part(0, 0, 2, crc_of("a", "b"))]) is True
        assert await bodies(broker) == ["a", "b"]


async def test_what_is_staged_is_gone_on_with_after_a_restart(tmp_path: Path) -> None:
    def store() -> Store:
        return SQLiteStore(tmp_path / "broker.db")

    async with Broker(store=store()) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        await stage(peer, ["a", "b"], durable=True)
    async with Broker(store=store()) as broker, broker.local() as peer:
        async with peer.sender("out", properties=resuming()) as out:
            assert await staged(peer) == (2, crc_of("a", "b", durable=True))
            await out.send("c", durable=True)
        found = crc_of("a", "b", "c", durable=True)
        assert await commit(peer, [Part(0, 0, 3, found)]) is True
        assert await bodies(broker) == ["a", "b", "c"]


async def test_what_is_being_written_is_counted_when_it_is_kept(tmp_path: Path) -> None:
    gate = Gate()
    async with Broker(store=MemoryStore(), executor=gate) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        found: list[Any] = []

        async def ask_for_it() -> None:
            found.append(await staged(peer))

        async with (
            peer.sender("out", properties=claim()) as out,
            trio.open_nursery() as nursery,
        ):
            gate.opened = trio.Event()
            out.send_nowait(Message("a", durable=True))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask_for_it)
            await trio.testing.wait_all_tasks_blocked()
            assert found == []
            gate.opened.set()
        assert found == [(1, crc_of("a", durable=True))]


# --- Room, time, and ends ------------------------------------------------------------------


async def test_there_is_a_bound_to_what_is_staged(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limits = Limits(staged_bytes_max=1_000, stages_max=2, epoch_producers_max=1, epoch_runs_max=2)
    async with Broker(limits=limits) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        async with peer.sender("out", properties=claim()) as out:
            # A message too large for the bound is refused; the next one waits for room, and is accepted.
            with pytest.raises(DeliveryRejected) as rejected:
                await out.send(bytes(1_001))
            assert rejected.value.condition == "amqp:resource-limit-exceeded"
            await out.send(bytes(900))
            assert out.link.credit == 0
            with trio.move_on_after(0.1) as waiting:
                await out.send(bytes(900))
            assert waiting.cancelled_caught
        await stage(peer, [], part=1)
        with pytest.raises(LinkRefused) as refused:
            await stage(peer, [], part=2)
        assert refused.value.condition == "amqp:resource-limit-exceeded"
        with pytest.raises(LinkRefused, match="1 producers"):
            async with peer.sender("out", properties={**claim(), PRODUCER: "other"}):
                pass
        # Of three runs the first is forgotten.
        for run in ("two", "three"):
            await stage(peer, [], run=run)
        with pytest.raises(LinkRefused):
            await stage(peer, [], run="two")
        assert broker.host.staging.area.bytes == 0
        await stage(peer, ["again"], run="one")


async def test_there_is_a_bound_to_what_is_said_of_epochs() -> None:
    limits = Limits(epoch_writes_max=2, epoch_plan_max=10)
    async with Broker(limits=limits) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        for name, most in (("write", 256), ("query", 256), ("content", 256), ("plan", 10)):
            assert await commit(peer, [], **{name: "x" * (most + 1)}) == "amqp:invalid-field"
        longest = {"write": "x" * 256, "query": "x" * 256, "content": "x" * 256, "plan": "x" * 10}
        assert await commit(peer, [], **longest) is True
        assert await commit(peer, [], write="second") is True
        assert await commit(peer, [], write="third") == "amqp:resource-limit-exceeded"
        assert await commit(peer, [], epoch=1, write="third") is True


@pytest.mark.slow
@pytest.mark.parametrize("size", [400, 1_000, 6_000])
async def test_who_stages_waits_for_room_and_is_not_refused(
    kept_or_not: Callable[[], Store | None], size: int
) -> None:
    """Two tasks send ten times the bytes that may be staged, while earlier epochs are published."""
    limits = Limits(staged_bytes_max=20_000)
    async with (
        Broker(store=kept_or_not(), limits=limits) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Queue("out"))
        count = 200_000 // size // 2
        most = 0

        async def send(name: str) -> None:
            """Send in epochs of a fifth of the room."""
            nonlocal most
            each = max(4_000 // size, 1)
            for epoch, first in enumerate(range(0, count, each)):
                sent = [
                    Message((name, n, bytes(size))) for n in range(first, min(first + each, count))
                ]
                claimed = {**claim(epoch), PRODUCER: name}
                async with peer.sender("out", properties=claimed) as out:
                    for message in sent:
                        await out.send(message)
                        most = max(most, broker.host.staging.area.bytes)
                crc = zlib.crc32(b"".join(message.encode() for message in sent))
                parts = [(0, 0, len(sent), crc)]
                assert await commit_epoch(broker.host, "out", name, "one", epoch, parts)

        for name in ("one", "two"):
            nursery.start_soon(send, name)
    assert most <= 20_000 + size + 200


async def test_who_waits_for_memory_goes_on_when_there_is_some() -> None:
    async with Broker() as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        memory = broker.host.memory
        taken = memory.limit
        memory.held += taken
        async with peer.sender("out", properties=claim()) as out:
            await trio.testing.wait_all_tasks_blocked()
            assert out.link.credit == 0
            memory.held -= taken
            memory.notify_waiting()
            await out.send("a")
            # A sender with credit may use it when memory becomes scarce, as long as there is some.
            memory.held += memory.limit - memory.held - 1_000
            await out.send("b")
            with pytest.raises(DeliveryRejected):
                await out.send(bytes(1_000))
            memory.held = 0
        assert await commit(peer, [Part(0, 0, 2, crc_of("a", "b"))]) is True


async def test_stages_without_a_commit_are_forgotten(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = MemoryStore()
    async with (
        Broker(store=store, executor=in_line, limits=Limits(stage_s=60)) as broker,
        broker.local() as peer,
    ):
        await broker.declare(Queue("out"))
        await stage(peer, ["a"], durable=True)
        async with peer.sender("out", properties=claim(part=1)) as out:
            await out.send("b")
            await trio.sleep(120)
            # An attached link keeps its stage from expiring.
            assert broker.host.staging.area.bytes > 0
        await trio.sleep(2)
        assert broker.host.staging.area.bytes == 0
        await broker.host.wait_kept()
        assert store.facts("epoch-stage") == []


async def test_a_node_takes_what_is_staged_along() -> None:
    store = MemoryStore()
    async with Broker(store=store) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        await stage(peer, ["a"], durable=True)
        async with peer.sender("out", properties=claim(part=1)) as out:
            await out.send("b")
            await broker.delete("out")
            with pytest.raises(LinkDetached) as caught:
                await out.send("c")
            assert caught.value.condition == "amqp:resource-deleted"
        assert broker.host.staging.area.bytes == 0
        await broker.host.wait_kept()
        assert store.facts("epoch-stage") == store.facts("epoch-producer") == []
        with pytest.raises(AmqpError, match="no node"):
            await commit_epoch(broker.host, "out", "job", "one", 0, [])


async def test_a_producer_that_was_silent_makes_room(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = MemoryStore()
    limits = Limits(epoch_producers_max=2, epoch_producer_s=100)

    async def publish(broker: Broker, peer: Any, producer: str, epoch: int) -> bool:
        return await commit_epoch(broker.host, "out", producer, "one", epoch, [])

    async with (
        Broker(store=store, executor=in_line, limits=limits) as broker,
        broker.local() as peer,
    ):
        await broker.declare(Queue("out"))
        assert await publish(broker, peer, "first", 5)
        await trio.sleep(60)
        assert await publish(broker, peer, "second", 5)
        with pytest.raises(AmqpError, match="2 producers"):
            await publish(broker, peer, "third", 0)
        await trio.sleep(60)
        # The second producer reaches that age in forty seconds only.
        assert await publish(broker, peer, "third", 0)
        assert not await publish(broker, peer, "second", 5)
        await broker.host.wait_kept()
    async with Broker(store=store, executor=in_line, limits=limits) as broker:
        assert committed_epoch(broker.host, "out", "second") == 5
        found = [key[4:] for key, _ in store.facts("epoch-producer")]
        assert sorted(found) == [b"second", b"third"]


class Unsteady(MemoryStore):
    """Disk that is full, or fails, from a moment chosen by the test."""

    full = fails = False

    def commit(self, batch: ChangeSet) -> None:
        if self.full and batch.puts:
            raise StoreFull("the disk is full")
        if self.fails:
            raise StoreFailed("the disk failed")
        super().commit(batch)


async def test_what_is_refused_after_its_node_has_gone_takes_no_room() -> None:
    gate, store = Gate(), Unsteady()
    async with Broker(store=store, executor=gate) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        async with peer.sender("out", properties=claim()) as out:
            await out.send("kept", durable=True)
            gate.opened = trio.Event()
            out.send_nowait("not kept", durable=True)
            with trio.move_on_after(0.05):
                await out.flush()
            store.full = True
            broker.host.space().delete("out")
            gate.opened.set()
            with pytest.raises(LinkDetached):
                await out.send("too late", durable=True)
        await broker.host.wait_kept()
        assert broker.host.staging.area.bytes == 0


async def test_nothing_is_said_of_what_may_have_been_kept() -> None:
    store = Unsteady()
    async with Broker(store=store) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        async with peer.sender("out", properties=claim()) as out:
            await out.send("kept", durable=True)
            store.fails = True
            # Neither accepted nor rejected.
            with pytest.raises(LinkDetached):
                await out.send("in doubt", durable=True)


class Limited(MemoryStore):
    """Disk on which no message can be put into a node for a while."""

    full = False

    def commit(self, batch: ChangeSet) -> None:
        if self.full and batch.puts and batch.removes:
            raise StoreFull("the disk is full")
        super().commit(batch)


async def test_what_is_committed_waits_for_room(autojump_clock: trio.testing.MockClock) -> None:
    store = Limited()
    async with (
        Broker(store=store, executor=in_line) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Queue("out"))
        part = await stage(peer, ["a", "b"], durable=True)
        store.full = True
        answers = []

        async def ask_for_it() -> None:
            answers.append(await commit(peer, [part]))

        nursery.start_soon(ask_for_it)
        await trio.sleep(3)
        assert await bodies(broker) == []
        # The epoch is decided: another commit changes nothing.
        store.full = False
        await trio.sleep(3)
        assert answers == [True]
        assert await bodies(broker) == ["a", "b"]


async def test_what_was_decided_is_published_after_a_restart(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = Limited()
    async with (
        Broker(store=store, executor=in_line) as broker,
        broker.local() as peer,
        trio.open_nursery() as nursery,
    ):
        await broker.declare(Queue("out"))
        parts = [await stage(peer, [part, part], part=part, durable=True) for part in range(3)]
        store.full = True
        nursery.start_soon(commit, peer, parts)
        await trio.sleep(3)
        assert await bodies(broker) == []
        nursery.cancel_scope.cancel()
    store.full = False
    async with Broker(store=store, executor=in_line) as broker, broker.local() as peer:
        await trio.sleep(3)
        assert await bodies(broker) == [0, 0, 1, 1, 2, 2]
        assert await commit(peer, parts) is False
        assert await bodies(broker) == [0, 0, 1, 1, 2, 2]
        await broker.host.wait_kept()
        assert store.facts("epoch-stage") == []


@pytest.mark.slow
async def test_a_crash_after_any_commit_loses_nothing_and_doubles_nothing() -> None:
    store = Photographed()
    expected = []
    async with Broker(store=store) as broker, broker.local() as peer:
        await broker.declare(Queue("out"))
        for epoch in range(2):
            parts = [
                await stage(peer, [(epoch, part)] * 2, epoch=epoch, part=part, durable=True)
                for part in range(2)
            ]
            assert await commit(peer, parts, epoch)
            expected += [[epoch, part] for part in range(2) for _ in range(2)]
    assert len(store.copies) > 10
    for crashed in store.copies:
        async with Broker(store=crashed) as broker, broker.local() as peer:
            await broker.declare(Queue("out"))
            # The writer does not know how far it came, and repeats everything in another order.
            for epoch in range(2):
                parts = [
                    await stage(
                        peer, [(epoch, part)] * 2, epoch=epoch, part=part, durable=True, run="two"
                    )
                    for part in (1, 0)
                ]
                await commit(peer, parts[::-1], epoch, run="two")
            assert await bodies(broker) == expected
            assert broker.host.staging.area.bytes == 0
