"""Transactions of a namespace, with Proton as the client: neither SDK has any."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from amqp_rt_servicebus.declarations import Queue, SasKey, Subscription, Topic
from amqp_rt_servicebus.quotas import SERVICE_LIMITS
from amqp_rt_servicebus.testing import ServiceBus
from driven import PEERS, require

from amqp_rt.security.tokens import sas_token

pytestmark = [pytest.mark.req("Z18"), pytest.mark.foreign, pytest.mark.slow]

KEYS = {
    "root": SasKey("all"),
    "sender": SasKey("sending", rights=("Send",)),
    "both": SasKey("both", rights=("Send", "Listen")),
}


@pytest.fixture(params=[False])
def bus(request: pytest.FixtureRequest) -> Iterator[ServiceBus]:
    with ServiceBus(
        Queue("from"),
        Queue("to"),
        Queue("once", requires_duplicate_detection=True),
        Topic("t", [Subscription("s")]),
        keys=KEYS,
        realistic=request.param,
    ) as bus:
        for number in range(3):
            bus.queue("from").send(str(number))
        yield bus


def token(bus: ServiceBus, policy: str, path: str = "") -> list[str]:
    """Return the resource and the token of a client that has the key of *policy*."""
    resource = f"sb://127.0.0.1:{bus.port}/{path}"
    return [resource, sas_token(resource, policy, KEYS[policy].key, int(time.time()) + 60)]


def states(bus: ServiceBus, name: str) -> tuple[int, int, int]:
    """Return how many messages of a queue are active, and locked; and the most failed deliveries."""
    held = bus.queue(name).messages
    return (
        len(held),
        sum(each.locked for each in held),
        max([each.delivery_count for each in held], default=0),
    )


@pytest.fixture
def transact(bus: ServiceBus) -> Any:
    if importlib.util.find_spec("proton") is None:
        require("python-qpid-proton is not installed (make peers)")

    def run(**options: Any) -> dict[str, Any]:
        options = {"port": bus.port, "address": "from", "to": "to", "count": 2, **options}
        options.setdefault("tokens", [token(bus, "root")])
        program = subprocess.run(
            [sys.executable, str(PEERS / "transacting.py"), json.dumps(options)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert program.returncode == 0, program.stderr
        result: dict[str, Any] = json.loads(program.stdout)
        return result

    return run


def test_messages_are_moved_together(bus: ServiceBus, transact: Any) -> None:
    assert transact(ends=["commit"])["ended"] == ["committed"]
    assert (states(bus, "from"), states(bus, "to")) == ((1, 0, 0), (2, 0, 0))


def test_messages_are_moved_not_at_all(bus: ServiceBus, transact: Any) -> None:
    assert transact(ends=["abort"])["ended"] == ["aborted"]
    # Proton releases what it had accepted.
    bus.queue("from").wait_until(lambda sizes: sizes.active == 3)
    assert states(bus, "to") == (0, 0, 0)


@pytest.mark.parametrize("to", ["to", "T"])
def test_messages_go_by_way_of_the_entity_that_they_came_from(
    bus: ServiceBus, transact: Any, to: str
) -> None:
    assert transact(ends=["commit"], to=to, via="from")["ended"] == ["committed"]
    found = bus.queue("to") if to == "to" else bus.subscription("t", "s")
    assert [each.body for each in found.messages] == ["0", "1"]
    assert states(bus, "from")[0] == 1


def test_a_destination_needs_the_right_to_send_there(bus: ServiceBus, transact: Any) -> None:
    tokens = [token(bus, "both", "from")]
    assert transact(ends=["commit"], via="from", tokens=tokens)["error"][0] == (
        "amqp:unauthorized-access"
    )
    tokens.append(token(bus, "sender", "to"))
    assert transact(ends=["commit"], via="from", tokens=tokens)["ended"] == ["committed"]


def test_a_destination_that_does_not_exist_is_refused(bus: ServiceBus, transact: Any) -> None:
    assert transact(ends=["commit"], to="nowhere", via="from")["error"] == [
        "amqp:not-found",
        "The messaging entity 'nowhere' could not be found.",
    ]


@pytest.mark.parametrize("bus", [True], indirect=True)
def test_a_transaction_has_as_many_messages_and_outcomes_as_at_the_service(
    bus: ServiceBus, transact: Any
) -> None:
    most = SERVICE_LIMITS["transaction_work_max"]
    count = most // 2 + 1
    for number in range(count):
        bus.queue("from").send(str(number))
    before = states(bus, "from")[0]
    transact(ends=["commit"], count=count)
    # Proton does not look at the answers to its messages, of which the last ones are rejected.
    assert before - states(bus, "from")[0] + states(bus, "to")[0] == most
