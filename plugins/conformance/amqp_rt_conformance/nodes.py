"""Checks of sources, targets and the answers to them, dynamic nodes, filters and transactions."""

from __future__ import annotations

import struct
from typing import Any

from amqp_rt.net.traces.octets import CompositeValue, Raw, composite, encode

from .checks import check
from .frames import error_of, shown
from .host import Host
from .links import Incoming, Outgoing
from .messages import APPLICATION_PROPERTIES, PROPERTIES, VALUE, message, section
from .peers import Peer
from .verdicts import Departs, NotOffered, require

#: The filter of the Apache registry that most hosts with filters support.
_SELECTOR = "apache.org:selector-filter:string"
_OUTCOMES = ("amqp:accepted:list", "amqp:rejected:list", "amqp:released:list", "amqp:modified:list")


def _terminus(link: Incoming | Outgoing, name: str) -> dict[str, Any]:
    found = link.answer.get(name)
    require(isinstance(found, CompositeValue), f"attach is answered without a {name}")
    assert isinstance(found, CompositeValue)
    return found.fields


# --- sources and targets -------------------------------------------------------------------------


@check("M40", section="3.5.3")
def minimal_termini(host: Host) -> None:
    """A source or target with nothing but an address is enough, and an empty one at our end."""
    peer = host.session()
    address = host.queue(peer)
    out = peer.sender(address, handle=0, source=composite("source"))
    source = peer.receiver(address, handle=1, target=composite("target"))
    out.put("x")
    source.flow(1)
    source.settle(source.read("x")[0])


@check("B4", section="3.5.3")
def address_of_a_source(host: Host) -> None:
    """The address in the host's source, or target, leads to the same node."""
    peer = host.session()
    address = host.queue(peer)
    out = peer.sender(address, handle=0)
    source = peer.receiver(address, handle=1)
    peer.sender(out.address, handle=2).put("x")
    source.close()
    again = peer.receiver(source.address, handle=3)
    again.flow(1)
    again.settle(again.read("x")[0])


@check("M31", section="3.5.3")
def outcomes_of_a_source(host: Host) -> None:
    """The outcomes in the host's source are known ones, and include its default-outcome."""
    peer = host.session()
    asked = composite("source", address=host.queue(peer), outcomes=list(_OUTCOMES))
    answered = _terminus(peer.receiver(asked), "source")
    outcomes = answered.get("outcomes") or []
    outcomes = outcomes if isinstance(outcomes, list) else [outcomes]
    odd = set(outcomes) - set(_OUTCOMES)
    require(not odd, f"{sorted(odd)} are no outcomes")
    default = answered.get("default_outcome")
    require(
        default is None
        or (
            isinstance(default, CompositeValue)
            and f"amqp:{default.name}:list" in (outcomes or _OUTCOMES)
        ),
        f"the default-outcome is {default}",
    )


@check("M31", "B4", section="3.5.3")
def unknown_outcome(host: Host) -> None:
    """An unknown outcome is not among the outcomes of the host's source."""
    peer = host.session()
    asked = composite(
        "source", address=host.queue(peer), outcomes=["amqp:accepted:list", "amqp-rt:no-such:list"]
    )
    try:
        answered = _terminus(peer.receiver(asked), "source")
    except NotOffered:
        return
    outcomes = answered.get("outcomes") or []
    require("amqp-rt:no-such:list" not in outcomes, "it is among the outcomes of the source")


@check("M30", section="3.5.2")
def copies(host: Host) -> None:
    """A source with distribution-mode copy leaves accepted messages to other receivers."""
    peer = host.session()
    address = host.queue(peer)
    peer.sender(address, handle=0).put("x")
    browser = peer.receiver(composite("source", address=address, distribution_mode="copy"), handle=2)  # fmt: skip
    mode = _terminus(browser, "source").get("distribution_mode")
    if mode != "copy":
        browser.close()
        raise NotOffered(f"the distribution-mode copy is answered by {mode}")
    browser.flow(5)
    browser.settle(browser.read("x")[0])
    browser.nothing()
    browser.close()
    source = peer.receiver(address, handle=3)
    source.flow(1)
    source.settle(source.read("x")[0])


@check("M30", "B4", section="3.5.3")
def unknown_distribution_mode(host: Host) -> None:
    """An unknown distribution-mode is refused, or answered by another."""
    peer = host.session()
    asked = composite("source", address=host.queue(peer), distribution_mode="no-such-mode")
    try:
        answered = _terminus(peer.receiver(asked), "source")
    except NotOffered:
        return
    require(
        answered.get("distribution_mode") != "no-such-mode", "it is answered as if it were kept"
    )


# --- filters -------------------------------------------------------------------------------------


def _filter(name: str, descriptor: str, value: str) -> Raw:
    """Encode a filter-set of one filter (Part 3 §3.5.8)."""
    described = b"\x00" + encode("symbol", descriptor) + encode("string", value)
    content = encode("symbol", name) + described
    return Raw(b"\xd1" + struct.pack(">II", 4 + len(content), 2) + content)


@check("M28", "B4", section="3.5.8")
def unknown_filter(host: Host) -> None:
    """An unknown filter is refused, or absent from the host's source."""
    peer = host.session()
    asked = _filter("amqp-rt:no-such", "amqp-rt:no-such-filter:string", "x")
    try:
        link = peer.receiver(composite("source", address=host.queue(peer), filter=asked))
    except NotOffered:
        return
    found = _terminus(link, "source").get("filter") or {}
    require("amqp-rt:no-such" not in found, "it is answered as if it were in place")


@check("M28", "M29", section="3.5.8")
def selector(host: Host) -> None:
    """A selector in the host's source is applied: messages that do not match are not sent."""
    peer = host.session()
    address = host.queue(peer)
    asked = _filter("selector", _SELECTOR, "colour = 'red'")
    try:
        source = peer.receiver(composite("source", address=address, filter=asked))
    except NotOffered as refused:
        raise NotOffered(f"a selector is refused: {refused}") from None
    if "selector" not in (_terminus(source, "source").get("filter") or {}):
        source.close()
        raise NotOffered("a selector is not answered, so it is not in place")
    out = peer.sender(address, handle=0)
    for colour in ("blue", "red"):
        # Keys of application-properties are strings.
        content = encode("string", "colour") + encode("string", colour)
        painted = b"\xd1" + struct.pack(">II", 4 + len(content), 2) + content
        out.accepted(out.send(message(colour, section(APPLICATION_PROPERTIES, painted))))
    source.flow(5)
    source.settle(source.read("red")[0])
    source.nothing()
    source.close()
    rest = peer.receiver(address, handle=2)
    rest.flow(5)
    rest.settle(rest.read("blue")[0])


# --- dynamic nodes and the anonymous relay --------------------------------------------------------


def _dynamic(peer: Peer, **fields: Any) -> Incoming:
    try:
        link = peer.receiver(composite("source", dynamic=True, **fields))
    except NotOffered as refused:
        raise NotOffered(f"a dynamic source is refused: {refused}") from None
    if not _terminus(link, "source").get("address"):
        raise NotOffered("a dynamic source is answered without an address")
    return link


@check("M33", section="3.5.3")
def dynamic_source(host: Host) -> None:
    """A dynamic source has an address, and messages sent there are delivered."""
    source = _dynamic(host.session())
    require(_terminus(source, "source").get("dynamic"), "a dynamic source is not answered as one")
    host.session().sender(source.address).put("x")
    source.flow(1)
    source.settle(source.read("x")[0])


@check("M33", section="3.5.3")
def two_dynamic_sources(host: Host) -> None:
    """Two dynamic sources have two addresses."""
    peer = host.session()
    one = _dynamic(peer)
    two = peer.receiver(composite("source", dynamic=True), handle=2)
    require(one.address != two.address, f"both have the address {one.address!r}")


@check("M33", section="3.5.4")
def dynamic_target(host: Host) -> None:
    """A dynamic target has an address, and messages sent there can be received from it."""
    peer = host.session()
    try:
        out = peer.sender(composite("target", dynamic=True))
    except NotOffered as refused:
        raise NotOffered(f"a dynamic target is refused: {refused}") from None
    if not _terminus(out, "target").get("address"):
        raise NotOffered("a dynamic target is answered without an address")
    require(_terminus(out, "target").get("dynamic"), "a dynamic target is not answered as one")
    out.put("x")
    source = peer.receiver(out.address)
    source.flow(1)
    source.settle(source.read("x")[0])


@check("M34", section="3.5.9")
def delete_on_close(host: Host) -> None:
    """A node with the lifetime-policy delete-on-close is deleted when its link is closed."""
    peer = host.session()
    policy = Raw(b"\x00\x53\x2b\x45")
    source = _dynamic(peer, dynamic_node_properties={"lifetime-policy": policy})
    address = source.address
    answered = _terminus(source, "source").get("dynamic_node_properties") or {}
    if "lifetime-policy" not in answered:
        raise NotOffered("the lifetime-policy is not answered")
    peer.sender(address, handle=0).put("x")
    source.close()
    other = host.session()
    try:
        left = other.receiver(address)
    except NotOffered:
        return
    left.flow(1)
    left.nothing()


@check("M41", section="2.7.3")
def anonymous_relay(host: Host) -> None:
    """Messages to a target without an address are routed by the to field of their properties."""
    peer = host.connect()
    offered = peer.greeting.get("offered_capabilities") or []
    if "ANONYMOUS-RELAY" not in offered:
        raise NotOffered("the host does not offer ANONYMOUS-RELAY")
    peer.begin()
    address = host.queue(peer)
    out = peer.attach("sender", source=composite("source"), target=composite("target"))
    require(out.fields.get("target") is not None, "it offers ANONYMOUS-RELAY and refuses the link")
    relay = Outgoing(peer, 0, 0, out.fields, 0)
    peer.channels[0].senders[int(out.fields["handle"])] = relay
    to = section(PROPERTIES, encode("list", [None, None, address]))
    relay.accepted(relay.send(to + message("x")))
    source = peer.receiver(address)
    source.flow(1)
    source.settle(source.read("x")[0])


# --- transactions --------------------------------------------------------------------------------


class Coordinator:
    """A link to the coordinator (Part 4 §4.2)."""

    def __init__(self, peer: Peer) -> None:
        try:
            self.link = peer.sender(composite("coordinator"), handle=5)
        except (NotOffered, Departs) as refused:
            raise NotOffered(f"the host has no transactions: {refused}") from None
        target = self.link.answer.get("target")
        if not isinstance(target, CompositeValue) or target.name != "coordinator":
            raise NotOffered("the host answers another target than the coordinator")
        self.target = target

    def declare(self) -> bytes:
        """Declare a transaction; return its txn-id."""
        number = self.link.send(section(VALUE, encode("any", composite("declare"))))
        state = self.link.outcome(number).fields.get("state")
        require(
            isinstance(state, CompositeValue)
            and state.name == "declared"
            and state.fields.get("txn_id"),
            f"declare is answered by {state}",
        )
        assert isinstance(state, CompositeValue)
        return bytes(state.fields["txn_id"])

    def discharge(self, transaction: bytes, *, fail: bool) -> None:
        """Discharge a transaction."""
        discharge = composite("discharge", txn_id=transaction, fail=fail)
        self.link.accepted(self.link.send(section(VALUE, encode("any", discharge))))


def _within(transaction: bytes, outcome: str | None = None) -> CompositeValue:
    return composite("transactional_state", txn_id=transaction, outcome=outcome)


@check("R1", section="4.2")
def coordinator(host: Host) -> None:
    """The coordinator answers with the capabilities of transactions that it has."""
    target = Coordinator(host.session()).target
    found = target.fields.get("capabilities") or []
    found = found if isinstance(found, list) else [found]
    known = {
        "amqp:local-transactions",
        "amqp:distributed-transactions",
        "amqp:promotable-transactions",
        "amqp:multi-txns-per-ssn",
        "amqp:multi-ssns-per-txn",
    }
    require(not {each for each in found if each.startswith("amqp:")} - known, f"there are {found}")


@check("R2", section="4.3")
def declare(host: Host) -> None:
    """Declare is answered by declared with a txn-id, discharge by accepted."""
    control = Coordinator(host.session())
    for fail in (False, True):
        control.discharge(control.declare(), fail=fail)


@check("R2", section="4.5.8")
def unknown_transaction(host: Host) -> None:
    """Discharge of an unknown transaction is refused with unknown-id."""
    peer = host.session()
    control = Coordinator(peer)
    discharge = composite("discharge", txn_id=b"amqp-rt-no-such", fail=False)
    control.link.send(section(VALUE, encode("any", discharge)))
    frame = peer.hear("disposition", "detach")
    if frame.name == "detach":
        require("amqp:transaction:unknown-id" in error_of(frame), f"this comes: {shown(frame)}")
        return
    state = frame.fields.get("state")
    require(
        isinstance(state, CompositeValue)
        and state.name == "rejected"
        and isinstance(error := state.fields.get("error"), CompositeValue)
        and error.fields.get("condition") == "amqp:transaction:unknown-id",
        f"this comes: {shown(frame)}",
    )


@check("R3", section="4.4.2")
def sent_in_a_transaction(host: Host) -> None:
    """A message sent in a transaction is available after its discharge, and not before."""
    peer = host.session()
    control = Coordinator(peer)
    address = host.queue(peer)
    out, source = peer.sender(address, handle=0), peer.receiver(address)
    source.flow(5)
    transaction = control.declare()
    number = out.send(message("x"), state=_within(transaction))
    state = out.outcome(number).fields.get("state")
    require(
        isinstance(state, CompositeValue) and state.name == "transactional_state",
        f"a transactional message is answered by {state}",
    )
    source.nothing()
    control.discharge(transaction, fail=False)
    source.settle(source.read("x")[0])


@check("R3", "R7", section="4.4.2")
def sent_and_rolled_back(host: Host) -> None:
    """A message sent in a transaction that is rolled back is never delivered."""
    peer = host.session()
    control = Coordinator(peer)
    address = host.queue(peer)
    out, source = peer.sender(address, handle=0), peer.receiver(address)
    source.flow(5)
    transaction = control.declare()
    out.outcome(out.send(message("x"), state=_within(transaction)))
    control.discharge(transaction, fail=True)
    source.nothing()


@check("R4", section="4.4.3")
def accepted_in_a_transaction(host: Host) -> None:
    """A message accepted in a transaction is removed after its discharge."""
    peer, control, source, address = _fetched(host)
    transaction = control.declare()
    (delivery,) = source.read("x")
    source.settle(delivery, state=_within(transaction, "accepted"), settled=False)
    control.discharge(transaction, fail=False)
    source.close()
    again = peer.receiver(address, handle=3)
    again.flow(5)
    again.nothing()


@check("R4", "R7", section="4.4.3")
def accepted_and_rolled_back(host: Host) -> None:
    """A message accepted in a rolled-back transaction is still acquired, and may be released."""
    _, control, source, _ = _fetched(host)
    transaction = control.declare()
    (delivery,) = source.read("x")
    source.settle(delivery, state=_within(transaction, "accepted"), settled=False)
    control.discharge(transaction, fail=True)
    source.settle(delivery, state="released")
    source.flow(5)
    source.settle(source.read("x")[0])


@check("R5", "R7", section="4.4.4")
def acquired_in_a_transaction(host: Host) -> None:
    """A message acquired in a transaction has its txn-id, and is available after a rollback."""
    peer = host.session()
    control = Coordinator(peer)
    address = host.queue(peer)
    peer.sender(address, handle=0).put("x")
    source = peer.receiver(address)
    transaction = control.declare()
    source.flow(1, properties={"txn-id": transaction})
    (delivery,) = source.read("x")
    state = delivery.first.get("state")
    if not isinstance(state, CompositeValue):
        raise NotOffered("messages are not acquired in transactions")
    require(
        state.name == "transactional_state" and state.fields.get("txn_id") == transaction,
        f"a message that is acquired in {transaction!r} comes in the state {state}",
    )
    source.settle(delivery, state=_within(transaction, "accepted"), settled=False)
    control.discharge(transaction, fail=True)
    source.close()
    again = peer.receiver(address, handle=2)
    again.flow(1, properties=None)
    again.settle(again.read("x")[0])


@check("R8", section="4.2")
def coordinator_closed(host: Host) -> None:
    """A transaction is rolled back when the link to its coordinator ends."""
    peer = host.session()
    control = Coordinator(peer)
    address = host.queue(peer)
    out, source = peer.sender(address, handle=0), peer.receiver(address)
    source.flow(5)
    transaction = control.declare()
    out.outcome(out.send(message("x"), state=_within(transaction)))
    control.link.close()
    source.nothing()


def _fetched(host: Host) -> tuple[Peer, Coordinator, Incoming, str]:
    """Open a session with a coordinator, and credit for a message."""
    peer = host.session()
    control = Coordinator(peer)
    address = host.queue(peer)
    peer.sender(address, handle=0).put("x")
    source = peer.receiver(address)
    source.flow(1)
    return peer, control, source, address
