"""Checks of transfers, settlement and outcomes, and of messages that pass through the host."""

from __future__ import annotations

import struct
import time

from amqp_rt.net.traces.octets import CompositeValue, Raw, composite, encode

from .checks import check
from .frames import shown
from .host import Host
from .links import Delivery, Incoming, Outgoing
from .messages import (
    APPLICATION_PROPERTIES,
    DATA,
    FOOTER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    SEQUENCE,
    VALUE,
    header,
    message,
    section,
    sections_of,
)
from .peers import Peer
from .verdicts import NotOffered, require

#: Largest max-message-size, in octets, that is exceeded to see whether the message is refused.
_LARGE = 4 * 2**20


def _through(host: Host) -> tuple[Peer, Outgoing, Incoming]:
    """Open a session with a link in each direction to one queue."""
    peer = host.session()
    address = host.queue(peer)
    return peer, peer.sender(address, handle=0), peer.receiver(address, handle=1)


def _relayed(host: Host, payload: bytes) -> Delivery:
    """Send *payload* through a queue, and return the delivery, settled."""
    _, out, source = _through(host)
    out.accepted(out.send(payload))
    source.flow(1)
    delivery = source.take()
    source.settle(delivery)
    return delivery


# --- deliveries of several frames ----------------------------------------------------------------


@check("X18", section="2.6.14")
def several_transfers(host: Host) -> None:
    """A delivery of several transfers is one message, wherever its sender splits it."""
    _, out, source = _through(host)
    whole = message("abcdefghij" * 20)
    number = out.begin(payload=whole[:1], more=True)
    for at in range(1, len(whole) - 50, 37):
        out.go_on(whole[at : min(at + 37, len(whole) - 50)], more=True)
    out.go_on(whole[len(whole) - 50 :])
    out.accepted(number)
    source.flow(1)
    delivery = source.take()
    source.settle(delivery)
    require(delivery.body == "abcdefghij" * 20, f"the message comes as {delivery.payload!r}")


@check("X18", section="2.7.5")
def transfers_that_repeat_themselves(host: Host) -> None:
    """Later transfers of a delivery may repeat its id and tag, and the last may be empty."""
    _, out, source = _through(host)
    whole = message("repeated")
    number = out.begin(b"tag", whole[:5], more=True)
    out.go_on(whole[5:], delivery_id=number, delivery_tag=b"tag", message_format=0, more=True)
    out.go_on(b"", delivery_id=number)
    out.accepted(number)
    source.flow(1)
    source.settle(source.read("repeated")[0])


@check("X18", section="2.6.14")
def interleaved_deliveries(host: Host) -> None:
    """Deliveries on two links of a session may be interleaved."""
    peer = host.session()
    address = host.queue(peer)
    one, two = peer.sender(address, handle=0), peer.sender(address, handle=2)
    first, second = message("first" * 9), message("second" * 9)
    numbers = [one.begin(payload=first[:9], more=True), two.begin(payload=second[:9], more=True)]
    one.go_on(first[9:20], more=True)
    two.go_on(second[9:30], more=True)
    two.go_on(second[30:])
    one.go_on(first[20:])
    one.accepted(numbers[0])
    two.accepted(numbers[1])
    source = peer.receiver(address)
    source.flow(2)
    came = source.read("first" * 9, "second" * 9)
    source.settle(came[0], came[1])


@check("X18", section="2.7.5")
def another_id_within_a_delivery(host: Host) -> None:
    """A transfer that goes on with another delivery-id is an error."""
    peer, out, _ = _through(host)
    number = out.begin(payload=message("x")[:3], more=True)
    out.go_on(message("x")[3:], delivery_id=number + 5)
    peer.fault("detach", "end", "close")


@check("X18", section="2.7.5")
def no_delivery_tag(host: Host) -> None:
    """A first transfer without a delivery-tag is an error."""
    peer, out, _ = _through(host)
    out.begin(payload=message("x"), delivery_tag=None)
    peer.fault("detach", "end", "close")


@check("X20", section="2.6.14")
def aborted(host: Host) -> None:
    """An aborted delivery leaves no message, and the next delivery works as usual."""
    _, out, source = _through(host)
    out.begin(payload=message("never")[:4], more=True)
    out.go_on(b"rubbish", more=True)
    out.go_on(b"", aborted=True)
    out.put("next")
    source.flow(5)
    source.settle(source.read("next")[0])
    source.nothing()


@check("X22", section="2.7.3")
def their_max_message_size(host: Host) -> None:
    """A message larger than the link's max-message-size detaches it with message-size-exceeded."""
    peer, out, _ = _through(host)
    limit = out.answer.get("max_message_size") or 0
    if not limit:
        raise NotOffered("the link has no max-message-size")
    if limit > _LARGE:
        raise NotOffered(f"messages of {limit} octets are taken")
    out.begin(payload=b"\x00\x53\x75\xb0" + struct.pack(">I", limit), more=True)
    piece = bytes(min(16_384, peer.greeting.get("max_frame_size", 2**32 - 1) - 100))
    for at in range(0, limit, len(piece)):
        out.go_on(piece, more=at + len(piece) < limit)
    peer.fault("detach", conditions=("amqp:link:message-size-exceeded",))


@check("X22", section="2.7.3")
def our_max_message_size(host: Host) -> None:
    """A message larger than the receiver's max-message-size is not sent to it."""
    peer = host.session()
    address = host.queue(peer)
    peer.sender(address, handle=0).put("x" * 5000)
    source = peer.receiver(address, max_message_size=1000)
    source.flow(1)
    frame = peer.next()
    while frame is not None and frame.name in ("flow", "empty", "disposition"):
        frame = peer.next(0.3)
    require(frame is None or frame.name != "transfer", "a message of 5000 octets is sent")


# --- settlement ----------------------------------------------------------------------------------


@check("X21", section="2.6.12")
def unsettled_is_answered(host: Host) -> None:
    """A message sent unsettled is accepted and settled by a disposition."""
    _, out, _ = _through(host)
    out.put("x")


@check("X21", section="2.6.12")
def many_are_answered(host: Host) -> None:
    """Each of several deliveries gets its disposition, one by one or as a range."""
    _, out, _ = _through(host)
    out.put(*map(str, range(9)))


@check("X21", section="2.6.12")
def settled_by_the_sender(host: Host) -> None:
    """A message sent settled gets no disposition, and is delivered."""
    peer, out, source = _through(host)
    out.send(message("settled"), settled=True)
    peer.silence()
    source.flow(1)
    source.settle(source.read("settled")[0])


@check("X21", section="2.7.5")
def settled_by_the_last_transfer(host: Host) -> None:
    """A delivery is settled if any of its transfers has the settled flag."""
    peer, out, source = _through(host)
    whole = message("settled at last")
    out.begin(payload=whole[:6], more=True)
    out.go_on(whole[6:], settled=True)
    peer.silence()
    source.flow(1)
    source.settle(source.read("settled at last")[0])


@check("X21", section="2.7.3")
def settled_by_the_host(host: Host) -> None:
    """If the host agrees to snd-settle-mode settled, it sends settled messages."""
    peer = host.session()
    address = host.queue(peer)
    peer.sender(address, handle=0).put("x")
    source = peer.receiver(address, snd_settle_mode=1)
    if source.answer.get("snd_settle_mode", 2) != 1:
        raise NotOffered("the host does not send settled")
    source.flow(1)
    require(source.take().settled, "snd-settle-mode is settled, and an unsettled message comes")


@check("X21", section="2.7.3")
def unsettled_by_the_host(host: Host) -> None:
    """If the host agrees to snd-settle-mode unsettled, it sends unsettled messages."""
    peer = host.session()
    address = host.queue(peer)
    peer.sender(address, handle=0).put("x")
    source = peer.receiver(address, snd_settle_mode=0)
    if source.answer.get("snd_settle_mode", 2) != 0:
        raise NotOffered("the host does not promise to send unsettled")
    source.flow(1)
    delivery = source.take()
    require(not delivery.settled, "snd-settle-mode is unsettled, and a settled message comes")
    source.settle(delivery)


@check("X21", section="2.7.6")
def a_range_is_settled(host: Host) -> None:
    """A disposition settles a range of deliveries: none of them is delivered again."""
    peer, out, source = _through(host)
    out.put("1", "2", "3")
    source.flow(3)
    came = source.read("1", "2", "3")
    source.settle(came[0], came[-1])
    source.close()
    again = peer.receiver(out.address, handle=2)
    again.flow(3)
    again.nothing()


@check("X21", section="2.7.6")
def outcomes_in_any_order(host: Host) -> None:
    """Deliveries may be settled in any order."""
    _peer, out, source = _through(host)
    out.put("1", "2", "3")
    source.flow(3)
    came = source.read("1", "2", "3")
    for delivery in (came[1], came[2]):
        source.settle(delivery)
    source.settle(came[0], state="released")
    source.flow(3)
    last = source.take()
    require(last.body == came[0].body, f"{came[0].body!r} is released, and {last.body!r} comes")
    source.settle(last)


@check("X21", section="2.7.6")
def dispositions_of_nothing(host: Host) -> None:
    """A disposition of unknown or settled deliveries is ignored."""
    peer, out, source = _through(host)
    out.put("x")
    source.flow(1)
    (delivery,) = source.read("x")
    source.settle(delivery)
    source.settle(delivery)
    peer.alive()


@check("X21", section="2.6.12")
def receiver_settles_second(host: Host) -> None:
    """With rcv-settle-mode second, the host answers the receiver's outcome by settling."""
    peer = host.session()
    address = host.queue(peer)
    peer.sender(address, handle=0).put("x")
    source = peer.receiver(address, rcv_settle_mode=1, snd_settle_mode=0)
    if source.answer.get("rcv_settle_mode", 0) != 1:
        raise NotOffered("the host does not have rcv-settle-mode second")
    source.flow(1)
    (delivery,) = source.read("x")
    source.settle(delivery, settled=False)
    while True:
        frame = peer.hear("disposition")
        if (
            frame.fields.get("role", False) is False
            and frame.fields.get("first") == delivery.number
        ):
            break
    require(frame.fields.get("settled"), f"the host must settle, and sends {shown(frame)}")
    source.settle(delivery)


@check("X21", section="2.6.12")
def host_settles_second(host: Host) -> None:
    """With rcv-settle-mode second, the host sends its outcome first, and does not settle."""
    peer = host.session()
    out = peer.sender(host.queue(peer), rcv_settle_mode=1, snd_settle_mode=0)
    if out.answer.get("rcv_settle_mode", 0) != 1:
        raise NotOffered("the host does not have rcv-settle-mode second")
    number = out.send(message("x"))
    frame = out.outcome(number)
    require(not frame.fields.get("settled"), f"the host settles before us: {shown(frame)}")
    require(isinstance(frame.fields.get("state"), CompositeValue), f"no outcome: {shown(frame)}")
    peer.send("disposition", role="sender", first=number, settled=True, state="accepted")
    peer.alive()


# --- outcomes ------------------------------------------------------------------------------------


def _one(host: Host, *before: bytes) -> tuple[Peer, Outgoing, Incoming, Delivery]:
    """Fetch a message and leave it unsettled."""
    peer, out, source = _through(host)
    out.accepted(out.send(message("x", *before)))
    source.flow(1)
    (delivery,) = source.read("x")
    return peer, out, source, delivery


def _again(source: Incoming) -> Delivery:
    source.flow(1)
    (delivery,) = source.read("x")
    source.settle(delivery)
    return delivery


def _count(delivery: Delivery) -> int:
    return int(sections_of(delivery.payload).header(4, 0))


@check("M19", section="3.4.2")
def accepted(host: Host) -> None:
    """An accepted message is removed from its source."""
    peer, out, source, delivery = _one(host)
    source.settle(delivery)
    source.flow(5)
    source.nothing()
    source.close()
    again = peer.receiver(out.address, handle=2)
    again.flow(5)
    again.nothing()


@check("M19", section="3.3")
def one_of_two_receivers(host: Host) -> None:
    """A message that one receiver holds unsettled is not sent to another."""
    peer, out, _, _ = _one(host)
    other = peer.receiver(out.address, handle=2)
    other.flow(5)
    other.nothing()


@check("M22", "M8", section="3.4.4")
def released(host: Host) -> None:
    """A released message is delivered again, with its delivery-count unchanged."""
    _, _, source, delivery = _one(host)
    source.settle(delivery, state="released")
    count = _count(_again(source))
    require(count == 0, f"the delivery-count is {count} after a release")


@check("M21", section="3.4.3")
def rejected(host: Host) -> None:
    """A rejected message is not delivered again on that link."""
    _, _, source, delivery = _one(host)
    source.settle(delivery, state=composite("rejected", error=("amqp:decode-error", "a bad message")))  # fmt: skip
    source.flow(5)
    source.nothing()


@check("M23", "M8", section="3.4.5")
def modified_failed(host: Host) -> None:
    """A message modified as failed is delivered again, with its delivery-count raised by one."""
    _, _, source, delivery = _one(host)
    source.settle(delivery, state=composite("modified", delivery_failed=True))
    count = _count(_again(source))
    require(count == 1, f"the delivery-count is {count} after one delivery that failed")


@check("M23", section="3.4.5")
def modified_undeliverable_here(host: Host) -> None:
    """A message modified as undeliverable here is not delivered again on that link."""
    _, _, source, delivery = _one(host)
    source.settle(delivery, state=composite("modified", undeliverable_here=True))
    source.flow(5)
    source.nothing()


@check("M23", section="3.4.5")
def modified_annotations(host: Host) -> None:
    """Annotations of the modified outcome are merged into those of the message."""
    kept = section(MESSAGE_ANNOTATIONS, encode("map", {"x-opt-kept": "k", "x-opt-new": "old"}))
    _, _, source, delivery = _one(host, kept)
    source.settle(delivery, state=composite("modified", message_annotations={"x-opt-new": "new"}))
    found = sections_of(_again(source).payload).values.get(MESSAGE_ANNOTATIONS) or {}
    require(
        found.get("x-opt-kept") == "k" and found.get("x-opt-new") == "new",
        f"the message annotations are {found}",
    )


@check("M25", section="3.4.1")
def received(host: Host) -> None:
    """Received is not an outcome: the delivery stays unsettled, and may still be accepted."""
    _, _, source, delivery = _one(host)
    state = composite("received", section_number=0, section_offset=0)
    source.settle(delivery, state=state, settled=False)
    source.settle(delivery)
    source.flow(5)
    source.nothing()


@check("M19", section="3.3")
def link_closed_unsettled(host: Host) -> None:
    """Messages unsettled when their link is closed are available to other receivers."""
    peer, out, source, _ = _one(host)
    source.close()
    _again(peer.receiver(out.address, handle=2))


@check("M19", section="3.3")
def connection_cut_unsettled(host: Host) -> None:
    """Messages unsettled when the connection breaks are available to other receivers."""
    keeper = host.session()
    address = host.queue(keeper)
    keeper.sender(address, handle=0).put("x")
    lost = host.session()
    source = lost.receiver(address)
    source.flow(1)
    source.read("x")
    lost.cut()
    _again(keeper.receiver(address, handle=2))


# --- messages ------------------------------------------------------------------------------------


def _long_string(text: str) -> Raw:
    """Encode a string in its long form, which no sender would choose."""
    return Raw(b"\xb1" + struct.pack(">I", len(text)) + text.encode())


@check("M1", section="3.2")
def kinds_of_body(host: Host) -> None:
    """A body of data, several data, sequences or any value is delivered as it was sent."""
    bodies = [
        section(DATA, encode("binary", b"data")),
        section(DATA, encode("binary", b"da")) + section(DATA, encode("binary", b"ta")),
        section(SEQUENCE, encode("list", [1, "two"])) + section(SEQUENCE, encode("list", [])),
        section(VALUE, encode("map", {"key": [1.5, True, b"\x00"]})),
        section(VALUE, b"\x40"),
    ]
    _, out, source = _through(host)
    for body in bodies:
        out.accepted(out.send(body))
        source.flow(1)
        delivery = source.take()
        source.settle(delivery)
        came = sections_of(delivery.payload)
        require(came.body() == body, f"{body!r} comes as {came.body()!r}")
        codes = [code for code, _ in came.octets]
        require(codes == sorted(codes), f"the sections come in the order {codes}")


@check("M2", section="3.2")
def bare_message(host: Host) -> None:
    """Properties, application-properties and body are delivered octet by octet as encoded."""
    properties = section(
        PROPERTIES, encode("list", [_long_string("id-1"), None, _long_string("anywhere")])
    )
    simple = Raw(b"\xd1" + struct.pack(">II", 4 + 11, 2) + _long_string("k") + b"\x70\x00\x00\x00\x07")  # fmt: skip
    bare = (
        properties + section(APPLICATION_PROPERTIES, simple) + section(VALUE, _long_string("long"))
    )
    came = sections_of(_relayed(host, bare).payload).bare()
    require(came == bare, f"{bare!r} comes as {came!r}")


@check("M2", "T1", section="3.2.4")
def kinds_of_message_id(host: Host) -> None:
    """A message-id may be a ulong, a uuid, a binary or a string, and keeps its type and value."""
    for value in (
        b"\x80" + struct.pack(">Q", 7),
        b"\x98" + bytes(range(16)),
        b"\xa0\x01x",
        b"\xa1\x01x",
    ):
        bare = section(PROPERTIES, encode("list", [Raw(value)])) + message("x")
        came = sections_of(_relayed(host, bare).payload).bare()
        require(came == bare, f"{bare!r} comes as {came!r}")


@check("M3", section="3.2")
def nothing_is_added(host: Host) -> None:
    """No section is added to the bare message, and no footer."""
    codes = [code for code, _ in sections_of(_relayed(host, message("x")).payload).octets]
    added = [code for code in codes if code >= PROPERTIES and code != VALUE]
    require(not added, f"sections {[f'0x{code:x}' for code in added]} have been added")


@check("M4", section="3.2.1")
def header_kept(host: Host) -> None:
    """Durable and priority of the header are delivered as they were sent."""
    came = sections_of(_relayed(host, message("x", header(durable=True, priority=7))).payload)
    require(came.header(0, False) is True, "a durable message comes as one that is not")
    require(came.header(1, 4) == 7, f"the priority 7 comes as {came.header(1, 4)}")


@check("M4", section="3.2.1")
def header_left_out(host: Host) -> None:
    """A message without a header is not durable, has priority 4, and delivery-count 0."""
    came = sections_of(_relayed(host, message("x")).payload)
    found = (came.header(0, False), came.header(1, 4), came.header(4, 0))
    require(found == (False, 4, 0), f"durable, priority and delivery-count come as {found}")


@check("M7", section="3.2.1")
def time_to_live(host: Host) -> None:
    """A message older than its ttl is not delivered."""
    _, out, source = _through(host)
    out.accepted(out.send(message("x", header(ttl=100))))
    time.sleep(0.4)
    source.flow(5)
    source.nothing()


@check("M10", section="3.2.3")
def message_annotations(host: Host) -> None:
    """Message annotations are passed on."""
    sent = section(MESSAGE_ANNOTATIONS, encode("map", {"x-opt-colour": "red"}))
    came = sections_of(_relayed(host, message("x", sent)).payload)
    found = came.values.get(MESSAGE_ANNOTATIONS) or {}
    require(found.get("x-opt-colour") == "red", f"the message annotations are {found}")


@check("M17", section="3.2.9")
def footer(host: Host) -> None:
    """The footer is passed on, after the body."""
    sent = section(FOOTER, encode("map", {"x-opt-sum": "1234"}))
    came = sections_of(_relayed(host, message("x") + sent).payload)
    require((came.values.get(FOOTER) or {}).get("x-opt-sum") == "1234", "the footer is missing")


@check("M1", section="3.2")
def large_message(host: Host) -> None:
    """A message of 200 kB is delivered complete, in frames of the agreed size."""
    peer, out, source = _through(host)
    limit = min(peer.greeting.get("max_frame_size", 2**32 - 1), 16_384)
    content = bytes(range(256)) * 800
    whole = section(DATA, b"\xb0" + struct.pack(">I", len(content)) + content)
    step = limit - 100
    number = out.begin(payload=whole[:step], more=True)
    for at in range(step, len(whole), step):
        out.go_on(whole[at : at + step], more=at + step < len(whole))
    out.accepted(number)
    source.flow(1)
    delivery = source.take()
    source.settle(delivery)
    require(sections_of(delivery.payload).body() == whole, "the message comes as another")
