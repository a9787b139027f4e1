"""Checks that a peer behaves as it answers: every option of a terminus is requested and tried.

According to the broker-behaviour paper a broker must not lie: where the protocol has a field for a
behaviour, the broker's answer must match it. It may refuse a link, or answer with less than was
requested.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from typing import Any, Final

import trio

from ..codec.composites import from_described
from ..container.connections import Connection
from ..message import Message
from ..outcomes import (
    ACCEPTED,
    MODIFIED_FAILED,
    RELEASED,
    Accepted,
    Modified,
    Outcome,
    Rejected,
    Released,
    rejected,
)
from ..termini import (
    STANDARD_OUTCOMES,
    DeleteOnClose,
    DeleteOnNoLinks,
    DeleteOnNoLinksOrMessages,
    DeleteOnNoMessages,
    Source,
    Target,
)
from ..unsettled import Unsettled, UnsettledMap
from ..values import Array, Described, Symbol
from .pairs import Recorder

__all__ = ["assert_honest"]

_MODES: Final = (None, "move", "copy")
_POLICIES: Final = ("link-detach", "session-end", "connection-close", "never")
_DEFAULTS: Final[tuple[Outcome, ...]] = (ACCEPTED, RELEASED, MODIFIED_FAILED, rejected("x"))
_BY_SYMBOL: Final[dict[str, Outcome]] = dict(zip(STANDARD_OUTCOMES, _DEFAULTS, strict=False))
_LIFETIMES: Final = (
    DeleteOnClose,
    DeleteOnNoLinks,
    DeleteOnNoMessages,
    DeleteOnNoLinksOrMessages,
)
_LIFETIME: Final = Symbol("lifetime-policy")
_SELECTOR: Final = Symbol("apache.org:selector-filter:string")
_UNKNOWN: Final = Symbol("example.org:no-such-filter:string")


async def assert_honest(
    peer: Connection,
    *,
    queue: str,
    topic: str | None = None,
    patience_s: float = 5.0,
    restart: Callable[[], Awaitable[Connection]] | None = None,
) -> None:
    """Attach with every option of a terminus, and compare the answers with the behaviour.

    The checks take a few seconds of the clock, for timeouts that have to run out. All messages they
    leave are their own. If cancelled, their links and sessions stay until the connection ends.

    Args:
        peer: A connection to the peer under test.
        queue: Address of an empty queue of the peer without other users.
        topic: Address of a topic, None if there is none.
        patience_s: Seconds that the peer has for each answer.
        restart: Restarts the peer and returns a connection to it, from the same container as
            *peer*. Without it the durability of termini is not tested.

    Raises:
        AssertionError: The behaviour differs from the answer; the message has both.
        AmqpError: The connection is lost.
    """
    await peer.wait_open()
    trial = _Trial(peer, patience_s)
    await trial.distribution_modes(queue)
    await trial.default_outcomes(queue)
    await trial.outcomes(queue)
    await trial.settle_modes(queue)
    await trial.delivery_modes(queue)
    await trial.filters(queue)
    await trial.capabilities(queue, topic)
    await trial.expiry(queue)
    await trial.targets(queue)
    if topic is not None:
        await trial.subscriptions(topic)
    await trial.lifetimes()
    if restart is not None:
        await trial.durability(queue, topic, restart)


class _End:
    """A link and the events recorded on it."""

    def __init__(self, trial: _Trial, link: Any, heard: Recorder) -> None:
        self.trial = trial
        self.link = link
        self.heard = heard

    @property
    def refused(self) -> bool:
        return not self.heard.attached

    async def take(self, most: int = 10) -> list[Any]:
        """Drain the link; return the deliveries that arrive, at most *most*."""
        have = len(self.heard.deliveries)
        self.link.grant(most)
        self.link.drain()
        await self.trial.until(
            lambda: (
                self.heard.detached
                or self.link.credit == 0
                or len(self.heard.deliveries) - have >= most
            ),
            "a drained link does not give its credit back",
        )
        return list(self.heard.deliveries[have:])

    async def detach(self, *, closed: bool = True) -> None:
        self.link.detach(closed=closed)
        await self.trial.until(lambda: self.heard.detached, "a detach is not answered")

    def remembered(self, state: Any = None) -> UnsettledMap:
        """Return the unsettled map of the link, with *state* for each delivery."""
        found: UnsettledMap = self.link.remember()
        for tag, known in list(found.items()):
            found[tag] = Unsettled(tag=tag, state=state, payload=known.payload)
        return found


def _is_over(end: _End) -> bool:
    return bool(end.heard.detached)


def _has_credit(end: _End) -> bool:
    return bool(end.link.credit > 0)


def _has_outcome(end: _End) -> bool:
    return bool(end.heard.outcomes)


class _Trial:
    def __init__(self, peer: Connection, patience_s: float) -> None:
        self.peer = peer
        self.patience_s = patience_s
        self.core = peer.engine.begin()
        self._names = count()
        self._bodies = count()

    async def until(self, condition: Callable[[], object], failure: str) -> None:
        deadline = trio.current_time() + self.patience_s
        while trio.current_time() < deadline:
            if condition():
                return
            await trio.sleep(0.002)
        raise AssertionError(failure)

    # --- links ---------------------------------------------------------------------------

    async def receiver(
        self,
        core: Any = None,
        *,
        name: str = "",
        snd_settle_mode: int = 2,
        rcv_settle_mode: int = 0,
        properties: Any = None,
        unsettled: UnsettledMap | None = None,
        **fields: Any,
    ) -> _End:
        heard = Recorder()
        link = (core or self.core).attach_receiver(
            name or f"honest-{next(self._names)}",
            heard,
            source=Source(**fields),
            target=Target(),
            snd_settle_mode=snd_settle_mode,
            rcv_settle_mode=rcv_settle_mode,
            properties=properties,
            unsettled=unsettled,
        )
        await self.until(lambda: heard.attached or heard.detached, "an attach is not answered")
        return _End(self, link, heard)

    async def sender(
        self,
        core: Any = None,
        *,
        name: str = "",
        unsettled: UnsettledMap | None = None,
        rcv_settle_mode: int = 0,
        **fields: Any,
    ) -> _End:
        heard = Recorder()
        link = (core or self.core).attach_sender(
            name or f"honest-{next(self._names)}",
            heard,
            source=Source(),
            target=Target(**fields),
            rcv_settle_mode=rcv_settle_mode,
            unsettled=unsettled,
        )
        await self.until(lambda: heard.attached or heard.detached, "an attach is not answered")
        return _End(self, link, heard)

    async def put(self, address: str, **fields: Any) -> str:
        """Send a message to *address*; return its body."""
        end = await self.sender(address=address)
        assert not end.refused, f"there is nothing to send to at {address!r}"
        body = f"honest {next(self._bodies)}"
        await self.until(lambda: end.link.credit > 0, f"{address!r} gives no credit")
        end.link.send(Message(body, **fields).encode())
        await self.until(lambda: end.heard.outcomes, "a message gets no outcome")
        assert end.heard.outcomes[0].state == ACCEPTED, "a plain message is not accepted"
        await end.detach()
        return body

    async def there(self, address: str) -> list[Message]:
        """Receive and accept all messages available to another receiver at *address*."""
        core = self.peer.engine.begin()
        end = await self.receiver(core, address=address)
        assert not end.refused, f"no right to receive from {address!r}"
        found = await end.take(1000)
        for delivery in found:
            delivery.settle(ACCEPTED)
        await end.detach()
        core.end()
        return [Message.decode(each.payload) for each in found]

    async def exists(self, address: str) -> bool:
        end = await self.sender(address=address)
        if not end.refused:
            await end.detach()
        return not end.refused

    # --- sources -------------------------------------------------------------------------

    async def distribution_modes(self, queue: str) -> None:
        for asked in _MODES:
            end = await self.receiver(
                address=queue, distribution_mode=None if asked is None else Symbol(asked)
            )
            if end.refused:
                assert asked, "a source without a distribution-mode is refused"
                continue
            mode = end.link.source.distribution_mode
            assert mode in ("move", "copy"), "the distribution-mode is not answered"
            assert asked in (None, mode), f"asked for {asked}, answered {mode} (S3 2.3.11)"
            await self.put(queue)
            (delivery,) = await end.take()
            if not delivery.settled:
                delivery.settle(ACCEPTED)
            await end.detach()
            left = len(await self.there(queue))
            assert left == (mode == "copy"), f"distribution-mode {mode} leaves {left} of 1 messages"

    async def default_outcomes(self, queue: str) -> None:
        for asked in (None, *_DEFAULTS):
            end = await self.receiver(
                address=queue, default_outcome=asked, distribution_mode=Symbol("move")
            )
            if end.refused:
                assert asked, "a source without a default-outcome is refused"
                continue
            outcome = end.link.source.default_outcome
            kinds = (Accepted, Rejected, Released, Modified)
            assert isinstance(outcome, kinds), "the default-outcome is not answered"
            assert asked is None or type(outcome) is type(asked), (
                f"asked for the default-outcome {asked}, answered {outcome}"
            )
            await self.put(queue)
            await end.take()
            await end.detach()
            left = await self.there(queue)
            again = isinstance(outcome, Released | Modified)
            assert len(left) == again, f"default-outcome {outcome}: {len(left)} of 1 come again"
            failed = isinstance(outcome, Modified) and bool(outcome.delivery_failed)
            assert [each.delivery_count for each in left] == [int(failed)] * again, (
                f"default-outcome {outcome} gives another delivery-count"
            )

    async def outcomes(self, queue: str) -> None:
        for asked in STANDARD_OUTCOMES:
            end = await self.receiver(address=queue, outcomes=(Symbol(asked),))
            if end.refused:
                continue
            answered = tuple(str(each) for each in end.link.source.outcomes)
            assert answered, "the outcomes are not answered"
            await self.put(queue)
            (delivery,) = await end.take()
            other = next((each for each in _BY_SYMBOL if each not in answered), None)
            if other is not None:
                delivery.settle(_BY_SYMBOL[other])
                await self.until(
                    partial(_is_over, end),
                    f"{other} is taken, and the outcomes are {answered}",
                )
            else:
                await end.detach()
            await self.there(queue)

    async def settle_modes(self, queue: str) -> None:
        for asked in (0, 1, 2):
            end = await self.receiver(address=queue, snd_settle_mode=asked)
            if end.refused:
                continue
            mode = end.link.snd_settle_mode
            await self.put(queue)
            (delivery,) = await end.take()
            if mode != 2:
                assert delivery.settled == (mode == 1), (
                    f"snd-settle-mode {mode}, and a delivery is settled: {delivery.settled}"
                )
            await end.detach()
            left = len(await self.there(queue))
            assert not (delivery.settled and left), "a presettled message is delivered again"

    async def delivery_modes(self, queue: str) -> None:
        name = Symbol("delivery-mode")
        for asked in ("at-most-once", "at-least-once"):
            end = await self.receiver(address=queue, properties={name: Symbol(asked)})
            if end.refused:
                continue
            answered = end.link.properties.get(name)
            if answered is not None:
                # Absent if the peer does not know the option.
                await self.put(queue)
                (delivery,) = await end.take()
                assert delivery.settled == (answered == "at-most-once"), (
                    f"delivery-mode {answered}, and a delivery is settled: {delivery.settled}"
                )
            await end.detach()
            await self.there(queue)

    async def filters(self, queue: str) -> None:
        asked = {
            Symbol("selected"): Described(_SELECTOR, "colour = 'green'"),
            Symbol("unknown"): Described(_UNKNOWN, "x"),
        }
        end = await self.receiver(address=queue, filter=asked)
        if end.refused:
            return
        in_place = {str(name) for name in end.link.source.filter or {}}
        assert "unknown" not in in_place, "an unknown filter is confirmed"
        green = await self.put(queue, application_properties={"colour": "green"})
        red = await self.put(queue, application_properties={"colour": "red"})
        found = {Message.decode(each.payload).body for each in await end.take()}
        expected = {green} if "selected" in in_place else {green, red}
        assert found == expected, f"filters in place: {in_place}; and other messages came"
        await end.detach()
        await self.there(queue)

    async def capabilities(self, queue: str, topic: str | None) -> None:
        for address, wrong in ((queue, "topic"), (topic, "queue")):
            if address is not None:
                end = await self.receiver(address=address, capabilities=(Symbol(wrong),))
                if not end.refused:
                    assert wrong not in end.link.source.capabilities, f"{address!r} is no {wrong}"
                    await end.detach()

    # --- --- termini without a link ------------------------------------------------------------

    async def expiry(self, queue: str) -> None:
        for policy in _POLICIES:
            for timeout in (0, 1):
                for how in ("detach", "end"):
                    await self._expire(queue, policy, timeout, how)

    async def _expire(self, queue: str, policy: str, timeout: int, how: str) -> None:
        core = self.peer.engine.begin()
        name = f"honest-{next(self._names)}"
        asked: dict[str, Any] = {
            "address": queue,
            "expiry_policy": Symbol(policy),
            "timeout": timeout,
            "default_outcome": RELEASED,
        }
        end = await self.receiver(core, name=name, rcv_settle_mode=1, **asked)
        if end.refused:
            core.end()
            return
        source = end.link.source
        body = await self.put(queue)
        await end.take(1)
        if how == "detach":
            await end.detach(closed=False)
        else:
            core.end()
            await self.until(lambda: end.heard.detached, "a session does not end")
        said = f"expiry-policy {source.expiry_policy}, timeout {source.timeout}, after {how}"
        counts = source.expiry_policy == "link-detach" or (
            how == "end" and source.expiry_policy == "session-end"
        )
        if counts and source.timeout:
            assert await self.there(queue) == [], f"{said}: it expires too early"
            await trio.sleep(source.timeout)
            await self._come(queue, f"{said}: it does not expire")
            return
        if counts:
            await self._come(queue, f"{said}: it does not expire")
            if how == "detach":
                core.end()
            return
        assert await self.there(queue) == [], (
            f"{said}: an unsettled message is delivered to another consumer"
        )
        unsettled = end.remembered(ACCEPTED)
        if how == "end":
            core = self.peer.engine.begin()
        again = await self.receiver(
            core, name=name, rcv_settle_mode=1, unsettled=unsettled, **asked
        )
        assert not again.refused, f"{said}: the link is refused when it comes back"
        assert again.link.resumed, f"{said}: nothing is remembered"
        await again.take(1)
        await again.detach()
        left = [each.body for each in await self.there(queue)]
        assert body not in left, f"{said}: an outcome sent while resuming is ignored"
        core.end()

    async def _come(self, queue: str, failure: str) -> None:
        found: list[Message] = []
        with trio.move_on_after(self.patience_s):
            while not found:
                found = await self.there(queue)
        assert found, failure

    async def targets(self, queue: str) -> None:
        for policy in _POLICIES:
            name = f"honest-{next(self._names)}"
            asked: dict[str, Any] = {"address": queue, "expiry_policy": Symbol(policy)}
            end = await self.sender(name=name, rcv_settle_mode=1, **asked)
            if end.refused:
                continue
            kept = end.link.target.expiry_policy != "link-detach" or end.link.target.timeout > 0
            payload = Message("honest").encode()
            await self.until(partial(_has_credit, end), f"{queue!r} gives no credit")
            sending = end.link.send(payload)
            await self.until(
                partial(_has_outcome, end), "a message gets no outcome before it is settled"
            )
            await end.detach(closed=False)
            unsettled = {sending.tag: Unsettled(tag=sending.tag, payload=payload)}
            again = await self.sender(name=name, rcv_settle_mode=1, unsettled=unsettled, **asked)
            if kept:
                said = f"expiry-policy {end.link.target.expiry_policy}"
                assert again.link.resumed, f"{said}: the target remembers nothing"
                await self.until(
                    partial(_has_outcome, again),
                    f"{said}: the target has forgotten a delivery that it had not settled",
                )
            await again.detach()
            left = len(await self.there(queue))
            assert left == 1, f"a message that was resumed is there {left} times"

    async def subscriptions(self, topic: str) -> None:
        for policy in _POLICIES:
            core = self.peer.engine.begin()
            name = f"honest-{next(self._names)}"
            asked: dict[str, Any] = {"address": topic, "expiry_policy": Symbol(policy)}
            end = await self.receiver(core, name=name, **asked)
            if end.refused:
                core.end()
                continue
            source = end.link.source
            assert source.distribution_mode == "copy", "a topic moves messages"
            await end.detach(closed=False)
            body = await self.put(topic)
            gathers = source.expiry_policy != "link-detach" or source.timeout > 0
            again = await self.receiver(core, name=name, **asked)
            found = [Message.decode(each.payload).body for each in await again.take()]
            assert found == [body] * gathers, (
                f"expiry-policy {source.expiry_policy}: {len(found)} of 1 messages were gathered"
            )
            await again.detach()
            again = await self.receiver(core, name=name, **asked)
            assert await again.take() == [], "a subscription that was closed is still there"
            await again.detach()
            core.end()

    # --- --- restarts of the peer ------------------------------------------------------------

    async def durability(
        self, queue: str, topic: str | None, restart: Callable[[], Awaitable[Connection]]
    ) -> None:
        sources: list[tuple[dict[str, Any], int, str, UnsettledMap]] = []
        targets: list[tuple[dict[str, Any], int, str, UnsettledMap]] = []
        subscriptions: list[dict[str, Any]] = []
        kinds: list[dict[str, Any]] = [
            {"durable": durable, "expiry_policy": Symbol("never")} for durable in (1, 2)
        ]
        for kind in kinds:
            asked = {"name": f"honest-{next(self._names)}", "rcv_settle_mode": 1, **kind}
            asked |= {"address": queue, "default_outcome": RELEASED}
            end = await self.receiver(**asked)
            if not end.refused and end.link.source.durable:
                body = await self.put(queue, durable=True)
                await end.take(1)
                await end.detach(closed=False)
                left = end.remembered(ACCEPTED)
                sources.append((asked, end.link.source.durable, body, left))
        # From here on nothing is taken from the queue.
        for kind in kinds:
            asked = {"name": f"honest-{next(self._names)}", "rcv_settle_mode": 1, **kind}
            asked |= {"address": queue}
            end = await self.sender(**asked)
            if not end.refused and end.link.target.durable:
                await self.until(partial(_has_credit, end), f"{queue!r} gives no credit")
                body = f"honest {next(self._bodies)}"
                payload = Message(body, durable=True).encode()
                tag = end.link.send(payload).tag
                await self.until(partial(_has_outcome, end), "a durable message gets no outcome")
                await end.detach(closed=False)
                left = {tag: Unsettled(tag=tag, payload=payload)}
                targets.append((asked, end.link.target.durable, body, left))
            if topic is not None:
                asked = {"name": f"honest-{next(self._names)}", "address": topic, **kind}
                end = await self.receiver(**asked)
                if not end.refused and end.link.source.durable:
                    await end.detach(closed=False)
                    subscriptions.append(asked)
        self.peer = await restart()
        await self.peer.wait_open()
        self.core = self.peer.engine.begin()
        expected: dict[str, str] = {}
        for asked, durable, body, left in sources:
            said = f"a source of durability {durable}, after a restart"
            remembers = durable == 2
            again = await self.receiver(unsettled=left if remembers else None, **asked)
            assert not again.refused, f"{said}: the link is refused"
            assert again.link.resumed or not remembers, f"{said}: nothing is remembered"
            if remembers:
                await again.take(1)
            else:
                expected[body] = f"{said}: a durable message that was in hand is lost"
            await again.detach()
        for asked, durable, body, left in targets:
            said = f"a target of durability {durable}, after a restart"
            expected[body] = f"{said}: a message that it had accepted is not there once"
            if durable == 2:
                again = await self.sender(unsettled=left, **asked)
                assert not again.refused, f"{said}: the link is refused"
                assert again.link.resumed, f"{said}: nothing is remembered"
                await self.until(partial(_has_outcome, again), f"{said}: its outcome is forgotten")
                await again.detach()
        found = [message.body for message in await self.there(queue)]
        for body, failure in expected.items():
            assert found.count(body) == 1, failure
        for _, durable, body, _ in sources:
            assert body in expected or body not in found, (
                f"a source of durability {durable}, after a restart: an unsettled message is delivered"
                " to another consumer"
            )
        for asked in subscriptions:
            assert topic is not None
            body = await self.put(topic)
            again = await self.receiver(**asked)
            found = [Message.decode(each.payload).body for each in await again.take()]
            assert body in found, f"a durable subscription of {topic!r} does not outlive a restart"
            await again.detach()

    # --- dynamic nodes -----------------------------------------------------------------------

    async def lifetimes(self) -> None:
        for lifetime in _LIFETIMES:
            for messages in (0, 1):
                for links in (0, 1):
                    await self._live(lifetime, messages, links)

    async def _live(self, asked: Any, messages: int, links: int) -> None:
        end = await self.sender(dynamic=True, dynamic_node_properties={_LIFETIME: asked()})
        if end.refused:
            return
        target = end.link.target
        assert target.dynamic, "a dynamic target is not answered as one"
        assert target.address, "a dynamic target has no address"
        properties = target.dynamic_node_properties or {}
        if _LIFETIME not in properties:
            await end.detach()
            return
        lifetime = from_described(properties[_LIFETIME], *_LIFETIMES)
        await self._supported_modes(target.address, properties)
        other = await self.sender(address=target.address) if links else None
        for _ in range(messages):
            await self.put(target.address)
        await end.detach()
        lives = {
            DeleteOnClose: False,
            DeleteOnNoLinks: bool(links),
            DeleteOnNoMessages: bool(messages),
            DeleteOnNoLinksOrMessages: bool(links or messages),
        }[type(lifetime)]
        said = f"{type(lifetime).__name__} with {messages} messages and {links} links"
        if other is not None and not lives:
            await self.until(lambda: other.heard.detached, f"{said}: its links stay")
        if lives:
            # A new link would keep some of them alive: those that exist have to suffice.
            if other is not None:
                await self.until(lambda: not other.heard.detached, f"{said}: it is gone")
                await other.detach()
            else:
                assert await self.exists(target.address), f"{said}: it is gone"
            if messages and await self.exists(target.address):
                await self.there(target.address)
        gone = False
        with trio.move_on_after(self.patience_s):
            while not gone:
                gone = not await self.exists(target.address)
        assert gone, f"{said}: it never goes"

    async def _supported_modes(self, address: str, properties: Any) -> None:
        modes = properties.get(Symbol("supported-dist-modes"))
        if modes is None:
            return
        supported = {str(mode) for mode in (modes if isinstance(modes, Array) else [modes])}
        for mode in ("move", "copy"):
            end = await self.receiver(address=address, distribution_mode=Symbol(mode))
            assert end.refused == (mode not in supported), (
                f"supported-dist-modes {sorted(supported)}, and {mode} is another thing"
            )
            if not end.refused:
                await end.detach()
