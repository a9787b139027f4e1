"""Checks of the conformance kit, and the requirements they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Struct

from .host import Host

__all__ = ["TITLES", "Check", "check"]

#: Requirement → its title in the report. The IDs are those of the project's list of requirements
#: (docs/conformance.md); a test compares the two.
TITLES: Final[dict[str, str]] = {
    "T1": "encodings of primitive types",
    "T3": "texts and symbols",
    "T5": "maps",
    "T6": "described types",
    "T7": "composite types",
    "T8": "fields with several values",
    "T9": "hostile sizes",
    "SE1": "SASL layer",
    "X1": "protocol headers",
    "X3": "frames",
    "X4": "open and close",
    "X5": "pipelining",
    "X6": "idle time-out",
    "X8": "sessions, channel-max, handle-max",
    "X10": "session windows",
    "X12": "attach",
    "X13": "links that are taken over",
    "X14": "links that are refused",
    "X15": "link credit",
    "X16": "drain",
    "X17": "echo",
    "X18": "deliveries of several frames",
    "X20": "aborted deliveries",
    "X21": "settlement",
    "X22": "max-message-size",
    "X23": "suspended links",
    "X24": "resumed deliveries",
    "X26": "errors and how far they reach",
    "M1": "sections of a message",
    "M2": "the bare message, octet by octet",
    "M3": "sections that are left out",
    "M4": "header of a message",
    "M7": "time to live",
    "M8": "delivery-count",
    "M10": "message annotations",
    "M17": "footer",
    "M19": "states of a message at its source",
    "M21": "rejected",
    "M22": "released",
    "M23": "modified",
    "M25": "received",
    "M28": "filters in place",
    "M29": "filters by selector",
    "M30": "distribution mode",
    "M31": "outcomes of a source",
    "M33": "dynamic nodes",
    "M34": "lifetime of dynamic nodes",
    "M40": "minimal sources and targets",
    "M41": "anonymous relay",
    "M42": "the only connection of a container",
    "M43": "capabilities",
    "R1": "coordinator",
    "R2": "declare and discharge",
    "R3": "messages sent in a transaction",
    "R4": "outcomes in a transaction",
    "R5": "messages acquired in a transaction",
    "R7": "rollback",
    "R8": "transactions whose link ends",
    "B4": "answers that are true",
}


class Check(Struct, frozen=True):
    """A rule of the standard, and the conversation that tests it."""

    name: str
    #: Requirements that the check belongs to; the report lists it under the first.
    ids: tuple[str, ...]
    #: Part and section of the standard, such as ``2.6.7``.
    section: str
    #: The rule, as a sentence of the report without its full stop.
    promise: str
    run: Callable[[Host], None]


def check(*ids: str, section: str) -> Callable[[Callable[[Host], None]], Check]:
    """Turn a function into a check; its docstring is the promise.

    Args:
        ids: Requirements, see ``TITLES``.
        section: Section of the standard. Part 1 is types, 2 transport, 3 messaging, 4 transactions,
            5 security.
    """

    def made(run: Callable[[Host], None]) -> Check:
        promise = " ".join((run.__doc__ or "").split()).rstrip(".")
        return Check(run.__name__, ids, section, promise, run)

    return made
