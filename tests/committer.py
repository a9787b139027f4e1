"""Commit batches to the store of the first argument, printing the number of each, until killed.

Batch n puts messages n * 10 to n * 10 + 9 of node 1, removes those of batch n - 3, moves some to node 2
and keeps n as a fact. Message n of nodes 3, 4 and 5 share a payload; batch n + 1 removes the first of
them, and batch n + 2 the others. With a second argument the process kills itself before that call of the disk.
"""

from __future__ import annotations

import os
import signal
import sys

from disks import disk

from amqp_rt.stores.base import ChangeSet
from amqp_rt.stores.sqlite import SQLiteStore

COUNT = 10
BATCHES = 40


def payload(sequence: int) -> bytes:
    return b"%d." % sequence * (3000 if sequence % 10 == 9 else 20)


def batch_of(n: int) -> ChangeSet:
    batch = ChangeSet()
    for sequence in range(n * COUNT, n * COUNT + COUNT):
        batch.put(1, sequence, b"head", payload(sequence))
    if n >= 3:
        for sequence in range((n - 3) * COUNT, (n - 2) * COUNT - 2):
            batch.remove(1, sequence)
        for sequence in range((n - 2) * COUNT - 2, (n - 2) * COUNT):
            batch.move(1, sequence, 2, sequence, b"moved")
    shared = payload(n * COUNT + 9)
    for node in (3, 4, 5):
        batch.put(node, n, b"head", shared)
    if n >= 1:
        batch.remove(3, n - 1)
    if n >= 2:
        batch.remove(4, n - 2)
        batch.drop(5, 0, n - 2)
    batch.put_fact("last", b"batch", b"%d" % n)
    return batch


def main() -> None:
    path = sys.argv[1]
    fatal = int(sys.argv[2]) if len(sys.argv) > 2 else -1

    def before(what: str, number: int) -> None:
        if number == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    with disk(before) as made:
        store = SQLiteStore(path, vfs=made.name)
        store.open()
        last = dict(store.facts("last")).get(b"batch")
        first = 0 if last is None else int(last) + 1
        for n in range(first, first + BATCHES if fatal >= 0 else 10**9):
            store.commit(batch_of(n))
            os.write(1, b"%d\n" % n)
            store.tidy()
        store.close()
        os.write(1, b"calls %d\n" % made.calls)


if __name__ == "__main__":
    main()
