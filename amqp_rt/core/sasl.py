"""The SASL exchange on the server side, as the application sees it (Part 5 §5.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..events import Event

if TYPE_CHECKING:
    from .engine import Engine


class SaslExchange:
    """What a client said in the SASL layer waits here for an answer.

    Each call answers once; a call after the connection ended is in vain.
    """

    def __init__(self, engine: Engine, mechanism: str) -> None:
        self.mechanism = mechanism
        #: Why it can only fail; empty if it may succeed.
        self.refused: str = ""
        self._engine = engine

    def challenge(self, data: bytes) -> list[Event]:
        """Ask the client for more; a further ``LoginRequested`` brings its response.

        Returns the events of what it had sent already: handle them as those of ``receive``.
        """
        return self._engine.sasl_challenge(data)

    def succeed(
        self, user: str | None, identity: Any = None, data: bytes | None = None
    ) -> list[Event]:
        """Let the client in as *user*; *data* goes with the outcome.

        Returns the events of what it had sent already: handle them as those of ``receive``.
        """
        return self._engine.sasl_succeed(user, identity, self.mechanism, data)

    def fail(self) -> None:
        """Refuse the client: it is told so, whatever the cause, and the connection ends."""
        self._engine.sasl_fail()
