"""Transactions of clients with a broker at the other end of a mesh, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from meshed import Members, client, members, until
from trio.testing import MockClock

from amqp_rt import Connection, Sender, Transaction
from amqp_rt.broker import Queue
from amqp_rt.errors import (
    ConnectionLost,
    DeliveryNotAccepted,
    LinkDetached,
    LinkRefused,
    TransactionRolledBack,
)
from amqp_rt.mesh import MeshRule
from amqp_rt.net.memory import MemoryNetwork

pytestmark = pytest.mark.req("P5")

LINKS = [MeshRule("orders*", route="link")]


@asynccontextmanager
async def brokered(
    network: MemoryNetwork, rules: Any = LINKS
) -> AsyncIterator[tuple[Members, Connection]]:
    """Connect A with C, which has a broker, over B; and a client with A."""
    async with members(network) as made:
        await made.start("A", rules=rules)
        await made.start("B", "A", rules=rules)
        await made.start("C", "B", rules=rules, broker={"volatile": True})
        await made.brokers["C"].declare(Queue("orders"), Queue("orders/done"))
        await made.meshes["A"].reachable("orders/done")
        await made.meshes["A"].reachable("$coordinator")
        async with client(made.urls["A"], network=network) as peer:
            yield made, peer


def held(made: Members, name: str) -> int:
    stats = made.brokers["C"].stats(name)
    return stats.available + stats.acquired


async def test_a_transaction_commits_and_rolls_back_posts_and_outcomes(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with brokered(network) as (made, peer), peer.sender("orders/done") as out:
        async with peer.sender("orders") as first:
            for number in range(3):
                await first.send(str(number))
        async with peer.receiver("orders", credit=3) as source:
            deliveries = [await source.receive() for _ in range(3)]
            async with peer.transaction() as txn:
                await out.send("done", transaction=txn)
                deliveries[0].accept(transaction=txn)
                assert held(made, "orders/done") == 0
            assert (held(made, "orders"), held(made, "orders/done")) == (2, 1)
            txn = await peer.transaction().__aenter__()
            await out.send("lost", transaction=txn)
            deliveries[1].accept(transaction=txn)
            await txn.__aexit__(ZeroDivisionError, ZeroDivisionError(), None)
            await trio.sleep(1)
            assert (held(made, "orders"), held(made, "orders/done")) == (2, 1)
            deliveries[1].release()
            deliveries[2].accept()
        await until(lambda: held(made, "orders") == 1)


async def told(out: Sender, transaction: Transaction) -> str | None:
    """Return the condition with which a node ends the link of a message of a transaction that it does not know."""
    with pytest.raises(DeliveryNotAccepted):
        await out.send("x", transaction=transaction)
    with pytest.raises(LinkDetached) as ended:
        await out.send("x")
    return ended.value.condition


async def test_no_other_client_can_use_a_transaction(autojump_clock: MockClock) -> None:
    """The ids of a broker are consecutive; the second client shares all connections of the nodes with the first."""
    network = MemoryNetwork()
    async with (
        brokered(network) as (made, peer),
        client(made.urls["A"], "other", network=network) as other,
        client(made.urls["B"], "third", network=network) as third,
        peer.sender("orders") as out,
        peer.transaction() as txn,
    ):
        await out.send("mine", transaction=txn)
        for each in (other, third):
            async with each.sender("orders") as guessing:
                own = await each.transaction().__aenter__()
                assert own._id != txn._id
                own._id = txn._id
                assert await told(guessing, own) == "amqp:transaction:unknown-id"
                with pytest.raises(TransactionRolledBack):
                    await own.__aexit__(None, None, None)
        assert held(made, "orders") == 0
    assert held(made, "orders") == 1


async def test_sessions_of_a_client_can_share_a_transaction(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with brokered(network) as (made, peer), peer.session() as another:
        async with (
            another.sender("orders") as out,
            peer.sender("orders/done") as mine,
            peer.transaction() as txn,
        ):
            await out.send("there", transaction=txn)
            await mine.send("here", transaction=txn)
            assert held(made, "orders") == held(made, "orders/done") == 0
        await until(lambda: held(made, "orders") == held(made, "orders/done") == 1)


@pytest.mark.parametrize("killed", ["A", "B", "C"])
async def test_a_transaction_ends_with_each_node_of_its_path(
    killed: str, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork()
    async with brokered(network) as (made, peer):
        out = await peer.sender("orders").__aenter__()
        txn = await peer.transaction().__aenter__()
        await out.send("lost", transaction=txn)
        made.kill[killed]()
        await trio.sleep(0.1)
        with pytest.raises((LinkDetached, ConnectionLost, TransactionRolledBack)):
            await txn.__aexit__(None, None, None)
        assert txn._over
        if killed != "C":
            transactions = made.brokers["C"].host.transactions
            await until(lambda: not len(transactions))
            assert held(made, "orders") == 0
            await until(lambda: not len(made.meshes["C"]._host._clients))


async def test_the_coordinator_is_where_the_links_of_the_session_are(
    autojump_clock: MockClock,
) -> None:
    """C is nearer than D, and both have the queue "both"."""
    network = MemoryNetwork()
    rules = [MeshRule("orders*", route="link"), MeshRule("far", route="link")]
    async with brokered(network, rules) as (made, peer):
        await made.start("D", "C", rules=rules, broker={"volatile": True})
        await made.brokers["D"].declare(Queue("far"), Queue("both"))
        await made.brokers["C"].declare(Queue("both"))
        await until(lambda: len(made.meshes["A"].instances("both")) == 2)
        await made.meshes["A"].reachable("far")

        def both() -> list[int]:
            return [made.brokers[name].stats("both").available for name in ("C", "D")]

        async with peer.session() as one, one.sender("far") as far, one.transaction() as txn:
            await far.send("x", transaction=txn)
            async with one.sender("both") as out:
                await out.send("x", transaction=txn)
        assert both() == [0, 1]
        # Without other links, it is the nearest one, and further links go there too.
        async with peer.session() as two:
            for _ in range(5):
                async with two.transaction() as txn, two.sender("both") as out:
                    await out.send("x", transaction=txn)
            assert both() == [5, 1]
            # The far queue is at another node, which does not know the transaction.
            async with two.sender("far") as far:
                txn = await two.transaction().__aenter__()
                assert await told(far, txn) == "amqp:transaction:unknown-id"
                with pytest.raises(TransactionRolledBack):
                    await txn.__aexit__(None, None, None)


async def test_rules_say_which_nodes_coordinate(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    rules = [MeshRule("$coordinator", nodes=("D",)), MeshRule("*", route="link")]
    async with members(network) as made:
        await made.start("A", rules=rules)
        await made.start("C", "A", rules=rules, broker={"volatile": True})
        await made.start("D", "C", rules=rules, broker={"volatile": True})
        await made.brokers["D"].declare(Queue("far"))
        await made.meshes["A"].reachable("far")
        assert [each.node for each in made.meshes["A"].instances("$coordinator")] == ["D"]
        async with client(made.urls["A"], network=network) as peer, peer.transaction() as txn:
            assert len(made.brokers["D"].host.transactions) == 1
            async with peer.sender("far") as out:
                await out.send("x", transaction=txn)
        assert made.brokers["D"].stats("far").available == 1


async def test_a_nodes_own_broker_coordinates_for_its_clients(autojump_clock: MockClock) -> None:
    """Both brokers have the queue: without the transaction, messages would be balanced between them."""
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A", broker={"volatile": True})
        await made.start("B", "A", broker={"volatile": True})
        for name in ("A", "B"):
            await made.brokers[name].declare(Queue("both"))
        await until(lambda: len(made.meshes["A"].instances("both")) == 2)
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.transaction() as txn,
            peer.sender("both") as out,
        ):
            for _ in range(20):
                await out.send("x", transaction=txn)
        await until(lambda: made.brokers["A"].stats("both").available == 20)


async def test_without_a_coordinator_there_are_no_transactions(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with members(network) as made:
        await made.start("A")
        await made.start("B", "A")
        async with client(made.urls["A"], network=network) as peer:
            since = trio.current_time()
            with pytest.raises(LinkRefused) as refused:
                async with peer.transaction():
                    pass
            assert refused.value.condition == "amqp:not-implemented"
            assert trio.current_time() - since == pytest.approx(2, abs=0.1)


@pytest.mark.req("P4")
async def test_clients_of_an_edge_have_links_and_transactions_of_their_own(
    autojump_clock: MockClock,
) -> None:
    """Their links have the same names, and pass over one connection of the edge."""
    network = MemoryNetwork()
    async with brokered(network) as (made, _):
        await made.start("E", "A", role="edge")
        await made.meshes["E"].wait_ready()
        async with (
            client(made.urls["E"], "one", network=network) as one,
            client(made.urls["E"], "two", network=network) as two,
            one.sender("orders", name="out") as out,
            two.sender("orders", name="out") as other,
        ):
            for number in range(4):
                await out.send(str(number))
                await other.send(str(number))
            async with (
                one.receiver("orders", name="in", credit=2) as source,
                two.receiver("orders", name="in", credit=2) as beside,
                one.sender("orders/done", name="done") as done,
                two.sender("orders/done", name="done") as beside_done,
                one.transaction() as mine,
                two.transaction() as theirs,
            ):
                (await source.receive()).accept(transaction=mine)
                await done.send("1", transaction=mine)
                (await beside.receive()).accept(transaction=theirs)
                await beside_done.send("2", transaction=theirs)
                assert held(made, "orders/done") == 0
            assert (held(made, "orders"), held(made, "orders/done")) == (6, 2)
            async with one.sender("orders") as held_open, one.transaction() as txn:
                await held_open.send("mine", transaction=txn)
                async with two.sender("orders") as guessing:
                    own = await two.transaction().__aenter__()
                    own._id = txn._id
                    assert await told(guessing, own) == "amqp:transaction:unknown-id"
                    with pytest.raises(TransactionRolledBack):
                        await own.__aexit__(None, None, None)
            assert held(made, "orders") == 7
