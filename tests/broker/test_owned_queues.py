"""Declarations for protocols whose sessions outlive connections and whose queues have alternate exchanges."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from brokers import client_of
from trio.testing import MockClock

from amqp_rt import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.broker.topology.topology import Topology
from amqp_rt.errors import AmqpError
from amqp_rt.events import Peer
from amqp_rt.fronts.anchors import Anchor
from amqp_rt.fronts.base import BindingMatch, Exchange, QueueDeclaration
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.outcomes import Error
from amqp_rt.security.access import Rights


def owned(broker: Broker) -> Topology:
    """The topology of a new session."""
    peer = Peer()
    return broker.topologies.of(peer, Anchor(DEFAULT_LIMITS, peer, "s"))


def refusal(call: Any) -> str:
    with pytest.raises(AmqpError) as caught:
        call()
    return caught.value.condition


def unbound(here: Topology, name: str, exchange: str, key: str) -> bool:
    """Remove the bindings of a queue with *key*; return whether there were any."""
    steps = here.unbind_key(name, exchange, key)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bool(end.value)


def exclusive(name: str = "q", **options: Any) -> QueueDeclaration:
    return QueueDeclaration(name=name, exclusive=True, outlives_owner=True, sticky=True, **options)


async def test_an_exclusive_queue_is_free_when_its_owner_has_gone() -> None:
    async with Broker() as broker:
        one, two = owned(broker), owned(broker)
        one.declare_queue(exclusive())
        assert refusal(lambda: two.queue("q")) == "amqp:resource-locked"
        assert refusal(lambda: two.declare_queue(exclusive())) == "amqp:resource-locked"
        one.close()
        state = two.queue("q")
        assert state.declared is not None
        assert not state.declared.exclusive
        two.declare_queue(exclusive())
        assert refusal(lambda: one.queue("q")) == "amqp:resource-locked"


async def test_by_default_an_exclusive_queue_is_deleted_with_its_owner() -> None:
    async with Broker() as broker:
        one = owned(broker)
        one.declare_queue(QueueDeclaration(name="q", exclusive=True))
        one.close()
        assert refusal(lambda: one.queue("q")) == "amqp:not-found"


async def test_an_auto_delete_queue_goes_with_its_owner_if_nobody_uses_it() -> None:
    async with Broker() as broker:
        one = owned(broker)
        one.declare_queue(exclusive(auto_delete=True))
        one.close()
        assert refusal(lambda: one.queue("q")) == "amqp:not-found"


async def test_a_queue_in_use_does_not_become_exclusive() -> None:
    async with Broker() as broker:
        await broker.declare(Queue("declared"))
        await broker.listen("memory://b")
        one = owned(broker)
        one.declare_queue(QueueDeclaration(name="q"))
        async with client_of(broker) as peer, peer.receiver("q") as link:
            await link.wait_attached()
            assert refusal(lambda: one.declare_queue(exclusive())) == "amqp:resource-locked"
        assert refusal(lambda: one.declare_queue(exclusive("declared"))) == "amqp:resource-locked"


async def test_a_durable_queue_of_an_owner_is_stored(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}"
    async with Broker(store=store) as broker:
        one = owned(broker)
        one.declare_exchange(Exchange(name="e", type="fanout", durable=True))
        one.declare_queue(exclusive(durable=True, alternate="e"))
        one.bind_queue("q", "e", "k", {})
    async with Broker(store=store) as broker:
        two = owned(broker)
        found = two.queue("q").declared
        assert found is not None
        assert (found.durable, found.exclusive, found.alternate) == (True, False, "e")
        assert two.bound("e", "q", "k", {}).arguments_matched


async def test_a_sticky_declaration_finds_a_queue_whatever_it_is() -> None:
    async with Broker() as broker:
        here = owned(broker)
        for name in ("e", "f"):
            here.declare_exchange(Exchange(name=name))
        here.declare_queue(QueueDeclaration(name="q", auto_delete=True, alternate="e"))
        here.declare_queue(QueueDeclaration(name="q", options={"priorities": 3}, sticky=True))
        here.declare_queue(QueueDeclaration(name="q", alternate="e", sticky=True))
        other = QueueDeclaration(name="q", alternate="f", sticky=True)
        assert refusal(lambda: here.declare_queue(other)) == "amqp:not-allowed"
        found = here.queue("q").declared
        assert found is not None
        assert (found.auto_delete, found.alternate) == (True, "e")


async def test_options_and_the_alternate_exchange_are_those_of_the_node() -> None:
    async with Broker() as broker:
        here = owned(broker)
        here.declare_exchange(Exchange(name="e"))
        here.declare_queue(
            QueueDeclaration(name="q", alternate="e", options={"last_value_key": "subject"})
        )
        node = broker.host.space().find("q").declared
        assert isinstance(node, Queue)
        assert (node.last_value_key, node.dead_letter_for) == ("subject", ("rejected", "deleted"))
        missing = QueueDeclaration(name="r", alternate="none")
        assert refusal(lambda: here.declare_queue(missing)) == "amqp:not-found"
        wrong = QueueDeclaration(name="r", options={"priorities": 0})
        assert refusal(lambda: here.declare_queue(wrong)) == "amqp:precondition-failed"
        assert refusal(lambda: here.queue("r")) == "amqp:not-found"


@pytest.mark.parametrize(
    ("asked", "matches"),
    [
        (("e", "q", "k", {"a": 1}), "queue_matched key_matched arguments_matched"),
        (("e", "q", "k", {"a": 2}), "queue_matched key_matched"),
        (("e", "q", "k", None), "queue_matched key_matched arguments_matched"),
        (("e", "q", "other", {"a": 1}), "queue_matched"),
        (("e", "unbound", "k", None), ""),
        (("e", None, "k", None), "queue_matched key_matched arguments_matched"),
        (("amq.direct", "q", None, None), ""),
    ],
)
async def test_what_is_bound(asked: tuple[Any, ...], matches: str) -> None:
    async with Broker() as broker:
        here = owned(broker)
        here.declare_exchange(Exchange(name="e"))
        for name in ("q", "unbound"):
            here.declare_queue(QueueDeclaration(name=name))
        here.bind_queue("q", "e", "k", {"a": 1})
        expected = dict.fromkeys(matches.split(), True)
        assert here.bound(*asked) == BindingMatch(exchange=True, queue=True, **expected)
        assert here.bound("none", "q") == BindingMatch(exchange=False, queue=True)
        assert here.bound("e", "none") == BindingMatch(exchange=True, queue=False)


async def test_a_binding_may_be_named_by_its_key_alone() -> None:
    async with Broker() as broker:
        here = owned(broker)
        here.declare_exchange(Exchange(name="e"))
        here.declare_queue(QueueDeclaration(name="q"))
        here.bind_queue("q", "e", "k", {"a": 1}, once=True)
        here.bind_queue("q", "e", "k", {"a": 2}, once=True)
        assert not here.bound("e", "q", "k", {"a": 2}).arguments_matched
        assert not unbound(here, "q", "e", "other")
        assert not here.unbind_queue("q", "e", "k", {"a": 2})
        assert unbound(here, "q", "e", "k")
        assert not unbound(here, "q", "e", "k")
        assert not here.bound("e", "q").queue_matched
        assert refusal(lambda: unbound(here, "q", "none", "k")) == "amqp:not-found"


@pytest.mark.req("SE11")
async def test_the_rights_are_those_of_the_connection_that_the_session_is_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decide(peer: Peer, wanted: Rights, address: str) -> Error | None:
        return None if peer.container_id == "may" else Error("amqp:unauthorized-access", "no")

    async with Broker() as broker:
        monkeypatch.setattr(broker.topologies, "decide", decide)
        may, must_not = Peer(container_id="may"), Peer(container_id="must not")
        here = broker.topologies.of(may, Anchor(DEFAULT_LIMITS, may, "s"))
        here.declare_queue(exclusive())
        here.moved(must_not)
        assert refusal(lambda: here.queue("q")) == "amqp:unauthorized-access"
        here.moved(may)
        # The owner is the same.
        assert here.queue("q").consumers == 0
        for other in (Peer(user="eve"), Peer(virtual_host="berlin")):
            with pytest.raises(ValueError, match="one user"):
                here.moved(other)


async def test_a_sticky_exchange_is_found_whatever_its_declaration() -> None:
    async with Broker() as broker:
        here = owned(broker)
        here.declare_exchange(Exchange(name="other"))
        e = Exchange(name="e", arguments={"alternate-exchange": "other"})
        here.declare_exchange(e, sticky=True)
        here.declare_exchange(Exchange(name="e", durable=True, auto_delete=True), sticky=True)
        assert here.exchange("e") == e
        for different in (
            Exchange(name="e", type="fanout"),
            Exchange(name="e", arguments={"alternate-exchange": "e"}),
            Exchange(name="other", arguments={"alternate-exchange": "e"}),
        ):
            declare = partial(here.declare_exchange, different, sticky=True)
            assert refusal(declare) == "amqp:not-allowed"
        missing = Exchange(name="f", arguments={"alternate-exchange": "none"})
        assert refusal(lambda: here.declare_exchange(missing, sticky=True)) == "amqp:not-found"
        # Peers of 0-9-1 may declare the alternate later.
        here.declare_exchange(missing)


async def test_an_alternate_exchange_is_kept_if_wanted() -> None:
    async with Broker() as broker:
        here = owned(broker)
        for name in ("of-a-queue", "of-an-exchange", "of-itself", "of-none"):
            here.declare_exchange(
                Exchange(name=name, arguments={"alternate-exchange": "of-itself"})
                if name == "of-itself"
                else Exchange(name=name)
            )
        here.declare_queue(QueueDeclaration(name="q", alternate="of-a-queue"))
        here.declare_queue(QueueDeclaration(name="r", alternate="of-a-queue"))
        here.declare_exchange(
            Exchange(name="e", arguments={"alternate-exchange": "of-an-exchange"})
        )

        def keeps(name: str) -> bool:
            try:
                here.delete_exchange(name, unless_alternate=True)
            except AmqpError as error:
                return error.condition == "amqp:not-allowed"
            return False

        assert keeps("of-a-queue")
        assert keeps("of-an-exchange")
        assert not keeps("of-itself")
        assert not keeps("of-none")
        here.delete_queue("q")
        assert keeps("of-a-queue")
        here.delete_queue("r")
        assert not keeps("of-a-queue")
        here.delete_exchange("of-an-exchange")


async def test_a_binding_alone_takes_the_key_from_other_queues_only() -> None:
    async with Broker() as broker:
        here, stranger = owned(broker), owned(broker)
        for name in ("e", "f"):
            here.declare_exchange(Exchange(name=name))
        for name in ("q", "r"):
            here.declare_queue(QueueDeclaration(name=name))
        here.bind_exchange("f", "e", "k", {})
        for key in ("k", "l"):
            here.bind_queue("q", "e", key, {})
        list(here.bind_alone("r", "e", "k", {}))
        assert not here.bound("e", "q", "k").key_matched
        assert here.bound("e", "q", "l").key_matched
        here.bind_queue("q", "f", "x", {})
        assert here.route("e", "k", {}) == ["r"]
        assert here.route("f", "x", {}) == ["q"]
        stranger.declare_queue(exclusive("s"))
        stranger.bind_queue("s", "f", "x", {})
        assert refusal(lambda: list(here.bind_alone("r", "f", "x", {}))) == "amqp:resource-locked"
        # None of the others has lost its binding.
        assert {"q", "s"} <= set(here.route("f", "x", {}))


@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "stored"])
async def test_an_auto_delete_queue_waits_as_long_as_declared(
    autojump_clock: MockClock, tmp_path: Path, stored: bool
) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}" if stored else None
    async with Broker(store=store) as broker:
        await broker.listen("memory://b")
        here = owned(broker)
        here.declare_queue(
            QueueDeclaration(name="q", durable=stored, auto_delete=True, auto_delete_s=30)
        )
        await trio.sleep(100)
        # Without a consumer ever it stays.
        here.queue("q")
        for _ in range(2):
            async with client_of(broker) as peer, peer.receiver("q") as link:
                await link.wait_attached()
                await trio.sleep(100)
            await trio.sleep(20)
            here.queue("q")
        await trio.sleep(30)
        assert refusal(lambda: here.queue("q")) == "amqp:not-found"


async def test_a_queue_that_keeps_its_messages_goes_once_it_has_none(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}"
    async with Broker(store=store) as broker:
        here = owned(broker)
        here.declare_queue(
            QueueDeclaration(name="q", durable=True, auto_delete=True, keeps_messages=True)
        )
    async with Broker(store=store) as broker:
        await broker.listen("memory://b")
        here = owned(broker)
        async with client_of(broker) as peer, peer.sender("q") as sender:
            for body in (b"1", b"2"):
                await sender.send(body)
        # A message that was delivered and goes back counts like one that was never delivered.
        for expected in (b"1", b"1"):
            async with client_of(broker) as peer, peer.receiver("q", credit=1) as link:
                delivery = await link.receive()
                assert bytes(delivery.body) == expected
            await trio.sleep(100)
            assert here.queue("q").messages == 2
        async with client_of(broker) as peer, peer.receiver("q", credit=1) as link:
            (await link.receive()).accept()
        await trio.sleep(100)
        assert here.queue("q").messages == 1
        async with client_of(broker) as peer, peer.receiver("q") as link:
            (await link.receive()).accept()
            # It is empty and in use.
            await trio.sleep(100)
            here.queue("q")
        await trio.sleep(10)
        assert refusal(lambda: here.queue("q")) == "amqp:not-found"
        # Messages that leave without a consumer count too.
        here.declare_queue(QueueDeclaration(name="q", auto_delete=True, keeps_messages=True))
        async with client_of(broker) as peer, peer.sender("q") as sender:
            await sender.send(b"3")
            async with peer.receiver("q", credit=1) as link:
                await link.receive()
        await trio.sleep(100)
        for _ in here.purge_queue("q"):
            pass
        await trio.sleep(10)
        assert refusal(lambda: here.queue("q")) == "amqp:not-found"


async def test_the_consumers_of_an_owner_do_not_delete_its_queue() -> None:
    async with Broker() as broker:
        await broker.listen("memory://b")
        here = owned(broker)
        here.declare_queue(exclusive(auto_delete=True))
        here.idle("q")
        assert here.queue("q").consumers == 0
        here.close()
        assert refusal(lambda: here.queue("q")) == "amqp:not-found"


async def test_scoped_bindings_end_with_their_owner(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'broker.db'}"
    async with Broker(store=store, limits=Limits(scoped_bindings_max=4)) as broker:
        here, other = owned(broker), owned(broker)
        for name in ("e", "deleted"):
            here.declare_exchange(Exchange(name=name, durable=True))
        here.declare_queue(QueueDeclaration(name="q", durable=True))
        here.bind_queue("q", "e", "stays", {})
        here.bind_queue("q", "e", "stays", {}, scoped=True)
        for exchange, key in (("e", "goes"), ("e", "again"), ("deleted", ""), ("e", "unbound")):
            here.bind_queue("q", exchange, key, {}, scoped=True)
        one_more = partial(here.bind_queue, "q", "e", "more", {}, scoped=True)
        assert refusal(one_more) == "amqp:resource-limit-exceeded"
        for key in ("again", "unbound"):
            assert unbound(here, "q", "e", key)
        here.delete_exchange("deleted")
        other.bind_queue("q", "e", "again", {})
        # Also where the owner might not unbind it any more.
        other.declare_queue(exclusive("q"))
        here.close()
        assert not other.bound("e", "q", "goes").key_matched
        for key in ("stays", "again"):
            assert other.bound("e", "q", key).key_matched
        owned(broker).bind_exchange("e", "e", "", {})
        scoped = owned(broker)
        other.close()
        scoped.bind_queue("q", "e", "not stored", {}, scoped=True)
    async with Broker(store=store) as broker:
        here = owned(broker)
        assert here.bound("e", "q", "stays").key_matched
        assert not here.bound("e", "q", "not stored").key_matched
