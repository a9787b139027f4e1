"""Errors for programs that use the classes of another event loop."""

from __future__ import annotations

import trio


def require_trio(name: str) -> None:
    """Check that the caller runs under trio, which *name* needs.

    Raises:
        RuntimeError: It runs under asyncio, or under nothing.
    """
    if not trio.lowlevel.in_trio_task():
        raise RuntimeError(
            f"amqp_rt.{name} runs under trio: under asyncio use amqp_rt.aio.{name}, in a program "
            f"without an event loop amqp_rt.sync.{name}"
        )
