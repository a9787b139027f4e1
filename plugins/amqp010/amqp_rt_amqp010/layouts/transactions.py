"""Commands and structs of classes tx and dtx."""

from __future__ import annotations

from .declaring import ArrayField, Bit, Command, Composite, Uint16Field, Uint32Field, Vbin8Field

# --- class tx (5) ---


class TxSelect(Command):
    """``tx.select``."""

    NAME = "tx.select"
    CODE = 0x0501
    TO_CLIENT = False


class TxCommit(Command):
    """``tx.commit``."""

    NAME = "tx.commit"
    CODE = 0x0502
    TO_CLIENT = False


class TxRollback(Command):
    """``tx.rollback``."""

    NAME = "tx.rollback"
    CODE = 0x0503
    TO_CLIENT = False


# --- class dtx (6) ---


class XaResult(Composite):
    """``dtx.xa-result``."""

    NAME = "dtx.xa-result"
    CODE = 0x0601

    status: Uint16Field | None = None


class Xid(Composite):
    """``dtx.xid``."""

    NAME = "dtx.xid"
    CODE = 0x0604

    format: Uint32Field | None = None
    global_id: Vbin8Field | None = None
    branch_id: Vbin8Field | None = None


class DtxSelect(Command):
    """``dtx.select``."""

    NAME = "dtx.select"
    CODE = 0x0601
    TO_CLIENT = False


class DtxStart(Command):
    """``dtx.start``."""

    NAME = "dtx.start"
    CODE = 0x0602
    TO_CLIENT = False
    RESULT = XaResult

    xid: Xid | None = None
    join: Bit = False
    resume: Bit = False


class DtxEnd(Command):
    """``dtx.end``."""

    NAME = "dtx.end"
    CODE = 0x0603
    TO_CLIENT = False
    RESULT = XaResult

    xid: Xid | None = None
    fail: Bit = False
    suspend: Bit = False


class DtxCommit(Command):
    """``dtx.commit``."""

    NAME = "dtx.commit"
    CODE = 0x0604
    TO_CLIENT = False
    RESULT = XaResult

    xid: Xid | None = None
    one_phase: Bit = False


class DtxForget(Command):
    """``dtx.forget``."""

    NAME = "dtx.forget"
    CODE = 0x0605
    TO_CLIENT = False

    xid: Xid | None = None


class GetTimeoutResult(Composite):
    """``dtx.get-timeout-result``."""

    NAME = "dtx.get-timeout-result"
    CODE = 0x0602

    timeout: Uint32Field | None = None


class DtxGetTimeout(Command):
    """``dtx.get-timeout``."""

    NAME = "dtx.get-timeout"
    CODE = 0x0606
    TO_CLIENT = False
    RESULT = GetTimeoutResult

    xid: Xid | None = None


class DtxPrepare(Command):
    """``dtx.prepare``."""

    NAME = "dtx.prepare"
    CODE = 0x0607
    TO_CLIENT = False
    RESULT = XaResult

    xid: Xid | None = None


class RecoverResult(Composite):
    """``dtx.recover-result``."""

    NAME = "dtx.recover-result"
    CODE = 0x0603

    in_doubt: ArrayField | None = None


class DtxRecover(Command):
    """``dtx.recover``."""

    NAME = "dtx.recover"
    CODE = 0x0608
    TO_CLIENT = False
    RESULT = RecoverResult


class DtxRollback(Command):
    """``dtx.rollback``."""

    NAME = "dtx.rollback"
    CODE = 0x0609
    TO_CLIENT = False
    RESULT = XaResult

    xid: Xid | None = None


class DtxSetTimeout(Command):
    """``dtx.set-timeout``."""

    NAME = "dtx.set-timeout"
    CODE = 0x060A
    TO_CLIENT = False

    xid: Xid | None = None
    timeout: Uint32Field | None = None
