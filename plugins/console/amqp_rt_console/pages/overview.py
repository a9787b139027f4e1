"""The first page: whether the broker is well, its counts, and where the most messages wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from amqp_rt.errors import AmqpError, printable

from .cells import Cell, cells_of, columns_with, entity_path, numbers_in
from .history import SAMPLES, STEP_S, Watches
from .kinds import CONTAINER, NODE, page_of
from .plots import legend, plot
from .rendering import Page
from .texts import shown, size
from .visits import Visit, url

#: Nodes that the page shows.
_NODES: Final = 10
_COLUMNS: Final = ("name", "kind", "available", "acquired", "delayed", "consumers", "producers")


async def _container(visit: Visit) -> Mapping[str, Any] | None:
    """Return the attributes of the container, None if the user may not see them."""
    try:
        found = await visit.there.page(CONTAINER, count=1)
    except AmqpError as error:
        if error.condition != "amqp:unauthorized-access":
            raise
        return None
    return found.rows[0]


def _figures(row: Mapping[str, Any] | None) -> list[tuple[str, str, str]]:
    if row is None:
        return []
    return [
        ("Ready", "ready", shown(row.get("ready"))),
        ("Connections", "connections", shown(row.get("connections"))),
        ("Nodes", "nodes", shown(row.get("nodes"))),
        ("In memory", "bytes", size(row.get("bytes", 0))),
        ("Stuck", "stuck", shown(row.get("stuck"))),
    ]


async def _deepest(visit: Visit) -> list[list[Cell]] | None:
    """Return the nodes with the most messages, None if the user may see no node."""
    try:
        found = await visit.there.page(
            NODE, sort="-messages", count=_NODES, attributes=["type", "messages", *_COLUMNS]
        )
    except AmqpError as error:
        if error.condition != "amqp:unauthorized-access":
            raise
        return None
    if not found.total:
        return None
    return [cells_of(page_of(NODE), _COLUMNS, row) for row in found.rows if row.get("messages")]


async def show_overview(visit: Visit, watches: Watches) -> Page:
    """Return the overview, as far as the user may see it."""
    container = await _container(visit)
    rows = await _deepest(visit) or []
    watched = []
    for name, history in watches.of(visit.session).items():
        lines = history.depths()
        drawn = plot("Messages", lines, slots=SAMPLES, step_s=STEP_S)
        watched.append((printable(name), entity_path(NODE, name), drawn, legend(lines)))
    title = "Overview" if container is None else f"Overview of {printable(str(container['name']))}"
    return Page(
        "overview.html",
        title,
        {
            "container": container,
            "figures": _figures(container),
            "reasons": []
            if container is None
            else [shown(e) for e in container.get("reasons", ())],
            "rows": rows,
            "columns": columns_with(_COLUMNS, rows) if rows else [],
            "watched": watched,
        },
        live=url("/live/overview"),
    )


async def overview_numbers(visit: Visit) -> Mapping[str, str]:
    """Return the present numbers of the overview.

    Raises:
        AmqpError: There is nothing that the user may see.
    """
    container = await _container(visit)
    rows = await _deepest(visit)
    if container is None and rows is None:
        raise AmqpError("there is nothing to see", condition="amqp:unauthorized-access")
    figures = {key: text for _, key, text in _figures(container)}
    return figures | numbers_in(rows or [])
