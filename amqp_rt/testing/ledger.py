"""Ledger of all messages of a test, which checks that the promised guarantees were kept.

A test creates each body with :meth:`DeliveryLedger.body`, and reports the events of its senders and
consumers with the methods ``was_…``. :meth:`DeliveryLedger.was_delivered` raises at once for a delivery
that breaks a guarantee; :meth:`DeliveryLedger.check` examines the messages left at the end. A ledger keeps
every body of its test in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, TypeAlias
from zlib import crc32

__all__ = ["Broken", "DeliveryLedger"]

#: Length of the checksum at the end of a body, in hexadecimal digits. Without it, a body with an altered
#: number could equal that of another message.
_CRC: Final = 8

#: When a message may be delivered again; see :class:`DeliveryLedger`.
Duplicates: TypeAlias = Literal["allowed", "in doubt", "never"]


class Broken(AssertionError):
    """A guarantee was not kept."""


class DeliveryLedger:
    """The messages of one queue or log.

    * Acknowledged messages are not lost: each is consumed, or still there.
    * Settled messages do not return: a message whose delivery the broker has settled is not delivered
      again.
    * Order is kept: messages of each sender are first delivered in the order in which they were
      sent.
    * Bodies are not altered: every body is one that was sent, octet by octet.

    Args:
        what: Name of the node in error messages.
        duplicates: When a message may be delivered again: at any time, as where senders repeat messages
            whose outcome they did not receive (``"allowed"``); until its consumer has learned that it is
            settled (``"in doubt"``); or only after its consumer has returned it, if links are resumed
            (``"never"``).
        ordered: Whether one consumer receives all messages, so that their order can be checked.
    """

    def __init__(
        self, what: str = "queue", *, duplicates: Duplicates = "in doubt", ordered: bool = True
    ) -> None:
        self.what = what
        self.duplicates = duplicates
        self.ordered = ordered
        #: Sender and number of each body, in the order of creation.
        self.sent: dict[bytes, tuple[str, int]] = {}
        #: Bodies accepted, and bodies refused, according to the outcomes that their senders
        #: received.
        self.acknowledged: set[bytes] = set()
        self.refused: set[bytes] = set()
        #: Bodies for which the consumer sent accepted, and those that the broker has settled.
        self.accepted: set[bytes] = set()
        self.settled: set[bytes] = set()
        #: Number of deliveries of each body.
        self.delivered: dict[bytes, int] = {}
        #: Number of times that each body was returned.
        self.returned: dict[bytes, int] = {}
        #: Bodies that the store set aside as damaged, and reported.
        self.damaged: set[bytes] = set()
        self._numbers: dict[str, int] = {}
        self._latest: dict[str, int] = {}

    def body(self, sender: str, size: int = 0) -> bytes:
        """Create the body of the next message of *sender*, with at least *size* octets."""
        number = self._numbers[sender] = self._numbers.get(sender, -1) + 1
        text = f"{sender} {number} ".encode()
        # The padding depends on the number, so that pieces of two messages cannot be exchanged unnoticed.
        text += bytes(number % 251 for _ in range(size - len(text) - _CRC))
        body = text + b"%08x" % crc32(text)
        self.sent[body] = sender, number
        return body

    def was_acknowledged(self, body: bytes) -> None:
        """Record that the sender received the outcome accepted."""
        self.acknowledged.add(body)

    def was_refused(self, body: bytes) -> None:
        """Record that the sender received an outcome other than accepted."""
        self.refused.add(body)

    def was_delivered(self, body: object) -> bytes:
        """Record a delivery to a consumer; return the body.

        Raises:
            Broken: The body was never sent, was refused, is out of order, or is delivered again although
                *duplicates* forbids it.
        """
        known = self._known(body)
        times = self.delivered[known] = self.delivered.get(known, 0) + 1
        if self.duplicates != "allowed" and known in self.settled:
            raise Broken(f"{self.what}: {_short(known)} was settled, and was delivered again")
        if self.duplicates == "never" and times > 1 + self.returned.get(known, 0):
            raise Broken(f"{self.what}: {_short(known)} was delivered again for no reason")
        sender, number = self.sent[known]
        if times == 1:
            if self.ordered and number < self._latest.get(sender, -1):
                raise Broken(
                    f"{self.what}: {_short(known)} came after number {self._latest[sender]}"
                )
            self._latest[sender] = number
        return known

    def was_accepted(self, body: bytes) -> None:
        """Record that the consumer sent the outcome accepted, which may still be lost."""
        self.accepted.add(body)

    def was_settled(self, body: bytes) -> None:
        """Record that the consumer has learned that the broker settled the delivery."""
        self.settled.add(body)

    def was_returned(self, body: bytes) -> None:
        """Record that the consumer returned the message, so that it may be delivered again."""
        self.returned[body] = self.returned.get(body, 0) + 1

    def was_damaged(self, body: bytes) -> None:
        """Record that the store reported the message as lost."""
        self.damaged.add(body)

    def check(self, left: Iterable[object]) -> None:
        """Check all guarantees, given the bodies *left* on the node at the end, in the node's order.

        Raises:
            Broken: A message was lost, altered or refused, is there twice or out of order, or is there
                although its delivery was settled.
        """
        there: dict[bytes, None] = {}
        latest: dict[str, int] = {}
        for body in left:
            known = self._known(body)
            if self.duplicates != "allowed" and known in there:
                raise Broken(f"{self.what}: {_short(known)} is there twice")
            if self.duplicates != "allowed" and known in self.settled:
                raise Broken(f"{self.what}: {_short(known)} was settled, and is there")
            sender, number = self.sent[known]
            if self.ordered and known not in there and number < latest.get(sender, -1):
                raise Broken(f"{self.what}: {_short(known)} is behind number {latest[sender]}")
            latest[sender] = number
            there[known] = None
        lost = [
            body
            for body in self.sent
            if body in self.acknowledged
            and body not in self.accepted
            and body not in self.damaged
            and body not in there
        ]
        if lost:
            raise Broken(f"{self.what}: acknowledged and lost: {', '.join(map(_short, lost))}")

    def _known(self, body: object) -> bytes:
        if not isinstance(body, bytes) or body not in self.sent:
            raise Broken(f"{self.what}: {body!r:.100} was never sent")
        if body in self.refused:
            raise Broken(f"{self.what}: {_short(body)} was refused, and was delivered")
        return body


def _short(body: bytes) -> str:
    return " ".join(body.decode("latin-1").split(" ", 2)[:2])
