"""AMQP 0-10 for amqp-rt: a front for the clients of Apache Qpid."""

from __future__ import annotations

from .assembling import Assembly
from .frames import Frame
from .front import Front
from .interceptors import CommandInterceptor, FrameInterceptor, OpenInterceptor, Refusal, Verdict
from .layouts import Command, ErrorCode
from .sessions import SessionKey
from .staged_files import StagingLimits

__all__ = [
    "Assembly",
    "Command",
    "CommandInterceptor",
    "ErrorCode",
    "Frame",
    "FrameInterceptor",
    "Front",
    "OpenInterceptor",
    "Refusal",
    "SessionKey",
    "StagingLimits",
    "Verdict",
]
