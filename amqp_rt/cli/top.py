"""``amqp-rt top``: the busiest nodes of a running broker, again and again."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import click
import trio

from ..container.managing import ManagementClient
from ..management.node import NODE_TYPE
from .listing import CLEAR, ask
from .running import Seconds, Where, client_options
from .tables import cell, table

_HEADS: Final = (
    *("name", "kind", "in/s", "out/s", "available", "acquired", "consumers", "producers"),
)
#: Keys of each object with ``--json``, in the order of the columns.
KEYS: Final = (
    *("name", "kind", "in_per_s", "out_per_s", "available", "acquired", "consumers", "producers"),
)
#: Fewest characters of a name that are shown.
_NAME_MIN: Final = 16
#: Orders of the table: name → the key of a row, largest first.
_ORDERS: Final = ("rate", "depth", "name")
#: Switch a terminal to another screen without a cursor, and back.
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
#: Lines above the rows.
_ABOVE: Final = 4


class _Look:
    """State of a broker at one time."""

    def __init__(
        self, container: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], at: float
    ) -> None:
        self.container = container
        self.nodes = {str(node["name"]): node for node in nodes}
        self.at = at


async def _look(there: ManagementClient) -> _Look:
    [container] = [each async for each in there.query("amqp_rt.container")]
    nodes = [each async for each in there.query(NODE_TYPE)]
    return _Look(container, nodes, time.monotonic())


def rows_of(before: _Look, now: _Look, order: str, *, everything: bool) -> list[tuple[Any, ...]]:
    """Return a row for each node of *now*, with its rates since *before* and the columns of the table.

    Args:
        before: An earlier look. Nodes that it does not have, or that were made anew since, have the rate 0.
        now: The later one.
        order: ``rate``, ``depth`` or ``name``.
        everything: Include dynamic nodes.
    """
    seconds = max(1e-9, now.at - before.at)
    rows: list[tuple[Any, ...]] = []
    for name, node in now.nodes.items():
        if node["dynamic"] and not everything:
            continue
        earlier = before.nodes.get(name, node)
        rates = [
            max(0.0, (node[key] - earlier[key]) / seconds) for key in ("enqueued", "delivered")
        ]
        counts = [int(node[key]) for key in ("available", "acquired", "consumers", "producers")]
        rows.append((name, str(node["kind"]), *rates, *counts))
    rows.sort(key=lambda row: row[0])
    if order == "rate":
        rows.sort(key=lambda row: -(row[2] + row[3]))
    elif order == "depth":
        rows.sort(key=lambda row: -(row[4] + row[5]))
    return rows


def _screen(
    before: _Look, now: _Look, order: str, *, everything: bool, most: int, width: int | None = None
) -> str:
    """Return what is shown of two looks: a summary, and a table of at most *most* nodes.

    Names are cut so that lines fit into *width* characters: those that wrap would move the others off the screen.
    """
    rows = rows_of(before, now, order, everything=everything)
    container = now.container
    stuck = f", {container['stuck']} stuck" if container.get("stuck") else ""
    state = "" if container.get("ready", True) else ", not ready"
    summary = cell(
        f"{container['name']}: {container['connections']} connections, {container['nodes']} nodes, "
        f"{container['bytes'] / 1e6:.1f} MB{stuck}{state}"
    )
    shown = [(row[0], row[1], f"{row[2]:.1f}", f"{row[3]:.1f}", *row[4:]) for row in rows[:most]]
    if width is not None:
        summary = _cut(summary, width)
        without = table([("", *row[1:]) for row in shown], _HEADS)
        taken = max(map(len, without.splitlines())) - len(_HEADS[0])
        shown = [(_cut(cell(row[0]), max(_NAME_MIN, width - taken)), *row[1:]) for row in shown]
    more = f"\n{len(rows) - most} more" if len(rows) > most else ""
    return f"{summary}\n\n{table(shown, _HEADS)}{more}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


@click.command()
@client_options
@click.option(
    "--every", type=Seconds(), default=2.0, show_default=True, metavar="TIME",
    help="Time between two looks, over which rates are counted.",
)  # fmt: skip
@click.option(
    "--sort", "order", type=click.Choice(_ORDERS), default="rate", show_default=True,
    help="Order of the nodes; the key s changes it.",
)  # fmt: skip
@click.option("--count", type=click.IntRange(1), help="Nodes to show; by default as many as fit.")
@click.option(
    "--all", "everything", is_flag=True, help="Include dynamic nodes, such as reply queues."
)
@click.option("--once", is_flag=True, help="Show it once, after --every, and end.")
@click.option(
    "--json", "as_json", is_flag=True, help="Show it once, as one JSON object per line and node."
)
def top(
    where: Where,
    every: float,
    order: str,
    count: int | None,
    everything: bool,
    once: bool,
    as_json: bool,
) -> None:
    """Show the nodes of the broker at --url by their rates, or by their messages, again and again.

    \b
    q   end
    s   sort by rate, depth or name

    Without a terminal it is shown once. It takes the right to manage $management.
    """  # noqa: D301
    if every < 0.1:
        raise click.BadParameter(
            "the time between two looks is at least 100ms", param_hint="--every"
        )
    if once or as_json or not sys.stdout.isatty():
        most = count or 1_000_000
        _show_once(where, every, order, everything=everything, most=most, as_json=as_json)
    else:
        _show_live(where, every, order, everything=everything, most=count)


def _show_once(
    where: Where, every: float, order: str, *, everything: bool, most: int, as_json: bool
) -> None:
    async def work(there: ManagementClient) -> tuple[_Look, _Look]:
        before = await _look(there)
        await trio.sleep(every)
        return before, await _look(there)

    before, now = ask(where, work)
    if not as_json:
        click.echo(_screen(before, now, order, everything=everything, most=most))
        return
    for row in rows_of(before, now, order, everything=everything)[:most]:
        click.echo(json.dumps(dict(zip(KEYS, row, strict=True))))


def _show_live(
    where: Where, every: float, order: str, *, everything: bool, most: int | None
) -> None:
    async def work(there: ManagementClient) -> None:
        chosen = order
        before = now = await _look(there)
        with _screen_of_its_own() as keys:
            async with trio.open_nursery() as nursery:

                def draw() -> None:
                    size = shutil.get_terminal_size()
                    text = _screen(
                        before,
                        now,
                        chosen,
                        everything=everything,
                        most=most or max(1, size.lines - _ABOVE),
                        width=size.columns,
                    )
                    click.echo(f"{CLEAR}{text}\nby {chosen}; s sorts, q ends", nl=False)

                async def listen(keys: int) -> None:
                    nonlocal chosen
                    while (key := await _key(keys)) != "q":
                        if key == "s":
                            chosen = _ORDERS[(_ORDERS.index(chosen) + 1) % len(_ORDERS)]
                            draw()
                    nursery.cancel_scope.cancel()

                if keys is not None:
                    nursery.start_soon(listen, keys)
                while True:
                    draw()
                    await trio.sleep(every)
                    before, now = now, await _look(there)

    ask(where, work)


async def _key(keys: int) -> str:
    """Wait for a key; return it. Return ``q`` at the end of the input."""
    await trio.lowlevel.wait_readable(keys)
    return os.read(keys, 1).decode("latin-1") or "q"


@contextmanager
def _screen_of_its_own() -> Iterator[int | None]:
    """Use another screen of the terminal; yield the descriptor of its keys, None if there are none."""
    keys = None
    restore = None
    try:
        import termios
        import tty

        if sys.stdin.isatty():
            keys = sys.stdin.fileno()
            restore = termios.tcgetattr(keys)
            tty.setcbreak(keys)
    except ImportError:
        pass  # Windows: Ctrl-C ends it.
    click.echo(_ENTER, nl=False)
    try:
        yield keys
    finally:
        click.echo(_LEAVE, nl=False)
        if keys is not None and restore is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, restore)
