"""Tables of entities: columns that can be sorted, and cells whose numbers a page keeps up to date."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from ..reading import JOURNAL
from .kinds import NODE, NODE_KINDS, TypePage
from .texts import shown
from .visits import url

#: Between the name of an entity and an attribute in the key of a cell: neither has it.
_BETWEEN: Final = "\x1f"


class Column(Struct, frozen=True):
    """Head of a column."""

    label: str
    numeric: bool = False
    #: Address of the list sorted by this column, empty if it is not sorted by it.
    path: str = ""
    #: ``ascending`` or ``descending``, if the list is sorted by it.
    order: str = ""


class Cell(Struct, frozen=True):
    """Cell of a table."""

    text: str
    numeric: bool = False
    #: Address of the page about the value.
    path: str = ""
    #: Key under which a stream of numbers has it.
    live: str = ""


def label_of(attribute: str) -> str:
    """Return the name of an attribute as people read it."""
    name = attribute.replace("_", " ")
    if attribute.endswith("_s"):
        return f"{name.removesuffix(' s')} (s)"
    return name.removesuffix(" at") if attribute.endswith("_at") else name


def entity_path(type_name: str, name: str) -> str:
    """Return the address of the page of one entity."""
    return url(f"/types/{type_name}/entity", name=name)


def path_of_value(page: TypePage, attribute: str, value: object) -> str:
    """Return the address of the entity that *value* names, empty if it names none."""
    kind = page.links.get(attribute)
    if not kind or not isinstance(value, str) or not value:
        return ""
    # Links to the broker's own services, such as $management, lead to no node.
    if kind == NODE and value.startswith("$") and value != JOURNAL:
        return ""
    return entity_path(kind, value)


def cells_of(
    page: TypePage, columns: Sequence[str], row: Mapping[str, Any], *, has_page: bool = True
) -> list[Cell]:
    """Return the cells of the entity *row* in *columns*; its name leads to its page, if it *has_page*."""
    name = str(row.get("name", ""))
    # Nodes have a page by their kind, with the options of that.
    kind = row.get("type")
    type_name = str(kind) if kind in NODE_KINDS else page.type_name
    found = []
    for column in columns:
        value = row.get(column)
        if column == "name":
            path = entity_path(type_name, name) if has_page else ""
            found.append(Cell(shown(name), path=path))
            continue
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        found.append(
            Cell(
                shown(value, column),
                numeric=numeric and not column.endswith("_at"),
                path=path_of_value(page, column, value),
                live=f"{name}{_BETWEEN}{column}" if numeric else "",
            )
        )
    return found


def numbers_in(rows: Iterable[Sequence[Cell]]) -> dict[str, str]:
    """Return the texts of the cells that are kept up to date, by their keys."""
    return {cell.live: cell.text for row in rows for cell in row if cell.live}


def columns_with(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    path: str = "",
    *,
    sort: str = "",
    q: str = "",
) -> list[Column]:
    """Return the heads of *columns*; with the *path* of a list they are links that sort it."""
    found = []
    for number, column in enumerate(columns):
        order = {column: "ascending", f"-{column}": "descending"}.get(sort, "")
        numeric = any(row[number].numeric for row in rows)
        # Numbers are of interest from the greatest, names from the first.
        first = f"-{column}" if numeric else column
        other = column if first != column else f"-{column}"
        found.append(
            Column(
                label_of(column),
                numeric=numeric,
                path=url(path, sort=other if sort == first else first, q=q) if path else "",
                order=order,
            )
        )
    return found
