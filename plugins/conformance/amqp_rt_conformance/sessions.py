"""Checks of sessions and windows, links, credit, and the scope of errors."""

from __future__ import annotations

import struct
from secrets import token_hex
from typing import Any

from amqp_rt.net.traces.octets import CompositeValue, Raw, composite, encode

from .checks import check
from .frames import shown
from .host import Host
from .messages import message
from .peers import Peer
from .verdicts import Departs, NotOffered, require

FRAMING = "amqp:connection:framing-error"
#: Bodies of the messages put where a check requests fewer.
_FEW = ("1", "2", "3", "4", "5")


def _stocked(host: Host, *bodies: str) -> tuple[Peer, str]:
    """Open a session, and fill a queue with these messages."""
    peer = host.session()
    address = host.queue(peer)
    out = peer.sender(address)
    out.put(*bodies)
    out.close()
    return peer, address


# --- sessions ------------------------------------------------------------------------------------


@check("X8", section="2.5.1")
def begin(host: Host) -> None:
    """Begin is answered by begin, with our channel and the host's initial windows."""
    peer = host.connect()
    answer = peer.begin(5)
    for name in ("next_outgoing_id", "incoming_window", "outgoing_window"):
        require(name in answer.fields, f"begin has no {name.replace('_', '-')}: {shown(answer)}")


@check("X8", section="2.5.1")
def several_sessions(host: Host) -> None:
    """Sessions of one connection are independent: ending one leaves the others."""
    peer = host.connect()
    if peer.greeting.get("channel_max", 65_535) < 2:
        raise NotOffered("the channel-max is too low for three sessions")
    for channel in (0, 1, 2):
        peer.begin(channel)
    peer.send("end", channel=1)
    peer.hear("end")
    peer.alive(0)
    peer.alive(2)


@check("X8", section="2.5.2")
def end(host: Host) -> None:
    """End is answered by end, and the channel may be used again."""
    peer = host.session()
    peer.send("end")
    frame = peer.hear("end")
    require(frame.fields.get("error") is None, f"our end is answered by {shown(frame)}")
    peer.begin()
    peer.alive()


@check("X8", section="2.5.2")
def end_ends_links(host: Host) -> None:
    """Ending a session ends its links: their names and handles may be used again."""
    peer = host.session()
    address = host.queue(host.session())
    peer.sender(address, name="once", handle=0)
    peer.send("end")
    peer.hear("end")
    peer.begin()
    peer.sender(address, name="once", handle=0).put("x")


@check("X8", section="2.7.1")
def our_channel_max(host: Host) -> None:
    """A peer with a channel-max of 0 receives no frames on other channels."""
    peer = host.connect(channel_max=0)
    answer = peer.begin()
    require(answer.channel == 0, f"begin comes on channel {answer.channel}")


@check("X8", section="2.7.1")
def their_channel_max(host: Host) -> None:
    """A channel beyond the host's channel-max is a framing error."""
    peer = host.connect()
    limit = peer.greeting.get("channel_max", 65_535)
    if limit >= 65_535:
        raise NotOffered("every channel may be used")
    peer.send("begin", channel=limit + 1, next_outgoing_id=0, incoming_window=9, outgoing_window=9)
    peer.fault("close", conditions=(FRAMING,))


@check("X8", section="2.7.2")
def their_handle_max(host: Host) -> None:
    """A handle beyond the host's handle-max is a framing error."""
    peer = host.connect()
    limit = peer.begin().fields.get("handle_max", 2**32 - 1)
    if limit >= 2**32 - 1:
        raise NotOffered("every handle may be used")
    peer.send("attach", name="l", handle=limit + 1, role="receiver", source="q", target="t")
    peer.fault("close", conditions=(FRAMING,))


@check("X8", "X26", section="2.5.1")
def channel_in_use(host: Host) -> None:
    """Begin on a channel with a session is an error."""
    peer = host.session()
    peer.send("begin", next_outgoing_id=0, incoming_window=9, outgoing_window=9)
    peer.fault("close", "end")


@check("X17", "X10", section="2.7.4")
def echo_of_a_session(host: Host) -> None:
    """An echo without a link is answered with the state of the session."""
    peer = host.session()
    frame = peer.echo()
    require("handle" not in frame.fields, f"the answer names a link: {shown(frame)}")
    expected = peer.channels[0].next_outgoing_id
    require(
        frame.fields.get("next_incoming_id") == expected,
        f"the next-incoming-id {expected} is expected, and {shown(frame)} arrives",
    )


@check("X10", section="2.5.6")
def our_window(host: Host) -> None:
    """No more transfers are sent than the incoming-window allows; a new window allows the rest."""
    _, address = _stocked(host, *_FEW)
    peer = host.session(incoming_window=2)
    source = peer.receiver(address)
    fields = {"handle": 1, "delivery_count": source.count, "link_credit": 10}
    peer.flow(incoming_window=2, **fields)
    first = [source.take(), source.take()]
    source.nothing()
    peer.flow(incoming_window=100, **{**fields, "delivery_count": source.count, "link_credit": 8})
    rest = [source.take() for _ in range(3)]
    source.settle(first[0], rest[-1])


@check("X10", section="2.5.6")
def numbers_wrap(host: Host) -> None:
    """Transfer-ids and delivery-ids may start anywhere, and wrap around at 2^32."""
    peer = host.session(next_outgoing_id=2**32 - 2)
    address = host.queue(peer)
    out = peer.sender(address, initial_delivery_count=2**32 - 3)
    out.put(*_FEW)
    source = peer.receiver(address)
    source.flow(10)
    came = source.read(*_FEW)
    source.settle(came[0], came[-1])


# --- links ---------------------------------------------------------------------------------------


@check("X12", section="2.6.3")
def attach(host: Host) -> None:
    """Attach is answered by attach, with its name, the other role, termini and a delivery-count."""
    peer = host.session()
    address = host.queue(peer)
    out = peer.sender(address)
    require(out.address, "the target is answered without an address")
    source = peer.receiver(address)
    require(source.address, "the source is answered without an address")
    require(
        "initial_delivery_count" in source.answer,
        "a sender attaches without initial-delivery-count",
    )


@check("X12", section="2.6.1")
def one_name_both_ways(host: Host) -> None:
    """Two links in opposite directions may have the same name."""
    peer = host.session()
    address = host.queue(peer)
    out = peer.sender(address, name="same", handle=0)
    source = peer.receiver(address, name="same", handle=1)
    out.put("x")
    source.flow(1)
    source.settle(source.read("x")[0])


@check("X12", section="2.6.2")
def any_handle(host: Host) -> None:
    """Each side chooses its handles: ours may be any up to the host's handle-max."""
    peer = host.connect()
    limit = peer.begin().fields.get("handle_max", 2**32 - 1)
    out = peer.sender(host.queue(peer), handle=limit)
    out.put("x")


@check("X12", section="2.6.5")
def handle_again(host: Host) -> None:
    """Detach with closed is answered with closed, and handle and name may be used again."""
    peer = host.session()
    address = host.queue(peer)
    for _ in range(3):
        peer.sender(address, handle=4, name="again")
        peer.send("detach", handle=4, closed=True)
        frame = peer.hear("detach")
        require(frame.fields.get("closed"), f"detach with closed is answered by {shown(frame)}")


@check("X26", section="2.6.5")
def detach_with_an_error(host: Host) -> None:
    """A detach with an error is answered as any other, and the session continues."""
    peer = host.session()
    source = peer.receiver(host.queue(peer))
    source.detach(closed=True, error=("amqp:internal-error", "this end has a fault of its own"))
    peer.alive()


@check("X13", section="2.6.1")
def stolen(host: Host) -> None:
    """A link that is attached again elsewhere is taken over; the first one is closed as stolen."""
    keeper = host.session()
    address = host.queue(keeper)
    first = host.connect(container_id="kit-thief")
    first.begin()
    first.sender(address, name="loot")
    second = host.connect(container_id="kit-thief")
    second.begin()
    second.sender(address, name="loot")
    first.fault("detach", conditions=("amqp:link:stolen",))


@check("X14", section="2.6.3")
def refused(host: Host) -> None:
    """A link to a missing node is attached without a terminus, and closed as not found."""
    peer = host.session()
    name = f"no-such-node/{token_hex(6)}"
    terminus = composite("source", address=name)
    peer.send("attach", name="l", handle=0, role="receiver", source=terminus, target=composite("target"))  # fmt: skip
    answer = peer.hear("attach", "detach", "end")
    if answer.name == "attach":
        if answer.fields.get("source") is not None:
            try:
                frame = peer.fault("detach")
            except Departs:
                raise NotOffered("the host makes a node of any name") from None
            raise Departs(f"attach with a source comes, and then {shown(frame)}")
        answer = peer.fault("detach")
        require(
            answer.fields.get("closed"), f"closed is expected, and this arrives: {shown(answer)}"
        )
        error = answer.fields["error"]
        require(
            error.fields.get("condition") in ("amqp:not-found", "amqp:unauthorized-access", "amqp:invalid-field"),
            f"amqp:not-found is expected, and this arrives: {shown(answer)}",
        )  # fmt: skip
        peer.send("detach", handle=0, closed=True)
        peer.alive()
        return
    raise Departs(f"attach without a source is expected, and this arrives: {shown(answer)}")


@check("X26", section="2.7.3")
def handle_in_use(host: Host) -> None:
    """Attach with a handle in use is answered by the error handle-in-use."""
    peer = host.session()
    address = host.queue(peer)
    peer.sender(address, handle=0)
    peer.send(
        "attach", name="other", handle=0, role="sender", source=composite("source"),
        target=address, initial_delivery_count=0,
    )  # fmt: skip
    peer.fault("end", "close", conditions=("amqp:session:handle-in-use",))


@check("X26", section="2.7.4")
def flow_without_a_link(host: Host) -> None:
    """Flow for a handle without a link ends the session with unattached-handle."""
    peer = host.session()
    peer.flow(handle=9, delivery_count=0, link_credit=1)
    peer.fault("end", conditions=("amqp:session:unattached-handle",))


@check("X26", section="2.8.17")
def transfer_without_a_link(host: Host) -> None:
    """A transfer for a handle without a link ends the session with unattached-handle."""
    peer = host.session()
    peer.send("transfer", handle=9, delivery_id=0, delivery_tag=b"t", payload=message("x"))
    peer.fault("end", conditions=("amqp:session:unattached-handle", "amqp:session:errant-link"))


@check("X26", section="2.8.17")
def detach_without_a_link(host: Host) -> None:
    """A detach for a handle without a link ends the session with an error for it."""
    peer = host.session()
    peer.send("detach", handle=9, closed=True)
    peer.fault("end", conditions=("amqp:session:unattached-handle", "amqp:session:errant-link"))


@check("X26", section="2.5.3")
def session_error_ends_no_connection(host: Host) -> None:
    """A session error leaves the connection and its other sessions open."""
    peer = host.connect()
    peer.begin(0)
    peer.begin(1)
    peer.flow(1, handle=9, delivery_count=0, link_credit=1)
    peer.fault("end")
    peer.alive(0)


# --- credit --------------------------------------------------------------------------------------


@check("X15", section="2.6.7")
def no_credit_no_transfer(host: Host) -> None:
    """Without credit no message is sent, and with a credit of one no more than one."""
    peer, address = _stocked(host, *_FEW)
    source = peer.receiver(address)
    source.nothing()
    source.flow(1)
    delivery = source.take()
    source.nothing()
    source.settle(delivery)
    source.nothing()


@check("X15", section="2.6.7")
def credit_is_no_sum(host: Host) -> None:
    """Credit counts from the delivery-count it is sent with: sent twice, it is granted once."""
    peer, address = _stocked(host, *_FEW)
    source = peer.receiver(address)
    source.flow(2)
    source.flow(2)
    came = [source.take(), source.take()]
    source.nothing()
    source.settle(came[0], came[1])


@check("X15", section="2.6.7")
def credit_is_taken_back(host: Host) -> None:
    """A flow with less credit withdraws credit granted before."""
    peer = host.session()
    address = host.queue(peer)
    source = peer.receiver(address)
    source.flow(5)
    source.flow(0)
    other = host.session()
    other.sender(address, handle=0).put("x")
    source.nothing()
    source.flow(1)
    source.settle(source.read("x")[0])


@check("X15", section="2.6.7")
def any_initial_delivery_count(host: Host) -> None:
    """A sender's delivery-count may start anywhere; credit counts from there."""
    peer = host.session()
    address = host.queue(peer)
    out = peer.sender(address, initial_delivery_count=2**32 - 1)
    out.wait()
    require(out.credit < 2**31, f"the credit is {out.credit} when counted from 4294967295")
    out.put(*_FEW)


@check("X17", "X15", section="2.7.4")
def echo_of_a_link(host: Host) -> None:
    """An echo for a link is answered with its delivery-count and credit."""
    peer = host.session()
    address = host.queue(peer)
    out = peer.sender(address)
    out.put(*_FEW)
    peer.flow(handle=0, delivery_count=out.count, link_credit=out.credit, available=0, echo=True)
    theirs = out.answer["handle"]
    while True:
        frame = peer.hear("flow", passing={"empty"})
        if frame.fields.get("handle") == theirs:
            break
    require(
        frame.fields.get("delivery_count") == out.count,
        f"the delivery-count {out.count} is expected, and this arrives: {shown(frame)}",
    )
    require("link_credit" in frame.fields, f"a flow without link-credit: {shown(frame)}")


@check("X16", section="2.6.7")
def drain_of_nothing(host: Host) -> None:
    """Drain of an empty source uses up the credit: delivery-count raised, link-credit 0."""
    peer = host.session()
    source = peer.receiver(host.queue(peer))
    start = source.count
    source.flow(10, drain=True)
    _drained(peer, (start + 10) % 2**32)


@check("X16", section="2.6.8")
def drain_of_what_is_there(host: Host) -> None:
    """Drain sends all available messages, then returns the remaining credit."""
    peer, address = _stocked(host, "1", "2")
    source = peer.receiver(address)
    start = source.count
    source.flow(10, drain=True)
    came = source.read("1", "2")
    _drained(peer, (start + 10) % 2**32)
    source.settle(came[0], came[1])
    source.count = (start + 10) % 2**32
    out = peer.sender(address, handle=0)
    out.put("3")
    source.nothing()
    source.flow(1)
    source.settle(source.read("3")[0])


def _drained(peer: Peer, count: int) -> None:
    seen = "no flow comes"
    while (frame := peer.next()) is not None:
        if frame.name in ("detach", "end", "close"):
            raise Departs(f"no flow comes, but {shown(frame)}")
        if frame.name == "flow" and "handle" in frame.fields:
            # The host may first send a flow with its current state.
            if not frame.fields.get("link_credit") and frame.fields.get("delivery_count") == count:
                return
            seen = f"this comes: {shown(frame)}"
    raise Departs(f"the delivery-count {count} and no credit are due, and {seen}")


# --- suspended links -----------------------------------------------------------------------------


@check("X23", section="2.6.4")
def suspended(host: Host) -> None:
    """A link detached without closed is answered alike, and may be attached again."""
    peer = host.session()
    address = host.queue(peer)
    source = peer.receiver(composite("source", address=address, expiry_policy="session-end", timeout=60), name="pause")  # fmt: skip
    answer = source.detach(closed=False)
    if answer.fields.get("closed"):
        raise NotOffered("the host closes a link that is to be suspended")
    again = peer.receiver(address, name="pause")
    out = peer.sender(address, handle=0)
    out.put("x")
    again.flow(1)
    again.settle(again.read("x")[0])


@check("X24", section="2.6.13")
def resumed(host: Host) -> None:
    """A delivery unsettled when the link breaks is in the unsettled map, and resumed by its tag."""
    _, address = _stocked(host, "x")
    terminus = composite(
        "source", address=address, durable=2, expiry_policy="never", timeout=60,
        outcomes=["amqp:accepted:list", "amqp:released:list"],
    )  # fmt: skip
    peer = host.connect(container_id="kit-resume")
    peer.begin()
    source = peer.receiver(terminus, name="resume", target=composite("target", address="t", durable=2, expiry_policy="never", timeout=60))  # fmt: skip
    answered = source.answer["source"].fields
    if answered.get("expiry_policy") != "never":
        source.close()
        raise NotOffered("the source is answered as one that does not last")
    source.flow(1)
    delivery = source.take()
    peer.cut()
    peer = host.connect(container_id="kit-resume")
    peer.begin()
    again = peer.receiver(
        terminus, name="resume", unsettled=_unsettled(delivery.tag),
        target=composite("target", address="t", durable=2, expiry_policy="never", timeout=60),
    )  # fmt: skip
    theirs = again.answer.get("unsettled")
    if not theirs:
        again.close()
        raise NotOffered("the host sends no unsettled map")
    require(delivery.tag in theirs, f"{delivery.tag!r} is unsettled, and the host knows {theirs}")
    again.flow(1)
    resumed_one = again.take()
    require(
        resumed_one.first.get("resume") and resumed_one.tag == delivery.tag,
        f"{delivery.tag!r} is to be resumed, and {resumed_one.first} comes",
    )
    again.settle(resumed_one)
    again.close()


@check("X24", section="2.6.13")
def resumed_by_us(host: Host) -> None:
    """A delivery to the host, unsettled when the link breaks, is neither lost nor duplicated."""
    keeper = host.session()
    address = host.queue(keeper)
    terminus = composite("target", address=address, durable=2, expiry_policy="never", timeout=60)
    ours = composite("source", address="s", durable=2, expiry_policy="never", timeout=60)
    link: dict[str, Any] = {
        "name": "resume",
        "source": ours,
        "snd_settle_mode": 0,
        "rcv_settle_mode": 1,
    }
    peer = host.connect(container_id="kit-resume-us")
    peer.begin()
    out = peer.sender(terminus, **link)
    answered = out.answer["target"].fields
    if answered.get("expiry_policy") != "never" or out.answer.get("rcv_settle_mode", 0) != 1:
        raise NotOffered("the target does not last, or settles first")
    out.outcome(out.send(message("x"), tag=b"tag"))
    peer.cut()
    peer = host.connect(container_id="kit-resume-us")
    peer.begin()
    out = peer.sender(terminus, unsettled=_unsettled(b"tag", composite("accepted")), **link)
    theirs = out.answer.get("unsettled")
    if not theirs:
        raise NotOffered("the host sends no unsettled map")
    require(b"tag" in theirs, f"b'tag' is unsettled, and the host knows {theirs}")
    out.send(b"", tag=b"tag", resume=True, settled=True, state="accepted")
    peer.alive()
    source = keeper.receiver(address)
    source.flow(5)
    source.settle(source.read("x")[0])
    source.nothing()


def _unsettled(tag: bytes, state: CompositeValue | None = None) -> Raw:
    """Encode an unsettled map of one delivery and its state."""
    content = encode("binary", tag) + encode("any", state)
    return Raw(b"\xd1" + struct.pack(">II", 4 + len(content), 2) + content)


@check("M42", section="2.6.1")
def only_connection(host: Host) -> None:
    """A container with sole-connection-for-container keeps one connection; the other is closed."""
    wish = {"container_id": "kit-alone", "desired_capabilities": ["sole-connection-for-container"]}
    first = host.connect(**wish)
    offered = first.greeting.get("offered_capabilities") or []
    if "sole-connection-for-container" not in offered:
        raise NotOffered("the host does not offer sole-connection-for-container")
    try:
        host.connect(**wish).fault("close")
    except Departs:
        first.fault("close")


@check("M43", "B4", section="2.7.1")
def capabilities(host: Host) -> None:
    """Unknown capabilities are not offered, on open, begin or attach."""
    wish: dict[str, Any] = {"desired_capabilities": ["amqp-rt:no-such-capability"]}
    peer = host.connect(**wish)
    begun = peer.begin(**wish)
    address = host.queue(peer)
    attached = peer.receiver(address, **wish).answer
    for name, fields in (("open", peer.greeting), ("begin", begun.fields), ("attach", attached)):
        offered = fields.get("offered_capabilities") or []
        require("amqp-rt:no-such-capability" not in offered, f"{name} offers an unknown capability")
    source = peer.receiver(
        composite("source", address=address, capabilities=["amqp-rt:no-such-capability"]), handle=2
    )
    answered = source.answer["source"]
    assert isinstance(answered, CompositeValue)
    require(
        "amqp-rt:no-such-capability" not in (answered.fields.get("capabilities") or []),
        "a source has an unknown capability",
    )
