"""What became of every message, and whether that is what was promised.

Each message has a number and a checksum in its body. Whoever sends and receives says so here; the
ledger raises at once when something cannot be, and :meth:`Ledger.check` looks at what is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, TypeAlias
from zlib import crc32

__all__ = ["Broken", "Ledger"]

_CRC: Final = 8

Duplicates: TypeAlias = Literal["allowed", "in doubt", "never"]


class Broken(AssertionError):
    """A promise was not kept."""


class Ledger:
    """The messages of one queue or log.

    * Nothing acknowledged is lost: what the sender was told is accepted is consumed, or there.
    * Nothing settled comes back: a delivery that the broker has settled is not delivered again.
    * Order is kept: of each sender, messages are first delivered in the order in which they were sent.
    * Nothing is invented: every body is one that was sent, octet by octet.

    Args:
        what: The name in complaints.
        duplicates: When a message may be delivered again: whenever its sender or its consumer does not
            know what became of it, and sends it again (``"allowed"``); as long as its consumer was not
            told that it is settled (``"in doubt"``); or not even then, because links are resumed
            (``"never"``).
        ordered: One consumer receives the messages, so that their order can be seen.
    """

    def __init__(
        self, what: str = "queue", *, duplicates: Duplicates = "in doubt", ordered: bool = True
    ) -> None:
        self.what = what
        self.duplicates = duplicates
        self.ordered = ordered
        #: Bodies in the order in which they were made, each with its sender.
        self.sent: dict[bytes, tuple[str, int]] = {}
        #: The sender was told that it is accepted; that it is not.
        self.acknowledged: set[bytes] = set()
        self.refused: set[bytes] = set()
        #: It was said to the broker that these are accepted; the broker settled these.
        self.accepted: set[bytes] = set()
        self.settled: set[bytes] = set()
        #: How often each was delivered.
        self.delivered: dict[bytes, int] = {}
        #: How often each was given back.
        self.returned: dict[bytes, int] = {}
        #: Set aside by the store, and reported.
        self.damaged: set[bytes] = set()
        self._numbers: dict[str, int] = {}
        self._latest: dict[str, int] = {}

    def body(self, sender: str, size: int = 0) -> bytes:
        """The next message of *sender*, with at least *size* octets."""
        number = self._numbers[sender] = self._numbers.get(sender, -1) + 1
        text = f"{sender} {number} ".encode()
        text += bytes(number % 251 for _ in range(size - len(text) - _CRC))
        body = text + b"%08x" % crc32(text)
        self.sent[body] = sender, number
        return body

    def was_acknowledged(self, body: bytes) -> None:
        """The sender heard that it was accepted."""
        self.acknowledged.add(body)

    def was_refused(self, body: bytes) -> None:
        """The sender heard that it was not."""
        self.refused.add(body)

    def was_delivered(self, body: object) -> bytes:
        """A consumer got it; returns the body.

        Raises:
            Broken: It was invented, was settled before, or is not in its order.
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
        """Its consumer says that it is accepted; whether that arrives is another matter."""
        self.accepted.add(body)

    def was_settled(self, body: bytes) -> None:
        """Its consumer heard that the broker has settled it."""
        self.settled.add(body)

    def was_returned(self, body: bytes) -> None:
        """Its consumer gave it back: it may come again."""
        self.returned[body] = self.returned.get(body, 0) + 1

    def was_damaged(self, body: bytes) -> None:
        """The store has said that it is lost."""
        self.damaged.add(body)

    def check(self, left: Iterable[object]) -> None:
        """Judge, with what is *left* on the node in the end, in its order.

        Raises:
            Broken: Something was lost, invented, doubled, out of order, or came back.
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
            raise Broken(f"{self.what}: nobody sent {body!r:.100}")
        if body in self.refused:
            raise Broken(f"{self.what}: {_short(body)} was refused, and was delivered")
        return body


def _short(body: bytes) -> str:
    return " ".join(body.decode("latin-1").split(" ", 2)[:2])
