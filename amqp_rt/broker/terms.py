"""Terms of links that attach to nodes (Part 3 §3.5).

:func:`answer` is the only place that decides about an attach, and its answer describes exactly the
behaviour of the node. Requested features that are not provided are omitted from the answer or
changed in it, so that the peer can see it and decide; where the standard requires it, the link is
refused.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Final, TypeAlias, cast

from msgspec import Struct

from ..codec.composites import from_described
from ..errors import DecodeError
from ..fronts.base import RCV_SECOND, SND_SETTLED, SND_UNSETTLED, Link, LinkConnection
from ..limits import DEFAULT_LIMITS, Limits
from ..outcomes import (
    ACCEPTED,
    RELEASED,
    Accepted,
    Error,
    Modified,
    Outcome,
    Rejected,
    Released,
)
from ..termini import (
    COPY,
    DURABLE_UNSETTLED,
    MOVE,
    STANDARD_OUTCOMES,
    DeleteOnClose,
    DeleteOnNoLinks,
    DeleteOnNoLinksOrMessages,
    DeleteOnNoMessages,
    Source,
    Target,
    outlives_connection,
)
from ..values import Array, Described, Symbol
from .filtering.filters import FilterSet, compile_filter_set
from .filtering.plugin_filters import FilterTypes
from .filtering.positions import Position
from .filtering.selectors import InvalidFilter
from .nodes import (
    LOG,
    QUEUE,
    TOPIC,
    Declaration,
    Queue,
    declaration,
)

#: Outcome types by the symbols in which a source lists them.
_OUTCOMES: Final[dict[str, type]] = dict(
    zip(STANDARD_OUTCOMES, (Accepted, Rejected, Released, Modified), strict=True)
)

#: Link properties for the priority of a consumer, in the spelling of Artemis and of RabbitMQ, and
#: for an exclusive consumer.
PRIORITIES: Final = (Symbol("priority"), Symbol("rabbitmq:priority"))
EXCLUSIVE: Final = Symbol("exclusive")

#: Capabilities that name the kind of node a client expects at the address.
_KINDS: Final = {
    "queue": QUEUE,
    "temporary-queue": QUEUE,
    "topic": TOPIC,
    "temporary-topic": TOPIC,
    "log": LOG,
}


#: Events that start the timer of a terminus; with ``never`` it does not start (§3.5.6).
LINK_DETACH: Final = "link-detach"
SESSION_END: Final = "session-end"
CONNECTION_CLOSE: Final = "connection-close"
NEVER: Final = "never"
_POLICIES: Final = (LINK_DETACH, SESSION_END, CONNECTION_CLOSE, NEVER)

#: Link properties for the delivery guarantee (S3 2.3.6): the required one, and the preferred one.
DELIVERY_MODE: Final = Symbol("delivery-mode")
OPT_DELIVERY_MODE: Final = Symbol("opt-delivery-mode")
AT_MOST_ONCE: Final = "at-most-once"
AT_LEAST_ONCE: Final = "at-least-once"
EXACTLY_ONCE: Final = "exactly-once"
_DELIVERY_MODES: Final = (AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE)

#: Capabilities of a subscription shared by several links, and by several containers.
SHARED: Final = "shared"
GLOBAL: Final = "global"

#: Lifetime policies of a dynamic node (§3.5.9).
Lifetime: TypeAlias = (
    DeleteOnClose | DeleteOnNoLinks | DeleteOnNoMessages | DeleteOnNoLinksOrMessages
)
_LIFETIMES: Final = (
    DeleteOnClose,
    DeleteOnNoLinks,
    DeleteOnNoMessages,
    DeleteOnNoLinksOrMessages,
)
_LIFETIME: Final = Symbol("lifetime-policy")
_DIST_MODES: Final = Symbol("supported-dist-modes")


class Terms(Struct, frozen=True, kw_only=True):
    """Terms of a link: the termini to answer with, and the behaviour of its endpoint."""

    source: Source | None
    target: Target | None
    snd_settle_mode: int
    #: Whether messages are copied and not moved; this and the next fields are for receiving links.
    copies: bool = False
    default_outcome: Outcome = RELEASED
    #: The only outcomes allowed, None for all.
    outcomes: tuple[type, ...] | None = None
    #: Filters that messages have to pass, None for none.
    filters: FilterSet | None = None
    #: Start position in a log, None if none was requested.
    position: Position | None = None
    #: Whether the terminus is kept when the link is detached without being closed.
    keeps: bool = False
    #: Whether the link is one of several of a shared subscription.
    shared: bool = False
    #: Link properties for our attach.
    properties: dict[object, object] | None = None
    #: Consumer priority; higher ones are served first.
    priority: int = 0
    #: Whether other consumers are excluded.
    exclusive: bool = False

    @property
    def settled(self) -> bool:
        """Whether messages are sent settled."""
        return self.snd_settle_mode == SND_SETTLED


class Means(Struct, frozen=True, kw_only=True):
    """Capabilities of the broker for the termini of links at a node."""

    #: Whether one more terminus can be kept.
    room: bool = True
    #: Whether the state of the node and of its links is in a store.
    stored: bool = False
    #: Whether a request for a durable terminus is granted without a store, for the life of the
    #: process.
    volatile: bool = False
    #: Filter types beside those of the broker; None for no others.
    filters: FilterTypes | None = None


_PLAIN: Final = Means()


def answer(
    link: Link,
    declared: Declaration,
    *,
    sending: bool,
    lifetime: Lifetime | None = None,
    owner: LinkConnection | None = None,
    means: Means = _PLAIN,
    address: str | None = None,
    now: float = 0.0,
    limits: Limits = DEFAULT_LIMITS,
) -> Terms | Error:
    """Return the terms of *link* at the node *declared*, or the error to refuse it with.

    Args:
        link: The peer's request.
        declared: The node.
        sending: Whether we send on the link, so that the peer is a consumer.
        lifetime: Lifetime of a dynamic node that was created for this link.
        owner: The only connection that may receive from the node, None for any.
        means: Capabilities of the broker for the terminus.
        address: Address by which the link named the node, if not its name.
        now: Wall-clock time, which a filter may use.
        limits: Bounds of filters and of the time for which a terminus is kept.
    """
    terminus: Any = link.source if sending else link.target
    for capability in terminus.capabilities:
        wanted = _KINDS.get(capability)
        if wanted is not None and wanted != declared.kind:
            return Error(
                "amqp:precondition-failed",
                f"{declared.name!r} is a {declared.kind}, not a {wanted}",
            )
    if sending:
        if owner is not None and owner is not link.connection:
            return Error(
                "amqp:unauthorized-access",
                "only the connection that made a dynamic node may receive from it",
            )
        return _consumer(link, declared, lifetime, means, address or declared.name, now, limits)
    kept = _kept(terminus, True, means, limits)
    if isinstance(kept, Error):
        return kept
    durable, policy, timeout = kept
    target = Target(
        address=address or declared.name,
        durable=durable,
        expiry_policy=policy,
        timeout=timeout,
        dynamic=lifetime is not None,
        dynamic_node_properties=_made(declared, lifetime),
        capabilities=(declared.kind,),
    )
    # Settled messages arrive at most once by nature, unsettled ones at least once.
    modes = [AT_MOST_ONCE] if link.snd_settle_mode == SND_SETTLED else [AT_LEAST_ONCE]
    if outlives_connection(target) and link.snd_settle_mode != SND_SETTLED:
        # After the link is resumed, a delivery is recognised by its tag.
        modes.append(EXACTLY_ONCE)
    delivery_mode = _delivery_mode(link, modes)
    if isinstance(delivery_mode, Error):
        return delivery_mode
    return Terms(
        source=link.source,
        target=target,
        snd_settle_mode=link.snd_settle_mode,
        keeps=policy != LINK_DETACH or timeout > 0,
        properties=delivery_mode,
    )


def _kept(
    asked: Source | Target, possible: bool, means: Means, limits: Limits
) -> tuple[int, Symbol, int] | Error:
    """Return the durability, the expiry-policy and the timeout in seconds of a terminus.

    A terminus that is to outlive its connection is granted or refused, so that the client knows at
    once. One that is only to outlive its link, as by default, is silently answered without that.
    """
    policy = asked.expiry_policy
    if policy not in _POLICIES:
        return Error("amqp:invalid-field", f"there is no expiry-policy {policy!r:.50}")
    if asked.durable > DURABLE_UNSETTLED:
        return Error("amqp:invalid-field", f"there is no terminus-durability {asked.durable}")
    lasting = outlives_connection(asked)
    if not possible:
        if asked.durable:
            return Error("amqp:not-implemented", "nothing is kept of a link like this")
        return 0, Symbol(LINK_DETACH), 0
    if not means.room:
        if lasting:
            return Error("amqp:resource-limit-exceeded", "too many termini are kept already")
        return 0, Symbol(LINK_DETACH), 0
    durable = 0
    if asked.durable and lasting:
        if means.stored:
            durable = asked.durable
        elif not means.volatile:
            return Error(
                "amqp:precondition-failed",
                "a durable terminus was requested, but the broker has no store",
            )
    timeout = 0 if policy == NEVER else min(asked.timeout, limits.terminus_timeout_max_s)
    return durable, Symbol(policy), timeout


def _delivery_mode(link: Link, possible: list[str]) -> dict[object, object] | Error | None:
    """Return the link properties for the delivery guarantee, if the peer requested one (S3 2.3.6).

    The first of *possible* applies unless the peer requests another of them.
    """
    if not link.properties:
        return None
    needed = link.properties.get(DELIVERY_MODE)
    wished = link.properties.get(OPT_DELIVERY_MODE)
    for mode in (needed, wished):
        if mode is not None and mode not in _DELIVERY_MODES:
            return Error("amqp:invalid-field", f"there is no delivery-mode {mode!r:.50}")
    if needed is not None and needed not in possible:
        return Error(
            "amqp:not-implemented",
            f"the delivery-mode here is {' or '.join(possible)}, not {needed}: settle modes, "
            "expiry-policy and timeout decide that",
        )
    chosen = needed or (wished if wished in possible else possible[0])
    found: dict[object, object] = {}
    if needed is not None:
        found[DELIVERY_MODE] = Symbol(str(chosen))
    if wished is not None:
        found[OPT_DELIVERY_MODE] = Symbol(str(chosen))
    return found or None


def _guarantee(
    link: Link, source: Source, *, shared: bool
) -> tuple[int, dict[object, object] | None] | Error:
    """Return the settle mode of *link*, which sends from *source*, and its properties for the delivery guarantee."""
    settle_mode = SND_SETTLED if link.snd_settle_mode == SND_SETTLED else SND_UNSETTLED
    delivery_modes = [AT_LEAST_ONCE]
    if settle_mode == SND_SETTLED:
        delivery_modes = [AT_MOST_ONCE]
    else:
        if link.snd_settle_mode != SND_UNSETTLED:
            # The peer left the settle mode to us.
            delivery_modes.append(AT_MOST_ONCE)
        if outlives_connection(source) and not shared and link.rcv_settle_mode == RCV_SECOND:
            delivery_modes.append(EXACTLY_ONCE)
    properties = _delivery_mode(link, delivery_modes)
    if isinstance(properties, Error):
        return properties
    if properties is not None and AT_MOST_ONCE in properties.values():
        settle_mode = SND_SETTLED
    return settle_mode, properties


def _consumer(
    link: Link,
    declared: Declaration,
    lifetime: Lifetime | None,
    means: Means,
    address: str,
    now: float,
    limits: Limits,
) -> Terms | Error:
    asked = link.source
    assert asked is not None
    # A client that relies on an unsupported distribution-mode is refused (S3 2.3.11).
    mode = asked.distribution_mode
    modes = _modes(declared)
    if mode is None:
        mode = modes[0]
    elif mode not in modes:
        return Error(
            "amqp:not-implemented",
            f"the {declared.kind} {declared.name!r} has no distribution-mode {mode!r}",
        )
    copies = mode == COPY
    shared = SHARED in asked.capabilities
    if shared and declared.kind != TOPIC:
        return Error("amqp:not-implemented", f"a {declared.kind} has no shared subscriptions")
    # A browser acquires nothing that had to be kept, and a reader of a log knows its own offset.
    kept = _kept(
        asked, declared.kind == TOPIC or not (copies or declared.kind == LOG), means, limits
    )
    if isinstance(kept, Error):
        return kept
    durable, policy, timeout = kept
    keeps = policy != LINK_DETACH or timeout > 0
    default = asked.default_outcome
    if default is None:
        # With a terminus that the peer can resume, the messages must not be lost with the link.
        lasting = timeout > 0 or policy == NEVER or shared
        default = ACCEPTED if copies and not lasting else RELEASED
    elif not isinstance(default, Outcome):
        return Error("amqp:invalid-field", "the default-outcome is not an outcome")
    unknown = [outcome for outcome in asked.outcomes if outcome not in _OUTCOMES]
    if unknown:
        return Error("amqp:not-implemented", f"there is no outcome {unknown[0]!r}")
    try:
        filters = compile_filter_set(
            asked.filter,
            receiver=link.peer.container_id,
            log=declared.kind == LOG,
            now_ms=int(now * 1000),
            limits=limits,
            types=means.filters,
        )
    except InvalidFilter as error:
        return Error.of(error)
    priority = _priority(link)
    if isinstance(priority, Error):
        return priority
    outcomes = tuple(asked.outcomes) or STANDARD_OUTCOMES
    capabilities = [declared.kind]
    if shared:
        capabilities += [SHARED, *([GLOBAL] if GLOBAL in asked.capabilities else [])]
    source = Source(
        address=address,
        durable=durable,
        expiry_policy=policy,
        timeout=timeout,
        dynamic=lifetime is not None,
        dynamic_node_properties=_made(declared, lifetime),
        distribution_mode=Symbol(mode),
        # Only the filters in place. Unknown ones are absent from the answer, so that the receiver
        # sees that it has to filter itself (§3.5.3).
        filter=filters.in_place or None,
        default_outcome=default,
        outcomes=outcomes,
        capabilities=tuple(capabilities),
    )
    guarantee = _guarantee(link, source, shared=shared)
    if isinstance(guarantee, Error):
        return guarantee
    settle_mode, properties = guarantee
    return Terms(
        source=source,
        target=link.target if isinstance(link.target, Target) else None,
        snd_settle_mode=settle_mode,
        copies=copies,
        default_outcome=default,
        outcomes=_allowed(outcomes),
        filters=filters if filters.selective else None,
        position=filters.position,
        keeps=keeps,
        shared=shared,
        properties=properties,
        priority=priority,
        exclusive=link.properties.get(EXCLUSIVE) is True,
    )


def restored_terms(
    source: Source,
    snd_settle_mode: int,
    container_id: str,
    *,
    priority: int,
    exclusive: bool,
    now: float,
    limits: Limits,
    types: FilterTypes,
) -> Terms:
    """Return the terms of a restored link whose attach was answered with *source*.

    Raises:
        InvalidFilter: A filter is no longer supported.
    """
    filters = compile_filter_set(
        source.filter,
        receiver=container_id,
        now_ms=int(now * 1000),
        limits=limits,
        types=types,
    )
    if filters.unsupported:
        # Without it, the subscription would get messages that its receiver does not want.
        raise InvalidFilter(
            f"no plug-in has the type of the filter {str(filters.unsupported[0])!r}"
        )
    return Terms(
        source=source,
        target=None,
        snd_settle_mode=snd_settle_mode,
        copies=source.distribution_mode == COPY,
        # As it was answered, with an outcome.
        default_outcome=cast("Outcome", source.default_outcome),
        outcomes=_allowed(source.outcomes),
        filters=filters if filters.selective else None,
        keeps=True,
        shared=SHARED in source.capabilities,
        priority=priority,
        exclusive=exclusive,
    )


def _allowed(outcomes: tuple[str, ...]) -> tuple[type, ...] | None:
    """Return the types of *outcomes*, None for all."""
    if len(set(outcomes)) >= len(_OUTCOMES):
        return None
    return tuple(_OUTCOMES[outcome] for outcome in outcomes)


def _priority(link: Link) -> int | Error:
    found = 0
    for name in PRIORITIES:
        value = link.properties.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not -(2**31) <= value < 2**31:
            return Error(
                "amqp:invalid-field",
                f"the link property {name} is a number of 32 bits, not {value!r:.50}",
            )
        found = int(value)
    return found


def _modes(declared: Declaration) -> tuple[str, ...]:
    if declared.kind != QUEUE or (isinstance(declared, Queue) and declared.browse_only):
        return (COPY,)
    return (MOVE, COPY)


def _made(declared: Declaration, lifetime: Lifetime | None) -> dict[object, object] | None:
    """Return the actual properties of a dynamic node (§3.5.9), None for other nodes."""
    if lifetime is None:
        return None
    modes = Array([Symbol(mode) for mode in _modes(declared)], Symbol)
    return {_LIFETIME: lifetime, _DIST_MODES: modes}


_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


def dynamic_declaration(
    link: Link, terminus: Source | Target
) -> tuple[Declaration, Lifetime] | Error:
    """Return the dynamic node to create for *terminus*, and its lifetime (§3.5.3, §3.5.4).

    The address contains the container-id and the name of the link, and ends in 128 random bits, so
    that others cannot guess it.
    """
    if terminus.address is not None:
        return Error("amqp:invalid-field", "a dynamic terminus brings no address")
    asked = terminus.dynamic_node_properties or {}
    lifetime = asked.get(_LIFETIME, DeleteOnClose())
    if isinstance(lifetime, Described):
        try:
            lifetime = from_described(lifetime, *_LIFETIMES)
        except DecodeError:
            lifetime = None
    if not isinstance(lifetime, _LIFETIMES):
        return Error("amqp:not-implemented", "there is no such lifetime-policy")
    parts = (_UNSAFE.sub("-", text)[:64] or "-" for text in (link.peer.container_id, link.name))
    name = "/".join(("dynamic", *parts, secrets.token_urlsafe(16)))
    wanted = {_KINDS[capability] for capability in terminus.capabilities if capability in _KINDS}
    if len(wanted) > 1:
        return Error("amqp:invalid-field", "a node is of one kind only")
    modes = asked.get(_DIST_MODES, ())
    needed = {
        str(mode) for mode in (modes if isinstance(modes, Array | list | tuple) else (modes,))
    }
    kind = wanted.pop() if wanted else TOPIC if needed == {COPY} else QUEUE
    declared = declaration(kind, name)
    if not needed.issubset(_modes(declared)):
        return Error(
            "amqp:not-implemented",
            f"a {kind} has no distribution-modes beside {', '.join(_modes(declared))}",
        )
    return declared, lifetime
