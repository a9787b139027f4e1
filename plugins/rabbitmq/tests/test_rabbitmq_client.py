"""RabbitMQ's own Python client, unmodified, against our broker."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from amqp_rt import Broker

LIFE = Path(__file__).parent / "rabbit_life.py"


@pytest.fixture
def client() -> list[str]:
    """Command of the client's life cycle."""
    if importlib.util.find_spec("rabbitmq_amqp_python_client") is None:
        pytest.skip("rabbitmq-amqp-python-client is not installed (make peers)")
    return [sys.executable, "-W", "ignore", str(LIFE)]


@pytest.mark.foreign
@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.req("G4")
async def test_the_client_lives_its_whole_life(client: list[str]) -> None:
    async with Broker(volatile=True) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        done = await trio.to_thread.run_sync(
            partial(
                subprocess.run,
                [*client, url.replace("amqp://", "amqp://guest:guest@")],
                capture_output=True,
                text=True,
                timeout=25,
            )
        )
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
    refused = "ValidationCodeException: 'wrong response code received: 404'"
    by_exchange = {"x-exchange": "ex.one", "x-routing-key": "a.b"}
    assert seen == {
        "conflict": "ValidationCodeException: 'ErrPreconditionFailed'",
        "unknown": refused,
        "unbound exchange": refused,
        "unroutable": "SendException: 38",  # released
        "accepted": [True] * 4,
        "info": {
            "name": "orders ä/1",
            "durable": True,
            "type": "quorum",
            "messages": 4,
            "consumers": 0,
            "members": 1,
            "arguments": {
                "x-queue-type": "quorum",
                "x-delivery-limit": 3,
                "x-dead-letter-exchange": "ex-two",
            },
        },
        "bodies": ["m0", "m1", "m2", "m3"],
        "annotations": [*[by_exchange] * 3, {"x-exchange": "", "x-routing-key": "orders ä/1"}],
        # The discarded message, and one by way of both exchanges.
        "dead": 2,
        "purged": 2,
        "unbound": "SendException: 38",
        "deleted": refused,
        "stream type": "stream",
        "streams": {
            "first": [[f"s{number}", number] for number in range(4)],
            "last": [["s3", 3]],
            "offset": [["s2", 2], ["s3", 3]],
            "values": [["s1", 1], ["s3", 3]],
            "application": [["s3", 3]],
            "properties": [["s1", 1]],
            "sql": [["s2", 2]],
        },
        "reply": ["pong"],
        "active": [["one", True], ["two", True]],
    }
