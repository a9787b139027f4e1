"""Lists of entities of a running broker, as tables or as JSON, once or again and again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import wraps
from math import inf
from typing import Any, Final, NamedTuple, TypeVar, cast

import click
import trio

from ..addresses import parse_url
from ..broker.nodes import SCHEDULE, Schedule
from ..broker.statistics import NodeStats, ScheduleStats
from ..container.container import Container
from ..container.managing import ManagementClient
from ..errors import AmqpError
from ..management.branches import BranchEntity
from ..management.entities import (
    ConnectionEntity,
    LinkEntity,
    SessionEntity,
    SubscriptionEntity,
    UserEntity,
)
from ..management.node import NODE_TYPE, VIRTUAL_HOST_TYPE
from ..management.open_transactions import TransactionEntity
from ..management.termini import TerminusEntity
from .running import Seconds, Where, run
from .tables import cell, plain, table

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

#: Moves the cursor of a terminal to its first line, and clears what is below.
CLEAR: Final = "\x1b[H\x1b[J"


class Listing(NamedTuple):
    """A list of entities of one type."""

    #: Type of the entities at ``$management``.
    type_name: str
    #: Keys of each object with ``--json``; those that an entity does not have are null.
    keys: tuple[str, ...]
    #: Keys that are columns of the table.
    columns: tuple[str, ...]
    #: Numbers of the columns of texts, which begin at their left edge.
    left: Collection[int] = (0, 1)


#: Settings of schedules that the list has: all but the payload, which may be long.
_SCHEDULE_KEYS: Final = ("to", "cron", "tz", "every_s", "catch_up", "durable")

#: Name of a list, as it is called on the command line, to what it has.
LISTINGS: Final = {
    "node list": Listing(
        NODE_TYPE,
        NodeStats.__struct_fields__,
        ("name", "kind", "available", "acquired", "consumers", "producers", "enqueued"),
    ),
    "node hosts": Listing(VIRTUAL_HOST_TYPE, ("name", "nodes"), ("name", "nodes")),
    "connections list": Listing(
        "amqp_rt.connection",
        ConnectionEntity.__struct_fields__,
        ("name", "user", "address", "protocol", "container_id", "state", "sessions"),
        (0, 1, 2, 3, 4, 5),
    ),
    "sessions list": Listing(
        "amqp_rt.session",
        SessionEntity.__struct_fields__,
        ("name", "connection", "channel", "links"),
    ),
    "links list": Listing(
        "amqp_rt.link",
        LinkEntity.__struct_fields__,
        ("name", "role", "address", "credit", "link_name"),
        (0, 1, 2, 4),
    ),
    "subscriptions list": Listing(
        "amqp_rt.subscription",
        SubscriptionEntity.__struct_fields__,
        ("name", "topic", "container_id", "link"),
        (0, 1, 2, 3),
    ),
    "transactions list": Listing(
        "amqp_rt.branch",
        BranchEntity.__struct_fields__,
        ("name", "state", "user", "prepared_at"),
        (0, 1, 2),
    ),
    "transactions open": Listing(
        "amqp_rt.transaction",
        TransactionEntity.__struct_fields__,
        ("name", "state", "user", "container_id", "posts", "deliveries", "age_s"),
        (0, 1, 2, 3),
    ),
    "termini list": Listing(
        "amqp_rt.terminus",
        TerminusEntity.__struct_fields__,
        ("name", "role", "address", "links", "expires_in_s"),
    ),
    "schedules list": Listing(
        f"amqp_rt.{SCHEDULE}",
        (
            "name",
            *(key for key in Schedule.__struct_fields__ if key in _SCHEDULE_KEYS),
            *(key for key in ScheduleStats.__struct_fields__ if key != "name"),
        ),
        ("name", "to", "times", "sent", "next_at"),
        (0, 1, 2, 4),
    ),
    "user list": Listing(
        "amqp_rt.user", UserEntity.__struct_fields__, ("name", "groups", "connections")
    ),
}


class Output(NamedTuple):
    """How a list is written."""

    as_json: bool
    #: Seconds between two looks; None for one look.
    watch_s: float | None

    def write(
        self, rows: Sequence[Mapping[str, Any]], listing: Listing, *, first: bool = True
    ) -> None:
        """Write *rows* on standard output: one JSON object a line, or a table."""
        if self.as_json:
            for row in rows:
                click.echo(json.dumps({key: plain(row.get(key)) for key in listing.keys}))
            sys.stdout.flush()
            return
        cells = [[_cell(row.get(key)) for key in listing.columns] for row in rows]
        text = table(cells, listing.columns, left=listing.left)
        if self.watch_s is not None and sys.stdout.isatty():
            head = f"every {self.watch_s:g} s, {time.strftime('%H:%M:%S')}; Ctrl-C ends it"
            text = f"{CLEAR}{head}\n\n{text}"
        elif not first:
            text = f"\n{text}"
        click.echo(text)


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value


def list_options(command: F) -> F:
    """Add ``--json`` and ``--watch`` to a command, which gets them as ``output``."""

    @wraps(command)
    def with_output(*args: Any, as_json: bool, watch_s: float | None, **options: Any) -> Any:
        return command(*args, output=Output(as_json, watch_s), **options)

    watched = click.option(
        "--watch",
        "watch_s",
        type=Seconds(),
        metavar="TIME",
        callback=_check_watch,
        help="List again after each TIME, such as 2s, until Ctrl-C.",
    )
    return cast("F", json_option(watched(with_output)))


def _check_watch(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    if value is not None and value < 0.1:
        raise click.BadParameter("the time between two looks is at least 100ms")
    return value


def json_option(command: F) -> F:
    """Add ``--json`` to a command, which gets it as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")(
        command
    )


def ask(
    where: Where,
    work: Callable[[ManagementClient], Awaitable[T]],
    *,
    hint: str = "",
    within: float | None = None,
) -> T:
    """Connect to *where*, run *work* with its management node, and return the result.

    Args:
        where: The peer.
        work: Called with a client of ``$management``, as ``await work(there)``.
        hint: What to say of a peer without ``$management``.
        within: Seconds for all of it; by default each request has its own limit.

    Raises:
        click.ClickException: It failed; the text is one sentence.
    """

    async def main() -> T:
        async with (
            Container("amqp-rt") as container,
            where.connect(container) as peer,
            peer.management() as there,
        ):
            try:
                return await work(there)
            except AmqpError as error:
                if error.condition == "amqp:not-found" and "$management" in error.description:
                    raise click.ClickException(
                        f"{error.description}: {hint or 'it is no broker of this package'}"
                    ) from None
                raise

    async def in_time() -> T:
        with trio.move_on_after(inf if within is None else within):
            return await main()
        raise click.ClickException(f"{parse_url(where.url)}: no answer within {within:g} s")

    return run(in_time)


def show_list(
    where: Where,
    output: Output,
    listing: Listing,
    *,
    wanted: Callable[[Mapping[str, Any]], bool] = lambda row: True,
    shown: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> None:
    """Write the entities of *listing* for which *wanted* is true, sorted by name, as *output* says.

    Each row is *shown* as this function returns it in tables; JSON has it as it is.

    Raises:
        click.ClickException: The peer refused, or the connection was lost.
    """

    async def work(there: ManagementClient) -> None:
        first = True
        while True:
            found = [dict(row) async for row in there.query(listing.type_name) if wanted(row)]
            found.sort(key=_order)
            rows = found if output.as_json else [shown(row) for row in found]
            output.write(rows, listing, first=first)
            if output.watch_s is None:
                return
            first = False
            await trio.sleep(output.watch_s)

    ask(where, work)


def _order(row: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    """Return the key that sorts names with numbers, such as ``2/0`` and ``10/0``, by these."""
    return [
        (0, int(part), "") if part.isdecimal() and len(part) < 19 else (1, 0, part)
        for part in str(row["name"]).split("/")
    ]


def show_entity(found: Mapping[str, Any], *, as_json: bool) -> None:
    """Write the attributes of one entity: a line for each, or one JSON object."""
    if as_json:
        click.echo(json.dumps(plain(found)))
        return
    width = max((len(cell(key)) for key in found), default=0)
    for key, value in found.items():
        click.echo(f"{cell(key).ljust(width)}  {cell(value)}")
