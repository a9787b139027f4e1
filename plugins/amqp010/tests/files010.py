"""A client's half of class file: it stages files, and answers opens of the broker."""

from __future__ import annotations

from typing import Any

from octets010 import Operation, Struct
from subscribers010 import Attached

PROPERTIES: dict[str, Any] = {"filename": "a.txt"}


def open_file(session: Attached, identifier: str, size: int) -> int:
    """Open a file, and return the octets that the broker has of it."""
    session.call("file.open", identifier=identifier, content_size=size)
    answers = [each for each in session.state.others if each.name == "file.open-ok"]
    staged = answers[-1].staged_size
    assert isinstance(staged, int)
    return staged


def stage(session: Attached, body: bytes, **properties: Any) -> None:
    """Stage content of the file that was opened first."""
    header = [Struct("file-properties", **(properties or PROPERTIES))]
    session.call("file.stage", headers=header, body=body)


def publish(session: Attached, identifier: str, key: str = "q", **fields: Any) -> None:
    """Publish a file that is staged."""
    session.call("file.publish", routing_key=key, identifier=identifier, **fields)


def send_file(
    session: Attached, body: bytes, key: str = "q", identifier: str = "f", **properties: Any
) -> None:
    """Stage and publish a file."""
    assert open_file(session, identifier, len(body)) == 0
    stage(session, body, **properties)
    publish(session, identifier, key)


class Delivered:
    """A file as it was delivered."""

    def __init__(self, deliver: Operation, stage: Operation, body: bytes) -> None:
        self.deliver = deliver
        self.tag: int = deliver.delivery_tag
        self.body = body
        (self.properties,) = stage.headers or []


class Receiver:
    """Consumers of files of a session.

    Args:
        session: The session.
        answers: Whether opens are answered; what has been staged is told from then on.
    """

    def __init__(self, session: Attached, *, answers: bool = True) -> None:
        self.session = session
        self.answers = answers
        #: Identifier → content, which outlives sessions if it is passed on.
        self.staged: dict[str, bytearray] = {}
        self.sizes: dict[str, int] = {}
        self.delivered: list[Delivered] = []
        self._seen = 0
        self._answered: list[str] = []
        self.unanswered: list[str] = []
        self._stage_of: dict[str, Operation] = {}

    def consume(self, queue: str = "q", tag: str = "c", **fields: Any) -> None:
        self.session.call("file.consume", queue=queue, consumer_tag=tag, **fields)

    def run(self) -> list[Delivered]:
        """Handle all that comes until nothing more does; return the files delivered meanwhile."""
        before = len(self.delivered)
        self.session.client.world.pump()
        while self._seen < len(self.session.state.others):
            operation = self.session.state.others[self._seen]
            self._seen += 1
            self._handle(operation)
            self.session.client.world.pump()
        return self.delivered[before:]

    def _handle(self, operation: Operation) -> None:
        if operation.name == "file.open":
            self.sizes[operation.identifier] = operation.content_size
            self.unanswered.append(operation.identifier)
            if self.answers:
                self.answer()
        elif operation.name == "file.stage":
            identifier = self._answered.pop(0)
            self.staged[identifier] += operation.body or b""
            self._stage_of[identifier] = operation
        elif operation.name == "file.deliver":
            identifier = operation.identifier
            body = bytes(self.staged.pop(identifier))
            assert len(body) == self.sizes[identifier]
            self.delivered.append(Delivered(operation, self._stage_of[identifier], body))

    def answer(self) -> None:
        """Answer the open that came first."""
        identifier = self.unanswered.pop(0)
        known = self.staged.setdefault(identifier, bytearray())
        self._answered.append(identifier)
        self.session.call("file.open-ok", staged_size=len(known))

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        self.session.call("file.ack", delivery_tag=tag, multiple=multiple)

    def reject(self, tag: int, *, requeue: bool = False) -> None:
        self.session.call("file.reject", delivery_tag=tag, requeue=requeue)
