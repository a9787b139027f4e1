"""The options with which an engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ..limits import DEFAULT_LIMITS, Limits


class EngineOptions(Struct, kw_only=True):
    """Options of either side of a connection; fields for one side are marked as such."""

    container_id: str
    hostname: str | None = None
    limits: Limits = DEFAULT_LIMITS
    offered_capabilities: tuple[str, ...] = ()
    desired_capabilities: tuple[str, ...] = ()
    properties: Mapping[object, object] | None = None
    #: Server: mechanisms to offer. Client: unused.
    mechanisms: tuple[str, ...] = ()
    sasl_required: bool = False
    #: Client: objects with ``name``, ``initial()`` and ``respond(challenge)``, preferred ones
    #: first; also with ``finish(data)`` if the additional data of the outcome has to be verified.
    client_mechanisms: tuple[Any, ...] = ()
    #: Client: send open together with the protocol header. False: wait for the peer's header first.
    pipelined: bool = True
    address: str = ""
