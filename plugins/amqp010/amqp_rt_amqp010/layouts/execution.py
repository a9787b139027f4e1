"""Commands of class execution."""

from __future__ import annotations

from .declaring import (
    Command,
    MapField,
    SequenceNoField,
    Str16Field,
    Struct32Field,
    Uint8Field,
    Uint16Field,
)

# --- class execution (3) ---


class ExecutionSync(Command):
    """``execution.sync``."""

    NAME = "execution.sync"
    CODE = 0x0301


class ExecutionResult(Command):
    """``execution.result``."""

    NAME = "execution.result"
    CODE = 0x0302

    command_id: SequenceNoField | None = None
    value: Struct32Field | None = None


class ExecutionException(Command):
    """``execution.exception``."""

    NAME = "execution.exception"
    CODE = 0x0303

    error_code: Uint16Field | None = None
    command_id: SequenceNoField | None = None
    class_code: Uint8Field | None = None
    command_code: Uint8Field | None = None
    field_index: Uint8Field | None = None
    description: Str16Field | None = None
    error_info: MapField | None = None
