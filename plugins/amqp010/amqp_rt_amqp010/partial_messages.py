"""Messages of which some fragments have arrived, in all sessions of a front and without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeAlias

from .assembling import Assembly
from .faults import CommandFault
from .layouts import ErrorCode
from .limits import (
    CHUNK_COST,
    FRAGMENTED_MAX,
    FRAGMENTED_OCTETS_MAX,
    FRAGMENTED_USER_MAX,
    FRAGMENTED_USER_OCTETS_MAX,
)
from .serials import RangeSet

#: Virtual host and user; None for all anonymous ones.
Principal: TypeAlias = tuple[str, str | None]


class PartialMessage:
    """A message of which some fragments have arrived.

    Args:
        principal: Its sender.
        resume_id: Name by which the sender may resume it; None if it gave none.
        ttl_s: Seconds for which it is kept without a session.
        header: Header segment of the first fragment.
    """

    __slots__ = (
        *("cost", "expires_at", "header", "is_dropped", "numbers", "offset", "owner", "pieces"),
        *("principal", "resume_id", "ttl_s"),
    )

    def __init__(
        self, principal: Principal, resume_id: str | None, ttl_s: float, header: bytes | None
    ) -> None:
        self.principal = principal
        self.resume_id = resume_id
        self.ttl_s = ttl_s
        self.header = header
        #: The body so far, and its octets.
        self.pieces: list[bytes] = []
        self.offset = 0
        #: Octets for which it counts.
        self.cost = 0
        #: The session that sends it; None while none does.
        self.owner: object = None
        #: When it is dropped; None if it has an owner, or that is not known yet.
        self.expires_at: float | None = None
        self.is_dropped = False
        #: Command-ids of its transfers in the session of the owner.
        self.numbers = RangeSet()

    def joined(self, last: Assembly) -> Assembly:
        """Return the message, which is complete, as if it had come whole with the transfer of *last*."""
        made = Assembly(last.channel, last.kind)
        made.content = last.content
        made.header = self.header
        made.body = self.pieces
        made.body_size = self.offset
        return made


class PartialMessages:
    """All incomplete messages of a front, of every session and those without one.

    None is dropped to make room for another: users cannot drop messages of others.
    """

    def __init__(self) -> None:
        self._named: dict[tuple[Principal, str], PartialMessage] = {}
        #: Those without an owner.
        self._left: dict[PartialMessage, None] = {}
        #: Number and octets of the messages of each user that has any, and of all.
        self._by_user: dict[Principal, tuple[int, int]] = {}
        self._count = 0
        self._octets = 0
        #: Called when ``deadline`` may have become earlier.
        self.on_deadline: Callable[[], None] = _nothing

    def __len__(self) -> int:
        return self._count

    @property
    def octets(self) -> int:
        """Octets for which the messages count together."""
        return self._octets

    def begin(self, message: PartialMessage) -> None:
        """Add *message*, in place of an earlier one with the same resume-id.

        Raises:
            CommandFault: There are too many (506).
        """
        key = message.resume_id
        if key is not None:
            before = self._named.get((message.principal, key))
            if before is not None:
                self.drop(before)
        count, _ = self._by_user.get(message.principal, (0, 0))
        if count >= FRAGMENTED_USER_MAX or self._count >= FRAGMENTED_MAX:
            raise _too_much(f"there are {self._count} incomplete messages, {count} of this user")
        self._account(message.principal, 1, 0)
        if key is not None:
            self._named[message.principal, key] = message

    def add(self, message: PartialMessage, pieces: Sequence[bytes]) -> None:
        """Append *pieces* to the body of *message*.

        Raises:
            CommandFault: There is no room; the message is dropped (506).
        """
        size = sum(len(each) for each in pieces)
        cost = size + CHUNK_COST * len(pieces)
        if not message.cost:
            cost += len(message.header or b"")
        _, octets = self._by_user[message.principal]
        if (
            octets + cost > FRAGMENTED_USER_OCTETS_MAX
            or self._octets + cost > FRAGMENTED_OCTETS_MAX
        ):
            self.drop(message)
            raise _too_much(
                f"incomplete messages have {self._octets} octets, {octets} of this user"
            )
        self._account(message.principal, 0, cost)
        message.cost += cost
        message.pieces += pieces
        message.offset += size

    def find(self, principal: Principal, resume_id: str) -> PartialMessage | None:
        """Return the message *resume_id* of *principal*, None if there is none."""
        return self._named.get((principal, resume_id))

    def own(self, message: PartialMessage, owner: object) -> None:
        """Let *owner* send the rest of *message*, which another session may have begun."""
        message.owner = owner
        message.expires_at = None
        message.numbers = RangeSet()
        self._left.pop(message, None)

    def leave(self, message: PartialMessage) -> None:
        """Keep *message* for its time, because the session of its owner has ended; drop it if it has none."""
        if message.resume_id is None or message.ttl_s <= 0:
            self.drop(message)
        else:
            message.owner = None
            self._left[message] = None
            self.on_deadline()

    def drop(self, message: PartialMessage) -> None:
        """Forget *message*, which is complete or cannot become so."""
        if message.is_dropped:
            return
        message.is_dropped = True
        message.owner = None
        self._left.pop(message, None)
        if message.resume_id is not None:
            self._named.pop((message.principal, message.resume_id), None)
        self._account(message.principal, -1, -message.cost)

    def _account(self, principal: Principal, count: int, octets: int) -> None:
        self._count += count
        self._octets += octets
        before = self._by_user.get(principal, (0, 0))
        after = before[0] + count, before[1] + octets
        if after[0]:
            self._by_user[principal] = after
        else:
            self._by_user.pop(principal, None)

    @property
    def deadline(self) -> float:
        """Time at which ``tick`` is due; ``inf`` for never."""
        # Sessions have no clock: the time of a message begins with the next tick.
        return min(
            (-inf if each.expires_at is None else each.expires_at for each in self._left),
            default=inf,
        )

    def tick(self, now: float) -> None:
        """Drop the messages whose time is up."""
        for message in list(self._left):
            if message.expires_at is None:
                message.expires_at = now + message.ttl_s
            elif message.expires_at <= now:
                self.drop(message)

    def close(self) -> None:
        """Drop all that no session sends."""
        for message in list(self._left):
            self.drop(message)


def _nothing() -> None:
    """Do nothing."""


def _too_much(text: str) -> CommandFault:
    return CommandFault(text, ErrorCode.RESOURCE_LIMIT_EXCEEDED)
