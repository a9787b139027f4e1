"""Hash of partition keys, against the SDK for Python, whose buffered producers compute partitions."""

from __future__ import annotations

from typing import Any

import pytest
from amqp_rt_servicebus.declarations import Hub
from amqp_rt_servicebus.namespace import Namespace
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.broker import Broker

pytestmark = [pytest.mark.req("Z20"), pytest.mark.usefixtures("azure_python")]

ASCII = st.text(st.characters(codec="ascii"), max_size=60)


def resolver(partitions: int = 1) -> Any:
    from azure.eventhub._buffered_producer._partition_resolver import PartitionResolver

    return PartitionResolver([str(index) for index in range(partitions)])


def signed_hash(key: str) -> int:
    from azure.eventhub._buffered_producer._partition_resolver import generate_hash_code

    return int(generate_hash_code(key))


async def hub_of(partitions: int) -> Any:
    addon = Namespace(Hub("h", partitions=partitions))
    async with Broker(addons=[addon]):
        return addon.hubs.find("h")


@pytest.fixture
async def hub() -> Any:
    return await hub_of(7)


@given(key=ASCII)
def test_the_hash_is_the_absolute_value_of_that_of_the_sdk(key: str) -> None:
    from amqp_rt.broker.log.key_hashes import lookup3

    assert lookup3(key.encode()) == abs(signed_hash(key))


@pytest.mark.parametrize("size", [*range(27), 48, 100, 128])
async def test_keys_of_every_length_get_the_partition_of_their_hash(hub: Any, size: int) -> None:
    key = "".join(chr(33 + at * 7 % 90) for at in range(size))
    assert hub.choose(key.encode()) == abs(signed_hash(key)) % 7


async def test_a_buffered_producer_computes_the_same_partition_if_the_hash_is_not_negative(
    hub: Any,
) -> None:
    keys = [f"key-{number}" for number in range(200)]
    positive = [key for key in keys if signed_hash(key) >= 0]
    assert len(positive) > 50
    for key in positive:
        chosen = resolver(7).get_partition_id_by_partition_key(key)
        assert str(hub.choose(key.encode())) == chosen


async def test_python_divides_negative_hashes_in_another_way_than_the_service(hub: Any) -> None:
    # The SDKs for .NET and JavaScript, as the service, truncate: -5 % 7 is -5, of which the absolute value is
    # 5. In Python the remainder is 2. If this fails, the SDK was corrected, and the guide has to say so.
    key = next(key for key in map(str, range(100)) if signed_hash(key) % 7 and signed_hash(key) < 0)
    assert hub.choose(key.encode()) == -signed_hash(key) % 7
    chosen = resolver(7).get_partition_id_by_partition_key(key)
    assert chosen == str(signed_hash(key) % 7) != str(hub.choose(key.encode()))


async def test_keys_beyond_ascii_are_hashed_as_utf8(hub: Any) -> None:
    # The SDK for JavaScript does the same; that for Python takes the numbers of the characters.
    hub_choice = hub.choose("\u00e9t\u00e9".encode())
    assert hub_choice == abs(signed_hash("\u00c3\u00a9t\u00c3\u00a9")) % 7
