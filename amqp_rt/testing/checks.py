"""Checks of a store that run anywhere: in pytest, in a script, in a plug-in's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from ..stores.base import (
    NODE_MAX,
    PIECE_MAX,
    RECORD_MAX,
    SEQUENCE_MAX,
    ChangeSet,
    Chunk,
    OpenResult,
    Store,
    StoreBusy,
    StoreFailed,
    StoreRefused,
)

__all__ = ["STORE_CHECKS", "check_store"]

E = TypeVar("E", bound=Exception)


def check_store(make: Callable[[], Store]) -> None:
    """Check that the stores *make* returns keep the contract of a store.

    Args:
        make: Returns an empty store that has not been opened. Each check takes a new one.

    Raises:
        AssertionError: A check failed; its name is in the traceback.
    """
    for check in STORE_CHECKS:
        store = make()
        assert store.open() == OpenResult(clean=True), "a new store is clean"
        try:
            check(store)
        finally:
            store.close()


def _reopen(store: Store) -> None:
    store.close()
    assert store.open() == OpenResult(clean=True), "closed in good order, opened clean"


def _raises(kind: type[E], call: Callable[[], object]) -> E:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def _commit(store: Store, fill: Callable[[ChangeSet], None]) -> None:
    batch = ChangeSet()
    fill(batch)
    store.commit(batch)


def _fill(store: Store, node: int, *sequences: int, size: int = 10) -> None:
    batch = ChangeSet()
    for sequence in sequences:
        batch.put(node, sequence, b"h%d" % sequence, _payload(sequence, size))
    store.commit(batch)


def _payload(sequence: int, size: int) -> bytes:
    return (b"%d." % sequence * size)[:size]


def _sequences(store: Store, node: int) -> list[int]:
    """Return the sequence numbers of a node, after comparing all ways to read them."""
    there = [head.sequence for head in store.heads(node)]
    assert [m.sequence for m in store.messages(node, 0, 1_000_000, 2**40)] == there
    assert [m.sequence for m in store.read(node, there)] == there
    count, _, first, last = store.summary(node)
    assert (count, first, last) == ((len(there), there[0], there[-1]) if there else (0, -1, -1))
    return there


def _bytes(store: Store, node: int) -> int:
    total = sum(head.size for head in store.heads(node))
    assert store.summary(node)[1] == total
    return total


def nothing_is_there_at_first(store: Store) -> None:
    assert store.facts("node") == []
    assert store.messages(0, 0, 10, 10) == []
    assert store.read(1, [1, 2]) == []
    assert list(store.heads(NODE_MAX)) == []
    assert store.summary(0) == (0, 0, -1, -1)
    assert store.piece(0, 0, 0) == b""
    assert store.chunks(0, 0, 10) == []
    assert store.chunk_at(0, 0) is None
    assert store.extent(0) == (0, 0, 0)
    while store.tidy():
        pass


def an_empty_batch_changes_nothing(store: Store) -> None:
    batch = ChangeSet()
    assert not batch
    store.commit(batch)
    assert store.summary(0) == (0, 0, -1, -1)


def messages_come_back_as_they_were_put(store: Store) -> None:
    everything = bytes(range(256))
    _commit(store, lambda batch: batch.put(3, 7, everything, everything * 100))
    for _ in range(2):
        (found,) = store.messages(3, 0, 10, 10)
        assert (found.sequence, found.head, found.payload, found.pieces) == (
            7,
            everything,
            everything * 100,
            0,
        )
        assert store.read(3, [7]) == [found]
        (head,) = store.heads(3)
        assert (head.sequence, head.head, head.size, head.pieces) == (7, everything, 25_600, 0)
        assert store.summary(3) == (1, 25_600, 7, 7)
        _reopen(store)


def empty_heads_and_payloads_are_kept(store: Store) -> None:
    _commit(store, lambda batch: batch.put(0, 0, b"", b""))
    _reopen(store)
    (found,) = store.messages(0, 0, 1, 0)
    assert (found.sequence, found.head, found.payload, found.pieces) == (0, b"", b"", 0)
    assert store.summary(0) == (1, 0, 0, 0)


def order_is_that_of_sequence_numbers(store: Store) -> None:
    for sequences in [(5, 9, 7), (1, 8), (1000, 0), (256, 255, 2**32, 2**31)]:
        _fill(store, 4, *sequences)
    expected = [0, 1, 5, 7, 8, 9, 255, 256, 1000, 2**31, 2**32]
    assert _sequences(store, 4) == expected
    _reopen(store)
    assert _sequences(store, 4) == expected
    assert [m.sequence for m in store.messages(4, 6, 3, 2**40)] == [7, 8, 9]
    assert [m.sequence for m in store.read(4, [9, 6, 1, 9])] == [9, 1, 9]


def nodes_do_not_touch(store: Store) -> None:
    for node in (0, 1, 2, NODE_MAX - 1, NODE_MAX):
        _fill(store, node, 0, SEQUENCE_MAX)
    for node in (0, 1, 2, NODE_MAX - 1, NODE_MAX):
        assert _sequences(store, node) == [0, SEQUENCE_MAX]
        assert store.messages(node, SEQUENCE_MAX, 10, 2**40)[0].sequence == SEQUENCE_MAX
    _commit(store, lambda batch: batch.clear(1))
    assert [len(_sequences(store, node)) for node in (0, 1, 2)] == [2, 0, 2]


def reading_stops_at_count_and_size(store: Store) -> None:
    _fill(store, 1, *range(20), size=100)
    for count, size_max, expected in [
        (5, 10_000, 5),
        (0, 10_000, 0),
        (20, 0, 1),
        (20, 1, 1),
        (20, 100, 1),
        (20, 101, 2),
        (20, 200, 2),
        (20, 1999, 20),
        (20, 1900, 19),
        (3, 10**15, 3),
    ]:
        found = store.messages(1, 0, count, size_max)
        assert [m.sequence for m in found] == list(range(expected)), (count, size_max)


def a_place_put_again_has_what_came_last(store: Store) -> None:
    _fill(store, 1, 5, size=1000)
    _commit(store, lambda batch: batch.put(1, 5, b"new", b"shorter"))
    assert _sequences(store, 1) == [5]
    assert store.messages(1, 0, 1, 1)[0].payload == b"shorter"
    assert _bytes(store, 1) == 7


def heads_are_updated(store: Store) -> None:
    def first(batch: ChangeSet) -> None:
        batch.put(1, 1, b"old", b"one")
        batch.put(1, 2, b"old", b"two")
        batch.update(1, 2, b"at once")
        batch.update(1, 3, b"of nothing")

    _commit(store, first)
    _commit(store, lambda batch: batch.update(1, 1, b"something much longer" * 100))
    _reopen(store)
    assert [(m.head, m.payload) for m in store.messages(1, 0, 9, 99)] == [
        (b"something much longer" * 100, b"one"),
        (b"at once", b"two"),
    ]


def removed_messages_are_gone(store: Store) -> None:
    _fill(store, 1, *range(10))

    def fill(batch: ChangeSet) -> None:
        for sequence in (0, 3, 9, 55):
            batch.remove(1, sequence)
        batch.put(1, 20, b"", b"never mind")
        batch.remove(1, 20)
        batch.update(1, 4, b"seen")
        batch.remove(1, 4)

    _commit(store, fill)
    for _ in range(2):
        assert _sequences(store, 1) == [1, 2, 5, 6, 7, 8]
        assert _bytes(store, 1) == 60
        _reopen(store)


def pieces_belong_to_their_message(store: Store) -> None:
    pieces = [_payload(index, 3000) for index in range(5)]

    def stage(batch: ChangeSet) -> None:
        for index, data in enumerate(pieces[:3]):
            batch.piece(2, 8, index, data)

    def rest(batch: ChangeSet) -> None:
        batch.piece(2, 8, 3, pieces[3])
        batch.piece(2, 8, 4, pieces[4])
        batch.put(2, 8, b"large", b"")

    _commit(store, stage)
    assert _sequences(store, 2) == []
    assert store.piece(2, 8, 0) == pieces[0]
    _commit(store, rest)
    for _ in range(2):
        assert _sequences(store, 2) == [8]
        assert [store.piece(2, 8, index) for index in range(6)] == [*pieces, b""]
        assert store.piece(2, 9, 0) == store.piece(3, 8, 0) == b""
        assert store.read(2, [8])[0].pieces == 5
        (head,) = store.heads(2)
        assert (head.size, head.pieces) == (15_000, 5)
        assert _bytes(store, 2) == 15_000
        _commit(store, lambda batch: batch.update(2, 8, b"seen"))
        _reopen(store)
    _commit(store, lambda batch: batch.remove(2, 8))
    assert [store.piece(2, 8, index) for index in range(5)] == [b""] * 5
    assert _sequences(store, 2) == []


def pieces_are_put_again(store: Store) -> None:
    def fill(batch: ChangeSet) -> None:
        batch.piece(2, 8, 0, b"first")
        batch.put(2, 8, b"", b"")

    _commit(store, fill)
    _commit(store, lambda batch: batch.remove(2, 8))
    _commit(store, lambda batch: batch.piece(2, 8, 0, b"second try"))
    assert store.piece(2, 8, 0) == b"second try"
    _commit(store, lambda batch: batch.put(2, 8, b"", b""))
    assert _bytes(store, 2) == 10


def pieces_without_message_are_dropped(store: Store) -> None:
    def fill(batch: ChangeSet) -> None:
        batch.piece(2, 8, 0, b"of nothing")
        batch.piece(2, 9, 0, b"of something")
        batch.put(2, 9, b"", b"")

    _commit(store, fill)
    _reopen(store)
    assert store.piece(2, 8, 0) == b""
    assert store.piece(2, 9, 0) == b"of something"
    _commit(store, lambda batch: batch.put(2, 8, b"", b""))
    assert store.read(2, [8])[0].pieces == 0


def put_and_removed_at_once_leaves_no_piece(store: Store) -> None:
    def fill(batch: ChangeSet) -> None:
        batch.piece(2, 8, 0, b"gone")
        batch.put(2, 8, b"", b"")
        batch.remove(2, 8)

    _commit(store, fill)
    assert store.piece(2, 8, 0) == b""
    assert _sequences(store, 2) == []


def messages_move_with_their_pieces(store: Store) -> None:
    def fill(batch: ChangeSet) -> None:
        batch.put(1, 1, b"small", b"payload")
        batch.piece(1, 2, 0, b"one")
        batch.piece(1, 2, 1, b"two")
        batch.put(1, 2, b"large", b"")

    def move(batch: ChangeSet) -> None:
        batch.move(1, 1, 5, 40, b"small, moved")
        batch.move(1, 2, 5, 41, b"large, moved")
        batch.move(1, 3, 5, 42, b"nothing")

    _commit(store, fill)
    _commit(store, move)
    for _ in range(2):
        assert _sequences(store, 1) == []
        assert _sequences(store, 5) == [40, 41]
        assert [m.head for m in store.read(5, [40, 41])] == [b"small, moved", b"large, moved"]
        assert store.read(5, [40])[0].payload == b"payload"
        assert store.read(5, [41])[0].pieces == 2
        assert [store.piece(5, 41, index) for index in range(3)] == [b"one", b"two", b""]
        assert store.piece(1, 2, 0) == b""
        assert _bytes(store, 5) == 13
        _reopen(store)


def messages_may_share_a_payload(store: Store) -> None:
    payload = _payload(1, 5000)

    def fill(batch: ChangeSet) -> None:
        for node in range(1, 8):
            batch.put(node, 1, b"h%d" % node, payload)
        assert batch.size < 2 * len(payload), "a shared payload counts once"

    def change(batch: ChangeSet) -> None:
        batch.put(1, 1, b"h1", b"its own")
        batch.update(2, 1, b"h2, updated")
        batch.remove(3, 1)
        batch.clear(4)
        batch.drop(5, 0, 9)
        batch.move(6, 1, 16, 2, b"h6, moved")

    def check_message(node: int, sequence: int, head: bytes) -> None:
        (found,) = store.messages(node, 0, 10, 2**40)
        assert (found.sequence, found.head, found.payload, found.pieces) == (
            sequence,
            head,
            payload,
            0,
        )
        assert store.read(node, [sequence]) == [found]
        (known,) = store.heads(node)
        assert (known.head, known.size, known.pieces) == (head, len(payload), 0)
        assert store.summary(node) == (1, len(payload), sequence, sequence)
        assert store.piece(node, sequence, 0) == b""
        bodies.add(found.body)

    bodies: set[int] = set()
    _commit(store, fill)
    for _ in range(2):
        for node in range(1, 8):
            check_message(node, 1, b"h%d" % node)
        assert len(bodies) == 1, "equal numbers for what is shared"
        _reopen(store)
    _commit(store, change)
    for _ in range(2):
        assert store.messages(1, 0, 10, 2**40)[0].payload == b"its own"
        check_message(2, 1, b"h2, updated")
        assert [_sequences(store, node) for node in (3, 4, 5, 6)] == [[], [], [], []]
        check_message(16, 2, b"h6, moved")
        check_message(7, 1, b"h7")
        assert len(bodies) == 1
        while store.tidy():
            pass
        _reopen(store)


def moved_messages_survive_the_clearing_of_their_old_node(store: Store) -> None:
    _fill(store, 1, 1, 2, 3)

    def fill(batch: ChangeSet) -> None:
        batch.clear(2)
        batch.move(1, 1, 2, 1, b"moved")
        batch.move(1, 2, 3, 2, b"moved")
        batch.clear(3)
        batch.clear(1)

    _fill(store, 2, 0, 1, 9)
    _fill(store, 3, 0)
    _commit(store, fill)
    for _ in range(2):
        assert [_sequences(store, node) for node in (1, 2, 3)] == [[], [1], []]
        assert store.read(2, [1])[0].head == b"moved"
        assert store.read(2, [1])[0].payload == _payload(1, 10)
        _reopen(store)


def spilled_messages_are_gone_when_opened_again(store: Store) -> None:
    def fill(batch: ChangeSet) -> None:
        for sequence in range(0, 10, 2):
            batch.put(1, sequence, b"kept", b"durable")
            batch.put(1, sequence + 1, b"spilled", b"volatile", spilled=True)
        batch.piece(1, 20, 0, b"volatile too")
        batch.put(1, 20, b"spilled", b"", spilled=True)

    _commit(store, fill)
    assert _sequences(store, 1) == [*range(10), 20]
    assert [m.payload for m in store.messages(1, 1, 2, 99)] == [b"volatile", b"durable"]
    assert store.piece(1, 20, 0) == b"volatile too"
    assert store.read(1, [20])[0].pieces == 1

    def change(batch: ChangeSet) -> None:
        batch.move(1, 1, 2, 0, b"moved")
        batch.update(1, 3, b"updated")
        batch.remove(1, 5)
        batch.remove(1, 0)

    _commit(store, change)
    assert _sequences(store, 1) == [2, 3, 4, 6, 7, 8, 9, 20]
    assert [(m.head, m.payload) for m in store.read(2, [0])] == [(b"moved", b"volatile")]
    assert [m.head for m in store.read(1, [3])] == [b"updated"]
    assert _bytes(store, 1) == 2 * 8 + 8 + 4 * 7 + 8 + 12 - 8
    _reopen(store)
    assert _sequences(store, 1) == [2, 4, 6, 8]
    assert _sequences(store, 2) == []
    assert store.piece(1, 20, 0) == b""


def spilled_messages_are_cleared(store: Store) -> None:
    for sequence in range(3):
        _commit(store, lambda batch, s=sequence: batch.put(1, s, b"", b"x", spilled=True))  # type: ignore[misc]
    _commit(store, lambda batch: batch.clear(1))
    assert _sequences(store, 1) == []
    _fill(store, 1, 1)
    assert _sequences(store, 1) == [1]


def a_message_may_become_durable(store: Store) -> None:
    _commit(store, lambda batch: batch.put(1, 1, b"", b"volatile", spilled=True))
    _commit(store, lambda batch: batch.put(1, 1, b"", b"durable"))
    _commit(store, lambda batch: batch.put(1, 2, b"", b"durable"))
    _commit(store, lambda batch: batch.put(1, 2, b"", b"volatile", spilled=True))
    assert [m.payload for m in store.messages(1, 0, 9, 99)] == [b"durable", b"volatile"]
    _reopen(store)
    assert [m.payload for m in store.messages(1, 0, 9, 99)] == [b"durable"]


def facts_are_kept_in_order_of_their_keys(store: Store) -> None:
    keys = [b"b", b"", b"a\0", b"a", b"\xff", b"aa", b"B", bytes(range(256))]

    def fill(batch: ChangeSet) -> None:
        for key in keys:
            batch.put_fact("binding", key, b"value of " + key)
        batch.put_fact("cursor", b"a", b"")
        batch.put_fact("épingle", b"a", b"x")

    _commit(store, fill)
    for _ in range(2):
        assert store.facts("binding") == [(key, b"value of " + key) for key in sorted(keys)]
        assert store.facts("cursor") == [(b"a", b"")]
        assert store.facts("épingle") == [(b"a", b"x")]
        assert store.facts("bind") == []
        _reopen(store)

    def change(batch: ChangeSet) -> None:
        batch.put_fact("binding", b"a", b"new")
        batch.remove_fact("binding", b"b")
        batch.remove_fact("binding", b"unknown")
        batch.put_fact("cursor", b"b", b"1")
        batch.remove_fact("cursor", b"b")
        batch.remove_fact("cursor", b"a")
        batch.put_fact("cursor", b"a", b"2")

    _commit(store, change)
    for _ in range(2):
        facts = dict(store.facts("binding"))
        assert facts[b"a"] == b"new"
        assert b"b" not in facts
        assert len(facts) == len(keys) - 1
        assert store.facts("cursor") == [(b"a", b"2")]
        _reopen(store)


def _chunk(offset: int, count: int, first_ms: int, last_ms: int, size: int = 100) -> Chunk:
    return Chunk(offset, count, first_ms, last_ms, _payload(offset, size))


def _append(store: Store, log: int, *chunks: Chunk) -> None:
    batch = ChangeSet()
    for chunk in chunks:
        batch.append(log, chunk)
    store.commit(batch)


def logs_are_read_from_any_offset(store: Store) -> None:
    chunks = [
        _chunk(0, 10, 5, 9),
        _chunk(10, 1, 9, 9),
        _chunk(11, 89, 9, 20),
        _chunk(100, 5, 20, 21),
    ]
    _append(store, 6, *chunks[:2])
    _append(store, 6, *chunks[2:])
    _append(store, 7, _chunk(0, 1, 0, 0))
    for _ in range(2):
        assert store.extent(6) == (0, 105, 400)
        for offset, index in [(0, 0), (9, 0), (10, 1), (11, 2), (99, 2), (100, 3), (104, 3)]:
            assert store.chunks(6, offset, 1) == [chunks[index]]
            assert store.chunks(6, offset, 2**40) == chunks[index:]
        assert store.chunks(6, 105, 1) == []
        assert store.chunks(6, 0, 0) == chunks[:1]
        assert store.chunks(6, 0, 100) == chunks[:1]
        assert store.chunks(6, 0, 101) == chunks[:2]
        _reopen(store)


def logs_leave_no_gap(store: Store) -> None:
    _append(store, 6, _chunk(50, 10, 0, 0))
    assert store.extent(6) == (50, 60, 100)
    for offset in (0, 50, 59, 61, 1000):
        batch = ChangeSet()
        batch.put(1, 1, b"", b"beside it")
        batch.append(6, _chunk(offset, 1, 0, 0))
        _raises(StoreRefused, lambda batch=batch: store.commit(batch))  # type: ignore[misc]
    batch = ChangeSet()
    batch.append(6, _chunk(60, 1, 0, 0))
    batch.append(6, _chunk(62, 1, 0, 0))
    _raises(StoreRefused, lambda: store.commit(batch))
    assert store.extent(6) == (50, 60, 100)
    assert _sequences(store, 1) == []
    _append(store, 6, _chunk(60, 1, 0, 0), _chunk(61, 1, 0, 0))
    assert store.extent(6) == (50, 62, 300)


def logs_are_trimmed_by_whole_chunks(store: Store) -> None:
    chunks = [_chunk(offset, 10, offset, offset + 9) for offset in range(0, 100, 10)]
    _append(store, 6, *chunks)
    for offset, first in [(0, 0), (9, 0), (10, 10), (35, 30), (20, 30)]:
        _commit(store, lambda batch, offset=offset: batch.trim(6, offset))  # type: ignore[misc]
        assert store.extent(6) == (first, 100, (100 - first) * 10)
        assert store.chunks(6, 0, 1) == [chunks[first // 10]]
        found = store.chunk_at(6, 0)
        assert found == chunks[first // 10]
    _reopen(store)
    assert store.extent(6) == (30, 100, 700)
    while store.tidy():
        pass
    assert store.chunks(6, 0, 2**40) == chunks[3:]

    def both(batch: ChangeSet) -> None:
        batch.append(6, _chunk(100, 10, 100, 109))
        batch.trim(6, 110)
        batch.trim(99, 5)

    _commit(store, both)
    for _ in range(2):
        assert store.extent(6) == (110, 110, 0)
        assert store.chunks(6, 0, 1) == []
        assert store.chunk_at(6, 0) is None
        assert store.extent(99) == (0, 0, 0)
        _reopen(store)
    _append(store, 6, _chunk(110, 1, 5, 5))
    assert store.extent(6) == (110, 111, 100)
    assert store.chunk_at(6, 0) == _chunk(110, 1, 5, 5)


def chunks_are_found_by_time(store: Store) -> None:
    # The wall clock was set back between these chunks.
    times = [(10, 20), (20, 20), (20, 40), (35, 36), (30, 50), (50, 50), (50, 70)]
    chunks = [_chunk(n * 3, 3, first, last) for n, (first, last) in enumerate(times)]
    _append(store, 6, *chunks)
    _append(store, 5, _chunk(0, 1, 1000, 1000))
    for trimmed in range(len(chunks) + 1):
        _commit(store, lambda batch, offset=trimmed * 3: batch.trim(6, offset))  # type: ignore[misc]
        for time_ms in range(75):
            expected = next((c for c in chunks[trimmed:] if c.last_ms >= time_ms), None)
            assert store.chunk_at(6, time_ms) == expected, (trimmed, time_ms)


def clearing_forgets_messages_pieces_and_chunks(store: Store) -> None:
    _fill(store, 1, *range(100, 200))
    _append(store, 1, _chunk(0, 10, 0, 0), _chunk(10, 10, 0, 0))

    def fill(batch: ChangeSet) -> None:
        batch.piece(1, 300, 0, b"piece")
        batch.put(1, 300, b"", b"")
        batch.piece(1, 301, 0, b"piece")
        batch.put_fact("node", b"1", b"stays")

    _commit(store, fill)
    _fill(store, 2, 1)
    before = ChangeSet()
    before.put(1, 400, b"", b"before")
    before.clear(1)
    before.put(1, 150, b"", b"after")
    store.commit(before)
    for _ in range(2):
        assert _sequences(store, 1) == [150]
        assert store.messages(1, 0, 10, 99)[0].payload == b"after"
        assert store.extent(1) == (0, 0, 0)
        assert store.chunks(1, 0, 99) == []
        assert store.chunk_at(1, 0) is None
        assert store.piece(1, 300, 0) == store.piece(1, 301, 0) == b""
        assert store.facts("node") == [(b"1", b"stays")]
        assert _sequences(store, 2) == [1]
        _reopen(store)
    _append(store, 1, _chunk(5, 1, 0, 0))
    assert store.extent(1) == (5, 6, 100)
    assert store.chunks(1, 0, 999) == [_chunk(5, 1, 0, 0)]


def a_node_is_filled_again_while_it_is_cleared(store: Store) -> None:
    """Clearing may take several steps of housekeeping; reads never see the old messages."""
    _fill(store, 1, *range(5000), size=100)
    _append(store, 1, *[_chunk(offset, 1, 0, 0) for offset in range(2000)])
    _commit(store, lambda batch: batch.clear(1))
    expected: list[int] = []
    for sequence in (0, 1, 2, 700, 699, 4999, 5000, 6000):
        _fill(store, 1, sequence)
        expected.append(sequence)
        assert _sequences(store, 1) == sorted(expected)
        _append(store, 1, _chunk(10 + len(expected), 1, 0, 0))
        assert store.extent(1) == (11, 11 + len(expected), 100 * len(expected))
        assert len(store.chunks(1, 0, 2**40)) == len(expected)
        store.tidy()
    _reopen(store)
    while store.tidy():
        pass
    assert _sequences(store, 1) == sorted(expected)
    assert len(store.chunks(1, 0, 2**40)) == len(expected)
    _commit(store, lambda batch: batch.clear(1))
    assert _sequences(store, 1) == []
    while store.tidy():
        pass
    assert store.summary(1) == (0, 0, -1, -1)


def what_no_store_can_keep_is_refused(store: Store) -> None:
    large = bytes(RECORD_MAX + 1)
    fills: tuple[Callable[[ChangeSet], None], ...] = (
        lambda batch: batch.put(NODE_MAX + 1, 0, b"", b""),
        lambda batch: batch.put(0, SEQUENCE_MAX + 1, b"", b""),
        lambda batch: batch.put(-1, 0, b"", b""),
        lambda batch: batch.put(0, -1, b"", b""),
        lambda batch: batch.put(0, 0, b"", large),
        lambda batch: batch.put(0, 0, large, b""),
        lambda batch: batch.update(0, 0, large),
        lambda batch: batch.piece(0, 0, 0, large),
        lambda batch: batch.piece(0, 0, PIECE_MAX + 1, b"x"),
        lambda batch: batch.piece(0, 0, 0, b""),
        lambda batch: batch.put_fact("kind", b"key", large),
        lambda batch: batch.append(0, Chunk(0, 1, 0, 0, large)),
        lambda batch: batch.append(0, Chunk(0, 0, 0, 0, b"")),
        lambda batch: batch.append(0, Chunk(SEQUENCE_MAX, 1, 0, 0, b"")),
        lambda batch: batch.move(0, 9, 0, SEQUENCE_MAX + 1, b""),
    )
    for fill in fills:
        batch = ChangeSet()
        batch.put(5, 5, b"", b"beside it")
        fill(batch)
        _raises(StoreRefused, lambda batch=batch: store.commit(batch))  # type: ignore[misc]
        assert _sequences(store, 5) == []
    _fill(store, 5, 5)
    assert _sequences(store, 5) == [5]


def a_large_batch_is_one(store: Store) -> None:
    batch = ChangeSet()
    for sequence in range(3000):
        batch.put(1, sequence, b"head", _payload(sequence, 2000))
    store.commit(batch)
    assert len(_sequences(store, 1)) == 3000
    assert _bytes(store, 1) == 6_000_000
    _reopen(store)
    for message in store.messages(1, 2500, 1000, 2**40):
        assert message.payload == _payload(message.sequence, 2000)


def heads_may_be_read_while_batches_are_committed(store: Store) -> None:
    _fill(store, 1, *range(3000))
    seen = []
    for head in store.heads(1):
        seen.append(head.sequence)
        if head.sequence % 500 == 0:
            _commit(store, lambda batch, head=head: batch.remove(1, head.sequence))  # type: ignore[misc]
    assert seen == list(range(3000))


def it_is_used_between_open_and_close(store: Store) -> None:
    _raises(StoreBusy, store.open)
    store.close()
    store.close()
    for call in (
        lambda: store.commit(ChangeSet()),
        lambda: store.facts("node"),
        lambda: store.messages(1, 1, 1, 1),
        lambda: list(store.heads(1)),
        store.tidy,
    ):
        _raises(StoreFailed, call)
    assert store.open() == OpenResult(clean=True)


#: Each check takes an open and empty store.
STORE_CHECKS: Final[tuple[Callable[[Store], None], ...]] = (
    nothing_is_there_at_first,
    an_empty_batch_changes_nothing,
    messages_come_back_as_they_were_put,
    empty_heads_and_payloads_are_kept,
    order_is_that_of_sequence_numbers,
    nodes_do_not_touch,
    reading_stops_at_count_and_size,
    a_place_put_again_has_what_came_last,
    heads_are_updated,
    removed_messages_are_gone,
    pieces_belong_to_their_message,
    pieces_are_put_again,
    pieces_without_message_are_dropped,
    put_and_removed_at_once_leaves_no_piece,
    messages_move_with_their_pieces,
    messages_may_share_a_payload,
    moved_messages_survive_the_clearing_of_their_old_node,
    spilled_messages_are_gone_when_opened_again,
    spilled_messages_are_cleared,
    a_message_may_become_durable,
    facts_are_kept_in_order_of_their_keys,
    logs_are_read_from_any_offset,
    logs_leave_no_gap,
    logs_are_trimmed_by_whole_chunks,
    chunks_are_found_by_time,
    clearing_forgets_messages_pieces_and_chunks,
    a_node_is_filled_again_while_it_is_cleared,
    what_no_store_can_keep_is_refused,
    a_large_batch_is_one,
    heads_may_be_read_while_batches_are_committed,
    it_is_used_between_open_and_close,
)
