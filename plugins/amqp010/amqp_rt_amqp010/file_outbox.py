"""Files on their way to the client of a session: ``file.open``, ``stage`` and ``deliver`` of the broker.

Neither the client's ``open-ok`` nor the broker's ``stage`` name a file: both follow the opens in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Protocol

from .codec import write_command
from .contexts import Context
from .deliveries import OutgoingDelivery
from .faults import CommandFault
from .layouts import ErrorCode, FileDeliver, FileOpen, FileStage
from .limits import HASHED_TURN, OUTGOING_FILES_MAX, OUTGOING_FILES_OCTETS_MAX
from .recent import Delivered


class Recipient(Protocol):
    """Consumer that a file is sent to."""

    destination: str

    def on_delivered(self, delivery: OutgoingDelivery) -> None:
        """Handle that ``file.deliver`` has been sent."""


class OutgoingFile:
    """A file that the client has not been sent as a whole.

    Args:
        link: The consumer.
        delivery: Its delivery, whose number is the delivery-tag.
        content: The file.
        size: Octets of its content.
    """

    __slots__ = (
        *("_hash", "_hashed", "content", "delivery", "identifier", "is_withdrawn", "link"),
        *("offset", "size"),
    )

    def __init__(
        self, link: Recipient, delivery: OutgoingDelivery, content: Delivered, size: int
    ) -> None:
        self.link = link
        self.delivery = delivery
        self.content = content
        self.size = size
        #: Name by which it is staged; empty until it is known.
        self.identifier = ""
        #: Octets that the client has already.
        self.offset = 0
        #: Whether the consumer was cancelled: it is not delivered.
        self.is_withdrawn = False
        self._hash = sha256(content.header)
        self._hashed = _pieces_of(content.body)

    def hash_on(self) -> bool:
        """Hash the next piece; return whether it was the last one.

        A file has the same name whenever it is sent, so that a client that has staged a part can continue.
        """
        for piece in self._hashed:
            self._hash.update(piece)
            if self.size > HASHED_TURN:
                return False
        return True

    @property
    def digest(self) -> str:
        """Hash of header and content."""
        return self._hash.hexdigest()

    def rest(self) -> list[bytes]:
        """Return the content that the client lacks; nothing of a file that is withdrawn."""
        skipped, found = self.offset, []
        for piece in () if self.is_withdrawn else self.content.body:
            if skipped < len(piece):
                found.append(piece[skipped:] if skipped else piece)
            skipped = max(0, skipped - len(piece))
        return found

    def withdraw(self) -> None:
        """Drop the content: the stage is going to be empty."""
        self.is_withdrawn = True
        self.content = self.content._replace(body=[])


class FileOutbox:
    """Files on their way to the client of a session, in order.

    Args:
        context: Context of the session.
        on_room: Called when more files may be added.
    """

    def __init__(self, context: Context, on_room: Callable[[], None]) -> None:
        self._context = context
        self._on_room = on_room
        #: Files that are not open yet; those that are, in the order of their opens; those to be staged.
        self._new: deque[OutgoingFile] = deque()
        self._opened: deque[OutgoingFile] = deque()
        self._ready: deque[OutgoingFile] = deque()
        self._octets = 0
        #: Names of the files that the client has and has not settled → their deliveries.
        self._names: dict[str, OutgoingDelivery] = {}
        self._name_of: dict[OutgoingDelivery, str] = {}
        #: Tag of the last file that was delivered.
        self.delivered = 0

    @property
    def is_full(self) -> bool:
        """Whether no more files should be added."""
        count = len(self._new) + len(self._opened) + len(self._ready)
        return count >= OUTGOING_FILES_MAX or self._octets >= OUTGOING_FILES_OCTETS_MAX

    def add(self, file: OutgoingFile) -> None:
        """Send *file*, from the next turn on."""
        self._new.append(file)
        self._octets += file.size
        # Not at once: the caller may be the queue, which the end of a delivery would reach.
        self._context.session.at_turn(self.send_waiting)

    def continue_at(self, offset: int) -> None:
        """Stage the file that was opened first from *offset* on.

        Raises:
            CommandFault: No file is open (409), or it has fewer octets (542).
        """
        if not self._opened:
            raise CommandFault("open-ok without an open of the broker", ErrorCode.ILLEGAL_STATE)
        file = self._opened[0]
        if offset > file.size:
            text = f"staged-size is {offset}, and the file has {file.size} octets"
            raise CommandFault(text, ErrorCode.INVALID_ARGUMENT, field_index=0)
        file.offset = offset
        self._ready.append(self._opened.popleft())
        self.send_waiting()

    def withdraw(self, link: Recipient) -> list[OutgoingDelivery]:
        """Stop sending to *link*; return the deliveries of files that it has not got.

        A file that is open is still staged, without content, because stages follow opens in order.
        """
        found = [each for each in self._all() if each.link is link and not each.is_withdrawn]
        for file in found:
            self._octets -= file.size
            file.withdraw()
        self._new = deque(each for each in self._new if not each.is_withdrawn)
        return [each.delivery for each in found]

    def forget(self, delivery: OutgoingDelivery) -> None:
        """Forget the name of the file of *delivery*, which has been settled."""
        name = self._name_of.pop(delivery, None)
        if name is not None:
            del self._names[name]

    def clear(self) -> None:
        """Drop all files, and the function for room: the session has ended.

        With it the owner, which has a reference to this object, would stay until a full collection.
        """
        self._on_room = _nothing
        for each in (self._new, self._opened, self._ready):
            each.clear()
        self._names.clear()
        self._name_of.clear()
        self._octets = 0

    def offer_credit(self) -> None:
        """Continue to send: the output has room."""
        self.send_waiting()

    def send_waiting(self) -> None:
        """Send what there is, as far as session and output have room."""
        was_full = self.is_full
        while self._ready and self._has_room():
            self._stage(self._ready.popleft())
        while self._new and self._has_room() and self._name(self._new[0]):
            file = self._new.popleft()
            command = FileOpen(identifier=file.identifier, content_size=file.size)
            if self._context.session.send(write_command(command)) < 0:
                return
            self._opened.append(file)
        if was_full and not self.is_full:
            self._context.session.at_turn(self._on_room)

    def _stage(self, file: OutgoingFile) -> None:
        session = self._context.session
        content, delivery = file.content, file.delivery
        if session.send(write_command(FileStage()), content.header, file.rest()) < 0:
            return
        if file.is_withdrawn:
            return
        self._octets -= file.size
        if delivery.settled:
            # Its queue was deleted.
            return
        command = FileDeliver(
            consumer_tag=file.link.destination,
            delivery_tag=delivery.number,
            redelivered=content.redelivered,
            exchange=content.exchange,
            routing_key=content.routing_key,
            identifier=file.identifier,
        )
        if session.send(write_command(command), urgent=True) >= 0:
            self.delivered = delivery.number
            file.link.on_delivered(delivery)

    def _name(self, file: OutgoingFile) -> bool:
        """Give *file* its name; return False if that is continued in a later turn."""
        if file.identifier:
            return True
        if not file.hash_on():
            connection = self._context.connection
            if connection is not None:
                connection.work_later(self.send_waiting)
            return False
        name = digest = file.digest
        copies = 1
        while name in self._names:
            # Equal files that the client has at the same time are staged apart.
            copies += 1
            name = f"{digest}-{copies}"
        file.identifier = name
        self._names[name] = file.delivery
        self._name_of[file.delivery] = name
        return True

    def _has_room(self) -> bool:
        context = self._context
        connection = context.connection
        if connection is None or not context.session.can_send:
            return False
        if connection.output_size >= connection.limits.output_max:
            connection.thirsty[self] = None
            return False
        return True

    def _all(self) -> Iterator[OutgoingFile]:
        for each in (self._new, self._opened, self._ready):
            yield from each


def _pieces_of(body: list[bytes]) -> Iterator[memoryview]:
    for piece in body:
        view = memoryview(piece)
        for at in range(0, len(view), HASHED_TURN):
            yield view[at : at + HASHED_TURN]


def _nothing() -> None:
    """Do nothing: the session has ended."""
