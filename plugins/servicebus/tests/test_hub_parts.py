"""Parts of event hubs without a broker: addresses, start positions, events, producers, owner levels."""

from __future__ import annotations

from typing import Any

import pytest
from amqp_rt_servicebus.conditions import ARGUMENT_ERROR, ARGUMENT_OUT_OF_RANGE
from amqp_rt_servicebus.hub_addresses import HubAddress, hub_address, partition_index
from amqp_rt_servicebus.hub_events import (
    BATCH_EVENTS_MAX,
    OFFSET,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    PRODUCER_SEQUENCE_NUMBER,
    PUBLISHER,
    Arrival,
    Arriving,
    Event,
    arrived_event,
    delivered_event,
)
from amqp_rt_servicebus.hub_positions import SELECTOR, SELECTOR_CODE, start_position
from amqp_rt_servicebus.hub_producers import (
    EPOCH_STOLEN,
    OUT_OF_ORDER,
    PRODUCERS_MAX,
    ProducerLink,
    Producers,
)
from amqp_rt_servicebus.messages import BATCH_FORMAT, ENQUEUED_TIME, SEQUENCE_NUMBER
from amqp_rt_servicebus.stored import PARTITION_KEY
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt import Message
from amqp_rt.batches import write_messages
from amqp_rt.broker.building import Position
from amqp_rt.errors import AmqpError, DecodeError
from amqp_rt.values import Described, Int, Short, Symbol, Timestamp

pytestmark = pytest.mark.req("Z20")

# --- Addresses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("clicks", HubAddress("clicks")),
        ("a/b/clicks", HubAddress("a/b/clicks")),
        ("clicks/Partitions/3", HubAddress("clicks", partition="3")),
        ("a/clicks/partitions/x", HubAddress("a/clicks", partition="x")),
        ("clicks/Publishers/Door-1", HubAddress("clicks", publisher="Door-1")),
        (
            "clicks/ConsumerGroups/$Default/Partitions/0",
            HubAddress("clicks", partition="0", group="$Default"),
        ),
        ("clicks/consumergroups/g/partitions/12", HubAddress("clicks", partition="12", group="g")),
        ("clicks/ConsumerGroups/g", HubAddress("clicks/ConsumerGroups/g")),
        ("clicks/$management", HubAddress("clicks/$management")),
        ("Partitions/1", HubAddress("Partitions/1")),
        ("", HubAddress("")),
    ],
)
def test_addresses_name_a_hub_a_partition_a_publisher_or_a_group(
    address: str, found: HubAddress
) -> None:
    assert hub_address(address) == found


@pytest.mark.parametrize(
    ("text", "index"),
    [
        *(("0", 0), ("3", 3), ("4", None), ("03", None), ("-1", None), ("+1", None), ("", None)),
        *(("1.0", None), ("\u0663", None), ("\u00b2", None), ("9" * 5_000, None)),
    ],
)
def test_partitions_have_one_spelling(text: str, index: int | None) -> None:
    assert partition_index(text, 4) == index


# --- Start positions -------------------------------------------------------------------------


def selected(text: object, descriptor: object = SELECTOR) -> Position:
    return start_position({Symbol("any"): Described(descriptor, text)})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("amqp.annotation.x-opt-offset > '-1'", Position("first")),
        ("amqp.annotation.x-opt-offset >= '-1'", Position("first")),
        ("amqp.annotation.x-opt-offset > '@latest'", Position("next")),
        ("amqp.annotation.x-opt-offset >= '@latest'", Position("last")),
        ("amqp.annotation.x-opt-offset > '7'", Position("offset", 7, inclusive=False)),
        ("amqp.annotation.x-opt-offset >= '7'", Position("offset", 7)),
        (
            "amqp.annotation.x-opt-sequence-number > '7'",
            Position("sequence-number", 7, inclusive=False),
        ),
        ("amqp.annotation.x-opt-sequence-number >= 7", Position("sequence-number", 7)),
        (
            "amqp.annotation.x-opt-enqueued-time > '1700000000000'",
            Position("timestamp", 1_700_000_000_000, inclusive=False),
        ),
        (" amqp.annotation.x-opt-enqueuedtimeutc>=5 ", Position("timestamp", 5)),
    ],
)
@pytest.mark.parametrize("descriptor", [SELECTOR, SELECTOR_CODE])
def test_selectors_of_both_sdks_are_start_positions(
    text: str, found: Position, descriptor: object
) -> None:
    assert selected(text, descriptor) == found


def test_without_a_filter_a_reader_begins_with_the_first_event() -> None:
    assert start_position(None) == start_position({}) == Position("first")


def test_the_name_of_a_filter_tells_its_type_if_it_has_no_descriptor() -> None:
    text = "amqp.annotation.x-opt-offset > '3'"
    assert start_position({SELECTOR: text}) == selected(text)


@pytest.mark.parametrize(
    ("filters", "why"),
    [
        ({Symbol("x"): Described(SELECTOR, "color = 'red'")}, "is no start position"),
        ({Symbol("x"): Described(SELECTOR, "amqp.annotation.x-opt-offset > 'x'")}, "expected as offset"),
        ({Symbol("x"): Described(SELECTOR, "amqp.annotation.x-opt-other > '1'")}, "no start"),
        ({Symbol("x"): Described(SELECTOR, "amqp.annotation.x-opt-sequence-number > '@latest'")}, "expected as sequence-number"),
        ({Symbol("x"): Described(SELECTOR, 7)}, "is not a text"),
        ({Symbol("x"): Described(Symbol("y"), "z")}, "'x' is not supported"),
        ({Symbol("x"): "amqp.annotation.x-opt-offset > '1'"}, "'x' is not supported"),
        ({Symbol("x"): Described(SELECTOR, " " * 100_000)}, "no start position"),
        (
            {
                Symbol(name): Described(SELECTOR, "amqp.annotation.x-opt-offset > '1'")
                for name in "ab"
            },
            "more than one filter",
        ),
    ],
)  # fmt: skip
def test_other_filters_are_refused(filters: dict[Any, Any], why: str) -> None:
    with pytest.raises(AmqpError, match=why) as refused:
        start_position(filters)
    assert refused.value.condition == ARGUMENT_ERROR


def arrival(payload: bytes, message_format: int) -> Arrival:
    """Return the events of a delivery."""
    arriving = Arriving(payload, message_format)
    for _ in arriving:
        """Go on: there is no turn to wait for."""
    return arriving.arrival


# --- Events ----------------------------------------------------------------------------------


def encoded(body: object = "e", **fields: Any) -> bytes:
    return bytes(Message(body, **fields).encode())


def kept(payload: bytes) -> dict[Any, Any]:
    return dict(Message.decode(payload).message_annotations)


def test_annotations_of_the_service_are_not_believed() -> None:
    event = arrived_event(
        encoded(
            delivery_annotations={Symbol("x-opt-note"): 1},
            message_annotations={
                SEQUENCE_NUMBER: 99,
                OFFSET: "99",
                ENQUEUED_TIME: Timestamp(1),
                PUBLISHER: "other",
                PRODUCER_ID: 5,
                PRODUCER_EPOCH: Short(1),
                PRODUCER_SEQUENCE_NUMBER: Int(7),
                Symbol("x-opt-color"): "red",
            },
        )
    )
    message = Message.decode(event.payload)
    assert dict(message.message_annotations) == {"x-opt-color": "red"}
    assert not message.delivery_annotations
    assert message.body == "e"
    assert event.producer == (5, 1, 7)


@pytest.mark.parametrize(
    ("key", "octets"),
    [("k", b"k"), ("\u00e9", b"\xc3\xa9"), (b"\xff", b"\xff"), ("", b""), (7, None), (None, None)],
)
def test_partition_keys_are_text_or_octets(key: object, octets: bytes | None) -> None:
    payload = encoded(message_annotations={PARTITION_KEY: key})
    event = arrived_event(payload)
    assert event.key == octets
    assert event.payload == payload


def test_the_name_of_a_publisher_is_its_partition_key() -> None:
    event = arrived_event(encoded(), publisher="door")
    assert event.key == b"door"
    assert kept(event.payload) == {"x-opt-partition-key": "door", "x-opt-publisher": "door"}
    arrived_event(encoded(message_annotations={PARTITION_KEY: "door"}), publisher="door")
    with pytest.raises(AmqpError, match="'gate' is not the name of the publisher 'door'"):
        arrived_event(encoded(message_annotations={PARTITION_KEY: "gate"}), publisher="door")


@pytest.mark.parametrize("payload", [b"\x00", b"\x00\x53\x75", b"\x00\x53\x72\x40" * 2])
def test_malformed_events_are_refused(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        arrived_event(payload)


def test_a_batch_is_its_events_with_the_key_of_its_envelope() -> None:
    envelope = encoded(b"", message_annotations={PARTITION_KEY: "all"})[:-5]
    events = [encoded("a", message_annotations={PARTITION_KEY: "own"}), encoded("b")]
    found = arrival(envelope + write_messages(events), BATCH_FORMAT)
    assert [Message.decode(each.payload).body for each in found.events] == ["a", "b"]
    assert found.key == b"all"
    assert arrival(write_messages(events), BATCH_FORMAT).key == b"own"


def test_a_batch_with_one_malformed_event_is_malformed() -> None:
    with pytest.raises(DecodeError):
        arrival(write_messages([encoded("a"), b"\x00"]), BATCH_FORMAT)
    with pytest.raises(DecodeError, match="no message in it"):
        arrival(b"", BATCH_FORMAT)


def test_a_batch_has_a_bound_on_its_events() -> None:
    assert len(arrival(write_messages([encoded("e")] * BATCH_EVENTS_MAX), BATCH_FORMAT).events) == BATCH_EVENTS_MAX  # fmt: skip
    with pytest.raises(DecodeError, match="more than 5000 messages: send several"):
        arrival(write_messages([encoded("e")] * (BATCH_EVENTS_MAX + 1)), BATCH_FORMAT)


def test_another_message_format_is_refused() -> None:
    with pytest.raises(DecodeError, match="0x00000007 is neither"):
        arrival(encoded(), 7)


@given(
    own=st.dictionaries(st.sampled_from(["x-opt-a", "x-opt-offset", "x-b"]), st.integers(0, 9)),
    body=st.binary(max_size=200),
    number=st.integers(0, 2**62),
)
def test_a_delivered_event_has_the_annotations_of_its_sender_and_of_the_service(
    own: dict[str, int], body: bytes, number: int
) -> None:
    sent = encoded(body, message_annotations={Symbol(name): value for name, value in own.items()})
    found = delivered_event(arrived_event(sent).payload, number, 1_700_000_000_123)
    assert isinstance(found, bytes)
    message = Message.decode(found)
    assert message.body == body
    assert dict(message.message_annotations) == {
        **own,
        "x-opt-sequence-number": number,
        "x-opt-offset": str(number),
        "x-opt-enqueued-time": 1_700_000_000_123,
    }
    assert not message.delivery_annotations


@pytest.mark.parametrize("size", [0, 1, 150, 160, *range(165, 180), 200, 245, 250, 300, 5_000])
def test_the_place_stands_beside_annotations_of_any_size(size: int) -> None:
    own = {Symbol("x-opt-note"): "n" * size, PARTITION_KEY: "k"}
    message = Message.decode(
        bytes(delivered_event(encoded("e", message_annotations=own), 7, -1))  # type: ignore[arg-type]
    )
    assert dict(message.message_annotations) == {
        **own,
        "x-opt-sequence-number": 7,
        "x-opt-offset": "7",
        "x-opt-enqueued-time": -1,
    }
    assert message.body == "e"


@pytest.mark.parametrize("count", [1, 100, 124, 125, 130, 200])
def test_the_place_stands_beside_any_number_of_annotations(count: int) -> None:
    own = {Symbol(f"x-{number}"): None for number in range(count)}
    found = Message.decode(
        bytes(delivered_event(encoded("e", message_annotations=own), 7, 1))  # type: ignore[arg-type]
    ).message_annotations
    assert len(found) == count + 3
    assert found.items() >= own.items()


def test_delivery_annotations_come_before_message_annotations() -> None:
    payload = encoded("e", durable=True, message_annotations={Symbol("x-opt-a"): 1})
    message = Message.decode(
        bytes(delivered_event(payload, 0, 1, {Symbol("last_enqueued_offset"): "9"}))  # type: ignore[arg-type]
    )
    assert dict(message.delivery_annotations) == {"last_enqueued_offset": "9"}
    assert message.durable


def test_large_events_are_delivered_in_pieces_that_share_the_body() -> None:
    found = delivered_event(encoded(b"x" * 1_000_000), 0, 1)
    assert isinstance(found, list)
    assert len(Message.decode(b"".join(found)).body) == 1_000_000


# --- Idempotent producers --------------------------------------------------------------------


def events(link: ProducerLink, *numbers: object, epoch: int | None = None) -> list[Event]:
    chosen = link.epoch if epoch is None else epoch
    return [Event(b"", None, (link.state.id, chosen, number)) for number in numbers]


def opened(producers: Producers, **values: Any) -> ProducerLink:
    names = {"id": PRODUCER_ID, "epoch": PRODUCER_EPOCH, "sequence": PRODUCER_SEQUENCE_NUMBER}
    return producers.open({names[name]: value for name, value in values.items()})


def store(link: ProducerLink, *numbers: object) -> bool:
    found = events(link, *numbers)
    if not link.check(found):
        return False
    link.stored(found)
    return True


def test_a_new_producer_gets_an_id_the_first_epoch_and_no_number() -> None:
    producers = Producers()
    link = opened(producers, id=None, epoch=None, sequence=None)
    other = opened(producers)
    assert dict(link.properties) == {
        "com.microsoft:producer-id": link.state.id,
        "com.microsoft:producer-epoch": 0,
        "com.microsoft:producer-sequence-number": 0,
    }
    types = [type(each) for each in link.properties.values()]
    assert types == [int, Short, Int]
    assert link.state.id != other.state.id


def test_numbers_of_events_have_no_gap_and_a_batch_sent_again_is_stored_once() -> None:
    link = opened(Producers())
    assert store(link, 1, 2, 3)
    assert not store(link, 1, 2, 3)
    assert not store(link, 3)
    assert store(link, 4)
    for numbers in ((6,), (4, 5), (7, 8)):
        with pytest.raises(AmqpError) as refused:
            store(link, *numbers)
        assert refused.value.condition == OUT_OF_ORDER
    assert store(link, 5)


@pytest.mark.parametrize("numbers", [(1, 3), (2, 1), (1, 1), (None,), (True,), ("1",), (1, None)])
def test_batches_with_wrong_numbers_are_refused(numbers: tuple[object, ...]) -> None:
    link = opened(Producers())
    with pytest.raises(AmqpError) as refused:
        store(link, *numbers)
    assert refused.value.condition == ARGUMENT_ERROR
    assert store(link, 1)


def test_events_of_another_producer_or_epoch_are_refused() -> None:
    producers = Producers()
    link, other = opened(producers), opened(producers)
    for wrong in (events(other, 1), events(link, 1, epoch=5)):
        with pytest.raises(AmqpError, match="was expected") as refused:
            link.check(wrong)
        assert refused.value.condition == ARGUMENT_ERROR


def test_a_higher_epoch_takes_the_producer_over() -> None:
    producers = Producers()
    old = opened(producers, id=7, epoch=3, sequence=10)
    assert store(old, 11)
    new = opened(producers, id=7, epoch=4)
    assert (new.epoch, new.sequence) == (4, 11)
    with pytest.raises(AmqpError, match="has the epoch 4") as refused:
        store(old, 12)
    assert refused.value.condition == EPOCH_STOLEN
    assert store(new, 12)
    with pytest.raises(AmqpError) as refused:
        opened(producers, id=7, epoch=3)
    assert refused.value.condition == EPOCH_STOLEN


def test_links_with_equal_epochs_share_the_numbers() -> None:
    producers = Producers()
    first = opened(producers, id=7, epoch=1)
    second = opened(producers, id=7, epoch=1)
    third = opened(producers, id=7)
    assert store(first, 1)
    assert store(second, 2)
    assert store(third, 3)


def test_a_client_that_lost_an_outcome_sends_the_batch_again() -> None:
    producers = Producers()
    assert store(opened(producers, id=7, epoch=0), 1, 2)
    again = opened(producers, id=7, epoch=0, sequence=0)
    assert again.properties[PRODUCER_SEQUENCE_NUMBER] == 0
    assert not store(again, 1, 2)
    assert store(again, 3)


def test_a_producer_may_begin_with_any_number() -> None:
    producers = Producers()
    assert store(opened(producers, id=7, sequence=41), 42)
    ahead = opened(producers, id=7, sequence=100)
    assert store(ahead, 101)


def test_zero_comes_after_the_largest_number() -> None:
    link = opened(Producers(), sequence=2**31 - 2)
    assert store(link, 2**31 - 1, 0, 1)
    assert store(link, 2)


@pytest.mark.parametrize(
    "values",
    [{"id": "7"}, {"id": -1}, {"id": True}, {"epoch": 2**15}, {"epoch": 1.5}, {"sequence": 2**31}],
)
def test_properties_of_a_producer_are_numbers_in_range(values: dict[str, Any]) -> None:
    with pytest.raises(AmqpError) as refused:
        opened(Producers(), **values)
    assert refused.value.condition == ARGUMENT_OUT_OF_RANGE


def test_a_partition_forgets_the_producers_that_were_used_longest_ago() -> None:
    producers = Producers()
    busy = opened(producers, id=10**6)
    for id_ in range(PRODUCERS_MAX + 10):
        opened(producers, id=id_)
        assert store(busy, id_ + 1)
    assert len(producers) == PRODUCERS_MAX
    assert opened(producers, id=10**6).sequence == PRODUCERS_MAX + 10


def test_new_ids_are_not_those_that_clients_chose() -> None:
    producers = Producers()
    for id_ in (1, 2, 3):
        opened(producers, id=id_)
    assert opened(producers).state.id == 4
