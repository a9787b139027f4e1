"""Types of a transaction's control link and of transactional work (Part 4 §4.5).

Defined outside the transport, because nodes that hold messages use them and the transport does not.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Struct

from .codec.composites import ANY, BOOLEAN, MANDATORY, any_of, composite
from .outcomes import Accepted, Modified, Outcome, Received, Rejected, Released
from .values import Described


@composite(0x31, ("global_id", ANY))
class Declare(Struct, gc=False):
    """Ask for a new transaction (§4.5.2)."""

    global_id: Any = None


@composite(0x32, ("txn_id", ANY, MANDATORY), ("fail", BOOLEAN))
class Discharge(Struct, gc=False):
    """End a transaction: commit, or with ``fail`` roll back (§4.5.3)."""

    txn_id: Any
    fail: bool | None = None


@composite(0x33, ("txn_id", ANY, MANDATORY))
class Declared(Struct, gc=False):
    """Outcome of a declare (§4.5.5)."""

    txn_id: Any


@composite(
    0x34, ("txn_id", ANY, MANDATORY), ("outcome", any_of(Accepted, Rejected, Released, Modified))
)
class TransactionalState(Struct, gc=False):
    """State of a delivery inside a transaction (§4.5.8)."""

    txn_id: Any
    outcome: Outcome | Described | None = None


#: State of a delivery (Part 3 §3.4, Part 4 §4.5). States of other specifications are described values.
DeliveryState: TypeAlias = Outcome | Received | Declared | TransactionalState | Described
