"""Follow a running query: its progress, its lag, and requests to stop it.

The query is polled from the thread that waits for it, without a listener: a signal may request the stop at
any time, and a call to Spark from its handler must not come between two other calls.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

from msgspec import Struct

#: Seconds between polls of a query, and seconds that a batch may still take after a request to stop.
_POLL_S: Final = 0.5
_GRACE_S: Final = 60.0

#: Node, and partition if it has some.
Place = tuple[str, int | None]


def places_of(offset: Any) -> dict[Place, int]:
    """Return the positions in an offset of a source of this package, as Spark has it: logs by partition,
    queues by the numbers of leased messages; empty for None and for other sources."""
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            return {}
    if not isinstance(offset, Mapping):
        return {}
    found: dict[Place, int] = {}
    for address, each in (offset.get("logs") or {}).items():
        found |= {(str(address), int(part)): int(at) for part, at in each["p"].items()}
    for address, at in (offset.get("leases") or {}).items():
        found[str(address), None] = int(at["n"])
    return found


class MicroBatch(Struct, frozen=True):
    """A completed micro-batch.

    Attributes:
        number: Number in the checkpoint.
        rows: Rows read.
        seconds: Duration.
        behind: Messages available beyond its end, None if the source reports none.
    """

    number: int
    rows: int
    seconds: float
    behind: int | None

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds if self.seconds else 0.0


class Watch:
    """Observer of a job's query, which can also stop it.

    This base class ignores batches; override :meth:`batch` to observe them.
    """

    def __init__(self) -> None:
        #: Set from any thread or signal handler, ends the query after the running batch.
        self.stopping = threading.Event()

    def batch(self, batch: MicroBatch) -> None:
        """Note that *batch* is done."""


class Run(Struct):
    """Progress of a query since it was started.

    Attributes:
        rows: Rows read.
        moved: Place → its first and its current position.
        behind: :attr:`MicroBatch.behind` of the last batch.
        history: The last batches, at most ``HISTORY``.
        observed: Counts of ``DataFrame.observe``, by name, summed over all batches.
        stopped: Whether the query ended because of a request to stop.
        late: Rows that came after the watermark and were dropped, counted after partial grouping.
    """

    HISTORY: ClassVar[int] = 1_000

    batches: int = 0
    rows: int = 0
    seconds: float = 0.0
    moved: dict[Place, tuple[int, int]] = {}
    behind: int | None = None
    late: int = 0
    history: list[MicroBatch] = []
    observed: dict[str, int] = {}
    stopped: bool = False


def follow(query: Any, watch: Watch | None = None) -> Run:
    """Wait until *query*, a ``StreamingQuery``, ends by itself, or stop it when *watch* requests that.

    Raises:
        StreamingQueryException: The query has failed.
    """
    watch = watch or Watch()
    run = Run()
    began = time.monotonic()
    last = -1
    asked: float | None = None
    while True:
        ended = query.awaitTermination(_POLL_S)
        done = _last_done(query, run, watch, last)
        if asked is not None and (
            done > last
            or not query.status["isTriggerActive"]
            or time.monotonic() - asked > _GRACE_S
        ):
            query.stop()
            run.stopped = ended = True
            done = _last_done(query, run, watch, done)
        last = done
        if ended:
            run.seconds = time.monotonic() - began
            return run
        if watch.stopping.is_set() and asked is None:
            asked = time.monotonic()


def _last_done(query: Any, run: Run, watch: Watch, last: int) -> int:
    """Add to *run* the batches after number *last*, and return the number of the last one now."""
    for progress in query.recentProgress:
        # Attributes rather than items: Spark Connect leaves the item empty, and the attribute sums the sources.
        number, rows = int(progress.batchId), int(progress.numInputRows)
        # A poll that found nothing new has the number of the next batch.
        if number <= last or not (rows or _moves(progress)):
            continue
        last = number
        behind = None
        for source in progress["sources"]:
            start, end = places_of(source["startOffset"]), places_of(source["endOffset"])
            latest = places_of(source["latestOffset"])
            for place, at in end.items():
                first = run.moved.get(place, (start.get(place, 0), 0))[0]
                run.moved[place] = first, at
            if latest:
                more = (max(at - end.get(place, 0), 0) for place, at in latest.items())
                behind = (behind or 0) + sum(more)
        seconds = progress["durationMs"].get("triggerExecution", 0) / 1000
        batch = MicroBatch(number, rows, seconds, behind)
        run.batches += 1
        run.rows += rows
        run.behind = behind
        for row in (progress["observedMetrics"] or {}).values():
            for name, value in _counted(row.asDict()):
                run.observed[name] = run.observed.get(name, 0) + int(value or 0)
        for state in progress["stateOperators"]:
            run.late += int(state["numRowsDroppedByWatermark"])
        run.history = [*run.history[1 - Run.HISTORY :], batch]
        watch.batch(batch)
    return last


def _counted(row: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Return names and values of an observation, which Spark Connect delivers with their schema."""
    if row.keys() == {"values", "schema"}:
        names = (field["name"] for field in row["schema"]["fields"])
        return zip(names, row["values"], strict=True)
    return row.items()


def _moves(progress: Any) -> bool:
    return any(source["startOffset"] != source["endOffset"] for source in progress["sources"])
