"""Dead letters go back exactly once, wherever a replay is interrupted (K7). Without Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from amqp_rt_spark import connections
from amqp_rt_spark.jobs import publishing, returning
from amqp_rt_spark.jobs.conf import JobConf
from amqp_rt_spark.jobs.publishing import Pace, short
from amqp_rt_spark.jobs.returning import Letter, Return, group_of
from amqp_rt_spark.leasing import leased
from amqp_rt_spark.options import SOURCE, read_options
from amqp_rt_spark.spans import Span

from amqp_rt import Message
from amqp_rt.broker import Queue
from amqp_rt.errors import AmqpError, ConnectionLost

pytestmark = [pytest.mark.req("K7"), pytest.mark.timeout(120)]

DEAD = "dead"


def fill(served: Any, count: int) -> None:
    """Letters of two queues in turn."""
    served.broker.declare(Queue(DEAD), Queue("a"), Queue("b"))
    for number in range(count):
        source = "ab"[number % 2]
        said = {"x-opt-deadletter-source": source, "x-opt-note": "n"}
        served.send(
            DEAD,
            Message(f"{source}{number}", message_annotations=said, durable=True, delivery_count=3),
        )


def replay(
    served: Any,
    chosen: Callable[[str], bool] = lambda body: True,
    name: str = "original",
    pace: Pace | None = None,
) -> Return:
    conf = JobConf(url=served.url)
    group = group_of(name)

    def choose() -> list[Letter]:
        options = read_options({"url": served.url, "address": DEAD, "group": group}, SOURCE)
        state = connections.call(served.endpoint, DEAD, "LEASE-STATE", group=group)
        span = Span(DEAD, 0, state["first"], state["next"], "")
        return [
            Letter(
                number, message.message_annotations["x-opt-deadletter-source"], chosen(message.body)
            )
            for number, message in leased(options, span)
        ]

    done = Return(conf, DEAD, name, choose, pace or Pace(None))
    done.run()
    return done


def bodies(served: Any) -> dict[str, list[str]]:
    return {address: served.bodies(address) for address in (DEAD, "a", "b")}


def test_the_chosen_ones_go_in_order_and_the_others_keep_their_places(served: Any) -> None:
    fill(served, 8)
    done = replay(served, lambda body: int(body[1:]) not in (2, 3, 6))
    assert done.sent == Counter(a=2, b=3)
    assert (done.kept, done.failed.total(), done.finished) == (3, 0, 0)
    assert bodies(served) == {DEAD: ["a2", "b3", "a6"], "a": ["a0", "a4"], "b": ["b1", "b5", "b7"]}
    (one, _) = served.messages("a")
    assert one.delivery_count == 0
    assert one.durable
    said = {str(key): value for key, value in one.message_annotations.items()}
    assert said == {
        "x-opt-deadletter-source": "a",
        "x-opt-note": "n",
        "x-opt-replay-id": done.id,
    }
    # Messages that were passed over are examined again.
    assert replay(served).sent == Counter(a=2, b=1)
    assert bodies(served)[DEAD] == []
    assert replay(served).sent.total() == 0


@pytest.mark.slow
@pytest.mark.parametrize("done", [True, False])
def test_an_interruption_anywhere_loses_and_doubles_nothing(
    served: Any, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    """A run ends at its first request, at its second, and so on: before it is done, or before its answer
    is heard. The next one chooses others, and so does the last one."""
    monkeypatch.setattr(publishing, "PIECE_MESSAGES", 3)
    monkeypatch.setattr(returning, "_RANGES", 2)
    fill(served, 11)
    expected = Counter(served.bodies(DEAD))
    changing = {"OPEN-LEASE", "LEASE", "RETURN-LEASE", "COMMIT-EPOCH", "ACCEPT-LEASE"}
    ask = connections.call
    for fatal in range(1, 60):
        left = [fatal]

        def call(
            endpoint: Any,
            address: str,
            operation: str,
            *args: Any,
            left: list[int] = left,
            **given: Any,
        ) -> Any:
            left[0] -= operation in changing
            if operation in changing and left[0] == 0 and not done:
                raise ConnectionLost("before")
            answer = ask(endpoint, address, operation, *args, **given)
            if operation in changing and left[0] == 0:
                raise ConnectionLost("after")
            return answer

        ended = False
        with monkeypatch.context() as broken:
            broken.setattr(connections, "call", call)
            try:
                replay(served, lambda body: int(body[1:]) % 5 != 1)
                ended = True
            except ConnectionLost:
                pass
        replay(served, lambda body: int(body[1:]) % 3 == 0)
        there = bodies(served)
        assert Counter(body for each in there.values() for body in each) == expected, (fatal, there)
        assert all(body[0] == "a" for body in there["a"])
        assert all(body[0] == "b" for body in there["b"])
        assert connections.call(served.endpoint, DEAD, "READ")["acquired"] == 0
        if ended:
            break
        # Once more, with all of them.
        with served.broker.local() as peer, peer.sender(DEAD) as out:
            for address in "ab":
                with peer.receiver(address) as messages:
                    for _ in there[address]:
                        delivery = messages.receive()
                        out.send(delivery.message)
                        delivery.accept()
    assert 10 < fatal < 59


def test_a_run_that_was_thought_dead_is_shut_out(served: Any) -> None:
    fill(served, 6)
    late: list[Return] = []

    class Slow(Pace):
        def wait(self, count: int) -> None:
            # Meanwhile the whole replay is done by another one.
            if not late:
                late.append(replay(served, lambda body: body == "b1"))

    with pytest.raises(AmqpError, match=r"taken over|opened again") as caught:
        replay(served, pace=Slow(None))
    assert caught.value.condition == "amqp:link:stolen"
    assert bodies(served) == {DEAD: ["a0", "a2", "b3", "a4", "b5"], "a": [], "b": ["b1"]}


def test_what_is_not_taken_stays(served: Any) -> None:
    served.broker.declare(Queue(DEAD), Queue("a"))
    for source in ("a", "nowhere", "a"):
        said = {"x-opt-deadletter-source": source}
        served.send(DEAD, Message(source, message_annotations=said, durable=True))
    done = replay(served)
    assert done.sent == Counter(a=2)
    assert done.failed == Counter(nowhere=1)
    assert "nowhere" in done.refused["nowhere"]
    assert served.bodies(DEAD) == ["nowhere"]


def test_a_single_message_that_is_not_taken_stays(served: Any) -> None:
    fill(served, 8)
    refuse = {"a2", "a6"}
    publish = publishing.Publisher.publish

    def picky(self: Any, messages: Any, end: int) -> int:
        from amqp_rt.errors import DeliveryRejected

        if any(Message.decode(payload).body in refuse for _, payload in messages):
            raise DeliveryRejected("too large")
        return publish(self, messages, end)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(publishing.Publisher, "publish", picky)
        done = replay(served)
    assert done.sent == Counter(a=2, b=4)
    assert done.failed == Counter(a=2)
    assert served.bodies(DEAD) == ["a2", "a6"]
    assert replay(served).sent == Counter(a=2)


def test_a_pace_is_kept() -> None:
    at = [0.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        at[0] += seconds

    pace = Pace(50, now=lambda: at[0], sleep=sleep)
    assert pace.piece == 50
    for _ in range(3):
        pace.wait(50)
    assert slept == [1.0, 1.0]
    at[0] = 100
    pace.wait(25)
    pace.wait(50)
    assert slept == [1.0, 1.0, 0.5]
    assert Pace(0.5).piece == 1
    assert Pace(None).piece == publishing.PIECE_MESSAGES


def test_names_are_short() -> None:
    assert short("x" * 256) == "x" * 256
    assert len(short("x" * 257)) == 256
    assert short("x" * 300) != short("x" * 301)
