"""Batches through a store alone: each puts messages, and removes those of the batch before."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from amqp_rt.broker.broker import store_of
from amqp_rt.stores.base import ChangeSet

#: Bytes of a message.
SIZE = 1024


@contextlib.contextmanager
def _url(kind: str, tests: str) -> Iterator[str]:
    """Give the URL of an empty store; that of PostgreSQL is in a server of its own on this machine."""
    if kind == "SQLite":
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite:{folder}/store"
        return
    sys.path.insert(0, tests)
    from postgresql import running_cluster

    with running_cluster("shared_buffers=128MB") as cluster:
        yield cluster.url(cluster.create_database())


def store(options: dict[str, Any], say: Any) -> None:
    """Commit batches of ``size`` messages to a store of ``kind`` for ``seconds``."""
    size = options["size"]
    with _url(options["kind"], options["tests"]) as url:
        store = store_of(url)
        assert store is not None
        store.open()
        say(ready=1)
        sequences = count(1)
        before: list[int] = []
        done = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < options["seconds"]:
            batch = ChangeSet()
            for sequence in before:
                batch.remove(1, sequence)
            before = [next(sequences) for _ in range(size)]
            for sequence in before:
                batch.put(1, sequence, b"head of a message", bytes(SIZE))
            store.commit(batch)
            done += size
        store.close()
    say(n=done, elapsed=elapsed)
