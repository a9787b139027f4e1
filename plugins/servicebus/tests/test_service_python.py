"""A namespace and the clients of Azure's SDK for Python, unmodified: Python with threads and with asyncio."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from amqp_rt_servicebus.declarations import Queue, Rule, SasKey, Sql, Subscription, Topic
from amqp_rt_servicebus.testing import ServiceBus
from driven import Dialler, Driven

pytestmark = [
    pytest.mark.req("Z21"),
    pytest.mark.foreign,
    pytest.mark.slow,
    pytest.mark.usefixtures("azure_python"),
]

#: Seconds that receivers wait for messages of which there are enough, and for those that do not come.
WAIT_S, SOON_S = 5, 0.3


@pytest.fixture
def bus() -> Iterator[ServiceBus]:
    with ServiceBus(
        Queue("q", lock_duration=30, max_delivery_count=2),
        Queue("s", requires_session=True, lock_duration=30),
        keys={
            "root": SasKey("all"),
            "sender": SasKey("sending", rights=("Send",)),
            "listener": SasKey("listening", rights=("Listen",)),
        },
    ) as bus:
        yield bus


@pytest.fixture(params=["threads", "asyncio"])
def dialler(request: pytest.FixtureRequest) -> Iterator[Dialler]:
    dialler = Dialler(request.param)
    yield dialler
    dialler.close()


def sent(client: Driven, *bodies: str, queue: str = "q", **options: Any) -> None:
    """Send messages one by one."""
    from azure.servicebus import ServiceBusMessage

    with client.get_queue_sender(queue) as sender:
        for body in bodies:
            sender.send_messages(ServiceBusMessage(body, **options))


def received(receiver: Driven, count: int = 1) -> list[Any]:
    """Receive *count* messages."""
    found: list[Any] = []
    while len(found) < count:
        more = receiver.receive_messages(count - len(found), max_wait_time=WAIT_S)
        assert more, f"{count} messages wanted, and there were {len(found)}"
        found += more
    return found


def bodies(messages: list[Any]) -> list[str]:
    return [str(each) for each in messages]


# --- Sending and receiving ---------------------------------------------------------------------


def test_messages_are_received_in_the_order_in_which_they_were_sent(
    bus: ServiceBus, client: Driven
) -> None:
    sent(client, "a", "b", "c")
    with client.get_queue_receiver("q") as receiver:
        messages = received(receiver, 3)
        assert bodies(messages) == ["a", "b", "c"]
        assert [each.sequence_number for each in messages] == [1, 2, 3]
        assert [each.delivery_count for each in messages] == [0, 0, 0]
        for each in messages:
            receiver.complete_message(each)
    bus.queue("q").wait_until(lambda sizes: not sizes.active)


@pytest.mark.req("Z16")
def test_fields_of_messages_arrive_as_they_were_sent(client: Driven) -> None:
    from azure.servicebus import ServiceBusMessage

    message = ServiceBusMessage(
        b"\x00\x01",
        application_properties={"a": 1, "b": "text", "c": True},
        content_type="text/x",
        correlation_id="c1",
        message_id="m1",
        partition_key="p",
        reply_to="r",
        reply_to_session_id="rs",
        subject="label",
        to="t",
        time_to_live=timedelta(seconds=90),
    )
    with client.get_queue_sender("q") as sender:
        sender.send_messages(message)
    with client.get_queue_receiver("q", receive_mode="receiveanddelete") as receiver:
        (found,) = received(receiver)
    assert b"".join(found.body) == b"\x00\x01"
    assert found.application_properties == {b"a": 1, b"b": b"text", b"c": True}
    assert (found.content_type, found.correlation_id, found.message_id) == ("text/x", "c1", "m1")
    assert (found.partition_key, found.reply_to, found.reply_to_session_id) == ("p", "r", "rs")
    assert (found.subject, found.to, found.time_to_live) == ("label", "t", timedelta(seconds=90))
    age = datetime.now(UTC) - found.enqueued_time_utc.replace(tzinfo=UTC)
    assert abs(age) < timedelta(seconds=60)
    assert found.expires_at_utc - found.enqueued_time_utc == timedelta(seconds=90)


def test_a_batch_is_stored_as_single_messages(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus import ServiceBusMessage

    with client.get_queue_sender("q") as sender:
        batch = sender.create_message_batch()
        for body in ("a", "b", "c"):
            batch.add_message(ServiceBusMessage(body))
        sender.send_messages(batch)
        sender.send_messages([ServiceBusMessage("d"), ServiceBusMessage("e")])
    assert [each.message.body for each in bus.queue("q").messages] == [b"a", b"b", b"c", b"d", b"e"]


def test_a_batch_with_a_message_that_is_refused_is_refused_as_a_whole(
    bus: ServiceBus, client: Driven
) -> None:
    from azure.servicebus import ServiceBusMessage
    from azure.servicebus.exceptions import ServiceBusError

    with client.get_queue_sender("s") as sender, pytest.raises(ServiceBusError, match="session"):
        sender.send_messages([ServiceBusMessage("a", session_id="x"), ServiceBusMessage("b")])
    assert bus.queue("s").stats.active == 0


@pytest.mark.req("Z8")
def test_messages_are_deleted_as_they_are_sent_in_the_mode_receive_and_delete(
    bus: ServiceBus, client: Driven
) -> None:
    sent(client, "a", "b")
    with client.get_queue_receiver("q", receive_mode="receiveanddelete") as receiver:
        assert bodies(received(receiver, 1)) == ["a"]
        assert bus.queue("q").stats.active == 1
        assert bodies(received(receiver, 1)) == ["b"]
    assert bus.queue("q").stats.bytes == 0


def test_a_receiver_waits_for_a_message_that_is_sent_later(bus: ServiceBus, client: Driven) -> None:
    with client.get_queue_receiver("q") as receiver:
        assert receiver.receive_messages(1, max_wait_time=SOON_S) == []
        bus.queue("q").send("late")
        (message,) = received(receiver)
        receiver.complete_message(message)
    assert bus.queue("q").stats.active == 0


# --- Settling by link --------------------------------------------------------------------------


@pytest.mark.req("Z10")
def test_an_abandoned_message_is_delivered_again_and_then_dead_lettered(
    bus: ServiceBus, client: Driven
) -> None:
    sent(client, "a")
    with client.get_queue_receiver("q") as receiver:
        for count in range(2):
            (message,) = received(receiver)
            assert message.delivery_count == count
            receiver.abandon_message(message)
    (dead,) = bus.queue("q").dead_letters
    assert (dead.reason, dead.delivery_count, dead.source) == ("MaxDeliveryCountExceeded", 2, "q")


@pytest.mark.req("Z6")
def test_a_dead_letter_has_the_reason_of_its_receiver(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus import ServiceBusSubQueue

    sent(client, "a")
    with client.get_queue_receiver("q") as receiver:
        (message,) = received(receiver)
        receiver.dead_letter_message(message, reason="why", error_description="because")
    with client.get_queue_receiver("q", sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver:
        (dead,) = received(receiver)
        assert (dead.dead_letter_reason, dead.dead_letter_error_description) == ("why", "because")
        assert dead.dead_letter_source == "q"
        receiver.complete_message(dead)
    bus.queue("q").wait_until(lambda sizes: not sizes.dead_letters)


@pytest.mark.req("Z13")
def test_a_deferred_message_is_received_by_its_number_only(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus.exceptions import MessageNotFoundError

    sent(client, "a")
    with client.get_queue_receiver("q") as receiver:
        (message,) = received(receiver)
        receiver.defer_message(message)
        assert receiver.receive_messages(1, max_wait_time=SOON_S) == []
        (deferred,) = receiver.receive_deferred_messages([message.sequence_number])
        assert str(deferred) == "a"
        with pytest.raises(MessageNotFoundError):
            receiver.receive_deferred_messages([message.sequence_number])
        receiver.complete_message(deferred)
    bus.queue("q").wait_until(lambda sizes: not sizes.deferred)


# --- Settling by operation, and locks ----------------------------------------------------------


@pytest.mark.req("Z7")
@pytest.mark.parametrize("settlement", ["complete", "abandon", "dead_letter", "defer"])
def test_a_message_is_settled_by_its_token_when_its_link_has_ended(
    bus: ServiceBus, client: Driven, settlement: str
) -> None:
    bus.queue("q").send("a")
    with client.get_queue_receiver("q") as receiver:
        # A message that was received by its number is settled by an operation.
        (message,) = received(receiver)
        receiver.defer_message(message)
        (deferred,) = receiver.receive_deferred_messages(message.sequence_number)
        getattr(receiver, f"{settlement}_message")(deferred)
    stats = bus.queue("q").stats
    states = (stats.active, stats.deferred, stats.dead_letters)
    wanted = {
        "complete": (0, 0, 0),
        "abandon": (0, 1, 0),
        "dead_letter": (0, 0, 1),
        "defer": (0, 1, 0),
    }
    assert states == wanted[settlement]


@pytest.mark.req("Z7")
def test_a_lock_that_has_expired_is_lost(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus.exceptions import MessageLockLostError

    sent(client, "a")
    with client.get_queue_receiver("q") as receiver:
        (message,) = received(receiver)
        bus.advance(31)
        with pytest.raises(MessageLockLostError):
            receiver.complete_message(message)
        (again,) = received(receiver)
        assert again.delivery_count == 1
        receiver.complete_message(again)


@pytest.mark.req("Z7")
def test_a_lock_outlives_its_link(bus: ServiceBus, client: Driven) -> None:
    sent(client, "a")
    with client.get_queue_receiver("q") as receiver:
        received(receiver)
    (held,) = bus.queue("q").messages
    assert held.locked
    bus.advance(31)
    (held,) = bus.queue("q").messages
    assert (held.locked, held.delivery_count) == (False, 1)


@pytest.mark.req("Z7")
def test_a_renewed_lock_begins_anew(bus: ServiceBus, client: Driven) -> None:
    sent(client, "a")
    with client.get_queue_receiver("q") as receiver:
        (message,) = received(receiver)
        before = message.locked_until_utc
        bus.advance(20)
        after = receiver.renew_message_lock(message)
        assert after - before >= timedelta(seconds=19)
        bus.advance(20)
        receiver.complete_message(message)
    bus.queue("q").wait_until(lambda sizes: not sizes.active)


@pytest.mark.req("Z10")
def test_a_message_without_an_outcome_is_delivered_as_often_as_allowed(
    bus: ServiceBus, client: Driven
) -> None:
    sent(client, "a")
    with client.get_queue_receiver("q") as receiver:
        for _ in range(2):
            received(receiver)
            bus.advance(31)
    assert bus.queue("q").dead_letters[0].reason == "MaxDeliveryCountExceeded"


# --- Schedules, times to live, peeking ---------------------------------------------------------


@pytest.mark.req("Z13")
def test_a_scheduled_message_is_there_when_it_is_due(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus import ServiceBusMessage

    due = datetime.now(UTC) + timedelta(seconds=100)
    with client.get_queue_sender("q") as sender:
        first, second = sender.schedule_messages(
            [ServiceBusMessage("a"), ServiceBusMessage("b")], due
        )
        sender.cancel_scheduled_messages(first)
    (held,) = bus.queue("q").scheduled
    assert held.sequence_number == second
    with client.get_queue_receiver("q") as receiver:
        assert receiver.receive_messages(1, max_wait_time=SOON_S) == []
        bus.advance(101)
        (message,) = received(receiver)
        assert str(message) == "b"
        assert message.sequence_number > second
        receiver.complete_message(message)


@pytest.mark.req("Z13")
def test_a_message_that_is_due_cannot_be_cancelled(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus import ServiceBusMessage
    from azure.servicebus.exceptions import MessageNotFoundError

    due = datetime.now(UTC) + timedelta(seconds=100)
    with client.get_queue_sender("q") as sender:
        numbers = sender.schedule_messages(ServiceBusMessage("a"), due)
        bus.advance(101)
        with pytest.raises(MessageNotFoundError):
            sender.cancel_scheduled_messages(numbers)


@pytest.mark.req("Z6", "Z10")
def test_a_message_expires(bus: ServiceBus, client: Driven) -> None:
    bus.declare(Queue("dying", dead_lettering_on_message_expiration=True))
    sent(client, "a", queue="dying", time_to_live=timedelta(seconds=10))
    bus.advance(11)
    assert bus.queue("dying").stats.active == 0
    assert bus.queue("dying").dead_letters[0].reason == "TTLExpiredException"


@pytest.mark.req("Z13")
def test_peeking_shows_messages_in_every_state_and_locks_none(
    bus: ServiceBus, client: Driven
) -> None:
    sent(client, "locked", "deferred", "free")
    with client.get_queue_receiver("q") as receiver:
        _, deferred = received(receiver, 2)
        receiver.defer_message(deferred)
        # By default the SDK peeks behind the last message that it has received.
        assert bodies(receiver.peek_messages(10)) == ["free"]
        found = receiver.peek_messages(10, sequence_number=1)
        assert bodies(found) == ["locked", "deferred", "free"]
        assert [each.state.value for each in found] == [0, 1, 0]
        assert bodies(receiver.peek_messages(1, sequence_number=2)) == ["deferred"]


@pytest.mark.req("Z11")
def test_a_duplicate_is_accepted_and_dropped(bus: ServiceBus, client: Driven) -> None:
    bus.declare(Queue("once", requires_duplicate_detection=True))
    sent(client, "a", "again", queue="once", message_id="1")
    assert [each.message.body for each in bus.queue("once").messages] == [b"a"]
    bus.advance(601)
    sent(client, "later", queue="once", message_id="1")
    assert bus.queue("once").stats.active == 2


# --- Sessions ----------------------------------------------------------------------------------


@pytest.mark.req("Z12")
def test_a_session_has_one_receiver_and_its_messages_in_order(
    bus: ServiceBus, client: Driven
) -> None:
    from azure.servicebus.exceptions import SessionCannotBeLockedError

    sent(client, "x1", "x2", queue="s", session_id="x")
    sent(client, "y1", queue="s", session_id="y")
    with client.get_queue_receiver("s", session_id="x") as receiver:
        messages = received(receiver, 2)
        assert bodies(messages) == ["x1", "x2"]
        assert receiver.session.session_id == "x"
        assert receiver.receive_messages(1, max_wait_time=SOON_S) == []
        other = client.get_queue_receiver("s", session_id="x")
        with pytest.raises(SessionCannotBeLockedError):
            other.receive_messages(1, max_wait_time=WAIT_S)
        other.close()
        for each in messages:
            receiver.complete_message(each)
    bus.queue("s").wait_until(lambda sizes: sizes.active == 1)


@pytest.mark.req("Z12")
def test_the_next_session_is_the_free_one_with_the_oldest_message(
    bus: ServiceBus, client: Driven
) -> None:
    from azure.servicebus import NEXT_AVAILABLE_SESSION

    sent(client, "a", queue="s", session_id="x")
    sent(client, "b", queue="s", session_id="y")
    with (
        client.get_queue_receiver("s", session_id=NEXT_AVAILABLE_SESSION) as first,
        client.get_queue_receiver("s", session_id=NEXT_AVAILABLE_SESSION) as second,
    ):
        assert (bodies(received(first)), first.session.session_id) == (["a"], "x")
        assert (bodies(received(second)), second.session.session_id) == (["b"], "y")


@pytest.mark.req("Z12")
def test_an_attach_waits_for_a_session_no_longer_than_it_says(client: Driven) -> None:
    from azure.servicebus import NEXT_AVAILABLE_SESSION
    from azure.servicebus.exceptions import OperationTimeoutError

    begun = time.monotonic()
    receiver = client.get_queue_receiver(
        "s", session_id=NEXT_AVAILABLE_SESSION, max_wait_time=SOON_S
    )
    with pytest.raises(OperationTimeoutError):
        receiver.receive_messages(1)
    receiver.close()
    assert time.monotonic() - begun < 30


@pytest.mark.req("Z12")
def test_the_state_of_a_session_outlives_its_lock(bus: ServiceBus, client: Driven) -> None:
    sent(client, "a", queue="s", session_id="x")
    with client.get_queue_receiver("s", session_id="x") as receiver:
        assert receiver.session.get_state() is None
        receiver.session.set_state("step 1")
    with client.get_queue_receiver("s", session_id="x") as receiver:
        assert receiver.session.get_state() == b"step 1"
        receiver.session.set_state(None)
        assert receiver.session.get_state() is None


@pytest.mark.req("Z12")
def test_the_lock_of_a_session_is_renewed_or_lost(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus.exceptions import SessionLockLostError

    sent(client, "a", queue="s", session_id="x")
    with client.get_queue_receiver("s", session_id="x") as receiver:
        (message,) = received(receiver)
        before = receiver.session.locked_until_utc
        bus.advance(20)
        assert receiver.session.renew_lock() - before >= timedelta(seconds=19)
        bus.advance(31)
        with pytest.raises(SessionLockLostError):
            receiver.complete_message(message)
    (held,) = bus.queue("s").messages
    assert (held.locked, held.delivery_count) == (False, 1)


@pytest.mark.req("Z12", "Z13")
def test_a_deferred_message_of_a_session_is_received_by_its_number(
    bus: ServiceBus, client: Driven
) -> None:
    sent(client, "a", queue="s", session_id="x")
    with client.get_queue_receiver("s", session_id="x") as receiver:
        (message,) = received(receiver)
        receiver.defer_message(message)
        (deferred,) = receiver.receive_deferred_messages(message.sequence_number)
        receiver.complete_message(deferred)
    bus.queue("s").wait_until(lambda sizes: not sizes.deferred)


@pytest.mark.req("Z12")
def test_a_receiver_without_a_session_is_refused_where_sessions_are_required(
    client: Driven,
) -> None:
    from azure.servicebus.exceptions import ServiceBusError

    receiver = client.get_queue_receiver("s")
    with pytest.raises(ServiceBusError, match="requires sessions"):
        receiver.receive_messages(1, max_wait_time=WAIT_S)
    receiver.close()


# --- Topics, rules, forwarding -----------------------------------------------------------------


@pytest.mark.req("Z6", "Z14")
def test_a_subscription_gets_what_its_rules_select(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus import ServiceBusMessage

    bus.declare(
        Topic(
            "prices",
            [
                Subscription("all"),
                Subscription("eu", [Rule("eu", Sql("region = 'eu'"), action="SET seen = 1")]),
                Subscription("none", []),
            ],
        )
    )
    with client.get_topic_sender("prices") as sender:
        for region in ("eu", "us"):
            message = ServiceBusMessage(region, application_properties={"region": region})
            sender.send_messages(message)
    found = {
        name: [
            str(each.application_properties) for each in bus.subscription("prices", name).messages
        ]
        for name in ("all", "eu", "none")
    }
    assert len(found["all"]) == 2
    assert found["none"] == []
    with client.get_subscription_receiver("prices", "eu") as receiver:
        (message,) = received(receiver)
        assert message.application_properties == {b"region": b"eu", b"seen": 1, b"RuleName": b"eu"}
        assert message.enqueued_sequence_number == 1
        receiver.complete_message(message)
    bus.subscription("prices", "eu").wait_until(lambda sizes: not sizes.active)


@pytest.mark.req("Z14")
def test_a_filter_that_fails_dead_letters_the_message_if_asked(
    bus: ServiceBus, client: Driven
) -> None:
    from azure.servicebus import ServiceBusMessage

    rule = Rule("bad", Sql("a / 0 > 1"))
    bus.declare(
        Topic(
            "t",
            [
                Subscription("asked", [rule]),
                Subscription("not", [rule], dead_lettering_on_filter_evaluation_exceptions=False),
            ],
        )
    )
    with client.get_topic_sender("t") as sender:
        sender.send_messages(ServiceBusMessage("x", application_properties={"a": 1}))
    (dead,) = bus.subscription("t", "asked").dead_letters
    assert dead.reason == "FilterException"
    assert bus.subscription("t", "not").dead_letters == []


@pytest.mark.req("Z14")
def test_messages_are_forwarded_and_so_are_dead_letters(bus: ServiceBus, client: Driven) -> None:
    bus.declare(
        Queue("first", forward_to="second"),
        Queue("second", max_delivery_count=1, forward_dead_lettered_messages_to="graves"),
        Queue("graves"),
    )
    sent(client, "a", queue="first")
    with client.get_queue_receiver("second") as receiver:
        (message,) = received(receiver)
        assert (message.sequence_number, message.enqueued_sequence_number) == (1, 1)
        receiver.abandon_message(message)
    (dead,) = bus.queue("graves").messages
    assert (dead.reason, dead.source) == ("MaxDeliveryCountExceeded", "second")
    assert bus.queue("second").dead_letters == []


@pytest.mark.req("Z14")
def test_a_message_that_cannot_be_forwarded_is_a_transfer_dead_letter(
    bus: ServiceBus, client: Driven
) -> None:
    bus.declare(Queue("from", forward_to="to"), Queue("to"))
    bus.delete("to")
    sent(client, "a", queue="from")
    (dead,) = bus.queue("from").transfer_dead_letters
    assert dead.reason == "MessagingEntityNotFoundException"


def test_a_message_in_a_circle_is_dead_lettered_after_four_hops(
    bus: ServiceBus, client: Driven
) -> None:
    bus.declare(Queue("one", forward_to="two"), Queue("two", forward_to="one"))
    sent(client, "a", queue="one")
    (dead,) = bus.queue("one").dead_letters
    assert dead.reason == "MaxTransferHopCountExceeded"


def test_a_subscription_forwards_to_a_queue(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus import ServiceBusMessage

    bus.declare(Topic("t", [Subscription("s", forward_to="q")]))
    with client.get_topic_sender("t") as sender:
        sender.send_messages([ServiceBusMessage("a"), ServiceBusMessage("b")])
    assert [each.message.body for each in bus.queue("q").messages] == [b"a", b"b"]


# --- Refusals ----------------------------------------------------------------------------------


@pytest.mark.req("Z6")
def test_an_entity_that_does_not_exist_is_refused(client: Driven) -> None:
    from azure.servicebus.exceptions import MessagingEntityNotFoundError

    receiver = client.get_queue_receiver("nowhere")
    with pytest.raises(MessagingEntityNotFoundError, match="could not be found"):
        receiver.receive_messages(1, max_wait_time=WAIT_S)
    receiver.close()


def test_a_disabled_entity_detaches_its_links_and_refuses_others(
    bus: ServiceBus, dialler: Dialler
) -> None:
    from azure.servicebus import ServiceBusMessage
    from azure.servicebus.exceptions import MessagingEntityDisabledError

    # An idle client does not read the reason of a detach: it attaches again to hear it.
    client = dialler.client(bus.connection_string, retry_total=1, retry_backoff_factor=0.01)
    with client.get_queue_sender("q") as sender:
        sender.send_messages(ServiceBusMessage("a"))
        bus.update("q", status="SendDisabled")
        with pytest.raises(MessagingEntityDisabledError):
            sender.send_messages(ServiceBusMessage("b"))
    with client.get_queue_receiver("q") as receiver:
        receiver.complete_message(received(receiver)[0])
    bus.update("q", status="Disabled")
    receiver = client.get_queue_receiver("q")
    with pytest.raises(MessagingEntityDisabledError):
        receiver.receive_messages(1, max_wait_time=WAIT_S)
    receiver.close()


def test_links_of_a_deleted_entity_are_detached(bus: ServiceBus, dialler: Dialler) -> None:
    from azure.servicebus import ServiceBusMessage
    from azure.servicebus.exceptions import MessagingEntityNotFoundError

    client = dialler.client(bus.connection_string, retry_total=1, retry_backoff_factor=0.01)
    with client.get_queue_sender("q") as sender:
        sender.send_messages(ServiceBusMessage("a"))
        bus.delete("q")
        with pytest.raises(MessagingEntityNotFoundError):
            sender.send_messages(ServiceBusMessage("b"))


@pytest.mark.req("Z15")
@pytest.mark.parametrize(("policy", "may_send"), [("sender", True), ("listener", False)])
def test_a_key_gives_only_its_rights(
    bus: ServiceBus, dialler: Dialler, policy: str, may_send: bool
) -> None:
    from azure.servicebus.exceptions import ServiceBusError

    client = dialler.client(bus.connection_string_for(policy))
    if may_send:
        sent(client, "a")
        assert bus.queue("q").stats.active == 1
        receiver = client.get_queue_receiver("q")
        with pytest.raises(ServiceBusError):
            receiver.receive_messages(1, max_wait_time=WAIT_S)
        receiver.close()
    else:
        with pytest.raises(ServiceBusError):
            sent(client, "a")
        assert bus.queue("q").stats.active == 0


@pytest.mark.req("Z15")
def test_a_wrong_key_gives_no_right(bus: ServiceBus, dialler: Dialler) -> None:
    from azure.servicebus.exceptions import ServiceBusAuthenticationError, ServiceBusError

    text = bus.connection_string.replace("SharedAccessKey=all", "SharedAccessKey=guessed")
    client = dialler.client(text)
    with pytest.raises((ServiceBusAuthenticationError, ServiceBusError)):
        sent(client, "a")
    assert bus.queue("q").stats.active == 0


@pytest.mark.req("Z15")
def test_a_key_of_an_entity_is_for_that_entity_only(bus: ServiceBus, dialler: Dialler) -> None:
    from azure.servicebus.exceptions import ServiceBusError

    bus.declare(Queue("own", keys={"app": SasKey("secret")}))
    text = bus.connection_string_for("app", "own")
    client = dialler.client(text)
    sent(client, "a", queue="own")
    assert bus.queue("own").stats.active == 1
    general = dialler.client(text.replace("EntityPath=own;", ""))
    with pytest.raises(ServiceBusError):
        sent(general, "a")
    assert bus.queue("q").stats.active == 0


def test_clients_connect_again_after_a_disconnect(bus: ServiceBus, dialler: Dialler) -> None:
    from azure.servicebus import ServiceBusMessage

    client = dialler.client(bus.connection_string, retry_total=3, retry_backoff_factor=0.01)
    with client.get_queue_sender("q") as sender:
        sender.send_messages(ServiceBusMessage("a"))
        assert bus.disconnect() >= 1
        sender.send_messages(ServiceBusMessage("b"))
    assert bus.queue("q").stats.active == 2
