"""A shop of five members of one mesh, each a process of its own, without a broker.

    python examples/mesh/main.py [--kill] [--orders 60]

======== =========================================================================
prices-1 ``price/{sku}``; one of two instances, which share the calls
prices-2 the other one
stock    ``stock/{sku}``, and a copy of each message to ``audit/sales``
orders   ``order``: asks for price and stock, and tells the audit
audit    ``audit/sales``; the other members find each other by its URL
======== =========================================================================

The gateway is a sixth process: a plain AMQP client, connected with the member ``stock``, which does not serve what the
gateway asks for. It is written on rhea in JavaScript; where node or rhea is missing (``npm install rhea``), the same is done in
Python.

With ``--kill``, prices-1 is killed in the middle (SIGKILL), and started again later: the orders go on. At the end the books are
compared. The whole takes less than half a minute, a minute at most; Ctrl-C closes the shop early.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import trio

HERE = Path(__file__).parent
#: Members other than the first, which is their seed.
OTHERS = ("prices-1", "prices-2", "stock", "orders")
SEED = "audit"
LIMIT_S = 60.0


class Member:
    """Process of one member, or of the gateway."""

    def __init__(self, name: str, process: trio.Process) -> None:
        self.name = name
        self.process = process
        self.url = ""
        self.ready = trio.Event()
        self.ended = trio.Event()

    async def read(self, hear: Callable[[str, dict[str, Any]], None]) -> None:
        """Pass on each event that the process prints, until it ends."""
        assert self.process.stdout is not None
        rest = b""
        async for data in self.process.stdout:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                event = json.loads(line)
                if "ready" in event:
                    self.url = event["ready"]
                    self.ready.set()
                else:
                    hear(self.name, event)
        await self.process.wait()
        self.ready.set()
        self.ended.set()

    async def stop(self) -> None:
        """Let the process end by itself, and wait for it; kill one that does not."""
        assert self.process.stdin is not None
        with trio.CancelScope(shield=True):
            with trio.move_on_after(10):
                await self.process.stdin.aclose()
                await self.process.wait()
            self.process.kill()
            await self.process.wait()


class Shop:
    """The processes, and what they have said.

    Args:
        nursery: For the tasks that read from the processes.
        kill_at: Number of the sale after which prices-1 is killed; 0 for never.
        back_at: Number of the sale after which it is started again.
    """

    def __init__(self, nursery: trio.Nursery, *, kill_at: int, back_at: int) -> None:
        self._nursery = nursery
        self.kill_at, self.back_at = kill_at, back_at
        self.members: dict[str, Member] = {}
        self.sales: dict[int, dict[str, Any]] = {}
        self.failed = 0
        self.booked: Counter[int] = Counter()
        self.picked: Counter[int] = Counter()
        self.cents = 0
        self.closing = False

    async def start(self, name: str, *command: str) -> Member:
        """Start a process."""
        # Without a session of its own it would get the Ctrl-C that is for this program, which stops it in order.
        process = await trio.lowlevel.open_process(
            command or [sys.executable, "members.py", name, *self.seeds],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=HERE,
            start_new_session=True,
        )
        member = self.members[name] = Member(name, process)
        self._nursery.start_soon(member.read, self.hear)
        return member

    @property
    def seeds(self) -> list[str]:
        """URLs by which a new member finds the others."""
        return [self.members[SEED].url] if SEED in self.members else []

    async def open(self) -> bool:
        """Start all members, and wait until they have found each other; return whether they have."""
        await (await self.start(SEED)).ready.wait()
        for name in OTHERS:
            await self.start(name)
        for name in OTHERS:
            await self.members[name].ready.wait()
        return all(each.url for each in self.members.values())

    def hear(self, name: str, event: dict[str, Any]) -> None:
        """Note and print one event."""
        match event:
            case {"serving": nodes} if not self.closing:
                print(f"{'':20}{name}: prices come from {' and '.join(nodes) or 'no instance'}")
            case {"booked": number, "total": total}:
                self.booked[number] += 1
                self.cents += round(100 * total)
            case {"picked": number}:
                self.picked[number] += 1
            case {"failed": reason}:
                self.failed += 1
                print(f"    an order failed: {reason}")
            case {"number": number}:
                self.sales[number] = event
                print(
                    f"    order {number:3}   {event['count']} x {event['sku']:9}"
                    f"{event['total']:8.2f}   price by {event['priced_by']}, {event['left']} left"
                )
                self._after(len(self.sales))

    def _after(self, sold: int) -> None:
        if sold == self.kill_at:
            print("\n--- kill -9 prices-1 ---\n")
            self.members["prices-1"].process.kill()
        elif sold == self.back_at and self.kill_at:
            print("\n--- prices-1 is started again ---\n")
            self._nursery.start_soon(self.start, "prices-1")

    async def close(self) -> None:
        """Stop the processes; members that leave let others finish what is under way."""
        self.closing = True
        if (gateway := self.members.pop("gateway", None)) is not None:
            gateway.process.terminate()
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for member in self.members.values():
                    nursery.start_soon(member.stop)


@asynccontextmanager
async def a_shop(*, kill_at: int, back_at: int) -> AsyncIterator[Shop]:
    """Run the processes as long as the block lasts."""
    async with trio.open_nursery() as nursery:
        shop = Shop(nursery, kill_at=kill_at, back_at=back_at)
        try:
            yield shop
        finally:
            await shop.close()
            nursery.cancel_scope.cancel()


def gateway(url: str, orders: int) -> tuple[list[str], str]:
    """Return the command that runs the gateway, and what to say about it."""
    host, _, port = url.removeprefix("amqp://").partition(":")
    node = shutil.which("node")
    if node is None:
        missing = "node is not installed"
    else:
        found = subprocess.run(
            [node, "gateway.js", "--check"], cwd=HERE, capture_output=True, text=True, check=False
        )
        if found.returncode == 0:
            said = f"rhea {found.stdout.strip()}, a plain AMQP client"
            return [node, "gateway.js", host, port, str(orders)], said
        missing = "rhea is not installed (npm install rhea)"
    command = [sys.executable, "gateway.py", host, port, str(orders)]
    return command, f"a Python client, since {missing}"


async def run(*, kill: bool, orders: int) -> bool:
    """Open the shop, sell, and close it; return whether the books are right."""
    print("The shop opens: five members, each of which needs the address of one other.\n")
    kill_at = orders // 4 if kill else 0
    async with a_shop(kill_at=kill_at, back_at=orders // 3) as shop:
        with trio.move_on_after(LIMIT_S) as limit:
            if not await shop.open():
                return False  # a member has ended, and has said why
            for member in shop.members.values():
                print(f"    {member.name:9} {member.url}")
            command, said = gateway(shop.members["stock"].url, orders)
            print(f"    {'gateway':9} {said}, connected with stock\n")
            await (await shop.start("gateway", *command)).ended.wait()
        if limit.cancelled_caught:
            print(f"\nThe shop was not done after {LIMIT_S:g} seconds.")
    return books_agree(shop, orders)


def books_agree(shop: Shop, orders: int) -> bool:
    """Print the books; return whether each order was sold, booked and picked exactly once."""
    by = Counter(sale["priced_by"] for sale in shop.sales.values())
    shares = ", ".join(f"{count} by {name}" for name, count in sorted(by.items()))
    print(f"\n{len(shop.sales)} of {orders} orders sold, {shop.failed} failed; prices: {shares}")
    total = sum(round(100 * sale["total"]) for sale in shop.sales.values())
    for what, seen in (("booked by audit", shop.booked), ("picked by stock", shop.picked)):
        print(f"{len(seen)} {what}, {seen.total() - len(seen)} of them twice")
    print(f"{total / 100:.2f} taken, {shop.cents / 100:.2f} booked")
    once = Counter(range(1, orders + 1))
    agree = shop.booked == shop.picked == once == Counter(dict.fromkeys(shop.sales, 1))
    print("The books agree." if agree and total == shop.cents else "The books do NOT agree.")
    return agree and total == shop.cents


@click.command()
@click.option("--kill", is_flag=True, help="Kill one of the two price members in the middle.")
@click.option("--orders", type=click.IntRange(12, 400), default=60, show_default=True)
def main(kill: bool, orders: int) -> None:
    """Run a shop of five members of one mesh."""
    try:
        agree = trio.run(lambda: run(kill=kill, orders=orders))
    except KeyboardInterrupt:
        print("\nThe shop is closed.")
        sys.exit(130)
    except BaseExceptionGroup as group:
        if group.split(KeyboardInterrupt)[1] is not None:
            raise
        print("\nThe shop is closed.")
        sys.exit(130)
    sys.exit(not agree)


if __name__ == "__main__":
    main()
