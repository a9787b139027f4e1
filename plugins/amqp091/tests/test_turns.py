"""Work that is legal and long is done in turns: other channels and connections have theirs meanwhile."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from amqp_rt_amqp091 import methods as m
from amqp_rt_amqp091.frames import method_frame
from worlds091 import Client, World, published

from amqp_rt.broker import Broker
from amqp_rt.broker.bindings import Destination
from amqp_rt.broker.nodes import Queue
from amqp_rt.broker.topology.exchange_addresses import exchange_address
from amqp_rt.errors import DeliveryNotAccepted, TransactionRolledBack
from amqp_rt.fronts import Limits, Peer
from amqp_rt.outcomes import ACCEPTED, RELEASED


def fanned_out(queues: int, limits: Limits | None = None) -> World:
    """A broker whose ``amq.fanout`` leads to that many queues."""
    world = World(limits or Limits())
    here = world.topologies.of(Peer(), object())
    for number in range(queues):
        world.host.space().declare(Queue(f"q{number}"))
        here.bind_queue(f"q{number}", "amq.fanout", "", {})
    return world


def received(world: World) -> int:
    """Queues that have a message."""
    return sum(world.stats(node.name).available > 0 for node in world.host.space().declarations())


class Stepping(Client):
    """A client whose connection gets a turn only when the test says so."""

    def feed(self, data: bytes) -> None:
        self.handle(self.engine.receive(data, self.world.now))

    def turn(self) -> None:
        """Let the connection go on, if it wants to."""
        if self.engine.unread:
            self.feed(b"")


def stepping(world: World, channels: int = 1) -> Stepping:
    client = Stepping(world)
    client.open(channels)
    while client.engine.unread:
        client.turn()
    client.take()
    return client


@pytest.mark.req("N11")
def test_a_message_for_very_many_queues_is_handed_out_in_turns() -> None:
    world = fanned_out(900)
    client = stepping(world, channels=2)
    client.say(1, m.ConfirmSelect(nowait=True))
    client.feed(published(1, "", b"x", "amq.fanout"))
    before = 0
    while received(world) < 100:
        client.turn()
        assert received(world) - before <= 50
        before = received(world)
    # Another channel goes on; what follows on this one waits.
    client.say(2, m.QueueDeclare(queue="q0", passive=True))
    client.say(1, m.QueueDeclare(queue="q899", passive=True))
    heard = client.take()
    assert [(number, type(method)) for number, method in heard] == [(2, m.QueueDeclareOk)]
    heard = []
    while client.engine.unread:
        assert m.QueueDeclareOk not in [type(each) for _, each in heard]
        client.turn()
        heard += client.take()
    assert received(world) == 900
    ((_, confirmed), (_, declared)) = heard
    assert declared.message_count == 1
    assert (type(confirmed), confirmed.delivery_tag) == (m.BasicAck, 1)
    # All of them have the same octets.
    held = [world.host.space().find(f"q{n}").held for n in range(900)]
    assert len({id(queue.peek(1)[0].payload) for queue in held}) == 1


@pytest.mark.req("N11")
def test_a_connection_that_ends_between_turns_leaves_nothing_behind() -> None:
    world = fanned_out(500)
    client = stepping(world)
    client.feed(published(1, "", b"x", "amq.fanout"))
    assert client.engine.unread
    client.engine.receive_eof(world.now)
    before = received(world)
    client.turn()
    assert received(world) == before
    assert client.engine.deadline > world.now


@pytest.mark.req("N17")
def test_messages_are_in_order_in_each_queue_however_many_turns_they_take() -> None:
    world = fanned_out(300)
    client = world.connect()
    for number in range(3):
        client.publish(1, "", b"%d" % number, exchange="amq.fanout")
        client.publish(1, "q0", b"direct %d" % number)
    for _ in range(6):
        client.say(1, m.BasicGet(queue="q0", no_ack=True))
    assert [each.body for each in client.contents()] == [
        *(b"0", b"direct 0", b"1", b"direct 1", b"2", b"direct 2")
    ]


@pytest.mark.req("N13")
@pytest.mark.parametrize("answer", ["ack", "nack", "recover", "recover-async"])
def test_very_many_messages_are_answered_in_turns(answer: str) -> None:
    world = World()
    world.host.space().declare(Queue("q", dead_letter="dead"))
    client = stepping(world)
    for _ in range(2_000):
        world.host.space().publish("q", b"\0Sw\xa1\1x")
    client.say(1, m.BasicConsume(queue="q", consumer_tag="t"))
    while client.engine.thirsty:
        client.tick()
    client.say(1, m.BasicCancel(consumer_tag="t"))
    client.take()
    assert world.stats("q").acquired == 2_000
    said: dict[str, m.Method] = {
        "ack": m.BasicAck(delivery_tag=0, multiple=True),
        "nack": m.BasicNack(delivery_tag=0, multiple=True, requeue=False),
        "recover": m.BasicRecover(requeue=True),
        "recover-async": m.BasicRecoverAsync(requeue=True),
    }
    client.feed(method_frame(1, said[answer]))
    left = world.stats("q").acquired
    assert 0 < left < 2_000
    while client.engine.unread:
        client.turn()
        assert left - world.stats("q").acquired <= 50
        left = world.stats("q").acquired
    while world.host.turns.unfinished:
        # Dead letters have their own turns.
        world.host.turns.run_pending()
        assert left - world.stats("q").acquired <= 100
        left = world.stats("q").acquired
    stats = world.stats("q")
    assert stats.acquired == 0
    assert stats.available == (2_000 if answer.startswith("recover") else 0)
    assert world.stats("dead").available == (2_000 if answer == "nack" else 0)


@pytest.mark.req("N17")
def test_frames_that_were_held_up_are_taken_in_turns_and_in_order() -> None:
    world = World()
    client = stepping(world)
    client.say(1, m.QueueDeclare(queue="q"))
    client.holds = []
    client.say(1, m.BasicGet(queue="q"))
    client.take()
    for number in range(500):
        client.feed(published(1, "q", b"%d" % number))
    (link,) = client.holds
    client.place(link)
    client.turn()
    client.tick()
    assert 0 < world.stats("q").available < 500
    client.feed(published(1, "q", b"last"))
    while client.engine.unread:
        client.turn()
    held = world.host.space().find("q").held
    bodies = [entry.payload for entry in held.peek(501)]
    assert len(bodies) == 501
    assert bodies[-1].endswith(b"last")
    assert all(each.endswith(b"%d" % n) for n, each in enumerate(bodies[:-1]))


def refused(client: Client) -> int:
    code: int = client.answer(m.ChannelClose).reply_code
    return code


@pytest.mark.req("N11")
@pytest.mark.parametrize("name", ["CC", "BCC"])
@pytest.mark.parametrize("exchange", ["", "amq.direct"])
def test_a_message_has_so_many_routing_keys(name: str, exchange: str) -> None:
    world = World(Limits(routing_keys_max=3))
    client = world.connect()
    for count, fits in ((2, True), (3, False)):
        headers: dict[str, object] = {name: [f"k{number}" for number in range(count)]}
        client.publish(1, "k", exchange=exchange, properties=m.BasicProperties(headers=headers))
        assert client.take() == [] if fits else refused(client) == 406


@pytest.mark.req("N11")
def test_a_search_that_is_too_long_ends_its_channel() -> None:
    world = fanned_out(300, Limits(routing_looks_max=200))
    client = world.connect()
    client.publish(1, "", b"x", exchange="amq.fanout")
    assert refused(client) == 406
    assert received(world) == 0


@pytest.mark.req("N11")
def test_a_dead_letter_goes_to_the_first_queues_of_very_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = fanned_out(300, Limits(dead_letter_looks_max=100))
    world.host.space().declare(Queue("work", dead_letter=exchange_address("amq.fanout")))
    client = world.connect()
    client.publish(1, "work", b"x")
    client.say(1, m.BasicGet(queue="work"))
    client.say(1, m.BasicReject(delivery_tag=1, requeue=False))
    assert 90 <= received(world) <= 110
    assert "use fewer bindings" in caplog.text


def looped(queues: int, limits: Limits | None = None) -> World:
    """A broker whose queues expire to ``amq.fanout``, which leads to all of them."""
    world = fanned_out(0, limits)
    here = world.topologies.of(Peer(), object())
    for number in range(queues):
        world.host.space().declare(
            Queue(f"q{number}", ttl_s=1, dead_letter=exchange_address("amq.fanout"))
        )
        here.bind_queue(f"q{number}", "amq.fanout", "", {})
    return world


def lap(world: World) -> int:
    """Let all messages expire once. Returns how many there are then."""
    world.now += 1.1
    alarms = world.host.turns.alarms
    # Work beyond one turn stays due.
    while world.host.turns.unfinished or (alarms and alarms[0][0] <= world.now):
        world.host.turns.tick()
        world.host.turns.run_pending()
    return sum(world.stats(node.name).available for node in world.host.space().declarations())


@pytest.mark.req("N11")
def test_one_message_does_not_multiply_in_a_cycle_of_dead_letters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = looped(4)
    world.connect().publish(1, "q0", b"x")
    assert [lap(world) for _ in range(5)] == [3, 6, 6, 0, 0]
    assert "dead-letter cycle" in caplog.text


@pytest.mark.req("N11")
def test_the_copies_that_dead_letters_make_are_bounded() -> None:
    for most, counts in ((120, [5, 20, 60, 120, 120]), (59, [5, 20, 40, 40, 40])):
        world = looped(6, Limits(dead_letter_copies_max=most))
        world.connect().publish(1, "q0", b"x")
        assert [lap(world) for _ in range(5)] == counts
        assert lap(world) == 0


# --- From AMQP 1.0 ---


class Delivery:
    """What a peer of 1.0 has sent."""

    tag = b""
    message_format = 0
    settled = False
    state: Any = None
    local_state: Any = None
    complete = True
    aborted = streamed = second = False
    context: Any = None

    def __init__(self, payload: bytes) -> None:
        self.payload = payload

    def settle(self, outcome: Any) -> None:
        self.local_state = outcome


class Link:
    """A link of a peer of 1.0 that sends."""

    attached = True
    credit = 0
    peer = Peer()
    connection = object()

    def grant(self, credit: int) -> None:
        self.credit = credit


class DetachedLink(Link):
    """One that remembers why it was detached."""

    error: Any = None

    def detach(self, error: Any) -> None:
        self.attached = False
        self.error = error


#: Delivery annotations ``{"x-opt-a": 1}``, the same with the key ``a``, which is reserved, and a body.
ALLOWED = b"\0Sq\xc1\x0c\x02\xa3\x07x-opt-aT\x01"
RESERVED = b"\0Sq\xc1\x06\x02\xa3\x01aT\x01"
BODY = b"\0Sw\xa1\1b"


async def test_queues_share_a_message_of_1_0_without_its_delivery_annotations() -> None:
    world = fanned_out(5)
    link: Any = Link()
    inlet: Any = world.topologies.inlet("", exchange_address("amq.fanout"), link)
    delivery = Delivery(ALLOWED + BODY)
    inlet.deliver(link, [delivery])
    assert delivery.local_state == ACCEPTED
    found = [each for n in range(5) for each in await world.host.space().find(f"q{n}").peek(9)]
    assert found == [BODY] * 5
    assert len({id(each) for each in found}) == 1


@pytest.mark.parametrize("payload", [RESERVED + BODY, ALLOWED[:-1], b"\0Sq\xff"])
def test_what_a_queue_refuses_is_refused_by_all_queues_of_an_exchange(payload: bytes) -> None:
    outcomes = []
    for count in (1, 5):
        world = fanned_out(count)
        link: Any = DetachedLink()
        inlet: Any = world.topologies.inlet("", exchange_address("amq.fanout"), link)
        delivery = Delivery(payload)
        inlet.deliver(link, [delivery])
        outcomes.append((type(delivery.local_state), link.error and link.error.condition))
        assert received(world) == 0
    assert outcomes[0] == outcomes[1] != (type(ACCEPTED), None)


@pytest.mark.req("N10")
def test_a_message_of_1_0_for_very_many_queues_is_handed_out_in_turns() -> None:
    world = fanned_out(500)
    link: Any = Link()
    inlet: Any = world.topologies.inlet("", exchange_address("amq.fanout"), link)
    inlet.on_attached(link)
    deliveries = [Delivery(b"\0Sw\xa1\1%d" % number) for number in range(2)]
    inlet.deliver(link, deliveries)
    assert received(world) < 500
    assert [each.local_state for each in deliveries] == [None, None]
    turns = 0
    while deliveries[-1].local_state is None:
        before = received(world)
        world.host.turns.run_pending()
        assert received(world) - before <= 300
        turns += 1
    assert turns > 2
    assert [each.local_state for each in deliveries] == [ACCEPTED, ACCEPTED]
    # In order.
    (first, second) = world.host.space().find("q499").held.peek(2)
    assert (first.payload, second.payload) == tuple(each.payload for each in deliveries)


def sent(world: World, count: int, exchange: str = "amq.fanout") -> list[Delivery]:
    """Messages that a link of a peer of 1.0 has sent to an exchange; their first turn is over."""
    link: Any = Link()
    inlet: Any = world.topologies.inlet("", exchange_address(exchange), link)
    inlet.on_attached(link)
    deliveries = [Delivery(b"\0Sw\xa1\1%d" % number) for number in range(count)]
    inlet.deliver(link, deliveries)
    return deliveries


def finish(world: World) -> None:
    while world.host.turns.unfinished:
        world.host.turns.run_pending()


@pytest.mark.slow
@pytest.mark.req("N10")
@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("change", ["delete", "declare again", "bind", "unbind"])
def test_queues_come_and_go_between_the_turns_of_a_message_of_1_0(change: str, turns: int) -> None:
    world = fanned_out(200)
    here = world.topologies.of(Peer(), object())
    deliveries = sent(world, 2)
    for _ in range(turns):
        world.host.turns.run_pending()
    if change in ("delete", "declare again"):
        world.host.space().delete("q0")
        world.host.space().delete("q199")
    if change == "declare again":
        world.host.space().declare(Queue("q199"))
    if change == "bind":
        world.host.space().declare(Queue("late"))
        here.bind_queue("late", "amq.fanout", "", {})
    if change == "unbind":
        here.unbind_queue("q199", "amq.fanout", "", {})
    finish(world)
    assert [each.local_state for each in deliveries] == [ACCEPTED, ACCEPTED]
    for number in range(1, 199):
        assert world.stats(f"q{number}").available == 2


@pytest.mark.slow
@pytest.mark.req("N10")
@pytest.mark.parametrize("turns", range(0, 12, 2))
@pytest.mark.parametrize("queue", ["q0", "q100", "q199"])
def test_a_queue_declared_again_between_turns_is_not_bound_any_more(queue: str, turns: int) -> None:
    world = fanned_out(200)
    (delivery,) = sent(world, 1)
    for _ in range(turns):
        world.host.turns.run_pending()
    over = delivery.local_state is not None
    world.host.space().delete(queue)
    world.host.space().declare(Queue(queue))
    finish(world)
    assert delivery.local_state == ACCEPTED
    assert world.stats(queue).available == 0
    assert received(world) == 199
    assert not world.topologies.space("").watched
    if turns == 0:
        assert not over


@pytest.mark.slow
@pytest.mark.req("N11")
@pytest.mark.parametrize("turns", range(0, 60, 14))
@pytest.mark.parametrize("queue", ["q0", "q299"])
@pytest.mark.parametrize("many", [1, 2])
def test_a_queue_declared_again_between_turns_of_the_plug_in_is_not_bound_any_more(
    many: int, queue: str, turns: int
) -> None:
    world = fanned_out(300)
    client = stepping(world)
    client.say(1, m.ConfirmSelect(nowait=True))
    # The second of two equal messages goes where the first one went, without another search.
    client.feed(published(1, "", b"x", "amq.fanout") * many)
    for _ in range(turns):
        client.turn()
    unread = client.engine.unread
    world.host.space().delete(queue)
    world.host.space().declare(Queue(queue))
    heard = client.take()
    while client.engine.unread:
        client.turn()
        heard += client.take()
    assert {type(method) for _, method in heard} == {m.BasicAck}
    assert world.stats(queue).available == 0
    assert {world.stats(f"q{number}").available for number in range(1, 299)} == {many}
    assert not world.topologies.space("").watched
    if turns == 0:
        assert unread


@pytest.mark.req("N11")
def test_a_connection_that_ends_between_turns_watches_for_deletions_no_more() -> None:
    world = fanned_out(500)
    client = stepping(world)
    client.feed(published(1, "", b"x", "amq.fanout"))
    assert world.topologies.space("").watched
    client.engine.receive_eof(world.now)
    client.turn()
    assert not world.topologies.space("").watched


@pytest.mark.req("N10")
@pytest.mark.parametrize("queues", [1, 30, 200])
@pytest.mark.parametrize("turns", range(4))
def test_all_queues_of_a_message_of_1_0_go_between_its_turns(queues: int, turns: int) -> None:
    world = fanned_out(200)
    for number in range(queues, 200):
        world.host.space().delete(f"q{number}")
    (long, delivery) = sent(world, 2)
    for _ in range(turns):
        world.host.turns.run_pending()
    for number in range(queues):
        world.host.space().delete(f"q{number}")
    finish(world)
    assert long.local_state in (ACCEPTED, RELEASED)
    assert delivery.local_state in (ACCEPTED, RELEASED)
    if queues == 200 and turns == 0:
        assert delivery.local_state == RELEASED


@pytest.mark.req("N10")
@pytest.mark.parametrize("turned", [False, True])
def test_a_turn_that_raises_holds_up_nothing_behind_it(
    turned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = fanned_out(200 if turned else 2)
    exchanges = world.topologies.space("").exchanges
    real = exchanges.routing
    calls = 0

    def routing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        yield from real(*args)
        if calls == 2:
            raise ZeroDivisionError("a bug")

    monkeypatch.setattr(exchanges, "routing", routing)
    deliveries = sent(world, 4)
    finish(world)
    first, second, *others = [each.local_state for each in deliveries]
    assert [first, *others] == [ACCEPTED] * 3
    assert second.error.condition == "amqp:internal-error"
    assert "ZeroDivisionError: a bug" in caplog.text
    assert world.stats("q0").available == 3


@pytest.mark.req("N10")
@pytest.mark.parametrize("bad", [0, 100, 199])
def test_a_queue_that_fails_in_a_turn_is_out_of_service_alone(bad: int) -> None:
    world = fanned_out(200)

    def put(entry: Any) -> None:
        raise ZeroDivisionError("a bug")

    world.host.space().find(f"q{bad}").inlet.node = Raising(
        world.host.space().find(f"q{bad}").held, put
    )
    deliveries = sent(world, 2)
    finish(world)
    assert [each.local_state.error.condition for each in deliveries] == ["amqp:internal-error"] * 2
    # The second one is refused before any queue has it.
    assert received(world) == 199
    assert world.stats("q1").available == 1
    assert world.stats(f"q{bad}").failure is not None


class Raising:
    """A queue whose ``put`` is another."""

    def __init__(self, held: Any, put: Any) -> None:
        self._held = held
        self.put = put

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)


@pytest.mark.req("N11")
@pytest.mark.parametrize("gone", [1, 300])
def test_a_mandatory_message_that_some_queue_has_is_not_returned(gone: int) -> None:
    world = fanned_out(300)
    client = stepping(world)
    client.say(1, m.ConfirmSelect(nowait=True))
    client.feed(published(1, "", b"x", "amq.fanout", mandatory=True))
    while not received(world):
        client.turn()
    assert received(world) < 300
    for number in range(300 - gone, 300):
        world.host.space().delete(f"q{number}")
    heard: list[Any] = []
    while client.engine.unread:
        client.turn()
        heard += client.take()
    assert [type(method) for _, method in heard] == [m.BasicAck]


def test_bindings_of_a_queue_that_goes_are_gone() -> None:
    world = fanned_out(3)
    world.host.space().delete("q1")
    space = world.topologies.space("")
    assert Destination("q1") not in {
        each.destination for each in space.exchanges.bindings("amq.fanout")
    }


@pytest.mark.req("N17")
@pytest.mark.parametrize("way", ["get", "consume"])
def test_what_is_requeued_again_and_again_is_there_at_once(way: str) -> None:
    world = World()
    client = world.connect()
    client.say(1, m.QueueDeclare(queue="q"))
    for number in range(2):
        client.publish(1, "q", b"%d" % number)
    if way == "consume":
        client.say(1, m.BasicQos(prefetch_count=2), m.BasicConsume(queue="q"))
    found = []
    for _ in range(4):
        if way == "get":
            client.say(1, m.BasicGet(queue="q"), m.BasicGet(queue="q"))
        contents = client.contents()
        found += [(each.body, each.method.redelivered) for each in contents]
        client.say(1, m.BasicNack(multiple=True, requeue=True))
    assert found == [(b"0", False), (b"1", False)] + 3 * [(b"0", True), (b"1", True)]


@pytest.mark.req("R1", "N19")
async def test_a_post_that_an_exchange_routes_nowhere_is_refused_in_its_transaction() -> None:
    async with Broker("b", fronts=["amqp091"]) as broker, broker.local() as peer:
        await broker.declare(Queue("q"))

        async def post(**options: Any) -> None:
            lost = peer.sender("/exchanges/amq.direct/nowhere", **options)
            async with lost, peer.sender("q") as found, peer.transaction() as txn:
                await found.send("undone", transaction=txn)
                with suppress(DeliveryNotAccepted):
                    await lost.send("lost", transaction=txn)

        with pytest.raises(TransactionRolledBack, match="released the message"):
            await post()
        # The sender would not learn otherwise that a settled message went nowhere.
        with pytest.raises(TransactionRolledBack, match="no queue takes it"):
            await post(settled=True)
        assert broker.stats("q").available == 0
