"""``amqp-rt mesh``: look at a mesh from one of its members, drain the member, ask for its health."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import click
import trio

from ..addresses import wild_match, wild_parts
from ..container.managing import ManagementClient
from ..errors import CallFailed
from .listing import ask, json_option
from .running import Seconds, Where, client_options
from .tables import cell, plain, table

T = TypeVar("T")

MEMBERSHIP: Final = "amqp_rt.mesh"
#: What can be shown as a list: type of the entities, and what one of them is called.
_LISTS: Final = {
    "nodes": "amqp_rt.mesh-node",
    "addresses": "amqp_rt.mesh-address",
    "legs": "amqp_rt.mesh-leg",
}
_SHOWN_MAX: Final = 1_000
#: Seconds between two looks at a member that drains.
_LOOK_S: Final = 0.2
#: Exit code of ``health``: the member answers, but is not ready.
NOT_READY: Final = 3


async def _membership(there: ManagementClient) -> Mapping[str, Any]:
    """Return the row of the member's only membership.

    Raises:
        click.ClickException: The container is no member of a mesh, or has no management node.
    """
    try:
        async for row in there.query(MEMBERSHIP):
            return row
    except CallFailed as error:
        if error.condition != "amqp:invalid-field":
            raise
    raise click.ClickException(
        "the container there is no member of a mesh: start it with amqp-rt serve --mesh SEED, or with "
        "Mesh(container, …) in its program"
    )


async def _address(there: ManagementClient, address: str) -> Mapping[str, Any] | None:
    """Return the row of an address; None if no node within reach serves it."""
    try:
        return await there.read(_LISTS["addresses"], address)
    except CallFailed as error:
        # The status of an entity that is not there has this condition.
        if error.condition != "amqp:invalid-field":
            raise
        return None


def _ask(where: Where, work: Callable[[ManagementClient], Awaitable[T]]) -> T:
    """Run *work* with the management node of the member."""
    return ask(where, work, hint="it is no member of a mesh, and no broker")


@click.group()
def mesh() -> None:
    """Look at a mesh from one of its members: nodes, addresses, legs and paths; drain the member; ask for its health.

    \b
    A first member:    amqp-rt serve --dev --name one --mesh-name shop --mesh-role interior
    A second one:      amqp-rt serve --dev --name two --listen amqp://127.0.0.1:5673 \\
                           --mesh amqp://127.0.0.1:5672 --mesh-name shop --mesh-role interior
    What they know:    amqp-rt mesh show nodes

    Every command asks the $management of the member at --url, which takes the right to manage $management.
    """  # noqa: D301  # click takes \b for "do not wrap"


@mesh.command()
@click.argument("what", type=click.Choice([*_LISTS, "path"]), default="nodes")
@click.argument("address", required=False)
@client_options
@click.option(
    "--count",
    type=click.IntRange(1),
    default=_SHOWN_MAX,
    show_default=True,
    help="Lines to show; how many more there are is written to standard error.",
)
@json_option
def show(what: str, address: str | None, where: Where, count: int, as_json: bool) -> None:
    """Show what the member knows of the mesh: nodes, addresses, legs, or the path to an address.

    \b
    nodes               nodes within reach: zone, cost, path, addresses, state
    addresses [PREFIX*] who serves which addresses, and how messages are distributed
    legs [PREFIX*]      links that the member has opened to destinations, pinned ones too, with credit and latency
    path ADDRESS        where a message for ADDRESS would go from here, the nearest first

    ADDRESS may have the wildcard *, except with path.
    """  # noqa: D301
    if what == "path":
        if address is None:
            raise click.UsageError("which address? amqp-rt mesh show path ADDRESS")
        _show_path(where, address, as_json=as_json)
        return
    if address is not None and what == "nodes":
        raise click.UsageError("nodes have no addresses to choose by: leave ADDRESS out")

    async def work(
        there: ManagementClient,
    ) -> tuple[Mapping[str, Any], list[Mapping[str, Any]], int]:
        member = await _membership(there)
        parts = None if address is None else wild_parts(address)
        key = "name" if what == "addresses" else "address"
        found: list[Mapping[str, Any]] = []
        more = 0
        async for row in there.query(_LISTS[what]):
            if parts is not None and not wild_match(parts, str(row[key])):
                continue
            if len(found) < count:
                found.append(row)
            else:
                more += 1
        return member, found, more

    member, found, more = _ask(where, work)
    if as_json:
        for row in found:
            click.echo(json.dumps(plain(row)))
    else:
        _SHOW[what](member, found)
    if more:
        click.echo(f"{more} more; choose by an address with *, or raise --count", err=True)


def _show_nodes(member: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            row["name"],
            _state(row),
            row["zone"],
            _shown_cost(row["cost"]),
            row["addresses"],
            row["links"],
            " > ".join(row["path"]),
        )
        for row in found
    ]
    heads = ("node", "state", "zone", "cost", "addresses", "links", "path")
    click.echo(_summary(member))
    click.echo(table(rows, heads, left=(0, 1, 2, 6)))


def _state(row: Mapping[str, Any]) -> str:
    return f"{row['state']}, draining" if row["draining"] else str(row["state"])


def _shown_cost(cost: int) -> str:
    # A path through a node that drains, which is taken only if there is no other.
    return str(cost) if cost < 2**32 else f"{cost % 2**32}, by a draining node"


def _summary(member: Mapping[str, Any]) -> str:
    zone = f", zone {member['zone']}" if member["zone"] else ""
    state = "draining" if member["draining"] else "ready" if member["ready"] else "not joined yet"
    return cell(
        f"{member['node']}, {member['role']} of mesh {member['name']!r}{zone}: {state}, "
        f"{_plural(member['nodes'], 'node')} within reach, {_plural(member['neighbours'], 'neighbour')}, "
        f"{_plural(member['edges'], 'edge')}"
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _show_addresses(member: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for row in sorted(found, key=lambda row: str(row["name"])):
        nodes = ", ".join(row["nodes"])
        if row["instances"] > len(row["nodes"]):
            nodes += f", {row['instances'] - len(row['nodes'])} more"
        alive = str(row["alive"])
        if row["instances"] != row["alive"]:
            alive += f" of {row['instances']}"
        rows.append((row["name"], _kind(row), alive, nodes))
    click.echo(
        table(rows, ("address", "distribution", "alive", "nodes, nearest first"), left=(0, 1, 3))
    )


def _kind(row: Mapping[str, Any]) -> str:
    gives = ", receive" if row["gives"] and row["takes"] else ""
    how = "receive" if row["gives"] and not row["takes"] else row["distribution"] + gives
    return f"{how}, by link" if row["link_routed"] else str(how)


def _show_legs(member: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            row["address"],
            " > ".join(row["path"]) or "here",
            row["state"],
            row["user"],
            row["credit"],
            row["outstanding"],
            f"{row['load']}/{row['slots']}" if row["slots"] else "",
            f"{row['latency_ms']:.1f} ms" if row["latency_ms"] else "",
        )
        for row in sorted(found, key=lambda row: (str(row["address"]), str(row["to"])))
    ]
    heads = ("address", "to", "state", "user", "credit", "unsettled", "load", "latency")
    click.echo(table(rows, heads, left=(0, 1, 2, 3)))


_SHOW: Final[Mapping[str, Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], None]]] = {
    "nodes": _show_nodes,
    "addresses": _show_addresses,
    "legs": _show_legs,
}


def _show_path(where: Where, address: str, *, as_json: bool) -> None:
    async def work(
        there: ManagementClient,
    ) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
        return await _membership(there), await _address(there, address)

    member, found = _ask(where, work)
    if found is None:
        raise click.ClickException(
            f"no node within reach of {cell(member['node'])!r} serves {address!r}: amqp-rt mesh show "
            "addresses lists what there is"
        )
    if as_json:
        for route in found["routes"]:
            click.echo(json.dumps(plain({"address": address, **route})))
        return
    click.echo(cell(f"{address}: {_kind(found)}, {_plural(found['instances'], 'node')}"))
    rows = [
        (
            route["node"],
            "up" if route["alive"] else "not alive",
            _shown_cost(route["cost"]),
            route["zone"],
            " > ".join([member["node"], *route["path"]]) + (" > its edge" if route["edge"] else ""),
        )
        for route in found["routes"]
    ]
    click.echo(table(rows, ("node", "state", "cost", "zone", "path"), left=(0, 1, 3, 4)))


@mesh.command()
@client_options
@click.option(
    "--within",
    type=Seconds(),
    default="30s",
    show_default=True,
    help="How long to wait until nothing of others runs there any more; 0 does not wait.",
)
@json_option
def drain(where: Where, within: float, as_json: bool) -> None:
    """Withdraw the addresses of the member, and wait until others have nothing there any more.

    Nothing new is sent there, and paths avoid the member; what is under way is answered. Its own clients are still
    served. A member is drained until its process is started again; stopping the process drains as well, so that this
    command is for a look before the stop. Exit code 3: something was still under way after --within.
    """

    async def work(there: ManagementClient) -> Mapping[str, Any]:
        member = await _membership(there)
        await there.request("DRAIN", type=MEMBERSHIP, name=member["name"])
        member = await _membership(there)
        with trio.move_on_after(within):
            while member["busy"]:
                await trio.sleep(_LOOK_S)
                member = await _membership(there)
        return member

    member = _ask(where, work)
    node = cell(member["node"])
    if as_json:
        click.echo(json.dumps(plain(member)))
        if member["busy"] and within:
            raise click.exceptions.Exit(NOT_READY)
        return
    if not member["busy"]:
        click.echo(f"{node} is drained: nothing of others is under way there")
        return
    left = f"{member['ends']} links of others end there, {member['hops']} pass through it"
    if not within:
        click.echo(f"{node} drains: {left}")
        return
    click.echo(f"{node} drains, but after {within:g} s {left}", err=True)
    raise click.exceptions.Exit(NOT_READY)


@mesh.command()
@client_options
@click.option(
    "--address",
    "addresses",
    metavar="ADDRESS",
    multiple=True,
    help="Ready only if a node within reach serves ADDRESS and is alive. Repeatable.",
)
@click.option("--live", is_flag=True, help="Ask only whether the member answers.")
@json_option
def health(where: Where, addresses: tuple[str, ...], live: bool, as_json: bool) -> None:
    """Tell by the exit code whether the member is ready: for probes of an orchestrator.

    \b
    0  ready: joined with at least one other member (or started without seeds), and not draining
    1  no answer, or no rights, or no member of a mesh
    3  the member answers, but is not ready

    A readiness probe runs it as it is, a liveness probe with --live, which has no exit code 3.
    """  # noqa: D301

    async def work(there: ManagementClient) -> tuple[Mapping[str, Any], list[str]]:
        member = await _membership(there)
        absent = []
        for address in () if live else addresses:
            row = await _address(there, address)
            if row is None or not row["alive"]:
                absent.append(address)
        return member, absent

    member, absent = _ask(where, work)
    ready = bool(member["ready"]) and not absent
    if as_json:
        click.echo(json.dumps(plain({**member, "ready": ready, "absent": absent})))
    else:
        missing = "".join(f"; no node alive serves {cell(each)!r}" for each in absent)
        click.echo(_summary(member) + missing)
    if not live and not ready:
        raise click.exceptions.Exit(NOT_READY)
