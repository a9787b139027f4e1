"""Interceptors: functions of an application that see input of a front, and may drop or refuse it.

There are two places for them (section 3.1 of the June 2007 draft): one at the connection layer, which keeps no
state between frames, and one for each session, above the numbering of its commands. A front without interceptors
has the classes of the other modules, and calls nothing of this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, TypeAlias

from amqp_rt.fronts import Peer

from .assembling import Assembly
from .engine import Engine
from .faults import CommandFault, ConnectionFault
from .frames import Frame
from .handlers import Answer
from .handling import Handler
from .layouts import CloseCode, Command, ErrorCode
from .lifecycle import Stage
from .sessions import Session, SessionKey

log = logging.getLogger("amqp_rt.frames")


class Verdict(Enum):
    """Decision of an interceptor about its input; None means ``PASS``."""

    PASS = auto()
    DROP = auto()


class Refusal(Exception):
    """Raised by an interceptor: refuse the input.

    Refused frames close their connection with code 320 (``connection-forced``). Refused commands end their session
    by ``execution.exception`` with *code*.

    Args:
        text: Explanation for the peer.
        code: The error-code of a command; frames have none.
    """

    def __init__(self, text: str, code: ErrorCode = ErrorCode.NOT_ALLOWED) -> None:
        super().__init__(text)
        self.text = text
        self.code = code


#: Judges each frame of a connection. Called with the peer, whose user is None until the login has succeeded.
FrameInterceptor: TypeAlias = Callable[[Frame, Peer], Verdict | None]
#: Judges each command of one session. Called with its id, the command, and the same with its header and body.
CommandInterceptor: TypeAlias = Callable[[int, Command, Assembly], Verdict | None]
#: Makes the interceptor of a new session.
OpenInterceptor: TypeAlias = Callable[[SessionKey], CommandInterceptor]


def is_dropped(verdict: object) -> bool:
    """Return whether an interceptor drops the input.

    Raises:
        TypeError: It returned something else than a verdict.
    """
    if verdict is None or verdict is Verdict.PASS:
        return False
    if verdict is Verdict.DROP:
        return True
    raise TypeError(f"an interceptor returns a Verdict or None, got {verdict!r:.100}")


class InterceptedHandler(Handler):
    """Layer above a session whose commands are judged before they are carried out.

    Args:
        open_interceptor: Makes the interceptor.
        session: The session.
        options: Further arguments of :class:`~amqp_rt_amqp010.handling.Handler`.
    """

    def __init__(self, open_interceptor: OpenInterceptor, session: Session, *options: Any) -> None:
        super().__init__(session, *options)
        self._name = session.key.name
        self._judge: CommandInterceptor | None = None
        try:
            self._judge = open_interceptor(session.key)
        except Exception:
            # The session exists already: its first command ends it.
            log.exception("interceptor failed: new session %r", self._name)

    def execute(self, number: int, command: Command, assembly: Assembly, *, sync: bool) -> Answer:
        """Carry out *command*, drop it, which completes it without a result, or refuse it.

        Raises:
            CommandFault: It was refused, or failed, or the interceptor did (541); the session ends.
        """
        if self._judge is None:
            raise CommandFault("an interceptor failed", ErrorCode.INTERNAL_ERROR)
        try:
            dropped = is_dropped(self._judge(number, command, assembly))
        except Refusal as refusal:
            log.warning(
                "command refused by an interceptor: %s of session %r: %s",
                command.NAME,
                self._name,
                refusal.text,
            )
            raise CommandFault(refusal.text, refusal.code) from refusal
        except Exception as error:
            # The text of the error may hold what the peer should not see.
            log.exception("interceptor failed: %s of session %r", command.NAME, self._name)
            raise CommandFault("an interceptor failed", ErrorCode.INTERNAL_ERROR) from error
        return None if dropped else super().execute(number, command, assembly, sync=sync)

    def salvage(self, assembly: Assembly) -> None:
        """Keep nothing: the interceptor judges whole commands only."""

    def on_ended(self) -> None:
        """End the parts; the interceptor is released."""
        self._judge = None
        super().on_ended()


class InterceptedEngine(Engine):
    """Connection whose input is judged by the interceptors of its front.

    Args:
        options: Arguments of :class:`~amqp_rt_amqp010.engine.Engine`.
        on_frame: Judges frames; None for no such interceptor.
        on_assembly: Makes the interceptors of new sessions; None likewise.
    """

    def __init__(
        self,
        *options: Any,
        on_frame: FrameInterceptor | None = None,
        on_assembly: OpenInterceptor | None = None,
    ) -> None:
        super().__init__(*options)
        self.judge_frame = on_frame
        self._open_interceptor = on_assembly

    def drops(self, frame: Frame) -> bool:
        """Ask the interceptor about *frame*; one that is refused, or cannot be judged, ends the connection."""
        # A connection that closes drops what comes; refusing it again would only fill the log.
        if self.judge_frame is None or self.stage is Stage.CLOSING:
            return False
        try:
            return is_dropped(self.judge_frame(frame, self.peer))
        except Refusal as refusal:
            self.fail(ConnectionFault(refusal.text, CloseCode.CONNECTION_FORCED))
        except Exception:
            log.exception("interceptor failed: frame of %s", self.peer.address or "a peer")
            self.fail(ConnectionFault("an interceptor failed", CloseCode.CONNECTION_FORCED))
        return True

    def _open_handler(self, session: Session) -> Handler:
        if self._open_interceptor is None:
            return super()._open_handler(session)
        options = self.options
        return InterceptedHandler(
            self._open_interceptor,
            session,
            self.peer,
            self.limits,
            options.topology,
            options.branches,
        )
