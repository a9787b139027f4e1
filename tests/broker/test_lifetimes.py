"""How long dynamic nodes live, and how often messages may come on a link."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import World

from amqp_rt.broker.nodes import Queue, Topic
from amqp_rt.fronts.base import RCV_SECOND, SND_MIXED, SND_SETTLED, SND_UNSETTLED
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.termini import (
    DeleteOnClose,
    DeleteOnNoLinks,
    DeleteOnNoLinksOrMessages,
    DeleteOnNoMessages,
    Source,
    Target,
)
from amqp_rt.testing.pairs import Recorder
from amqp_rt.values import Array, Described, Symbol, ULong

POLICY = Symbol("lifetime-policy")
MODES = Symbol("supported-dist-modes")
LIFETIMES = [DeleteOnClose, DeleteOnNoLinks, DeleteOnNoMessages, DeleteOnNoLinksOrMessages]


def made(here: World, lifetime: Any, **options: Any) -> tuple[Any, str]:
    """A sender to a queue that lives so long, and its address."""
    target = Target(dynamic=True, dynamic_node_properties={POLICY: lifetime}, **options)
    sender = here.client("maker").sender(None, target=target)
    assert sender.error is None
    return sender, sender.link.target.address


@pytest.mark.req("M34", "M35", "M36", "M37", "B4")
@pytest.mark.parametrize("lifetime", LIFETIMES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("links", [0, 1])
@pytest.mark.parametrize("messages", [0, 1])
@pytest.mark.parametrize("creator", [False, True], ids=["abandoned", "attached"])
def test_a_dynamic_node_lives_as_long_as_its_policy_says(
    creator: bool, messages: int, links: int, lifetime: Any
) -> None:
    """All four policies, in every situation."""
    here = World()
    sender, address = made(here, lifetime())
    code = {kind: ULong(0x2B + n) for n, kind in enumerate(LIFETIMES)}[lifetime]
    assert sender.link.target.dynamic_node_properties[POLICY] == Described(code, [])
    other = here.client().sender(address) if links else None
    if messages:
        sender.send(*range(messages))
    if not creator:
        sender.detach()
    lives = {
        DeleteOnClose: creator,
        DeleteOnNoLinks: creator or bool(links),
        DeleteOnNoMessages: creator or bool(messages),
        DeleteOnNoLinksOrMessages: creator or bool(links) or bool(messages),
    }[lifetime]
    assert [each.name for each in here.host.space().declarations()] == ([address] if lives else [])
    if other is not None:
        assert other.error == (None if lives else "amqp:resource-deleted")


@pytest.mark.req("M36", "M37")
@pytest.mark.parametrize("lifetime", [DeleteOnNoMessages, DeleteOnNoLinksOrMessages])
def test_it_goes_when_its_last_message_has_gone(lifetime: Any) -> None:
    here = World()
    sender, address = made(here, lifetime())
    sender.send(1, 2)
    sender.detach()
    receiver = here.client().receiver(address, credit=5)
    assert receiver.bodies == [1, 2]
    receiver.settle(ACCEPTED, 0)
    assert here.host.space().declarations()
    receiver.settle(ACCEPTED, 1)
    with_links = lifetime is DeleteOnNoLinksOrMessages
    assert bool(here.host.space().declarations()) is with_links
    assert receiver.error == (None if with_links else "amqp:resource-deleted")
    if with_links:
        receiver.detach()
        assert not here.host.space().declarations()


@pytest.mark.req("M36")
def test_it_goes_when_its_last_message_has_expired() -> None:
    here = World()
    sender, _ = made(here, DeleteOnNoMessages())
    sender.send(1, ttl_s=5)
    sender.detach()
    here.time.now += 6
    here.host.sweep()
    here.host.sweep()
    assert not here.host.space().declarations()


@pytest.mark.req("M34", "M39")
def test_a_link_that_may_come_back_is_not_gone() -> None:
    here = World()
    client = here.client("c")
    source = Source(dynamic=True, timeout=30)
    address = client.receiver(None, name="l", source=source).link.source.address
    client.cut()
    assert [each.name for each in here.host.space().declarations()] == [address]
    here.client().sender(address).send("m")
    again = here.client("c").receiver(None, name="l", source=source, credit=1)
    assert again.link.source.address == address
    assert again.bodies == ["m"]
    again.world.clients[-1].cut()
    here.time.now += 31
    here.host.sweep()
    assert not here.host.space().declarations()


@pytest.mark.req("M37", "B8")
@pytest.mark.parametrize(
    ("properties", "capabilities", "kind"),
    [
        ({MODES: Array([Symbol("move"), Symbol("copy")], Symbol)}, (), "queue"),
        ({MODES: Symbol("move")}, (), "queue"),
        ({MODES: Symbol("copy")}, (), "topic"),
        ({MODES: Symbol("copy")}, ("queue",), "queue"),
        ({MODES: Symbol("move")}, ("topic",), None),
        ({MODES: Symbol("x-fan")}, (), None),
        ({POLICY: Described(ULong(0x2F), [])}, (), None),
        ({POLICY: 7}, (), None),
    ],
    ids=str,
)
def test_what_a_dynamic_node_is_to_be_is_answered_or_refused(
    properties: Any, capabilities: tuple[str, ...], kind: str | None
) -> None:
    here = World()
    receiver = here.client().receiver(
        None, dynamic=True, dynamic_node_properties=properties, capabilities=capabilities
    )
    assert receiver.error == (None if kind else "amqp:not-implemented")
    assert [each.kind for each in here.host.space().declarations()] == ([kind] if kind else [])


# --- delivery modes (S3 2.3.6) ---------------------------------------------------------------------

NEEDED, WISHED = Symbol("delivery-mode"), Symbol("opt-delivery-mode")
AT_MOST, AT_LEAST, EXACTLY = "at-most-once", "at-least-once", "exactly-once"


def attached(sends: bool, properties: Any, snd: int, rcv: int, timeout: int) -> Any:
    here = World(Queue("q"), Topic("t"))
    session = here.client().session
    endpoint = Recorder()
    modes: dict[str, Any] = {"snd_settle_mode": snd, "rcv_settle_mode": rcv}
    if sends:
        target = Target(address="q", timeout=timeout)
        link = session.attach_sender("l", endpoint, target=target, properties=properties, **modes)
    else:
        source = Source(address="q", timeout=timeout)
        link = session.attach_receiver("l", endpoint, source=source, properties=properties, **modes)
    here.pump()
    return link if endpoint.attached else str(endpoint.detached[0][0].condition)


#: whether the client sends, what it says, settle modes, timeout, what it is answered
ASKED: list[tuple[bool, dict[Symbol, str], int, int, int, Any]] = [
    (True, {NEEDED: AT_LEAST}, SND_MIXED, 0, 0, {NEEDED: AT_LEAST}),
    (True, {NEEDED: EXACTLY}, SND_MIXED, 0, 60, {NEEDED: EXACTLY}),
    (True, {NEEDED: EXACTLY}, SND_MIXED, 0, 0, "amqp:not-implemented"),
    (True, {WISHED: EXACTLY}, SND_MIXED, 0, 0, {WISHED: AT_LEAST}),
    (True, {NEEDED: AT_MOST}, SND_SETTLED, 0, 0, {NEEDED: AT_MOST}),
    (True, {NEEDED: AT_LEAST}, SND_SETTLED, 0, 0, "amqp:not-implemented"),
    (False, {NEEDED: AT_MOST}, SND_MIXED, 0, 0, {NEEDED: AT_MOST}),
    (False, {NEEDED: AT_MOST}, SND_UNSETTLED, 0, 0, "amqp:not-implemented"),
    (False, {NEEDED: AT_LEAST}, SND_MIXED, 0, 0, {NEEDED: AT_LEAST}),
    (False, {NEEDED: AT_LEAST}, SND_SETTLED, 0, 0, "amqp:not-implemented"),
    (False, {NEEDED: EXACTLY}, SND_MIXED, RCV_SECOND, 60, {NEEDED: EXACTLY}),
    (False, {NEEDED: EXACTLY}, SND_MIXED, 0, 60, "amqp:not-implemented"),
    (False, {WISHED: EXACTLY}, SND_MIXED, 0, 60, {WISHED: AT_LEAST}),
    (False, {NEEDED: AT_LEAST, WISHED: EXACTLY}, 0, 0, 0, {NEEDED: AT_LEAST, WISHED: AT_LEAST}),
    (False, {NEEDED: "now-and-then"}, SND_MIXED, 0, 0, "amqp:invalid-field"),
    (False, {}, SND_MIXED, 0, 0, {}),
]


@pytest.mark.req("B12", "B4", "B8")
@pytest.mark.parametrize(("sends", "said", "snd", "rcv", "timeout", "answered"), ASKED, ids=str)
def test_a_delivery_mode_is_answered_as_it_is(
    sends: bool, said: dict[Symbol, str], snd: int, rcv: int, timeout: int, answered: Any
) -> None:
    properties = {name: Symbol(mode) for name, mode in said.items()}
    link = attached(sends, properties, snd, rcv, timeout)
    if isinstance(answered, str):
        assert link == answered
        return
    assert {name: link.properties[name] for name in link.properties if name in said} == answered
    if not sends and answered.get(NEEDED) == AT_MOST:
        assert link.snd_settle_mode == SND_SETTLED
