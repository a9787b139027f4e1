"""Program with inboxes and outboxes on SQLAlchemy, which can be killed at a given statement of their database.

It reads lines ``[URL, DATABASE, STATEMENT]`` of JSON. For each it forks a process, which kills itself before the statement, or after it
if that is negative (-1 is after the first one), or ends by itself without orders left; and writes a line with its exit status.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any

import trio
from sql_shop import declare, engine_of, nodes_of
from sqlalchemy import event

from amqp_rt import Container


async def main(url: str, database: str, statement: int) -> None:
    """Work until the orders are done, or until *statement*."""
    engine = engine_of(database)
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


def run(url: str, database: str, statement: int) -> int:
    """Run :func:`main` in a process of its own, and return its exit status."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        trio.run(main, url, database, statement)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    for line in sys.stdin:
        print(run(*json.loads(line)), flush=True)
