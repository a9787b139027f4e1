"""Metrics for Prometheus."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import trio
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as read_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from amqp_rt import Container, Message, Plain, Reject, node, rpc
from amqp_rt.addresses import parse_url
from amqp_rt.broker.broker import Broker
from amqp_rt.broker.nodes import Log, Queue, Topic
from amqp_rt.errors import AuthenticationFailed, DeliveryRejected, LinkRefused
from amqp_rt.limits import Limits
from amqp_rt.stores.sqlite import SQLiteStore
from amqp_rt.tallies import KINDS_MAX, OTHER, BoundedCounts, Distribution
from amqp_rt.telemetry.metrics import HELP, Metrics

pytestmark = pytest.mark.req("O3")

#: Name of a sample and its labels, without ``amqp_rt_`` → value.
Values = dict[tuple[str, ...], float]


#: Labels in the order in which the tests give their values; pages have them sorted.
LABELS = (
    *("virtual_host", "kind", "node", "group", "state", "reason", "protocol", "condition", "role"),
    *("mechanism", "route", "outcome", "le", "what", "version", "compiled"),
)


def values_of(page: bytes) -> Values:
    """Return the samples of a page."""
    return {
        (
            sample.name.removeprefix("amqp_rt_"),
            *(sample.labels[name] for name in LABELS if name in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


async def rendered(metrics: Metrics, node: str | None = None) -> Values:
    page, _ = await metrics.render(node=node)
    return values_of(page)


@node("orders/{customer}")
async def place(body: bytes) -> None:
    if body == b"bad":
        raise Reject("no")


@rpc("ping")
async def ping() -> int:
    return 1


async def test_values_are_those_of_the_broker(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store")
    async with Broker("broker", nodes=[place, ping], store=store) as broker:
        metrics = Metrics(broker.container)
        await broker.declare(
            Queue("q", dead_letter="dead", max_deliveries=1),
            Queue("dead"),
            Topic("news"),
            Log("log"),
        )
        async with broker.local() as peer, peer.sender("q") as sender:
            await sender.send(b"x" * 100, durable=True)
            await sender.send_many([b"x" * 100] * 3)
            async with peer.receiver("q", credit=2) as receiver:
                (await receiver.receive()).accept()
                (await receiver.receive()).reject("bad")
                held = await receiver.receive()
                async with peer.sender("log") as logged:
                    await logged.send_many([b"r"] * 5)
                await broker.set_cursor("log", "readers", {0: 2})
                async with peer.sender("orders/ada") as orders:
                    await orders.send(b"good")
                    with pytest.raises(DeliveryRejected):
                        await orders.send(b"bad")
                await peer.call("ping")
                with pytest.raises(LinkRefused):
                    async with peer.sender("nowhere"):
                        pass
                found = await rendered(metrics)
                held.accept()
    queue = ("", "queue")
    assert found["messages", *queue, "available"] == 1
    assert found["messages", *queue, "acquired"] == 2
    assert found["messages", "", "log", "available"] == 5
    assert found["bytes", *queue] > 300
    # One of them is the reply, which goes through a queue that the broker creates for it.
    assert found["messages_enqueued_total", *queue] == 6
    assert found["messages_delivered_total", *queue] >= 3
    assert found["messages_accepted_total", *queue] == 2
    assert found["messages_dropped_total", *queue] == 0
    assert found["messages_dead_lettered_total", "rejected"] == 1
    assert found["connections", "amqp1.0"] == 1
    assert found["connections_opened_total", "amqp1.0"] == 1
    assert found["links_refused_total", "amqp:not-found"] == 1
    assert found["links", "receiver"] == 2
    assert found["links", "sender"] == 2
    assert found[("sessions",)] == 1
    assert found[("memory_bytes",)] > 300
    assert found[("memory_limit_bytes",)] == broker.container.limits.broker_bytes_max
    assert found[("store_bytes",)] >= 4096
    assert found[("store_commit_seconds_count",)] >= 1
    assert found[("store_batch_messages_sum",)] >= 1
    assert found["log_lag_records", "", "log", "readers"] == 3
    assert found["handler_seconds_count", "orders/{customer}"] == 2
    assert found["handler_seconds_bucket", "ping", "+Inf"] == 1
    assert found["handler_running", "orders/{customer}"] == 0
    assert found["handler_outcomes_total", "orders/{customer}", "accepted"] == 1
    assert found["handler_outcomes_total", "orders/{customer}", "rejected"] == 1
    assert found[("metrics_left_out",)] == 0
    assert not [key for key in found if key[0].startswith("node_")]


async def test_totals_never_shrink_when_a_node_goes() -> None:
    async with Broker("broker") as broker:
        metrics = Metrics(broker.container)
        before: Values = {}
        for round_ in range(3):
            await broker.declare(Queue("q"), Topic("news"))
            broker.publish("q", Message(b"x").encode())
            broker.publish("news", Message(b"x").encode())
            found = await rendered(metrics)
            assert found["messages_enqueued_total", "", "queue"] == round_ + 1
            assert found["messages_dropped_total", "", "queue"] == round_
            assert found["messages_enqueued_total", "", "topic"] == round_ + 1
            assert all(found[key] >= value for key, value in before.items() if "_total" in key[0])
            before = found
            await broker.delete("q")
            await broker.delete("news")
        assert (await rendered(metrics))["messages_enqueued_total", "", "queue"] == 3


async def test_totals_are_right_while_nodes_are_deleted_in_the_middle_of_a_snapshot() -> None:
    """A snapshot of many nodes takes several turns."""
    count = 600
    async with Broker("broker", limits=Limits(nodes_max=2 * count)) as broker:
        metrics = Metrics(broker.container)
        await broker.declare(*(Queue(f"q{number}") for number in range(count)))
        for number in range(count):
            broker.publish(f"q{number}", Message(b"x").encode())
        space = broker.host.space("")
        left = {"q0", "q1", f"q{count - 1}", f"q{count - 2}"}
        found: list[Values] = []

        async def delete_some() -> None:
            for name in sorted(left):
                space.delete(name)
                await trio.lowlevel.checkpoint()

        async def scrape() -> None:
            found.append(await rendered(metrics))

        for _ in range(3):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scrape)
                nursery.start_soon(delete_some)
            left = {f"q{number}" for number in range(len(found) * 10, len(found) * 10 + 4)}
        assert [each["messages_enqueued_total", "", "queue"] for each in found] == [count] * 3
        assert space.retiring == []


async def test_many_nodes_with_hostile_names_are_bounded_and_escaped() -> None:
    hostile = ['a"b', "back\\slash", "new\nline", "tab\t", "{x=1} 2", "é💥", "x" * 200]
    count = 10_000
    limits = Limits(nodes_max=count + 100, metrics_nodes_max=50)
    async with Broker("broker", limits=limits) as broker:
        metrics = Metrics(broker.container)
        names = [f"orders-{number}" for number in range(count)]
        for name in [*names, *hostile]:
            broker.host.space("").declare(Queue(name))
        page, kind = await metrics.render()
        assert kind.startswith("text/plain")
        assert len(page) < 20_000
        detailed = await rendered(metrics, "orders-*")
        found = [key for key in detailed if key[0] == "node_bytes"]
        assert len(found) == 50
        assert detailed[("metrics_left_out",)] == count - 50
        for name in hostile:
            pattern = re.sub(r"[\[*?]", "?", name)
            assert ("node_messages", "", "queue", name, "available") in await rendered(
                metrics, pattern
            )


async def test_a_snapshot_lets_other_tasks_run() -> None:
    turns = 0
    async with Broker("broker", limits=Limits(nodes_max=6_000)) as broker:
        metrics = Metrics(broker.container)
        for number in range(5_000):
            broker.host.space("").declare(Queue(f"q{number}"))

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            await metrics.render()
            nursery.cancel_scope.cancel()
    assert turns >= 15


async def test_openmetrics_is_written_if_it_is_asked_for() -> None:
    async with Broker("broker", nodes=[place]) as broker:
        metrics = Metrics(broker.container)
        await broker.declare(Queue("q"))
        page, kind = await metrics.render(
            "application/openmetrics-text;version=1.0.0,text/plain;q=0.5", node="*"
        )
    assert kind.startswith("application/openmetrics-text")
    assert page.endswith(b"# EOF\n")
    found = {family.name: family for family in read_openmetrics(page.decode())}
    assert {name.removeprefix("amqp_rt_") for name in found} <= set(HELP)
    assert all(family.documentation for family in found.values())
    assert found["amqp_rt_messages_enqueued"].type == "counter"


async def test_promtool_has_nothing_to_say() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    async with Broker("broker", nodes=[place]) as broker:
        metrics = Metrics(broker.container)
        await broker.declare(Queue("q"), Topic("news"), Log("log"))
        page, _ = await metrics.render(node="*")
    done = await trio.to_thread.run_sync(
        lambda: subprocess.run(
            [promtool, "check", "metrics"], input=page, capture_output=True, check=False
        )
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


async def test_connections_that_end_and_logins_that_fail_are_counted() -> None:
    async with Container("server", users={"ada": "right"}, nodes=[ping]) as server:
        metrics = Metrics(server)
        await server.listen("memory://b")
        async with Container("client", network=server.network) as client:
            for password in ("wrong", "right"):
                try:
                    async with client.connect(
                        "memory://b", auth=Plain("ada", password), reconnect=None
                    ) as peer:
                        await peer.call("ping")
                except AuthenticationFailed:
                    assert password == "wrong"
        await trio.testing.wait_all_tasks_blocked()
        found = await rendered(metrics)
        mechanism = [key for key in found if key[0] == "logins_failed_total"]
        assert len(mechanism) == 1
        assert found[mechanism[0]] == 1
        assert found["connections_opened_total", "amqp1.0"] == 1
        assert found["connections_closed_total", "amqp1.0"] == 1
        server.remove(ping)
        await trio.testing.wait_all_tasks_blocked()
        assert (await rendered(metrics))["handler_outcomes_total", "ping", "accepted"] == 1


async def test_mechanisms_that_are_not_offered_are_counted_together() -> None:
    async with Container("server", users={"ada": "right"}) as server:
        metrics = Metrics(server)
        url = (await server.listen("amqp://127.0.0.1:0"))[0]
        for name in (b"EVIL-1", b"EVIL-2"):
            async with await trio.open_tcp_stream("127.0.0.1", parse_url(url).port) as stream:
                fields = b"\xa3" + bytes([len(name)]) + name
                body = b"\x00\x53\x41\xc0" + bytes([len(fields) + 1, 1]) + fields
                frame = (len(body) + 8).to_bytes(4) + b"\x02\x01\x00\x00" + body
                await stream.send_all(b"AMQP\x03\x01\x00\x00" + frame)
                async for _ in stream:
                    pass
        found = await rendered(metrics)
    failed = {key[1]: found[key] for key in found if key[0] == "logins_failed_total"}
    assert failed == {OTHER: 2}


def test_counts_of_kinds_that_peers_choose_are_bounded() -> None:
    counts = BoundedCounts()
    for number in range(100):
        counts.add(f"app:condition-{number}")
    assert len(counts.items()) == KINDS_MAX + 1
    assert dict(counts.items())["other"] == 100 - KINDS_MAX
    assert counts.total() == 100


def test_a_distribution_counts_by_its_bounds() -> None:
    found = Distribution((1.0, 10.0))
    for value in (0.5, 1.0, 1.5, 10.0, 11.0):
        found.add(value)
    assert (found.counts, found.total) == ([2, 2, 1], 24.0)
