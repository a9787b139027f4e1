"""Pages of messages: the first ones of a queue, records of a log or of ``$journal``, and a form that publishes."""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import count
from typing import Any, Final

from msgspec import Struct

from amqp_rt.errors import AmqpError, printable

from ..messages import Publication
from ..problems import Problem, problem_of
from ..publishing import publish as publish_for
from ..reading import COUNT_MAX, JOURNAL, peek, records
from .cells import entity_path
from .entities import show_entity
from .history import Watches
from .kinds import NODE
from .rendering import Page, Redirect
from .texts import TIMES, body_text, pairs
from .visits import Visit

#: Messages of one page, unless its user wants another number.
_COUNT: Final = 20
#: Copies that one form publishes.
_COPIES_MAX: Final = 1_000


class ShownMessage(Struct, frozen=True):
    """A message, as texts."""

    heading: str
    fields: list[tuple[str, str]]
    annotations: list[tuple[str, str]]
    properties: list[tuple[str, str]]
    body: str
    remark: str


def shown_message(
    heading: str, row: Mapping[str, Any], *, times: Container[str] = ()
) -> ShownMessage:
    """Return a message as texts.

    Args:
        heading: Text above it.
        row: The message as the JSON API answers.
        times: Application-properties that are milliseconds since 1970.
    """
    header = dict(row.get("header", {}))
    if header.get("priority") == 4:
        # The default, which a message without a header has, too.
        del header["priority"]
    body, remark = body_text(row)
    return ShownMessage(
        heading,
        [
            *pairs({key: value for key, value in header.items() if value}),
            *pairs(row.get("properties"), times=TIMES),
        ],
        pairs(row.get("message_annotations"), times=TIMES),
        pairs(row.get("application_properties"), times=times),
        body,
        remark,
    )


async def show_messages(visit: Visit, name: str) -> Page:
    """Return the page with messages of node *name*, which stay there."""
    row = await visit.read(NODE, name)
    if len(row.get("partitions", ())) == 1:
        shown = await _latest(visit, name, row)
        remark = "Records of the log, which stay there."
    else:
        numbers = count(1)
        shown = await peek(
            visit.session,
            name,
            _count(visit),
            lambda each: shown_message(f"Message {next(numbers)}", each),
        )
        remark = "The first messages. They stay there, and consumers do not notice."
    return _page(visit, f"Messages of {printable(name)}", name, shown, remark, "partitions" in row)


async def show_journal(visit: Visit) -> Page:
    """Return the page with the latest events in the life of messages."""
    try:
        row = await visit.read(NODE, JOURNAL)
    except AmqpError as error:
        if error.condition != "amqp:not-found":
            raise
        remark = "This broker keeps no journal: amqp-rt serve --journal makes it keep one."
        return _page(visit, "Journal", "", [], remark, False)
    shown = await _latest(visit, JOURNAL, row, times=("time",))
    remark = "Events in the life of messages, the latest first."
    return _page(visit, "Journal", "", shown[::-1], remark, True)


def _page(
    visit: Visit, title: str, name: str, shown: list[ShownMessage], remark: str, is_log: bool
) -> Page:
    return Page(
        "messages.html",
        title,
        {
            "here": "/messages" if name else "/journal",
            "name": name,
            "offset_field": is_log,
            "offset": visit.query("offset"),
            "count": _count(visit),
            "messages": shown,
            "remark": remark,
            "back": entity_path(NODE, name) if name else "",
            "back_name": printable(name),
        },
    )


async def _latest(
    visit: Visit, name: str, row: Mapping[str, Any], *, times: Container[str] = ()
) -> list[ShownMessage]:
    """Return the latest records of a log with one partition, or those from the offset of the request on.

    Raises:
        AmqpError: The user may not receive from it.
    """
    number = _count(visit)
    [partition] = row["partitions"]
    first, following = int(partition["first"]), int(partition["next"])
    begin = max(first, _whole(visit.query("offset"), following - number))
    offsets = count(begin)
    shown, _ = await records(
        visit.session,
        name,
        begin,
        number,
        lambda each: shown_message(f"Record {next(offsets)}", each, times=times),
    )
    return shown


def _count(visit: Visit) -> int:
    return max(1, min(_whole(visit.query("count"), _COUNT), COUNT_MAX))


def _whole(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else default


async def publish(visit: Visit, watches: Watches) -> Page | Redirect:
    """Publish the message of a form, with the user's right to send, and lead back to the node."""
    name = visit.form.get("name", "")
    try:
        copies = _copies(visit.form.get("count", "").strip())
        message = _publication(visit.form).message()
        await publish_for(visit.request, name, message, copies)
    except (AmqpError, Problem) as error:
        refused = error if isinstance(error, Problem) else problem_of(error)
        return await show_entity(visit, watches, NODE, name, refused=refused, failed="publish")
    visit.tell(f"{copies:,} published to {printable(name)}.")
    return Redirect(entity_path(NODE, name))


def _copies(text: str) -> int:
    copies = _whole(text, 0 if text else 1)
    if not 0 < copies <= _COPIES_MAX:
        raise _refused(f"the number of copies is 1 to {_COPIES_MAX}, not {text!r:.20}")
    return copies


def _publication(form: Mapping[str, str]) -> Publication:
    """Return the message that a form describes.

    Raises:
        AmqpError: A field is invalid; the description names it.
    """
    given: dict[str, Any] = {
        key: text
        for key in ("subject", "message_id", "correlation_id", "reply_to")
        if (text := form.get(key, "").strip())
    }
    body = form.get("body", "").replace("\r\n", "\n")
    kind = form.get("content_type", "text")
    if kind == "base64":
        given["base64"] = "".join(body.split())
    else:
        given["body"] = body
        if kind != "text":
            given["content_type"] = kind
    for key, label, convert in (("ttl_s", "time to live", float), ("priority", "priority", int)):
        if text := form.get(key, "").strip():
            try:
                given[key] = convert(text)
            except ValueError:
                raise _refused(f"{label} must be a number, got {text!r:.50}") from None
    return Publication(
        durable=form.get("durable") == "yes",
        application_properties=_properties(form.get("properties", "")),
        **given,
    )


def _properties(text: str) -> dict[str, str | int | float | bool | None]:
    found: dict[str, str | int | float | bool | None] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        key, equals, value = line.partition("=")
        if not (equals and key):
            raise _refused(f"application properties: {line!r:.50} is not NAME=VALUE")
        found[key] = value
    return found


def _refused(description: str) -> AmqpError:
    return AmqpError(description, condition="amqp:invalid-field")
