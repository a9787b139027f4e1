"""Server side of the SASL exchange, as the application sees it (Part 5 §5.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..events import Event

if TYPE_CHECKING:
    from .engine import Engine


class SaslExchange:
    """A client's SASL init or response that waits for the application's answer.

    Each call answers once. Calls after the end of the connection have no effect.
    """

    def __init__(self, engine: Engine, mechanism: str) -> None:
        self.mechanism = mechanism
        #: Why the exchange can only fail; empty if it may succeed.
        self.refused: str = ""
        self._engine = engine

    def challenge(self, data: bytes) -> list[Event]:
        """Send a challenge; the client's response arrives as another ``LoginRequested``.

        Returns the events of bytes that had already arrived: handle them as those of ``receive``.
        """
        return self._engine.sasl_challenge(data)

    def succeed(
        self, user: str | None, identity: Any = None, data: bytes | None = None
    ) -> list[Event]:
        """Accept the client as *user*; *data* goes with the outcome.

        Returns the events of bytes that had already arrived: handle them as those of ``receive``.
        """
        return self._engine.sasl_succeed(user, identity, self.mechanism, data)

    def fail(self) -> None:
        """Reject the login with the same outcome for every cause, and end the connection."""
        self._engine.sasl_fail()
