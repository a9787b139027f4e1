"""Pages of entities: the list of a type, one entity with its operations, and the form that makes another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from amqp_rt.container.managing import Page as RowPage
from amqp_rt.errors import AmqpError, printable

from ..problems import Problem, problem_of
from .cells import Cell, cells_of, columns_with, entity_path, label_of, numbers_in, path_of_value
from .forms import FormField, attributes_in, fields_of
from .history import SAMPLES, STEP_S, Watches
from .kinds import (
    CHOICES,
    NODE,
    NODE_KINDS,
    WITH_MESSAGES,
    WITH_RECORDS,
    further_operations,
    page_of,
)
from .plots import legend, plot
from .rendering import Page, Redirect
from .texts import shown
from .visits import TypeDescriptions, Visit, url

#: Rows of one page of a list.
ROWS: Final = 100
#: Fields of an entity that need no line of their own.
_TITLES: Final = frozenset(("name", "identity", "type"))

#: The attribute of users that can be set, but not read.
PASSWORD: Final = FormField("password", "password", required=True)


def known_type(types: TypeDescriptions, type_name: str) -> str:
    """Return *type_name* if the broker has this type.

    Raises:
        AmqpError: It has not.
    """
    if type_name not in types.attributes:
        raise AmqpError(f"there is no type {type_name!r:.100}", condition="amqp:not-found")
    return type_name


async def show_list(visit: Visit, type_name: str) -> Page:
    """Return the list of the entities of a type."""
    types = await visit.types()
    page = page_of(known_type(types, type_name))
    rows, columns, found = await _list(visit, types, type_name)
    here = url(f"/types/{type_name}")
    q, sort = visit.query("q"), visit.query("sort")
    return Page(
        "list.html",
        page.title,
        {
            "here": here,
            "q": q,
            "sort": sort,
            "rows": rows,
            "columns": columns_with(columns, rows, here, sort=sort, q=q),
            "creates": [] if visit.read_only else _creates(types, type_name),
            "total": found.total,
            "next_path": found.next and url(here, q=q, sort=sort, after=found.next),
            "first_path": visit.query("after") and url(here, q=q, sort=sort),
        },
        live=url("/live/list", type=type_name, q=q, sort=sort, after=visit.query("after")),
    )


async def _list(
    visit: Visit, types: TypeDescriptions, type_name: str
) -> tuple[list[list[Cell]], list[str], RowPage]:
    """Return the rows of the page that the request is about, their columns, and the answer that had them."""
    page = page_of(type_name)
    columns = page.columns_of(types.attributes[type_name])
    found = await visit.there.page(
        type_name,
        q=visit.query("q"),
        sort=visit.query("sort") or "name",
        after=visit.query("after") or None,
        count=ROWS,
        attributes=["name", "type", *columns],
    )
    has_pages = "READ" in types.operations.get(type_name, {})
    return [cells_of(page, columns, row, has_page=has_pages) for row in found.rows], columns, found


async def list_numbers(visit: Visit) -> Mapping[str, str]:
    """Return the present numbers of a list, for a page that shows it."""
    types = await visit.types()
    rows, _, _ = await _list(visit, types, known_type(types, visit.query("type")))
    return numbers_in(rows)


def _creates(types: TypeDescriptions, type_name: str) -> list[tuple[str, str]]:
    """Return label and address of each form that makes an entity for the list of *type_name*."""
    kinds = NODE_KINDS if type_name == NODE else (type_name,)
    return [
        (f"New {page_of(kind).one.lower()}", f"/types/{kind}/new")
        for kind in kinds
        if "CREATE" in types.operations.get(kind, {}) and _has_form(types, kind)
    ]


def _has_form(types: TypeDescriptions, kind: str) -> bool:
    return kind == "amqp_rt.user" or kind in types.schemas


async def show_entity(
    visit: Visit,
    watches: Watches,
    type_name: str,
    name: str,
    *,
    refused: Problem | None = None,
    failed: str = "",
) -> Page:
    """Return the page of one entity, with the forms for its operations.

    Args:
        visit: The request.
        watches: Histories of watched nodes.
        type_name: Its type.
        name: Its name.
        refused: Why the operation *failed* was refused; its form is shown as it was filled in.
        failed: The operation.
    """
    types = await visit.types()
    row = await visit.read(known_type(types, type_name), name)
    kind = row.get("type")
    if kind in NODE_KINDS:
        type_name = str(kind)
    page = page_of(type_name)
    operations = types.operations.get(type_name, {})
    is_node = type_name in NODE_KINDS
    tables = [
        (label_of(key), columns, cells) for key, value in row.items() if (found := _table(value)) for columns, cells in [found]
    ]  # fmt: skip
    in_tables = {key for key, value in row.items() if _table(value)}
    history = watches.of(visit.session).get(name) if is_node else None
    plots = []
    if history is not None:
        for title, lines in (("Messages", history.depths()), ("Rates", history.rates())):
            plots.append((plot(title, lines, slots=SAMPLES, step_s=STEP_S), legend(lines)))
    return Page(
        "entity.html",
        f"{page.one} {printable(name) or '(default)'}",
        {
            "name": name,
            "title_name": printable(name),
            "act": f"/types/{type_name}/act",
            "attributes": _attributes(type_name, row, in_tables),
            "tables": tables,
            "links": _links(type_name, name),
            "watchable": is_node and type_name != "amqp_rt.schedule",
            "plots": plots,
            "fields": _fields_to_change(types, type_name, row),
            "operations": _operations(type_name, operations),
            "choices": CHOICES,
            "deletes": "DELETE" in operations,
            "ends": page.ends,
            "asks_name": page.asks_name,
            "purges": "PURGE" in operations and _kind(type_name) in WITH_MESSAGES + WITH_RECORDS,
            "publishes": is_node and type_name != "amqp_rt.schedule",
            "given": visit.form,
            "failed": failed,
        },
        failure="" if refused is None else refused.detail,
        status=200 if refused is None else refused.status,
        live=url("/live/entity", type=type_name, name=name),
    )


def _kind(type_name: str) -> str:
    return type_name.removeprefix("amqp_rt.")


def _attributes(
    type_name: str, row: Mapping[str, Any], in_tables: set[str]
) -> list[tuple[str, str, str, str]]:
    """Return label, text, address and key of the attributes of *row*."""
    page = page_of(type_name)
    return [
        (
            label_of(key),
            shown(value, key),
            path_of_value(page, key, value),
            key if isinstance(value, int | float) and not isinstance(value, bool) else "",
        )
        for key, value in row.items()
        if key not in _TITLES and key not in in_tables and value not in (None, [], "")
    ]


def _table(value: object) -> tuple[list[Any], list[list[Cell]]] | None:
    """Return columns and rows of an attribute that is a list of maps, such as the partitions of a log."""
    if not isinstance(value, list) or not value or not all(isinstance(e, Mapping) for e in value):
        return None
    columns = list(dict.fromkeys(str(key) for each in value for key in each))
    rows = [
        [
            Cell(shown(each.get(key), key), numeric=isinstance(each.get(key), int | float))
            for key in columns
        ]
        for each in value
    ]
    return columns_with(columns, rows), rows


def _links(type_name: str, name: str) -> list[tuple[str, str]]:
    found = []
    if _kind(type_name) in WITH_MESSAGES + WITH_RECORDS:
        found.append(("Look at messages", url("/messages", name=name)))
    return found


def _fields_to_change(types: TypeDescriptions, type_name: str, row: Mapping[str, Any]) -> list[Any]:
    if "UPDATE" not in types.operations.get(type_name, {}):
        return []
    if type_name == "amqp_rt.user":
        return [PASSWORD]
    return fields_of(types.schemas.get(type_name, {}), row)


def _operations(type_name: str, operations: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the operations that get a form of their arguments."""
    found = further_operations(operations)
    if "MOVE" in operations and _kind(type_name) in WITH_MESSAGES:
        found["MOVE"] = list(operations["MOVE"])
    return found


async def entity_numbers(visit: Visit) -> Mapping[str, str]:
    """Return the present numbers of an entity, for a page that shows it."""
    types = await visit.types()
    type_name = known_type(types, visit.query("type"))
    row = await visit.read(type_name, visit.query("name"))
    return {key: text for _, text, _, key in _attributes(type_name, row, set()) if key}


async def create(visit: Visit, type_name: str) -> Page | Redirect:
    """Return the form for a new entity, or make the one that the form describes."""
    types = await visit.types()
    page = page_of(known_type(types, type_name))
    if "CREATE" not in types.operations.get(type_name, {}) or not _has_form(types, type_name):
        raise AmqpError(
            f"entities of the type {type_name} are not made here", condition="amqp:not-implemented"
        )
    fields = [PASSWORD] if type_name == "amqp_rt.user" else fields_of(types.schemas[type_name])
    refused: Problem | None = None
    if visit.request.method == "POST":
        name = visit.form.get("name", "").strip()
        try:
            if not name:
                raise AmqpError("a name must be given", condition="amqp:invalid-field")
            given = attributes_in(visit.form, fields)
            await visit.operate("CREATE", type_name, name, given)
        except AmqpError as error:
            refused = problem_of(error)
        else:
            visit.tell(f"{page.one} {printable(name)} was created.")
            return Redirect(entity_path(type_name, name))
    return Page(
        "create.html",
        f"New {page.one.lower()}",
        {"here": f"/types/{type_name}/new", "fields": fields, "given": visit.form},
        failure="" if refused is None else refused.detail,
        status=200 if refused is None else refused.status,
    )


async def act(visit: Visit, watches: Watches, type_name: str) -> Page | Redirect:
    """Perform the operation of a form on an entity, and lead back to its page, or to the list if it is gone."""
    types = await visit.types()
    page = page_of(known_type(types, type_name))
    name, operation = visit.form.get("name", ""), visit.form.get("operation", "")
    allowed = types.operations.get(type_name, {})
    if operation not in allowed:
        raise AmqpError(
            f"{type_name} has no operation {operation!r:.50}", condition="amqp:not-implemented"
        )
    try:
        done = await _perform(visit, types, type_name, name, operation)
    except AmqpError as error:
        try:
            return await show_entity(
                visit, watches, type_name, name, refused=problem_of(error), failed=operation
            )
        except AmqpError:
            # It is gone, or was never there: the page of it cannot be shown.
            raise error from None
    title = f"{page.one} {printable(name)}"
    if operation == "DELETE":
        visit.tell(f"{title}: {page.ends.lower()} was done.")
        return Redirect(url(f"/types/{NODE if type_name in NODE_KINDS else type_name}"))
    visit.tell(f"{title}: {done}.")
    return Redirect(entity_path(type_name, name))


async def _perform(
    visit: Visit, types: TypeDescriptions, type_name: str, name: str, operation: str
) -> str:
    """Perform *operation* as the form says it, and return the result in words.

    Raises:
        AmqpError: It was refused.
    """
    match operation:
        case "UPDATE":
            row = await visit.read(type_name, name)
            fields = _fields_to_change(types, type_name, row)
            # The values in the form count: changes of others since then stay.
            changed = attributes_in(visit.form, fields, changing=True)
            if not changed:
                return "nothing was changed"
            await visit.operate("UPDATE", type_name, name, changed)
            return f"{', '.join(label_of(key) for key in changed)} changed"
        case "DELETE" | "PURGE":
            if operation == "PURGE" or page_of(type_name).asks_name:
                check_name(visit.form.get("confirm", ""), name)
            if operation == "DELETE":
                await visit.delete(type_name, name)
                return "gone"
            body = await visit.operate(operation, type_name, name)
            return f"{shown(body.get('messages', 0))} messages dropped"
    arguments: dict[str, Any] = {}
    for argument in types.operations[type_name][operation]:
        text = visit.form.get(f"p.{argument}", "").strip()
        if text:
            arguments[argument] = _whole(argument, text) if argument == "count" else text
    body = await visit.operate(operation, type_name, name, **arguments)
    if isinstance(body, Mapping) and "messages" in body:
        return f"{shown(body['messages'])} messages moved"
    return f"{operation.lower().replace('-', ' ')} was done"


def check_name(typed: str, name: str) -> None:
    """Check that the user has typed the *name* of the entity that would be lost.

    Raises:
        AmqpError: The user has not.
    """
    if typed not in (name, printable(name)):
        raise AmqpError(
            f"nothing was done: the name that was typed is not {printable(name)}",
            condition="amqp:precondition-failed",
        )


def _whole(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 10:
        raise AmqpError(
            f"{name} must be a whole number, got {text!r:.50}", condition="amqp:invalid-field"
        )
    return int(text)
