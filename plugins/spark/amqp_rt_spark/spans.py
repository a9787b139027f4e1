"""Input of tasks: records of a log, or messages in a queue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct

from .options import Options


class Span(Struct, frozen=True):
    """Records of one partition of a log, from *start* on and before *end*: the input of one task."""

    address: str
    partition: int
    start: int
    end: int
    incarnation: str


class Snapshot(Struct, frozen=True):
    """Messages in a queue, *most* at most: the input of one browsing task."""

    address: str
    most: int | None


def cut(ranges: list[Span], least: int, most: int | None) -> Iterator[Span]:
    """Yield *ranges* in *least* pieces at least, of *most* records at most, as equal as possible."""
    total = sum(span.end - span.start for span in ranges)
    size = total
    if len(ranges) < least:
        size = -(-total // least)
    if most is not None:
        size = min(size, most)
    for span in ranges:
        length = span.end - span.start
        pieces = -(-length // max(size, 1))
        for piece in range(pieces):
            yield Span(
                span.address,
                span.partition,
                span.start + length * piece // pieces,
                span.start + length * (piece + 1) // pieces,
                span.incarnation,
            )


def joined(spans: Iterable[Any], options: Options) -> list[tuple[Any, ...]]:
    """Return *spans* as tasks, each with the spans that it reads in turn: small ones share a task, of
    ``minMessagesPerPartition`` at least."""
    alone = [(span,) for span in spans]
    found: list[tuple[Any, ...]] = []
    missing = 0
    for task in alone:
        (span,) = task
        # The sizes of other spans are unknown before they are read.
        size = span.end - span.start if isinstance(span, Span) else options.min_per_partition
        if missing > 0:
            found[-1] += task
            missing -= size
        else:
            found.append(task)
            missing = options.min_per_partition - size
    if missing > 0 and len(found) > 1:
        found[-2:] = [found[-2] + found[-1]]
    return alone if len(found) < options.min_partitions else found
