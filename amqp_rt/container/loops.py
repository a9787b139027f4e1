"""Check that the classes for trio are used under trio."""

from __future__ import annotations

import trio


def require_trio(name: str) -> None:
    """Check that the caller runs under trio, which *name* needs.

    Raises:
        RuntimeError: The caller runs under asyncio, or without an event loop.
    """
    if not trio.lowlevel.in_trio_task():
        raise RuntimeError(
            f"amqp_rt.{name} runs under trio: under asyncio use amqp_rt.aio.{name}, in a program "
            f"without an event loop amqp_rt.sync.{name}"
        )
