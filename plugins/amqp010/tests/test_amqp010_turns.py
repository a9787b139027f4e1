"""The work of commands and headers with very many values is charged, so that one turn has few of them."""

from __future__ import annotations

from typing import Any

import pytest
from octets010 import Struct
from protocol010 import CREDIT, UNLIMITED
from subscribers010 import World

from amqp_rt.broker.topology.declared import DeclaredSpace

#: Some 14,000 octets as a header, which take some milliseconds to convert.
MANY: dict[str, Any] = {f"name-{number}": number for number in range(800)}


@pytest.mark.req("N10")
@pytest.mark.parametrize("sends", ["arguments", "headers"])
def test_values_of_a_command_and_its_header_are_work(
    sends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("q")
    session = world.client().attach()
    session.call("queue.declare", queue="bound")
    spent: list[int] = []
    monkeypatch.setattr(session.client.engine, "spend", spent.append)
    if sends == "arguments":
        few = {"queue": "bound", "exchange": "amq.headers", "arguments": {"a": 1}}
        session.call("exchange.bind", **few, binding_key="few")
        assert sum(spent) < 100
        session.call("exchange.bind", **few | {"binding_key": "many", "arguments": MANY})
    else:
        for headers in ({"a": 1}, MANY):
            assert sum(spent) < 100
            session.send(
                "message.transfer",
                destination="",
                headers=[
                    Struct("delivery-properties", **{"routing-key": "q"}),
                    Struct("message-properties", **{"application-headers": headers}),
                ],
                body=b"x",
            )
    assert sum(spent) >= 400


@pytest.mark.req("N10")
def test_messages_with_many_headers_are_sent_in_several_turns() -> None:
    world = World("q", "few")
    world.publish("q", *[b"x"] * 20, application_properties=MANY)
    world.publish("few", *[b"x"] * 20, application_properties={"a": 1})
    client = world.client()
    session = client.attach()
    # Turns in which messages came → how many.
    came: list[int] = []
    receive = client.wire.receive

    def counting(octets: bytes) -> None:
        before = len(session.state.messages)
        receive(octets)
        if found := len(session.state.messages) - before:
            came.append(found)

    client.wire.receive = counting  # type: ignore[method-assign]
    session.subscribe("few", "few", flow_mode=CREDIT, messages=UNLIMITED)
    session.messages()
    assert came == [20]
    came.clear()
    session.subscribe("q", "q", flow_mode=CREDIT, messages=UNLIMITED)
    session.messages()
    assert sum(came) == 20
    # One when octets come, and one before output is taken.
    assert max(came) <= 2


def test_a_subscription_does_not_count_the_consumers_of_its_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    session = world.client().attach()
    session.call("queue.declare", queue="q", arguments={"no-local": True})
    counted: list[str] = []
    monkeypatch.setattr(DeclaredSpace, "consumers", lambda self, name: counted.append(name) or 0)
    session.call("queue.query", queue="q")
    assert counted == ["q"]
    session.subscribe("q")
    session.call("queue.declare", queue="q", passive=True)
    assert counted == ["q"]
