"""Messages that arrive in fragments, and those of them that may be resumed (0-10 §message fragment-properties).

Only the first fragment has delivery-properties. Those after it belong to the message that is incomplete at the same
destination in the same session; ``message.resume`` makes that the one with a resume-id.
"""

from __future__ import annotations

from .assembling import Assembly
from .contexts import Context
from .faults import CommandFault
from .handlers import Answer, Method
from .layouts import (
    Command,
    ErrorCode,
    FragmentProperties,
    MessageResume,
    MessageResumeResult,
)
from .limits import RESUME_TTL_MAX
from .partial_messages import PartialMessage, PartialMessages, Principal


class Fragments:
    """Incomplete messages of one session; carries out ``message.resume``.

    Args:
        context: The session.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        #: Destination → the message that is incomplete there.
        self._current: dict[str, PartialMessage] = {}
        #: Those of the front, once there has been a fragment.
        self._all: PartialMessages | None = None

    def methods(self) -> dict[type[Command], Method]:
        """Return the method for each command."""
        return {MessageResume: self.resume}

    def add(
        self,
        number: int,
        destination: str,
        fragment: FragmentProperties,
        assembly: Assembly,
        *,
        resume_id: str | None,
        resume_ttl_ms: int | None,
        explicit: bool,
    ) -> PartialMessage | None:
        """Add the body of *assembly*; return the message if it is complete now.

        Args:
            number: Id of the transfer.
            destination: Its destination.
            fragment: Its fragment-properties, which are not those of a whole message.
            assembly: Its content.
            resume_id: Name by which the rest can be sent after the end of the session; None for none.
            resume_ttl_ms: How long after it; None for as long as possible.
            explicit: Whether it states the accept-mode *explicit*.

        Raises:
            CommandFault: There is no message that it continues, or one that is incomplete (409), its size is
                another than stated (542), or there is no room (506).
        """
        size = fragment.fragment_size
        if size is not None and size != assembly.body_size:
            raise CommandFault(
                f"the fragment-size is {size}, and the body has {assembly.body_size} octets",
                ErrorCode.INVALID_ARGUMENT,
            )
        store = self._store()
        message = self._find(destination)
        if fragment.first:
            if message is not None:
                raise _wrong_state(f"a message to {destination!r:.80} is incomplete")
            message = self._begin(store, destination, assembly.header, resume_id, resume_ttl_ms)
        elif message is None:
            raise _wrong_state(
                f"no message to {destination!r:.80} is incomplete: send its beginning"
            )
        total = message.offset + assembly.body_size
        most = self._context.limits.message_size_max
        if total > most:
            self._drop(destination, message)
            raise CommandFault(
                f"a message of {total} octets; it has at most {most}",
                ErrorCode.RESOURCE_LIMIT_EXCEEDED,
            )
        store.add(message, assembly.body or ())
        if explicit:
            message.numbers.add(number)
        if not fragment.last:
            return None
        self._drop(destination, message)
        return message

    def _store(self) -> PartialMessages:
        if self._all is None:
            connection = self._context.connection
            assert connection is not None
            self._all = connection.partials
        return self._all

    def _principal(self) -> Principal:
        key = self._context.session.key
        return key.host, key.user

    def _find(self, destination: str) -> PartialMessage | None:
        message = self._current.get(destination)
        if message is None or message.owner is self:
            return message
        # Another session has resumed it, or begun it anew.
        del self._current[destination]
        return None

    def _begin(
        self,
        store: PartialMessages,
        destination: str,
        header: bytes | None,
        resume_id: str | None,
        ttl_ms: int | None,
    ) -> PartialMessage:
        ttl_s = RESUME_TTL_MAX if ttl_ms is None else min(ttl_ms / 1000, RESUME_TTL_MAX)
        message = PartialMessage(self._principal(), resume_id, ttl_s, header)
        store.begin(message)
        message.owner = self
        self._current[destination] = message
        return message

    def _drop(self, destination: str, message: PartialMessage) -> None:
        self._current.pop(destination, None)
        self._store().drop(message)

    def resume(self, number: int, command: MessageResume, assembly: Assembly) -> Answer:
        """Return how many octets of a message have arrived; its next fragment continues it in this session.

        Raises:
            CommandFault: There is no such exchange, or the peer has no right there (404, 403), or another
                message to it is incomplete (409).
        """
        destination, resume_id = command.destination or "", command.resume_id
        topology = self._context.topology
        if destination and topology is not None:
            topology.exchange(destination)
        store = self._store()
        message = None if resume_id is None else store.find(self._principal(), resume_id)
        if message is None:
            return MessageResumeResult(offset=0)
        current = self._find(destination)
        if current is not None and current is not message:
            raise _wrong_state(f"another message to {destination!r:.80} is incomplete")
        for name, each in list(self._current.items()):
            if each is message:
                del self._current[name]
        store.own(message, self)
        self._current[destination] = message
        return MessageResumeResult(offset=message.offset)

    def on_ended(self) -> None:
        """Leave the messages to sessions that may resume them."""
        current, self._current = self._current, {}
        for message in current.values():
            if message.owner is self and self._all is not None:
                self._all.leave(message)


def _wrong_state(text: str) -> CommandFault:
    return CommandFault(text, ErrorCode.ILLEGAL_STATE)
