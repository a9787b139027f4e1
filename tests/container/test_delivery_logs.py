"""Log records that say which message was being handled."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from amqp_rt import Batch, Broker, Container, DeliveryLogs, Message, aio, node, rpc
from amqp_rt.broker import Queue
from amqp_rt.cli.running import log_deliveries, set_up_logs
from amqp_rt.container.callers import HANDLED
from amqp_rt.container.delivery_logs import FIELDS

pytestmark = pytest.mark.req("O2")

TRACE = "0af7651916cd43dd8448eb211c80319c"
log = logging.getLogger("shop")


class Records(logging.Handler):
    """Handler that keeps the fields of each record, by its text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[str, str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.found[record.getMessage()] = {name: getattr(record, name) for name in FIELDS}


@pytest.fixture
def logs() -> DeliveryLogs:
    return DeliveryLogs()


@pytest.fixture
def records(logs: DeliveryLogs) -> Iterator[Records]:
    handler = Records()
    handler.addFilter(logs)
    logging.getLogger().addHandler(handler)
    level = log.level
    log.setLevel("INFO")
    yield handler
    log.setLevel(level)
    logging.getLogger().removeHandler(handler)


def message(name: str) -> Message:
    return Message(
        name,
        message_id=name,
        application_properties={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"},
    )


async def test_records_have_the_message_of_their_handler(
    logs: DeliveryLogs, records: Records, autojump_clock: trio.testing.MockClock
) -> None:
    async with trio.open_nursery() as beside:

        @node("work/{kind}", slots=2)
        async def work(body: str) -> None:
            await trio.sleep(1)
            log.info("working on %s", body)
            beside.start_soon(later, body)

        async def later(body: str) -> None:
            await trio.sleep(10)
            log.info("later: %s", body)

        @node("blocked", thread=True)
        def blocked(body: str) -> None:
            log.info("in a thread")

        @rpc("fail")
        async def fail() -> None:
            log.info("asked")
            raise LookupError("mine")

        async with Container("shop", nodes=[work, blocked, fail], observe=[logs]) as shop:
            await shop.listen("memory://shop")
            async with (
                Container("buyer", network=shop.network) as buyer,
                buyer.connect("memory://shop") as peer,
                peer.sender("work/fast", name="link-1") as out,
                peer.sender("blocked") as other,
            ):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(out.send, message("a"))
                    nursery.start_soon(out.send, message("b"))
                await other.send("x")
                with pytest.raises(Exception, match="fail"):
                    await peer.call("fail", within=5)
                log.info("outside")
    expected = {
        "address": "work/fast",
        "link": "link-1",
        "peer": "buyer",
        "attempt": "1",
        "trace_id": TRACE,
    }
    for name in ("a", "b"):
        assert records.found[f"working on {name}"] == {"message_id": name, **expected}
        assert records.found[f"later: {name}"] == {"message_id": name, **expected}
    assert records.found["in a thread"]["address"] == "blocked"
    assert records.found["asked"]["address"] == "fail"
    assert records.found["outside"] == dict.fromkeys(FIELDS, "")


async def test_attempts_are_counted(logs: DeliveryLogs, records: Records) -> None:
    done = trio.Event()

    @node("work")
    async def work(body: str) -> None:
        log.info("attempt")
        if records.found["attempt"]["attempt"] == "1":
            raise LookupError("mine")
        done.set()

    async with Broker("b") as broker:
        await broker.declare(Queue("work"))
        await broker.listen("memory://b")
        network = broker.container.network
        async with (
            Container("app", nodes=[work], observe=[logs], network=network) as app,
            app.connect("memory://b") as peer,
        ):
            await peer.serve()
            broker.publish("work", Message("x", message_id="1\n2").encode())
            await done.wait()
    assert records.found["attempt"]["attempt"] == "2"
    assert records.found["attempt"]["message_id"] == "1\\n2", "no forged line"
    # The line of the library has the message, too.
    assert [each for each in records.found.values() if each["attempt"] == "1"]


async def test_a_batch_has_no_single_message(logs: DeliveryLogs, records: Records) -> None:
    @node("work", batch=Batch(messages=2))
    async def work(bodies: list[str]) -> None:
        log.info("batch of %d", len(bodies))

    async with (
        Container("shop", nodes=[work], observe=[logs]) as shop,
        shop.local() as peer,
        peer.sender("work") as out,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(out.send, message("a"))
        nursery.start_soon(out.send, message("b"))
    found = records.found["batch of 2"]
    assert (found["address"], found["message_id"], found["trace_id"]) == ("work", "", "")


async def test_without_it_nothing_is_noted() -> None:
    seen: list[object] = []

    @node("work")
    async def work(body: str) -> None:
        seen.append(HANDLED.get())

    async with (
        Container("shop", nodes=[work]) as shop,
        shop.local() as peer,
        peer.sender("work") as out,
    ):
        await out.send("x")
    assert seen == [None]


def test_handlers_of_asyncio(logs: DeliveryLogs, records: Records) -> None:
    @node("work")
    async def work(body: str) -> None:
        await asyncio.sleep(0)
        log.info("handled")

    async def main() -> None:
        async with aio.Container("shop", nodes=[work], observe=[logs]) as shop:
            (url,) = await shop.listen("amqp://127.0.0.1:0")
            async with shop.connect(url) as peer, peer.sender("work") as out:
                await out.send(message("a"))

    asyncio.run(main())
    assert records.found["handled"]["message_id"] == "a"


async def test_lines_in_json_have_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    @node("work")
    async def work(body: str) -> None:
        log.info("handled", extra={"order": body, "odd": {1}})

    set_up_logs("info", "json")
    container = Container("shop", nodes=[work])
    log_deliveries(container)
    async with container as shop, shop.local() as peer, peer.sender("work", name="l") as out:
        await out.send(message("a"))
    log.info("outside")
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in capsys.readouterr().err.splitlines()
    ]
    (handled,) = [each for each in lines if each["message"] == "handled"]
    assert handled["extra"] == {
        "order": "a",
        "odd": "{1}",
        "message_id": "a",
        "address": "work",
        "link": "l",
        "peer": "shop",
        "attempt": "1",
        "trace_id": TRACE,
    }
    (outside,) = [each for each in lines if each["message"] == "outside"]
    assert "extra" not in outside


def test_lines_of_text_observe_nothing() -> None:
    set_up_logs("info", "text")
    container = Container("shop")
    log_deliveries(container)
    assert container.observers == []
