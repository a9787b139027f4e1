"""A query while it runs: what it has done, how far it is behind, and how it is asked to stop.

A query is looked at from the thread that waits for it rather than through a listener: a signal may
ask for its end at any time, and nothing that Spark is told then may come in between two other calls.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

from msgspec import Struct

#: How often a query is looked at, and how long one that is to stop may go on with its batch.
_POLL_S: Final = 0.5
_GRACE_S: Final = 60.0

#: Node, and partition if it has some.
Place = tuple[str, int | None]


def places_of(offset: Any) -> dict[Place, int]:
    """How far an offset of a source of ours goes, as Spark has it: logs by their partitions, queues
    by the numbers of what was leased; empty for None and for sources that are not ours."""
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


class Batch(Struct, frozen=True):
    """A micro-batch that is done.

    Attributes:
        number: As the checkpoint counts.
        rows: That were read.
        seconds: That it took.
        behind: Messages that there were beyond its end, None if the source does not say.
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
    """What whoever runs a job sees of its query, and how it is asked to stop.

    This one sees nothing; whoever wants to overrides :meth:`batch`.
    """

    def __init__(self) -> None:
        #: Set it, from any thread or signal handler: the query ends after the batch that is running.
        self.stopping = threading.Event()

    def batch(self, batch: Batch) -> None:
        """*batch* is done."""


class Run(Struct):
    """What a query has done since it was started.

    Attributes:
        rows: That were read.
        moved: Place → where it began, and how far it has come.
        behind: As :attr:`Batch.behind` of the last one.
        history: The last batches, ``HISTORY`` of them at most.
        observed: What ``DataFrame.observe`` has counted, by name, of all batches together.
        stopped: It was asked to, and would have gone on.
        late: Rows, grouped as far as the query does, that came after the watermark and are left out.
    """

    HISTORY: ClassVar[int] = 1_000

    batches: int = 0
    rows: int = 0
    seconds: float = 0.0
    moved: dict[Place, tuple[int, int]] = {}
    behind: int | None = None
    late: int = 0
    history: list[Batch] = []
    observed: dict[str, int] = {}
    stopped: bool = False


def follow(query: Any, watch: Watch | None = None) -> Run:
    """Wait until *query*, a ``StreamingQuery``, has ended by itself or *watch* asks it to stop.

    Raises:
        StreamingQueryException: It has failed.
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
    """Add to *run* the batches after number *last*; the number of the last one now."""
    for progress in query.recentProgress:
        # As an attribute: Spark Connect leaves the item empty, and sums the sources.
        number, rows = int(progress.batchId), int(progress.numInputRows)
        # One that looked for more and found nothing has the number of the batch to come.
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
        batch = Batch(number, rows, seconds, behind)
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
    """The names and values of what was observed, which Spark Connect gives with their schema."""
    if row.keys() == {"values", "schema"}:
        names = (field["name"] for field in row["schema"]["fields"])
        return zip(names, row["values"], strict=True)
    return row.items()


def _moves(progress: Any) -> bool:
    return any(source["startOffset"] != source["endOffset"] for source in progress["sources"])
