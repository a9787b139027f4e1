"""What an engine needs to know before the first byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ..limits import DEFAULT_LIMITS, Limits


class EngineOptions(Struct, kw_only=True):
    """Both sides of a connection; a field that one side does not use says so."""

    container_id: str
    hostname: str | None = None
    limits: Limits = DEFAULT_LIMITS
    offered_capabilities: tuple[str, ...] = ()
    desired_capabilities: tuple[str, ...] = ()
    properties: Mapping[object, object] | None = None
    #: Server: mechanisms to offer. Client: unused.
    mechanisms: tuple[str, ...] = ()
    sasl_required: bool = False
    #: Client: objects with ``name``, ``initial()`` and ``respond(challenge)``, best first; and with
    #: ``finish(data)`` if what comes with the outcome has to be judged.
    client_mechanisms: tuple[Any, ...] = ()
    #: Client: send open with the header. False waits for the peer's header first.
    pipelined: bool = True
    address: str = ""
