"""Program with an outbox: receives orders, writes rows and invoices. It can be killed at a given step.

``python outbox_worker.py URL DATABASE STEP`` kills itself before statement ``STEP // 3`` of its database,
right after it, or a moment later, when some frames are sent; -1 for never. Without orders left, it ends by
itself and prints the number of statements.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from typing import Any

import trio

from amqp_rt import Container
from amqp_rt.outbox import SqliteOutbox


class Mortal:
    """Database whose process kills itself at a step."""

    def __init__(self, path: str, step: int) -> None:
        self.real = sqlite3.connect(path, isolation_level=None)
        self.real.execute("PRAGMA synchronous = FULL")
        self.statement, self.how = divmod(step, 3)
        self.count = -1
        #: Set when the process is to be killed soon.
        self.dying = trio.Event()

    @property
    def in_transaction(self) -> bool:
        return self.real.in_transaction

    def execute(self, statement: str, parameters: tuple[Any, ...] = (), /) -> Any:
        self.count += 1
        if self.statement == self.count and self.how == 0:
            die()
        cursor = self.real.execute(statement, parameters)
        if self.statement == self.count:
            if self.how == 1:
                die()
            self.dying.set()
        return cursor


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def main(url: str, path: str, step: int) -> None:
    database = Mortal(path, step)
    database.real.execute("CREATE TABLE IF NOT EXISTS orders (body TEXT)")
    outbox = SqliteOutbox(database, "shop")

    async def die_soon() -> None:
        await database.dying.wait()
        await trio.sleep(0.02)
        die()

    async with (
        Container("shop") as container,
        container.connect(url, reconnect=None) as peer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(die_soon)
        nursery.start_soon(outbox.run, peer)
        async with peer.receiver("orders", credit=2) as orders:
            while (delivery := await orders.get(within=0.3)) is not None:
                async with outbox.transaction() as work:
                    if work.accept(delivery):
                        database.execute("INSERT INTO orders VALUES (?)", (delivery.body,))
                        work.send("invoices", f"invoice for {delivery.body}")
            await outbox.flush()
        # Leave the broker's dispositions time to arrive.
        await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    print(database.count + 1)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]))
