"""Attachment of channels to sessions: the controls of class session that are about it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from .assembling import Assembly
from .faults import CommandFault, ConnectionFault
from .handlers import CommandHandler, Transport
from .layouts import (
    Control,
    DetachCode,
    SessionAttach,
    SessionAttached,
    SessionCommandPoint,
    SessionDetach,
    SessionDetached,
    SessionRequestTimeout,
    SessionTimeout,
)
from .registry import SessionRegistry
from .sessions import CommandPointMissing, Session, SessionKey


class AttachmentStage(Enum):
    """How far a channel is from carrying a session."""

    #: It carries none.
    FREE = 0
    ATTACHED = 1
    #: Its session has failed; input is dropped until the peer confirms our ``detach``.
    DETACHING = 2


class Attachment:
    """A channel of a connection, and the session that it carries, if any.

    Times are those of the registry.

    Args:
        registry: The sessions of the broker.
        transport: The channel.
        host: The virtual host of the connection.
        user: The user who logged in; None for anonymous ones.
        open_handler: Makes the layer above a new session.
    """

    def __init__(
        self,
        registry: SessionRegistry,
        transport: Transport,
        host: str,
        user: str | None,
        open_handler: Callable[[Session], CommandHandler],
    ) -> None:
        self._registry = registry
        self._transport = transport
        self._host = host
        self._user = user
        self._open_handler = open_handler
        self.stage = AttachmentStage.FREE
        self.session: Session | None = None
        #: Name of the session that is being detached.
        self._name = b""
        #: Whether command data without a session has been answered since the last turn.
        self._refused = False

    @property
    def transport(self) -> Transport:
        """The channel."""
        return self._transport

    @property
    def is_congested(self) -> bool:
        """Whether input of this channel should wait."""
        return self.session is not None and self.session.is_congested

    # --- input ------------------------------------------------------------------------------------

    def receive_control(self, control: Control, now: float) -> None:
        """Handle a control of class session.

        Raises:
            ConnectionFault: It is a command-point within a command.
        """
        if isinstance(control, SessionAttach):
            self._on_attach(control, now)
        elif isinstance(control, SessionDetach):
            self._on_detach(control, now)
        elif isinstance(control, SessionDetached):
            self._on_detached(control, now)
        elif self.session is not None:
            if isinstance(control, SessionRequestTimeout):
                granted = self._registry.granted(self.session.key, control.timeout)
                self.session.set_timeout(granted)
                self._transport.send_control(SessionTimeout(timeout=granted))
                return
            if isinstance(control, SessionCommandPoint) and self._transport.has_begun:
                raise ConnectionFault("session.command-point within a command")
            self.session.receive_control(control)
        elif self.stage is AttachmentStage.FREE:
            self._refuse(b"", DetachCode.NOT_ATTACHED)

    def receive_command(self, assembly: Assembly, now: float) -> None:
        """Handle a command, or refuse it where no session is attached."""
        if self.session is not None:
            try:
                self.session.receive_command(assembly)
            except CommandPointMissing:
                self._detach(DetachCode.UNKNOWN_IDS, now)
        else:
            self._refuse_data()

    def fail(self, fault: CommandFault, now: float) -> None:
        """End the session for *fault* of a command that could not be received."""
        session = self.session
        if session is None:
            self._refuse_data()
        else:
            try:
                session.fail_input(fault)
            except CommandPointMissing:
                self._detach(DetachCode.UNKNOWN_IDS, now)

    def turn(self, now: float) -> None:
        """Send the replies and sets that are due.

        Called after each chunk of input, when the transport has been asked for it, and when that has
        room again.
        """
        self._refused = False
        if self.session is not None:
            try:
                self.session.turn()
            except CommandPointMissing:
                self._detach(DetachCode.UNKNOWN_IDS, now)

    def lose(self, now: float, *, at_once: bool = True) -> None:
        """Detach without a word: the connection or the channel is gone.

        Unless *at_once*, a session that is not kept ends in a later turn.
        """
        session = self._release()
        if session is not None:
            self._registry.keep(session, now, at_once=at_once)

    # --- for the session --------------------------------------------------------------------------

    def session_failed(self) -> None:
        """Drop input until ``detached`` comes: exception and ``detach`` are out, the session has ended."""
        session = self._release()
        if session is not None:
            self._registry.remove(session)
            self._name = session.key.name
            self.stage = AttachmentStage.DETACHING

    def renew_session(self) -> None:
        """Begin with a new session of the same key: the peer has no state of the one that is attached."""
        old = self.session
        assert old is not None
        self.session = self._registry.renew(old, self._open_handler)
        self.session.begin(self)

    def give_up(self, now: float) -> None:
        """Detach with ``session-busy``: another transport attaches by force, at time *now*."""
        self._detach(DetachCode.SESSION_BUSY, now)

    # --- attach and detach ------------------------------------------------------------------------

    def _on_attach(self, control: SessionAttach, now: float) -> None:
        name = control.name or b""
        key = SessionKey(self._host, self._user, name)
        if self.stage is not AttachmentStage.FREE:
            if self.session is not None and key == self.session.key:
                self._transport.send_control(SessionAttached(name=name))
            else:
                self._refuse(name, DetachCode.TRANSPORT_BUSY)
            return
        session = self._registry.find(key)
        if session is not None and session.carrier is not None:
            if not control.force:
                self._refuse(name, DetachCode.SESSION_BUSY)
                return
            session.carrier.give_up(now)
            # Without a timeout its state has ended.
            session = self._registry.find(key)
        if session is None:
            session = self._registry.open(key, self._open_handler)
        self._registry.reattach(session)
        self.session = session
        self.stage = AttachmentStage.ATTACHED
        self._transport.send_control(SessionAttached(name=name))
        session.begin(self)

    def _on_detach(self, control: SessionDetach, now: float) -> None:
        session = self.session
        if session is not None:
            name = session.key.name
            if control.name is not None and control.name != name:
                self._refuse(control.name, DetachCode.NOT_ATTACHED)
            else:
                self._detach(DetachCode.NORMAL, now)
        elif self.stage is AttachmentStage.DETACHING:
            # It crosses ours, and confirms it as well.
            self.stage = AttachmentStage.FREE
            self._refuse(self._name, DetachCode.NORMAL)
        else:
            self._refuse(control.name or b"", DetachCode.NOT_ATTACHED)

    def _on_detached(self, control: SessionDetached, now: float) -> None:
        # Never answered: two peers could answer each other for ever.
        if self.session is not None:
            if control.name is None or control.name == self.session.key.name:
                self.lose(now)
        elif self.stage is AttachmentStage.DETACHING:
            self.stage = AttachmentStage.FREE

    def _detach(self, code: DetachCode, now: float) -> None:
        session = self.session
        assert session is not None
        if code is not DetachCode.UNKNOWN_IDS:
            self.turn(now)
            if self.session is not session:
                # It failed, or began anew, at the last moment.
                if code is DetachCode.NORMAL:
                    self.stage = AttachmentStage.FREE
                    self._refuse(session.key.name, code)
                return
        name = session.key.name
        self.lose(now)
        self._refuse(name, code)

    def _release(self) -> Session | None:
        session = self.session
        self.session = None
        self.stage = AttachmentStage.FREE
        if session is not None:
            self._transport.forget()
        return session

    def _refuse_data(self) -> None:
        if self.stage is AttachmentStage.FREE and not self._refused:
            # Once a turn: a peer that lost its session to another has sent many commands since.
            self._refused = True
            self._refuse(b"", DetachCode.NOT_ATTACHED)

    def _refuse(self, name: bytes, code: DetachCode) -> None:
        self._transport.send_control(SessionDetached(name=name, code=code))
