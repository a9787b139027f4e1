"""Dead letters: messages that a queue gives up go to other nodes, or are dropped with a log line."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from ..addresses import EXCHANGES
from ..errors import AmqpError, DecodeError
from ..limits import Limits
from ..loglimit import log_loss
from ..message import MESSAGE_FORMAT
from ..outcomes import Error
from .entries import Entry, Moves, dead_letter, moves_after
from .expiry import AUTOMATIC
from .filtering.views import MessageView
from .nodes import Queue, origin_of
from .producers import Inlet, IntakeLedger
from .queue.accounts import WORK_OF_A_LETTER
from .services import Services

_log: Final = logging.getLogger("amqp_rt.broker")


def leads_to_an_exchange(address: str | None) -> bool:
    """Return whether the dead-letter *address* is that of an exchange."""
    return address is not None and address.startswith(EXCHANGES)


def reply_address(entry: Entry, limits: Limits) -> str | None:
    """Return the ``reply-to`` of a message, None if it has none."""
    if entry.message_format != MESSAGE_FORMAT:
        return None
    try:
        address = MessageView(entry, limits).properties().reply_to
    except DecodeError:
        return None
    return None if address is None else str(address)


class Recipient(Protocol):
    """Node that may get dead letters."""

    #: Stores durable messages; None if the node stores none.
    ledger: IntakeLedger | None
    inlet: Inlet

    @property
    def name(self) -> str: ...
    @property
    def is_sealed(self) -> bool: ...
    @property
    def takes_pieces(self) -> bool: ...


class DeadLetters:
    """Moves the dead letters of one virtual host.

    Args:
        services: The broker's services.
        virtual_host: Name of the virtual host.
        nodes: Its nodes by name.
    """

    def __init__(
        self, services: Services, virtual_host: str, nodes: Mapping[str, Recipient]
    ) -> None:
        self._services = services
        self._virtual_host = virtual_host
        self._nodes = nodes

    def move(self, declared: Queue, entry: Entry, reason: str, error: Error | None) -> bool:
        """Move *entry*, which the queue *declared* gives up for *reason*; return whether a node takes it."""
        services = self._services
        origin = origin_of(declared.name)
        node = self._sender(declared, entry) if declared.return_to_sender else None
        if node is not None and entry.pieces and not node.takes_pieces:
            # Only a stored queue can take a message in pieces, and the sender's node is none.
            node = None
        if node is None and declared.dead_letter is None:
            self.drop(origin, entry, reason, error, "the queue has no dead_letter")
            return False
        if node is None and not declared.dead_letters(reason):
            self.drop(origin, entry, reason, error, "dead_letter_for has no such reason")
            return False
        address = declared.dead_letter or ""
        if node is None:
            node = self._nodes.get(address)
        if node is None and services.routed_addresses is not None:
            try:
                names = services.routed_addresses.dead_letter_nodes(
                    self._virtual_host, address, entry, diverted=declared.has_alternate
                )
            except AmqpError as failure:
                why = f"its dead-letter address {address!r} leads nowhere: {failure.description}"
                self._log_drop(origin, entry, reason, error, why)
                return False
            if names is not None:
                return self._move_to_each(declared, entry, names, reason, error)
        if node is None:
            why = f"its dead-letter address {declared.dead_letter!r} has been deleted"
            self._log_drop(origin, entry, reason, error, why)
            return False
        if entry.pieces and not node.takes_pieces:
            why = f"it is too large for {node.name!r}, which is not in the store"
            self._log_drop(origin, entry, reason, error, why)
            return False
        moves = moves_after(entry, origin, reason)
        if moves is not None and moves.is_cycle(node.name, services.limits):
            self._log_cycle(node.name, origin, entry, reason)
            return False
        letter = dead_letter(
            entry, origin, reason, error, services.clock.wall(), services.limits, moves
        )
        unit = None if services.journal is None else services.journal.transaction_unit
        if unit is not None:
            # All copies are written, and examined by filters, in the step that writes the transaction.
            unit.letters += 1 if node.ledger is None else node.ledger.copies
        if unit is not None and node.ledger is None:
            # A transaction has no visible effect before it is stored.
            unit.then(partial(node.inlet.take, letter))
        elif unit is not None:
            node.inlet.take(letter)
        else:
            self._hand_over(declared.name, entry, letter, node.inlet)
        services.dead_lettered.add(reason)
        return True

    def _hand_over(self, source: str, entry: Entry, letter: Entry, inlet: Inlet) -> None:
        """Put *letter* into *inlet*, in place of *entry* of the queue *source*.

        The queue removes *entry* from the store, unless filters of a topic need more than this turn
        to examine *letter*: then both changes are made together in a later one.
        """
        node = self._nodes.get(source)
        ledger = None if node is None or node.ledger is None else node.ledger.pieces
        if not entry.stored:
            inlet.take_in_turn(letter, _nothing)
        elif ledger is None:
            inlet.take(letter)
        elif inlet.take_in_turn(letter, partial(ledger.remove_left, entry)):
            ledger.leave(entry)

    def _move_to_each(
        self,
        declared: Queue,
        entry: Entry,
        names: Sequence[str],
        reason: str,
        error: Error | None,
    ) -> bool:
        """Put a dead letter into each of the nodes in *names*, except the one that gave it up.

        Return whether at least one node takes it.
        """
        services = self._services
        origin = origin_of(declared.name)
        moves = moves_after(entry, origin, reason)
        nodes: list[Recipient] = []
        cycle = False
        for name in names:
            node = self._nodes.get(name)
            if node is None or name == origin or entry.pieces or node.is_sealed:
                continue
            if moves is not None and moves.is_cycle(node.name, services.limits):
                self._log_cycle(name, origin, entry, reason)
                cycle = True
            else:
                nodes.append(node)
        if moves is not None and nodes:
            nodes = self._within_copies(declared, entry, moves, nodes)
            moves = moves.copied(len(nodes))
        if not nodes:
            if not cycle:
                why = f"its dead-letter address {declared.dead_letter!r} leads to no queue that takes it"
                self._log_drop(origin, entry, reason, error, why)
            return False
        letter = dead_letter(
            entry, origin, reason, error, services.clock.wall(), services.limits, moves
        )
        unit = None if services.journal is None else services.journal.transaction_unit
        services.memory.work -= WORK_OF_A_LETTER * len(nodes)
        if unit is not None:
            unit.letters += len(nodes)
        for node in nodes:
            if unit is not None and node.ledger is None:
                unit.then(partial(node.inlet.take, letter.copy_for_node()))
            else:
                node.inlet.take(letter.copy_for_node())
        services.dead_lettered.add(reason)
        return True

    def _within_copies(
        self, declared: Queue, entry: Entry, moves: Moves, nodes: list[Recipient]
    ) -> list[Recipient]:
        """Return as many of *nodes* as the limit of copies allows for this dead letter.

        Without a bound, n queues that are bound to each other's exchange would make about n! copies
        of one message, although no copy enters a queue twice.
        """
        most = max(1, self._services.limits.dead_letter_copies_max // moves.copies)
        if moves.copies == 1 or len(nodes) <= most:
            return nodes
        why = "dead_letter_copies_max is reached; its queues dead-letter to each other"
        self._log_drop(declared.name, entry, "dead-letter copies", None, why)
        return nodes[:most]

    def _sender(self, declared: Queue, entry: Entry) -> Recipient | None:
        """Return the node to which a message that was given up returns, None if it names none.

        If that node gives it up too, only a dead-letter address is left: the ``reply-to`` stays.
        """
        if self._services.may_send is not None and not entry.returnable:
            return None
        address = reply_address(entry, self._services.limits)
        node = None if address is None or address == declared.name else self._nodes.get(address)
        return None if node is None or node.is_sealed else node

    def drop(self, name: str, entry: Entry, reason: str, error: Error | None, why: str) -> None:
        """Warn of a message dropped at the node *name*, unless it expired or overflowed, as declared."""
        if reason not in AUTOMATIC:
            self._log_drop(name, entry, reason, error, why)

    def _log_cycle(self, name: str, source: str, entry: Entry, reason: str) -> None:
        """Warn that *entry* is not moved to the node *name*, because it would move in a cycle."""
        why = f"{reason} in {source!r}"
        # Each of n queues may lead back to all others: the lines are limited for each destination.
        self._log_drop(name, entry, "dead-letter cycle", None, why, key="cycle")

    def _log_drop(
        self,
        name: str,
        entry: Entry,
        reason: str,
        error: Error | None,
        why: str,
        key: object = None,
    ) -> None:
        """Warn that *entry* was dropped at the node *name*, within the rate limit of the log."""
        services = self._services
        log_loss(
            _log,
            services.log_limiter,
            services.clock.monotonic(),
            event=f"message dropped: {reason} at",
            address=name,
            payload=entry.payload,
            message_format=entry.message_format,
            why=why,
            error=error,
            key=key,
        )


def _nothing() -> None:
    """Do nothing: the message is not in the store."""
