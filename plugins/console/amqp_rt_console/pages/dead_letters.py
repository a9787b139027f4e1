"""The page of dead letters: queues that gave messages up, and the addresses that have them now."""

from __future__ import annotations

from typing import Final

from .cells import cells_of, columns_with
from .kinds import page_of
from .rendering import Page
from .visits import Visit

_QUEUE: Final = "amqp_rt.queue"
_COLUMNS: Final = ("name", "dead_lettered", "dead_letter", "expired", "dropped", "available")


async def show_dead_letters(visit: Visit) -> Page:
    """Return the queues with the most dead letters."""
    found = await visit.there.page(_QUEUE, sort="-dead_lettered", attributes=["type", *_COLUMNS])
    rows = [
        cells_of(page_of(_QUEUE), _COLUMNS, row) for row in found.rows if row.get("dead_lettered")
    ]
    return Page(
        "dead_letters.html",
        "Dead letters",
        {"rows": rows, "columns": columns_with(_COLUMNS, rows) if rows else []},
    )
