"""Program with an inbox and an outbox on SQLAlchemy, which can be killed at a given statement of its database.

``python sql_outbox_worker.py URL DATABASE STATEMENT`` kills itself before the statement, or after it if that is negative
(-1 is after the first one); 0 for never. Without orders left, it ends by itself and prints the number of statements.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import trio
from sql_shop import declare, nodes_of
from sqlalchemy import create_engine, event

from amqp_rt import Container


async def main(url: str, database: str, statement: int) -> None:
    engine = create_engine(database)
    shop = declare(engine)
    count = 0

    def die_if(due: bool) -> None:
        if due:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(*_: Any) -> None:
        nonlocal count
        count += 1
        die_if(count == statement)

    def after(*_: Any) -> None:
        die_if(count == -statement)

    event.listen(engine, "before_cursor_execute", before)
    event.listen(engine, "after_cursor_execute", after)
    # The commit is a statement too.
    event.listen(engine, "commit", before)
    async with (
        Container("shop", nodes=nodes_of(shop), outbox=shop.outbox) as container,
        container.connect(url, reconnect=None) as peer,
    ):
        await peer.serve()
        seen = -1
        while seen != count or await shop.outbox.pending():
            seen = count
            await trio.sleep(0.3)
    print(count)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]))
