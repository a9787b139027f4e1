"""Event hubs of a namespace: declarations, keys, handles of tests, faults, logins, other namespaces."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from amqp_rt_servicebus.administration import EntityExists, QuotaExceeded
from amqp_rt_servicebus.bounds import Bounds
from amqp_rt_servicebus.declarations import Hub, Queue, SasKey, Topic
from amqp_rt_servicebus.namespace import Namespace, Namespaces
from amqp_rt_servicebus.testing import ServiceBus

from amqp_rt import Broker, Message, Plain
from amqp_rt.errors import AmqpError, AuthenticationFailed, LinkRefused

pytestmark = pytest.mark.req("Z20")

TOML = """
[hubs.clicks]
partitions = 2
consumer_groups = ["audit"]
retention = "PT24H"

[hubs.clicks.keys.reader]
key = "reading"
rights = ["Listen"]
"""
JSON = """
{"UserConfig": {"NamespaceConfig": [{"Type": "EventHub", "Name": "emulatorNs1", "Entities": [
    {"Name": "clicks", "PartitionCount": "2", "ConsumerGroups": [{"Name": "audit"}]}
]}], "LoggingConfig": {"Type": "File"}}}
"""


# --- Declarations ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "text"), [("hubs.toml", TOML), ("config.json", JSON)])
def test_hubs_of_files_are_served(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with ServiceBus(config=tmp_path / name) as bus:
        hub = bus.hub("CLICKS")
        hub.send("a", partition=1)
        assert [(each.partition, each.body) for each in hub.events] == [(1, b"a")]
        declared = bus.namespace.hubs.declared("clicks")
        assert declared is not None
        assert declared.consumer_groups == ("audit",)


def test_names_of_queues_topics_and_hubs_are_different() -> None:
    with ServiceBus(Queue("q"), Hub("h")) as bus:
        for declared in (Hub("Q"), Queue("H"), Topic("H")):
            with pytest.raises(EntityExists, match="share their names"):
                bus.declare(declared)
        bus.delete_hub("H")
        bus.declare(Queue("h")).send("a")
        with pytest.raises(AmqpError, match="'h' could not be found"):
            bus.hub("h").send("a")


def test_a_hub_that_exists_gets_other_groups_but_no_other_partitions() -> None:
    with ServiceBus(Hub("h", partitions=2)) as bus:
        bus.hub("h").send("a")
        bus.declare(Hub("h", partitions=2, consumer_groups=["new"]))
        assert bus.hub("h").stats.events == 1
        with pytest.raises(ValueError, match="cannot become 3: delete the hub first"):
            bus.declare(Hub("h", partitions=3))


def test_quotas_of_the_service_apply_if_asked() -> None:
    with ServiceBus(realistic=True, bounds=Bounds(entities_max=2)) as bus:
        bus.declare(Hub("h", partitions=32, consumer_groups=[f"g{n}" for n in range(20)]))
        with pytest.raises(ValueError, match="there are 33 partitions, at most 32"):
            bus.declare(Hub("i", partitions=33))
        with pytest.raises(ValueError, match="there are 21 consumer_groups, at most 20"):
            bus.declare(Hub("i", consumer_groups=[f"g{n}" for n in range(21)]))
        bus.declare(Queue("q"))
        with pytest.raises(QuotaExceeded, match="has 2 entities already"):
            bus.declare(Hub("more"))


# --- Handles ---------------------------------------------------------------------------------


def test_a_handle_sends_and_shows_events() -> None:
    with ServiceBus() as bus:
        hub = bus.declare(Hub("clicks", partitions=4))
        first = hub.send("a", key="k", application_properties={"n": 1})
        second = hub.send(Message("b"), partition=0)
        assert (first.body, first.partition_key, first.sequence_number) == (b"a", "k", 0)
        assert dict(first.application_properties) == {"n": 1}
        assert (second.partition, second.partition_key) == (0, None)
        assert {repr(each) for each in hub.events} == {repr(first), repr(second)}
        assert hub.stats.events == 2
        assert hub.stats.readers == 0
        assert sum(each.last + 1 for each in hub.stats.partitions) == 2
        with pytest.raises(AmqpError, match="has no partition '4'"):
            hub.send("c", partition=4)


DAY = timedelta(days=1)


@pytest.mark.parametrize("retention", [DAY, 86_400, "P1D"])
def test_events_are_dropped_after_their_retention(retention: Any) -> None:
    with ServiceBus(Hub("clicks", retention=retention), Hub("kept")) as bus:
        clicks, kept = bus.hub("clicks"), bus.hub("kept")
        for hub in (clicks, kept):
            hub.send("first")
        bus.advance(86_400 / 2)
        clicks.send("second")
        assert [each.body for each in clicks.events] == [b"first", b"second"]
        bus.advance(86_400 / 2 + 1)
        assert [each.body for each in clicks.events] == [b"second"]
        assert clicks.stats.partitions[0].begin == 1
        bus.advance(86_400)
        assert clicks.events == []
        clicks.send("third")
        assert [each.sequence_number for each in clicks.events] == [2]
        assert [each.body for each in kept.events] == [b"first"]


def test_the_retention_of_a_hub_can_be_changed() -> None:
    with ServiceBus(Hub("clicks")) as bus:
        clicks = bus.hub("clicks")
        clicks.send("a")
        bus.declare(Hub("clicks", retention=60))
        bus.advance(61)
        assert clicks.events == []
        clicks.send("b")
        bus.declare(Hub("clicks", retention=DAY))
        bus.advance(61)
        assert [each.body for each in clicks.events] == [b"b"]
        bus.declare(Hub("clicks"))
        bus.advance(1_000 * 86_400)
        assert [each.body for each in clicks.events] == [b"b"]


def test_a_realistic_hub_retains_as_long_as_the_service() -> None:
    with ServiceBus(Hub("least", retention=3_600), Hub("most", retention=7 * DAY), realistic=True):
        pass
    for retention in (3_599, 7 * DAY + timedelta(seconds=1)):
        with (
            pytest.raises(ValueError, match="retention is"),
            ServiceBus(Hub("clicks", retention=retention), realistic=True),
        ):
            pass
    with pytest.raises(ValueError, match="retention"):
        Hub("clicks", retention=0)


def test_sequence_numbers_continue_after_a_purge() -> None:
    with ServiceBus(Hub("h")) as bus:
        hub = bus.hub("h")
        for body in "abc":
            hub.send(body)
        assert hub.purge() == 3
        (facts,) = hub.stats.partitions
        assert (facts.begin, facts.last, facts.is_empty) == (3, 2, True)
        assert hub.send("d").sequence_number == 3
        assert [each.body for each in hub.events] == [b"d"]


def test_a_handle_waits_for_its_hub() -> None:
    with ServiceBus(Hub("h")) as bus:
        hub = bus.hub("h")
        hub.send("a")
        assert hub.wait_until(lambda sizes: sizes.events == 1).events == 1
        with pytest.raises(AssertionError, match=r"did not become as wanted within 0\.01 s"):
            hub.wait_until(lambda sizes: sizes.readers > 0, timeout_s=0.01)


@pytest.mark.eventhubs(Hub("clicks", partitions=3))
def test_both_fixtures_are_namespaces_of_their_own(
    eventhubs: ServiceBus, servicebus: ServiceBus
) -> None:
    eventhubs.hub("clicks").send("a")
    with pytest.raises(AmqpError, match="could not be found"):
        servicebus.hub("clicks").send("a")


# --- Clients ---------------------------------------------------------------------------------


async def received(peer: Any, address: str, count: int) -> list[Any]:
    async with peer.receiver(address) as receiver:
        return [(await receiver.receive()).message.body for _ in range(count)]


GROUP = "Clicks/ConsumerGroups/$Default/Partitions/0"


@pytest.mark.slow
async def test_a_policy_and_its_key_are_a_login() -> None:
    keys = {
        "root": SasKey("all"),
        "sender": SasKey("sending", rights=("Send",), secondary="too"),
    }
    namespace = Namespace(Hub("clicks"), keys=keys)
    async with Broker(addons=[namespace]) as broker:
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        for password in ("sending", "too"):
            async with broker.container.connect(url, auth=Plain("sender", password)) as peer:
                async with peer.sender("Clicks") as sender:
                    await sender.send("a")
                with pytest.raises(LinkRefused, match="takes the right to listen"):
                    await received(peer, GROUP, 1)
        async with broker.container.connect(url, auth=Plain("root", "all")) as peer:
            assert await received(peer, GROUP, 2) == ["a", "a"]
        for user, password in (("sender", "all"), ("other", "all"), ("other", "-" * 44)):
            with pytest.raises(AuthenticationFailed):
                async with broker.container.connect(
                    url, auth=Plain(user, password), reconnect=None
                ):
                    pass


def test_keys_of_a_hub_are_for_this_hub() -> None:
    reader = SasKey("reading", rights=("Listen",))
    with ServiceBus(Hub("clicks", keys={"reader": reader}), Hub("other")) as bus:
        assert "EntityPath=Clicks;" in bus.connection_string_for("reader", "Clicks")
        with pytest.raises(ValueError, match="no policy 'reader'"):
            bus.connection_string_for("reader", "other")


async def test_namespaces_of_one_broker_have_hubs_of_one_name() -> None:
    first = Namespace(Hub("clicks"), name="first")
    second = Namespace(Hub("clicks", partitions=3), name="second")
    async with Broker(addons=[Namespaces(first, second)]) as broker:
        urls = [
            (await broker.listen("amqp://127.0.0.1:0", profile=each.profile))[0]
            for each in (first, second)
        ]
        for url, namespace, count in zip(urls, (first, second), (1, 3), strict=True):
            root = Plain("RootManageSharedAccessKey", "SAS_KEY_VALUE")
            async with broker.container.connect(url, auth=root) as peer:
                async with peer.sender("clicks") as sender:
                    await sender.send(namespace.name)
                asked = {"operation": "READ", "type": "com.microsoft:eventhub", "name": "clicks"}
                request = Message(None, application_properties=asked)
                reply = await peer.call("$management", request, reply=Message)
                assert reply.body["partition_count"] == count
        assert [each.log.available for each in (*first.hubs, *second.hubs)] == [1, 1]


# --- Faults ----------------------------------------------------------------------------------

BUSY = "com.microsoft:server-busy"


async def test_faults_occur_at_hubs() -> None:
    namespace = Namespace(Hub("clicks"), Hub("other"))
    async with Broker(addons=[namespace]) as broker, broker.local() as peer:
        from amqp_rt_servicebus.faults import Fault

        from amqp_rt.outcomes import Error

        def fault(on: str) -> None:
            namespace.faults.add(Fault(error=Error(BUSY, "throttled"), on=on, path="clicks"))

        async with peer.sender("other") as other, peer.sender("clicks") as sender:
            fault("send")
            await other.send("a")
            with pytest.raises(AmqpError, match="throttled") as refused:
                await sender.send("a")
            assert refused.value.condition == BUSY
            await sender.send("b")
        fault("attach")
        with pytest.raises(LinkRefused, match="throttled"):
            await received(peer, GROUP, 1)
        fault("receive")
        with pytest.raises(AmqpError, match="throttled"):
            await received(peer, GROUP, 1)
        assert await received(peer, GROUP, 1) == ["b"]
        fault("read")
        asked = {"operation": "READ", "type": "com.microsoft:eventhub", "name": "clicks"}
        request = Message(None, application_properties=asked)
        with pytest.raises(AmqpError, match="throttled") as failed:
            await peer.call("$management", request, reply=Message)
        assert failed.value.condition == BUSY
        assert (await peer.call("$management", request, reply=Message)).body["name"] == "clicks"
