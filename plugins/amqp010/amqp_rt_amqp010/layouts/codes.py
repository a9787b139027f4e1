"""Codes of the specification: reasons for closing and detaching, error codes, modes."""

from __future__ import annotations

from enum import IntEnum


class Layer(IntEnum):
    """Layer of the protocol at which a control or command acts."""

    #: TCP, TLS, a Unix socket or memory; no control is addressed to it.
    CARRIER = 0
    CONNECTION = 1
    SESSION = 2
    EXECUTION = 3
    MODEL = 4


class CloseCode(IntEnum):
    """``connection.close-code``."""

    NORMAL = 200
    CONNECTION_FORCED = 320
    INVALID_PATH = 402
    FRAMING_ERROR = 501


class DetachCode(IntEnum):
    """``session.detach-code``."""

    NORMAL = 0
    SESSION_BUSY = 1
    TRANSPORT_BUSY = 2
    NOT_ATTACHED = 3
    UNKNOWN_IDS = 4


class ErrorCode(IntEnum):
    """``execution.error-code``."""

    UNAUTHORIZED_ACCESS = 403
    NOT_FOUND = 404
    RESOURCE_LOCKED = 405
    PRECONDITION_FAILED = 406
    RESOURCE_DELETED = 408
    ILLEGAL_STATE = 409
    COMMAND_INVALID = 503
    RESOURCE_LIMIT_EXCEEDED = 506
    NOT_ALLOWED = 530
    ILLEGAL_ARGUMENT = 531
    NOT_IMPLEMENTED = 540
    INTERNAL_ERROR = 541
    INVALID_ARGUMENT = 542


class AcceptMode(IntEnum):
    """``message.accept-mode``."""

    EXPLICIT = 0
    NONE = 1


class AcquireMode(IntEnum):
    """``message.acquire-mode``."""

    PRE_ACQUIRED = 0
    NOT_ACQUIRED = 1


class RejectCode(IntEnum):
    """``message.reject-code``."""

    UNSPECIFIED = 0
    UNROUTABLE = 1
    IMMEDIATE = 2


class DeliveryMode(IntEnum):
    """``message.delivery-mode``."""

    NON_PERSISTENT = 1
    PERSISTENT = 2


class FlowMode(IntEnum):
    """``message.flow-mode``."""

    CREDIT = 0
    WINDOW = 1


class CreditUnit(IntEnum):
    """``message.credit-unit``."""

    MESSAGE = 0
    BYTE = 1


class XaStatus(IntEnum):
    """``dtx.xa-status``."""

    XA_OK = 0
    XA_RBROLLBACK = 1
    XA_RBTIMEOUT = 2
    XA_HEURHAZ = 3
    XA_HEURCOM = 4
    XA_HEURRB = 5
    XA_HEURMIX = 6
    XA_RDONLY = 7


class ReturnCode(IntEnum):
    """``file.return-code`` and ``stream.return-code``."""

    CONTENT_TOO_LARGE = 311
    NO_ROUTE = 312
    NO_CONSUMERS = 313
