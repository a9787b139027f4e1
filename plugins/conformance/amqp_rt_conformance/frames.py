"""Frames: those that may arrive in passing, how reports show one, and how to write one by hand."""

from __future__ import annotations

import struct
from typing import Final

from amqp_rt.net.traces.octets import CompositeValue, Frame, encode_frame

#: Frames to skip while another one is expected.
IN_PASSING: Final = frozenset({"empty", "flow"})


def shown(frame: Frame) -> str:
    """Format a frame for a report: its error if it has one, else the frame, cut if it is long."""
    if frame.fields.get("error") is not None:
        return f"{frame.name} with {error_of(frame)}"
    text = repr(frame)
    return text if len(text) < 300 else f"{text[:300]}…"


def error_of(frame: Frame) -> str:
    """Format the error of a detach, end or close."""
    error = frame.fields.get("error")
    if not isinstance(error, CompositeValue):
        return f"{frame.name} without an error"
    told = error.fields.get("description")
    condition = str(error.fields.get("condition"))
    return f"{condition} ({told})" if told else condition


def open_frame(*items: bytes, code: bytes = b"\x53\x10", channel: int = 0) -> bytes:
    """Encode an open frame, or another composite, of encoded *items* in a list of 32-bit size."""
    content = b"".join(items)
    return encode_frame(
        b"\x00" + code + struct.pack(">BII", 0xD0, len(content) + 4, len(items)) + content,
        channel=channel,
    )
