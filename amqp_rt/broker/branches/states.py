"""States of a branch, and the reply to each operation in each of them.

Replies follow the exceptions of class dtx in the definition of AMQP 0-10, and X/Open XA where that
leaves them open.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class State(Enum):
    """State of a branch."""

    #: No branch has the xid, or it was committed, rolled back or forgotten.
    UNKNOWN = "unknown"
    #: Work of a session belongs to it.
    ACTIVE = "active"
    #: Sessions have suspended their work for it, and none continues.
    SUSPENDED = "suspended"
    #: Sessions have ended their work for it.
    IDLE = "idle"
    #: Its work was undone: it is rollback-only, or timed out.
    DEAD = "dead"
    PREPARED = "prepared"
    #: An operator has committed it or rolled it back.
    HEURISTIC = "heuristic"


class Operation(Enum):
    """Operation on a branch."""

    START = "start"
    JOIN = "join"
    RESUME = "resume"
    END = "end"
    FAIL = "end fail"
    SUSPEND = "suspend"
    PREPARE = "prepare"
    COMMIT_ONE = "commit one"
    COMMIT = "commit"
    ROLL_BACK = "rollback"
    FORGET = "forget"


class Reply(Enum):
    """Reply to an operation."""

    #: It is carried out.
    OK = "ok"
    #: The branch was rolled back: xa-rbrollback or xa-rbtimeout.
    DEAD = "dead"
    #: An operator has completed the branch: the result of that decision.
    HEURISTIC = "heuristic"
    #: It is refused: not-allowed, not-found, illegal-state.
    NOT_ALLOWED = "not allowed"
    NOT_FOUND = "not found"
    ILLEGAL = "illegal"


#: Operation → its replies, in the order of :class:`State`.
_ROWS: Final = {
    Operation.START: "+ 530 530 530 530 530 530",
    Operation.JOIN: "530 + + + rb 409 409",
    Operation.RESUME: "530 409 + 409 rb 409 409",
    Operation.END: "409 + + 409 rb 409 409",
    Operation.FAIL: "409 + + 409 rb 409 409",
    Operation.SUSPEND: "409 + 409 409 rb 409 409",
    Operation.PREPARE: "404 409 409 + rb 409 409",
    Operation.COMMIT_ONE: "404 409 409 + rb 409 heur",
    Operation.COMMIT: "404 409 409 409 rb + heur",
    Operation.ROLL_BACK: "404 409 409 + rb + heur",
    Operation.FORGET: "404 409 409 409 409 409 +",
}
_WORDS: Final = {
    "+": Reply.OK,
    "rb": Reply.DEAD,
    "heur": Reply.HEURISTIC,
    "530": Reply.NOT_ALLOWED,
    "404": Reply.NOT_FOUND,
    "409": Reply.ILLEGAL,
}
#: Operation → state → reply.
REPLIES: Final[dict[Operation, dict[State, Reply]]] = {
    operation: dict(zip(State, (_WORDS[word] for word in row.split()), strict=True))
    for operation, row in _ROWS.items()
}
