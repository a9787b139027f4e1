"""The five frames of the SASL layer (Part 5 §5.3.3)."""

from __future__ import annotations

from msgspec import Struct

from ..codec.composites import BINARY, MANDATORY, STRING, SYMBOL, SYMBOLS, UBYTE, composite

#: ``sasl-code`` (§5.3.3.6).
OK, AUTH, SYS, SYS_PERM, SYS_TEMP = range(5)


@composite(0x40, ("sasl_server_mechanisms", SYMBOLS, MANDATORY))
class SaslMechanisms(Struct, gc=False):
    """Mechanisms that the server offers (§5.3.3.1)."""

    sasl_server_mechanisms: tuple[str, ...]


@composite(
    0x41, ("mechanism", SYMBOL, MANDATORY), ("initial_response", BINARY), ("hostname", STRING)
)
class SaslInit(Struct, gc=False):
    """Mechanism that the client chose (§5.3.3.2). An empty initial response differs from none."""

    mechanism: str
    initial_response: bytes | None = None
    hostname: str | None = None

    def __repr__(self) -> str:
        """Return a representation without secrets, which is safe to log."""
        said = "None" if self.initial_response is None else "***"
        return f"SaslInit({self.mechanism!r}, {said}, {self.hostname!r})"


@composite(0x42, ("challenge", BINARY, MANDATORY))
class SaslChallenge(Struct, gc=False):
    """Challenge of the server (§5.3.3.3)."""

    challenge: bytes


@composite(0x43, ("response", BINARY, MANDATORY))
class SaslResponse(Struct, gc=False):
    """Response of the client (§5.3.3.4)."""

    response: bytes

    def __repr__(self) -> str:
        return "SaslResponse(***)"


@composite(0x44, ("code", UBYTE, MANDATORY), ("additional_data", BINARY))
class SaslOutcome(Struct, gc=False):
    """Result of the exchange (§5.3.3.5)."""

    code: int
    additional_data: bytes | None = None
