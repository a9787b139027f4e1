"""A store against a small model: random batches, and plain dicts that say what must be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from amqp_rt.stores.base import SHARED_MIN, ChangeSet, Chunk, OpenResult, Store


def check_model(make: Callable[[], Store], *, max_examples: int) -> None:
    """Run random batches on stores from *make*, each of which is empty and not open."""
    machine = type("Machine", (Model,), {"make": staticmethod(make)})
    machine.TestCase.settings = settings(
        max_examples=max_examples,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    machine.TestCase().runTest()


NODES = st.integers(0, 3)
SEQUENCES = st.integers(0, 12)
DATA = st.binary(max_size=12) | st.integers(0, 9000).map(lambda size: b"%d" % size * (size // 4))

#: Payloads that messages share, as they are the same objects.
SHARED = st.sampled_from([bytes([n]) * (SHARED_MIN + n) for n in range(3)])


class Model(RuleBasedStateMachine):
    """Random batches, now and then reopened; a plain dict says what must be there."""

    make: Callable[[], Store]

    def __init__(self) -> None:
        super().__init__()
        self.store = type(self).make()
        self.store.open()
        #: place → head, payload, spilled, pieces
        self.messages: dict[tuple[int, int], tuple[bytes, bytes, bool, list[bytes]]] = {}
        self.staged: dict[tuple[int, int], list[bytes]] = {}
        self.facts: dict[tuple[str, bytes], bytes] = {}
        self.logs: dict[int, tuple[list[Chunk], int]] = {}

    def teardown(self) -> None:
        self.store.close()

    @rule(data=st.data())
    def commit(self, data: Any) -> None:
        batch = ChangeSet()
        messages, staged = dict(self.messages), dict(self.staged)
        named: set[tuple[int, int]] = set()
        logs = {log: (list(chunks), end) for log, (chunks, end) in self.logs.items()}
        for node in data.draw(
            st.sets(NODES, max_size=1) if data.draw(st.booleans()) else st.just(())
        ):
            batch.clear(node)
            messages = {place: put for place, put in messages.items() if place[0] != node}
            staged = {place: put for place, put in staged.items() if place[0] != node}
            logs.pop(node, None)
        for kind in data.draw(st.lists(st.sampled_from("pPusSmrR"), max_size=8)):
            place = data.draw(st.tuples(NODES, SEQUENCES))
            if place in named:
                continue
            named.add(place)
            if kind in "ps" and place not in staged:
                head, payload = data.draw(DATA), data.draw(DATA | SHARED)
                if place in messages and messages[place][3]:
                    continue  # Pieces and a payload exclude each other.
                batch.put(*place, head, payload or b"-", spilled=kind == "s")
                messages[place] = (head, payload or b"-", kind == "s", [])
            elif kind in "PS" and place not in messages:
                pieces = list(staged.get(place, []))
                for part in data.draw(st.lists(DATA.filter(bool), max_size=3)):
                    batch.piece(*place, len(pieces), part)
                    pieces.append(part)
                if kind == "P" and pieces:
                    batch.put(*place, b"pieces", b"")
                    messages[place] = (b"pieces", b"", False, pieces)
                    staged.pop(place, None)
                elif pieces:
                    staged[place] = pieces
            elif kind == "u":
                head = data.draw(DATA)
                batch.update(*place, head)
                if place in messages:
                    messages[place] = (head, *messages[place][1:])
            elif kind in "rR":
                batch.remove(*place)
                messages.pop(place, None)
                staged.pop(place, None)
            elif kind == "m" and place in self.messages and place in messages:
                to = data.draw(st.tuples(NODES, SEQUENCES))
                if to in named or to in messages or to in staged or place[0] in batch.cleared:
                    continue
                named.add(to)
                batch.move(*place, *to, b"moved")
                messages[to] = (b"moved", *messages.pop(place)[1:])
        for key in data.draw(st.sets(st.sampled_from([b"a", b"b", b"\xff"]))):
            value = data.draw(st.none() | DATA)
            if value is None:
                batch.remove_fact("kind", key)
                self.facts.pop(("kind", key), None)
            else:
                batch.put_fact("kind", key, value)
                self.facts["kind", key] = value
        for log in data.draw(st.lists(NODES, max_size=3)):
            chunks, end = logs.get(log, ([], 0))
            count, time_ms = data.draw(st.tuples(st.integers(1, 4), st.integers(0, 50)))
            chunk = Chunk(end, count, time_ms, time_ms + count, data.draw(DATA))
            batch.append(log, chunk)
            logs[log] = ([*chunks, chunk], end + count)
        for log in data.draw(st.sets(NODES, max_size=2)):
            if log in logs:
                chunks, end = logs[log]
                offset = data.draw(st.integers(0, end + 2))
                batch.trim(log, offset)
                logs[log] = ([c for c in chunks if c.offset + c.count > offset], end)
        self.store.commit(batch)
        self.messages, self.staged, self.logs = messages, staged, logs

    @rule()
    def reopen(self) -> None:
        self.store.close()
        assert self.store.open() == OpenResult(clean=True)
        self.messages = {place: put for place, put in self.messages.items() if not put[2]}
        self.staged = {}

    @rule()
    def tidy(self) -> None:
        self.store.tidy()

    @invariant()
    def check_facts_and_messages(self) -> None:
        store = self.store
        for node in range(4):
            there = {s: put for (n, s), put in sorted(self.messages.items()) if n == node}
            found = store.messages(node, 0, 100, 2**40)
            assert [(m.sequence, m.head, m.payload, m.pieces) for m in found] == [
                (s, head, payload, len(pieces)) for s, (head, payload, _, pieces) in there.items()
            ]
            assert [(h.sequence, h.head, h.size, h.pieces) for h in store.heads(node)] == [
                (s, head, len(payload) + sum(map(len, pieces)), len(pieces))
                for s, (head, payload, _, pieces) in there.items()
            ]
            assert store.read(node, range(13)) == found
            for s, (_, _, _, pieces) in there.items():
                assert [store.piece(node, s, i) for i in range(len(pieces) + 1)] == [*pieces, b""]
            chunks, end = self.logs.get(node, ([], 0))
            assert store.chunks(node, 0, 2**40) == chunks
            first = chunks[0].offset if chunks else end
            assert store.extent(node) == (first, end, sum(len(c.data) for c in chunks))
            for time_ms in (0, 10, 25, 40, 60):
                expected = next((c for c in chunks if c.last_ms >= time_ms), None)
                assert store.chunk_at(node, time_ms) == expected
        assert store.facts("kind") == sorted((key, value) for (_, key), value in self.facts.items())
