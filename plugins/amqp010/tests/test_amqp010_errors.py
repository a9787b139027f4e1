"""Errors in three protocols: each row of the tables in ``docs/guides/amqp010.md`` is a test at a real port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from amqp_rt_amqp010 import Front, faults
from amqp_rt_amqp010.layouts import CloseCode, ErrorCode
from amqp_rt_amqp091 import connect as connect091
from amqp_rt_amqp091 import faults as faults091
from amqp_rt_amqp091.client import ClientChannel, ClientConnection
from client010 import Attached, Client, connected
from protocol010 import Failed, Login

from amqp_rt import Broker, Container
from amqp_rt.broker import Queue
from amqp_rt.container.connections import Connection
from amqp_rt.errors import AmqpError, DeliveryRejected, LinkDetached
from amqp_rt.fronts import Error
from amqp_rt.security.access import Access, Rights, Rule

pytestmark = pytest.mark.req("N19")

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "amqp010.md"
if not GUIDE.exists():
    pytest.skip("the documentation is not here", allow_module_level=True)


def table(head: str) -> list[list[str]]:
    """Return the cells of the table of the guide whose first row begins with *head*."""
    lines = GUIDE.read_text("utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


# --- codes -------------------------------------------------------------------------------------------

CODES = [
    row
    for row in table("1.0 | 0-9-1")
    if len(row) == 3 and row[0].startswith("`amqp:") and row[1].isdigit()
]


@pytest.mark.parametrize("row", CODES, ids=[row[0].split("`")[1] for row in CODES])
def test_a_condition_has_its_code_in_each_protocol(row: list[str]) -> None:
    condition = row[0].split("`")[1]
    error = AmqpError("why", condition=condition)
    code091, code010 = int(row[1]), int(row[2])
    assert faults091.Fault.of(error).code == code091
    if "of a connection" in row[0]:
        assert faults.close_code_of(Error(condition)) is CloseCode(code010)
        assert faults.condition_of(code010) == condition
    else:
        fault = faults.CommandFault.of(error)
        assert (fault.code, fault.text) == (ErrorCode(code010), "why")


def test_the_table_has_all_conditions() -> None:
    listed = {row[0].split("`")[1] for row in CODES}
    assert listed - {"amqp:internal-error"} == {
        *faults091._CODES,
        *faults._CODES,
        *(each for each in faults._CLOSE_CONDITIONS.values() if each != "amqp:not-found"),
    }
    other = AmqpError("why", condition="app:unheard-of")
    assert faults091.Fault.of(other).code == faults.CommandFault.of(other).code == 541


# --- occasions ---------------------------------------------------------------------------------------


class Three:
    """A broker, and a client of each protocol."""

    def __init__(
        self, broker: Broker, native: Connection, amqp091: ClientConnection, amqp010: Client
    ) -> None:
        self.broker = broker
        self.native = native
        self.amqp091 = amqp091
        self.amqp010 = amqp010


@asynccontextmanager
async def three(*queues: Queue, users: bool = False) -> AsyncIterator[Three]:
    """Connect them to a broker with *queues*; with *users* they may use all but "secret"."""
    options: dict[str, Any] = {}
    login, who = Login.anonymous(), ""
    if users:
        rules = [Rule(address, Rights.MANAGE, users=("ada",)) for address in ("q", "missing")]
        options = {"users": {"ada": "pw"}, "access": Access(rules)}
        login, who = Login.plain("ada", "pw"), "ada:pw@"
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        broker = await enter(Broker(fronts=[Front(), "amqp091"], volatile=True, **options))
        for queue in queues:
            await broker.declare(queue)
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        where = url.replace("://", f"://{who}")
        client = await enter(Container("client"))
        native = await enter(client.connect(where, reconnect=None))
        amqp091 = await enter(connect091(where))
        stream = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2].rstrip("/")))
        amqp010 = await enter(connected(stream, login=login))
        yield Three(broker, native, amqp091, amqp010)


Found = tuple[str, str, str]


async def errors_of(
    here: Three,
    native: Callable[[Connection], Awaitable[Any]],
    amqp091: Callable[[ClientChannel], Awaitable[Any]],
    amqp010: Callable[[Attached], Awaitable[Any]],
) -> Found:
    """Return what the clients get when they do the same."""
    with pytest.raises((LinkDetached, DeliveryRejected)) as native_error:
        await native(here.native)
    found = f"`{native_error.value.condition}`"
    if isinstance(native_error.value, DeliveryRejected):
        found = f"rejected: {found}"
    with pytest.raises(AmqpError) as error:
        async with here.amqp091.channel() as channel:
            await amqp091(channel)
    nacked = isinstance(error.value, DeliveryRejected)
    code = "`basic.nack`" if nacked else str(faults091.code_of(error.value.condition))
    with pytest.raises(Failed) as failed:
        await amqp010(await here.amqp010.session(b"s"))
    return found, code, str(failed.value.code)


async def attach(native: Connection, address: str, **options: Any) -> None:
    async with native.receiver(address, **options) as link:
        await link.wait_attached()


async def consume(channel: ClientChannel, queue: str, **options: Any) -> None:
    async with channel.consume(queue, **options):
        pass


async def publish(session: Attached, key: str) -> None:
    await session.done(session.transfer("", b"x", key=key))


async def send(native: Connection, address: str) -> None:
    async with native.sender(address) as link:
        await link.send("x")


async def consumed(queue: str, *, users: bool = False) -> Found:
    async with three(Queue("secret"), users=users) as here:
        return await errors_of(
            here,
            lambda native: attach(native, queue),
            lambda channel: consume(channel, queue),
            lambda session: session.subscribe(queue, "d"),
        )


async def published() -> Found:
    async with three(Queue("secret"), users=True) as here:
        return await errors_of(
            here,
            lambda native: send(native, "secret"),
            lambda channel: channel.publish(b"x", key="secret"),
            lambda session: publish(session, "secret"),
        )


async def consumed_beside() -> Found:
    async with three(Queue("q")) as here:
        session = await here.amqp010.session(b"first")
        await session.subscribe("q", "d", exclusive=True)
        return await errors_of(
            here,
            lambda native: attach(native, "q"),
            lambda channel: consume(channel, "q"),
            lambda session: session.subscribe("q", "d"),
        )


async def selected() -> Found:
    wrong = "colour ="
    async with three(Queue("q")) as here:
        with pytest.raises(LinkDetached) as native_error:
            await attach(here.native, "q", selector=wrong)
        session = await here.amqp010.session(b"s")
        with pytest.raises(Failed) as failed:
            await session.subscribe("q", "d", arguments={"x-apache-selector": wrong})
    text = "none: it has no selectors"
    return f"`{native_error.value.condition}`", text, str(failed.value.code)


async def overflowed() -> Found:
    async with three(Queue("q", length_max=1, overflow="reject")) as here:
        await send(here.native, "q")
        return await errors_of(
            here,
            lambda native: send(native, "q"),
            lambda channel: channel.publish(b"x", key="q"),
            lambda session: publish(session, "q"),
        )


async def deleted() -> Found:
    async with three(Queue("q")) as here, here.amqp091.channel() as channel:
        session = await here.amqp010.session(b"s")
        await session.subscribe("q", "d")
        async with here.native.receiver("q") as link, channel.consume("q") as consumer:
            await link.wait_attached()
            here.broker.host.space().delete("q")
            with pytest.raises(LinkDetached) as native_error:
                await link.receive()
            # A cancelled consumer ends without an error, and its channel goes on.
            assert [each async for each in consumer] == []
            await channel.declare_queue("other")
            with pytest.raises(Failed) as failed:
                await session.sync()
        return f"`{native_error.value.condition}`", "`basic.cancel`", str(failed.value.code)


OCCASIONS: dict[str, Callable[[], Awaitable[Found]]] = {
    "consuming from a queue that does not exist": lambda: consumed("missing"),
    "consuming without the right to": lambda: consumed("secret", users=True),
    "publishing without the right to": published,
    "consuming beside an exclusive consumer": consumed_beside,
    "a wrong selector": selected,
    "a message that a full queue refuses": overflowed,
    "the queue of a consumer is deleted": deleted,
}
ROWS = table("occasion")


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
async def test_an_occasion_has_its_error_in_each_protocol(row: list[str]) -> None:
    assert list(await OCCASIONS[row[0]]()) == row[1:]


def test_each_occasion_has_its_row() -> None:
    assert [row[0] for row in ROWS] == list(OCCASIONS)


# --- dead letters ------------------------------------------------------------------------------------


async def reject_by_native(here: Three) -> None:
    async with here.native.receiver("q", credit=1) as link:
        (await link.receive()).reject("the text", condition="the condition")


async def reject_by_091(here: Three) -> None:
    async with here.amqp091.channel(prefetch=1) as channel, channel.consume("q") as consumer:
        (await consumer.__anext__()).nack(requeue=False)


def rejecting(code: int) -> Callable[[Three], Awaitable[None]]:
    async def reject(here: Three) -> None:
        session = await here.amqp010.session(b"rejecting")
        await session.subscribe("q", "d")
        message = await session.message()
        await session.done(session.state.reject(message.id, code=code, text="the text"))

    return reject


REJECTIONS: dict[str, Callable[[Three], Awaitable[None]]] = {
    "1.0, with a condition and a text": reject_by_native,
    "0-9-1": reject_by_091,
    **{f"0-10, code {code}": rejecting(code) for code in range(3)},
}
REJECTED = table("rejected by")


def test_each_rejection_has_its_row() -> None:
    assert [row[0] for row in REJECTED] == list(REJECTIONS)


@pytest.mark.parametrize("row", REJECTED, ids=[row[0] for row in REJECTED])
async def test_a_dead_letter_says_why_in_each_protocol(row: list[str]) -> None:
    queues = (Queue("dead", browse_only=True), Queue("q", dead_letter="dead"))
    names = [f"x-opt-dead-letter-{word}" for word in ("reason", "condition", "description")]
    expected = [None if cell == "none" else cell for cell in row[1:]]
    async with three(*queues) as here:
        await send(here.native, "q")
        await REJECTIONS[row[0]](here)
        async with here.native.receiver("dead") as link:
            annotations = (await link.receive()).message.message_annotations
            assert [annotations.get(name) for name in names] == expected
        async with here.amqp091.channel() as channel, channel.consume("dead") as consumer:
            headers = (await consumer.__anext__()).properties.headers or {}
            assert [headers.get(name) for name in names] == expected
        session = await here.amqp010.session(b"s")
        await session.subscribe("dead", "dead")
        message = await session.message()
        headers = message.header("message-properties").application_headers
        assert [headers.get(name) for name in names] == expected
