"""What is measured: each module names its cases, and how a contestant takes a sample of one."""

from __future__ import annotations

from contextlib import ExitStack

from msgspec import Struct

from ..contestants import Contestant, Field, Running


class Settings(Struct, frozen=True):
    """How much is measured."""

    seconds: float
    sizes: tuple[int, ...]
    quick: bool


class Plan:
    """What the cases of one measure need: settings, contestants, and brokers kept running."""

    def __init__(self, settings: Settings, field: Field, stack: ExitStack) -> None:
        self.settings = settings
        self.field = field
        self.stack = stack
        self._brokers: dict[str, Running] = {}
        self._durable: dict[str, Running] = {}
        self._091: dict[tuple[str, bool], Running] = {}

    def broker(self, contestant: Contestant) -> Running:
        """The broker of *contestant*, started when it is first used and stopped at the end."""
        if contestant.key not in self._brokers:
            assert contestant.broker
            self._brokers[contestant.key] = self.stack.enter_context(contestant.broker())
        return self._brokers[contestant.key]

    def durable_broker(self, contestant: Contestant) -> Running:
        """The same with a store."""
        if contestant.durable_broker == contestant.broker:
            return self.broker(contestant)
        if contestant.key not in self._durable:
            assert contestant.durable_broker
            self._durable[contestant.key] = self.stack.enter_context(contestant.durable_broker())
        return self._durable[contestant.key]

    def broker091(self, contestant: Contestant, *, durable: bool) -> Running:
        """The broker of *contestant* for 0-9-1, with a store or without."""
        key = contestant.key, durable
        if key not in self._091:
            assert contestant.broker091
            self._091[key] = self.stack.enter_context(contestant.broker091(durable))
        return self._091[key]


def size_name(size: int) -> str:
    """100 B, 1 KiB, 64 KiB."""
    return f"{size // 1024} KiB" if size >= 1024 and size % 1024 == 0 else f"{size} B"
