"""AMQP 0-10 as a front of a broker (:mod:`amqp_rt.fronts`)."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from amqp_rt.fronts import TRACINGS, ServerOptions
from amqp_rt.fronts.tracing import ClientSecretsTracing

from .engine import Engine
from .frames import PROTOCOL_HEADER
from .interceptors import FrameInterceptor, InterceptedEngine, OpenInterceptor
from .limits import EXPIRING_TURN
from .partial_messages import PartialMessages
from .recent import Recents
from .registry import SessionRegistry
from .staged_files import StagedFiles, StagingLimits
from .tracing import ClientMask, FrameNames

TRACINGS[PROTOCOL_HEADER] = ClientSecretsTracing(ClientMask, FrameNames)


class Front:
    """Front for clients of AMQP 0-10, those of Apache Qpid.

    It keeps sessions whose clients have lost their connection, for the time that they requested, and
    therefore belongs to one running broker.

    ::

        Broker(fronts=[amqp_rt.fronts.amqp10.Front(), amqp_rt_amqp010.Front()])

    Interceptors are called while input is handled: they must return at once, and change nothing of what they are
    given. They return :class:`Verdict`, None to pass the input, or raise :class:`Refusal`. Another exception is
    logged, and ends the connection of the frame (320) or the session of the command (541).

    Args:
        on_frame: Called with each frame, those of the login included, and its peer. Incomplete commands and
            their ids are counted above it: frames of commands should be dropped only to lose their session.
        on_assembly: Called with the key of each new session; returns the interceptor of its commands, which lives
            as long as the session, on whichever connection. It is called once for each command, in their order,
            except those of class execution. A dropped command is complete, without a result or an effect.
        staging: Bounds on files that clients stage; None for the defaults, which hold them in memory.
    """

    name = "amqp0-10"
    headers: tuple[bytes, ...] = (PROTOCOL_HEADER,)
    preferred_header = PROTOCOL_HEADER

    def __init__(
        self,
        *,
        on_frame: FrameInterceptor | None = None,
        on_assembly: OpenInterceptor | None = None,
        staging: StagingLimits | None = None,
    ) -> None:
        self._on_frame = on_frame
        self._on_assembly = on_assembly
        self._sessions = SessionRegistry()
        self._recents = Recents()
        self._partials = PartialMessages()
        self._staged = StagedFiles(staging or StagingLimits())

    @property
    def on_deadline(self) -> Callable[[], None]:
        """Function that is called when ``deadline`` has become earlier."""
        return self._sessions.on_deadline

    @on_deadline.setter
    def on_deadline(self, call: Callable[[], None]) -> None:
        self._sessions.on_deadline = call
        self._partials.on_deadline = self._staged.on_deadline = call

    def server(self, options: ServerOptions, now: float) -> Engine:
        """Create the engine for a connection that a client opened."""
        state = (options, self._sessions, self._recents, self._partials, self._staged, now)
        if self._on_frame is None and self._on_assembly is None:
            return Engine(*state)
        return InterceptedEngine(*state, on_frame=self._on_frame, on_assembly=self._on_assembly)

    @property
    def deadline(self) -> float:
        """Time at which the next detached session, incomplete message or staged file ends; else ``inf``."""
        deadline = self._sessions.deadline
        return min(
            inf if deadline is None else deadline, self._partials.deadline, self._staged.deadline
        )

    def tick(self, now: float) -> None:
        """End detached sessions, incomplete messages and staged files whose time is up, few sessions at a time."""
        self._sessions.tick(now, EXPIRING_TURN)
        self._partials.tick(now)
        self._staged.tick(now)

    def close(self) -> None:
        """End all sessions."""
        self._sessions.close()
        self._partials.close()
        self._staged.close()
