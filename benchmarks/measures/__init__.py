"""Measures: each module defines its cases, and how a sample of a contestant is taken."""

from __future__ import annotations

from contextlib import ExitStack

from msgspec import Struct

from ..contestants import Contestant, Field, Running


class Settings(Struct, frozen=True):
    """Extent of the measurements."""

    seconds: float
    sizes: tuple[int, ...]
    quick: bool


class Plan:
    """Context of the cases of one measure: settings, contestants, and running brokers."""

    def __init__(self, settings: Settings, field: Field, stack: ExitStack) -> None:
        self.settings = settings
        self.field = field
        self.stack = stack
        self._brokers: dict[str, Running] = {}
        self._durable: dict[str, Running] = {}
        self._091: dict[tuple[str, bool], Running] = {}
        self._010: dict[tuple[str, bool], Running] = {}

    def broker(self, contestant: Contestant) -> Running:
        """Return the broker of *contestant*, started on first use and stopped at the end."""
        if contestant.key not in self._brokers:
            assert contestant.broker
            self._brokers[contestant.key] = self.stack.enter_context(contestant.broker())
        return self._brokers[contestant.key]

    def durable_broker(self, contestant: Contestant) -> Running:
        """Return the broker of *contestant* with a store."""
        if contestant.durable_broker == contestant.broker:
            return self.broker(contestant)
        if contestant.key not in self._durable:
            assert contestant.durable_broker
            self._durable[contestant.key] = self.stack.enter_context(contestant.durable_broker())
        return self._durable[contestant.key]

    def broker091(self, contestant: Contestant, *, durable: bool) -> Running:
        """Return the broker of *contestant* for 0-9-1, with a store or without."""
        key = contestant.key, durable
        if key not in self._091:
            assert contestant.broker091
            self._091[key] = self.stack.enter_context(contestant.broker091(durable))
        return self._091[key]

    def broker010(self, contestant: Contestant, *, durable: bool) -> Running:
        """Return the broker of *contestant* for 0-10 and 0-9-1, with a store or without."""
        key = contestant.key, durable
        if key not in self._010:
            assert contestant.broker010
            self._010[key] = self.stack.enter_context(contestant.broker010(durable))
        return self._010[key]


def size_name(size: int) -> str:
    """Format a size: 100 B, 1 KiB, 64 KiB."""
    return f"{size // 1024} KiB" if size >= 1024 and size % 1024 == 0 else f"{size} B"
