"""Store with known content, so that losses can be compared with the reported damage."""

from __future__ import annotations

from pathlib import Path

from amqp_rt.stores.base import ChangeSet, Chunk, OpenResult
from amqp_rt.stores.sqlite import SQLiteStore

KNOWN = 12


def known_batch(n: int) -> ChangeSet:
    batch = ChangeSet()
    shared = known_payload(n * 25)
    for node in (6, 7):
        batch.put(node, n, b"shared", shared)
    for sequence in range(n * 25, n * 25 + 25):
        batch.put(1 + n % 3, sequence, b"h%d" % sequence, known_payload(sequence))
    batch.put_fact("kind", b"%d" % n, b"value" * 20)
    batch.append(9, Chunk(n * 10, 10, n, n + 1, b"c%d" % n * 300))
    if n % 4 == 0:
        for index in range(3):
            batch.piece(5, n, index, b"x%d" % index * 3000)
        batch.put(5, n, b"in pieces", b"")
    return batch


def known_payload(sequence: int) -> bytes:
    return b"p%d." % sequence * (20 if sequence % 25 else 2000)


def known_store(path: Path, batches: int = KNOWN) -> SQLiteStore:
    store = SQLiteStore(path)
    store.open()
    for n in range(batches):
        store.commit(known_batch(n))
    return store


def count_lost(
    store: SQLiteStore, opened: OpenResult, batches: int = KNOWN, *, shared: bool = True
) -> int:
    """Check that all content is correct and every loss is reported; return the number of lost messages."""

    def named(what: str, node: int, at: int) -> bool:
        return any(
            damage.what in (what, "batch")
            and damage.node in (-1, node)
            and (damage.first < 0 or damage.first <= at <= damage.last)
            for damage in opened.damage
        )

    lost = 0
    for node in (1, 2, 3):
        found = {m.sequence: m for m in store.messages(node, 0, 10**6, 2**40)}
        for n in range(node - 1, batches, 3):
            for sequence in range(n * 25, n * 25 + 25):
                message = found.pop(sequence, None)
                if message is None:
                    lost += 1
                    assert named("message", node, sequence), (node, sequence, opened)
                else:
                    assert message.head == b"h%d" % sequence
                    assert message.payload == known_payload(sequence)
        assert not found
    for node in (6, 7) if shared else ():
        for n in range(batches):
            messages = store.read(node, [n])
            assert messages or named("message", node, n), (node, n, opened)
            assert all(message.payload == known_payload(n * 25) for message in messages)
    facts = store.facts("kind")
    assert all(value == b"value" * 20 for _, value in facts)
    assert len(facts) == batches or named("fact", -1, -1), opened
    chunks = {chunk.offset: chunk for chunk in store.chunks(9, 0, 2**40)}
    for n in range(batches):
        if n * 10 in chunks:
            assert chunks[n * 10] == Chunk(n * 10, 10, n, n + 1, b"c%d" % n * 300)
        else:
            assert named("chunk", 9, n * 10), (n, opened)
    for n in range(0, batches, 4):
        if store.read(5, [n]):
            assert [store.piece(5, n, i) for i in range(3)] == [b"x%d" % i * 3000 for i in range(3)]
        else:
            assert named("message", 5, n), (n, opened)
    return lost


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
