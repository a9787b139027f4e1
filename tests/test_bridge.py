"""The same classes through three interfaces: trio, asyncio and threads."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import inspect
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import trio
from anyio.from_thread import BlockingPortalProvider

import amqp_rt
from amqp_rt import (
    Connection,
    Delivery,
    Message,
    PerMessage,
    Reject,
    Release,
    aio,
    node,
    rpc,
    source,
    sync,
)
from amqp_rt.bridge import ThreadBridge
from amqp_rt.broker import Queue
from amqp_rt.errors import (
    AmqpError,
    ConnectFailed,
    DeadlineExceeded,
    DeliveryNotAccepted,
    LocalProtocolError,
)
from amqp_rt.outbox import SqliteOutbox
from amqp_rt.outcomes import ACCEPTED, RELEASED

ANYWHERE = "amqp://127.0.0.1:0"

# --- One table of scenarios: written for trio, awaited under asyncio, and without any await ------


async def nodes_requests_and_streams(door: Any) -> None:
    got: list[str] = []

    @node("orders")
    async def place(order: str, delivery: Delivery) -> None:
        await door.sleep(0.001)
        assert delivery.message.subject == "new"
        if order == "bad":
            raise Reject("not this one")
        got.append(order)

    @rpc("count/{kind}")
    async def count(kind: str) -> int:
        await door.sleep(0)
        return sum(each.startswith(kind) for each in got)

    @rpc("range")
    async def numbers(upto: int) -> AsyncIterator[int]:
        for number in range(upto):
            await door.sleep(0)
            yield number

    @source("ticks")
    async def ticks() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    async with door.Container("shop", nodes=[place, count, numbers]) as shop:

        @shop.rpc("late")
        async def late(text: str) -> str:
            return text + "!"

        shop.add(ticks)
        (url,) = await shop.listen(ANYWHERE)
        async with door.connect(url) as peer:
            assert isinstance(peer, Connection)
            async with peer.sender("orders") as out:
                assert await out.send("apple", subject="new") == ACCEPTED
                receipts = [out.send_nowait(each, subject="new") for each in ("ant", "bee")]
                for receipt in receipts:
                    await receipt.accepted()
                with pytest.raises(AmqpError, match="not this one"):
                    await out.send("bad", subject="new")
            assert await peer.call("count/a", reply=int) == 2
            assert await peer.call("late", "x", reply=str) == "x!"
            found = []
            async for number in peer.stream("range", 5, reply=int):
                found.append(number)  # noqa: PERF401 (reads the same with and without async)
            assert found == [0, 1, 2, 3, 4]
            async with peer.receiver("ticks") as messages:
                assert [(await messages.receive()).body for _ in range(3)] == [0, 1, 2]
            shop.remove("late")
            shop.remove(ticks)
            # The link may still be attached, without a handler.
            with pytest.raises(AmqpError, match=r"no node|is gone|released"):
                await peer.call("late", "x", reply=str)
            with pytest.raises(AmqpError, match="no node"):
                await peer.call("never", reply=str)
        assert [each.peer.container_id for each in shop.connections] in (
            [],
            [peer.peer.container_id],
        )


async def a_queue_from_both_ends(door: Any) -> None:
    async with door.Broker() as broker:
        await broker.declare(Queue("q"))
        async with (
            broker.local() as peer,
            peer.sender("q") as out,
            peer.receiver("q", credit=10) as messages,
        ):
            for number in range(6):
                await out.send(number)
            async with await messages.receive() as delivery:
                assert delivery.body == 0
            with await messages.receive() as delivery:
                assert delivery.body == 1
            (await messages.receive()).release()
            seen = []
            async for delivery in messages:
                seen.append(delivery.body)
                delivery.accept()
                if len(seen) == 4:
                    break
            assert sorted(seen) == [2, 3, 4, 5]
            with pytest.raises(DeadlineExceeded):
                await messages.receive(within=0.01)
            assert messages.receive_nowait() is None
            assert await messages.get() is None
        await broker.delete("q")


async def a_transaction(door: Any) -> None:
    async with door.Broker() as broker:
        await broker.declare(Queue("q"))
        async with broker.local() as peer, peer.sender("q") as out:
            async with peer.transaction() as work:
                await out.send("kept", transaction=work)
            with pytest.raises(ZeroDivisionError):  # noqa: PT012 (the block is under test)
                async with peer.transaction() as work:
                    await out.send("never", transaction=work)
                    raise ZeroDivisionError
            async with peer.receiver("q") as messages:
                async with peer.transaction() as work:
                    delivery = await messages.receive()
                    delivery.accept(transaction=work)
                assert delivery.body == "kept"
                assert await messages.get() is None


async def a_body_in_pieces(door: Any) -> None:
    sizes: list[int] = []

    async with door.Container("disk") as disk:
        disk.add(streamed(sizes))
        (url,) = await disk.listen(ANYWHERE)
        async with (
            door.connect(url) as peer,
            peer.sender("store") as out,
            out.stream() as message,
        ):
            for _ in range(10):
                await message.write(bytes(100_000))
        assert sizes == [1_000_000]


async def mistakes(door: Any) -> None:
    with pytest.raises(ConnectFailed, match="nothing listens there"):
        async with door.connect("amqp://127.0.0.1:1", within=5, reconnect=None):
            raise AssertionError
    with pytest.raises(AmqpError, match="ampq"):
        async with door.connect("ampq://127.0.0.1"):
            raise AssertionError
    async with door.Container("empty") as empty:
        (url,) = await empty.listen(ANYWHERE)
        with pytest.raises(KeyError):
            async with door.connect(url):
                raise KeyError
        with pytest.raises(AmqpError, match="no node"):
            async with door.connect(url) as peer, peer.sender("nothing"):
                raise AssertionError
        with pytest.raises(AttributeError):
            empty.no_such_thing  # noqa: B018
    with pytest.raises(TypeError, match="declares no node"):
        async with door.Container("wrong", nodes=[object()]):
            raise AssertionError


SCENARIOS = (
    nodes_requests_and_streams,
    a_queue_from_both_ends,
    a_transaction,
    a_body_in_pieces,
    mistakes,
)


class _Waits(ast.NodeTransformer):
    """Transformer that removes every ``async`` and ``await`` from a program."""

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        self.generic_visit(node)
        return ast.FunctionDef(
            **{name: getattr(node, name, []) for name in ast.FunctionDef._fields}
        )

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        self.generic_visit(node)
        return ast.With(items=node.items, body=node.body)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        self.generic_visit(node)
        return ast.For(target=node.target, iter=node.iter, body=node.body, orelse=node.orelse)

    def visit_Await(self, node: ast.Await) -> ast.AST:
        self.generic_visit(node)
        return node.value

    def visit_Name(self, node: ast.Name) -> ast.AST:
        name = "Iterator" if node.id == "AsyncIterator" else node.id
        return ast.Name(name, node.ctx)


def without_await(scenario: Callable[[Any], Awaitable[None]]) -> Callable[[Any], None]:
    """Return *scenario* as it would be written for threads."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(scenario)))
    plain = ast.fix_missing_locations(_Waits().visit(tree))
    space = {**globals()}
    code = compile(
        plain, __file__, "exec", flags=__import__("__future__").annotations.compiler_flag
    )
    exec(code, space)
    made: Callable[[Any], None] = space[scenario.__name__]
    return made


def streamed(sizes: list[int]) -> Any:
    """Return the handler of a body in pieces, which is a coroutine for threads as well."""

    @node("store", streaming=True)
    async def store(body: AsyncIterator[bytes]) -> None:
        size = 0
        async for chunk in body:
            size += len(chunk)
        sizes.append(size)

    return store


DOORS: dict[str, Any] = {
    "trio": SimpleNamespace(
        Broker=amqp_rt.Broker,
        Container=amqp_rt.Container,
        connect=amqp_rt.connect,
        sleep=trio.sleep,
    ),
    "aio": SimpleNamespace(
        Broker=aio.Broker,
        Container=aio.Container,
        connect=aio.connect,
        sleep=asyncio.sleep,
    ),
    "sync": SimpleNamespace(
        Broker=sync.Broker,
        Container=sync.Container,
        connect=sync.connect,
        sleep=time.sleep,
    ),
}


@pytest.mark.req("A15")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("door", DOORS)
def test_a_scenario(door: str, scenario: Callable[[Any], Awaitable[None]]) -> None:
    threads = threading.active_count()
    if door == "trio":
        trio.run(scenario, DOORS[door])
    elif door == "aio":
        asyncio.run(scenario(DOORS[door]))  # type: ignore[arg-type]
        # The guest of this loop has ended with its last block.
        assert not aio._GUESTS or all(guest._nursery is None for guest in aio._GUESTS.values())
    else:
        without_await(scenario)(DOORS[door])
    # Worker threads of trio stay for a while; none of ours is among them.
    names = [thread.name for thread in threading.enumerate()[threads:]]
    assert not [name for name in names if "Portal" in name], names


@pytest.mark.req("A15")
@pytest.mark.skipif(amqp_rt.COMPILED, reason="the sources are checked, not what is made of them")
def test_what_type_checkers_know_of_the_door_for_threads_is_up_to_date() -> None:
    tool = Path(__file__).parent.parent / "docs" / "_tools" / "sync_stub.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# --- asyncio -----------------------------------------------------------------------------------


def in_asyncio(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))

    return run


@asynccontextmanager
async def a_service(*nodes: Any, **options: Any) -> AsyncIterator[Connection]:
    """Run a container with these nodes, and connect to it."""
    async with aio.Container("service", nodes=nodes, **options) as service:
        (url,) = await service.listen(ANYWHERE)
        async with aio.connect(url) as peer:
            yield peer


@pytest.mark.req("A8", "A15")
@in_asyncio
async def test_a_task_that_is_cancelled_cancels_the_handler_on_the_other_side() -> None:
    cancelled = asyncio.Event()

    @rpc("slow")
    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with a_service(slow) as peer:
        call = asyncio.create_task(peer.call("slow"))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await cancelled.wait()
        cancelled.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await peer.call("slow")
        await cancelled.wait()


@pytest.mark.req("A15")
@in_asyncio
async def test_tasks_of_a_group_end_together() -> None:
    @rpc("slow")
    async def slow() -> None:
        await asyncio.sleep(60)

    async with a_service(slow) as peer:
        with pytest.raises(ExceptionGroup) as failed:  # noqa: PT012 (the block is under test)
            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(peer.call("slow"))  # type: ignore[arg-type]
                group.create_task(peer.call("nothing"))  # type: ignore[arg-type]
        (error,) = failed.value.exceptions
        assert isinstance(error, AmqpError)


@pytest.mark.req("A15")
@in_asyncio
async def test_a_delivery_that_comes_with_the_cancellation_is_released() -> None:
    async with aio.Broker() as broker:
        await broker.declare(Queue("q"))
        async with broker.local() as peer, peer.sender("q") as out:
            for delay in range(20):
                async with peer.receiver("q", credit=1) as messages:
                    waiting = asyncio.create_task(messages.receive())  # type: ignore[arg-type]
                    await asyncio.sleep(0.01)
                    await out.send(delay)
                    for _ in range(delay):
                        await asyncio.sleep(0)
                    waiting.cancel()
                    try:
                        delivery = await waiting
                    except asyncio.CancelledError:
                        delivery = await messages.receive(within=5)
                    assert delivery.body == delay
                    delivery.accept()


def _delivery(settled: list[Any]) -> Delivery:
    raw: Any = SimpleNamespace(
        settled=False, local_state=None, context=None, link=None, settle=settled.append
    )
    return Delivery(raw)


@pytest.mark.req("A15")
@in_asyncio
async def test_a_batch_that_comes_with_the_cancellation_is_released() -> None:
    settled: list[Any] = []

    async def take() -> list[Delivery]:
        with contextlib.suppress(trio.Cancelled):
            await trio.sleep_forever()
        # The batch arrived in the same pass of the loop as the cancellation.
        return [_delivery(settled), _delivery(settled)]

    async with aio.Container("one"):
        guest = aio._GUESTS[asyncio.get_running_loop()]
        waiting = asyncio.create_task(guest.wait(take))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert settled == [RELEASED, RELEASED]


@pytest.mark.req("A15")
@in_asyncio
async def test_a_guest_that_is_cancelled_while_it_begins_or_ends_can_begin_again() -> None:
    async def use() -> None:
        async with aio.Container("one") as one:
            assert one.ready

    for passes in range(100):
        task = asyncio.create_task(use())
        for _ in range(passes):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            await use()
        else:
            break
    else:
        pytest.fail("it never came to its end")


@pytest.mark.req("A15")
def test_an_interrupted_thread_gives_back_what_comes_all_the_same() -> None:
    settled: list[Any] = []
    thread = threading.get_ident()
    over = threading.Event()

    async def take() -> Delivery:
        await interrupt(thread)
        with contextlib.suppress(trio.Cancelled):
            await trio.sleep_forever()
        # The delivery arrived in the same pass of the loop as the cancellation.
        over.set()
        return _delivery(settled)

    with BlockingPortalProvider("trio") as portal:
        door = ThreadBridge(portal)
        with pytest.raises(KeyboardInterrupt):
            door.wait(take)
        assert over.wait(10)
        portal.call(trio.lowlevel.checkpoint)
    assert settled == [RELEASED]


async def interrupt(thread: int) -> None:
    """Interrupt *thread* once it waits for a call under trio."""
    # A signal that comes just before the thread blocks is only handled when it wakes up.
    while sys._current_frames()[thread].f_code.co_name != "wait":  # noqa: ASYNC110
        await trio.sleep(0.01)
    await trio.sleep(0.1)
    signal.pthread_kill(thread, signal.SIGINT)


class Interrupting:
    """Block whose entry or end interrupts the thread that waits for it, and is cancelled or not."""

    def __init__(self, where: str, *, heeds: bool = True) -> None:
        self.where = where
        self.heeds = heeds
        self.thread = threading.get_ident()
        self.said: list[str] = []

    async def _pass(self, where: str) -> None:
        self.said.append(where)
        if where == self.where:
            await interrupt(self.thread)
            with contextlib.ExitStack() as stack:
                if not self.heeds:
                    stack.enter_context(contextlib.suppress(trio.Cancelled))
                await trio.sleep_forever()
        self.said.append(f"{where}ed")

    async def __aenter__(self) -> Self:
        await self._pass("enter")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.said.append("nothing" if kind is None else kind.__name__)
        await self._pass("exit")


@pytest.mark.req("A15")
@pytest.mark.parametrize(
    ("block", "said"),
    [
        (Interrupting("enter"), ["enter"]),
        # The block was entered although it was cancelled: it is left, with the cancellation.
        (
            Interrupting("enter", heeds=False),
            ["enter", "entered", "Cancelled", "exit", "exited"],
        ),
        (Interrupting("exit"), ["enter", "entered", "nothing", "exit"]),
    ],
    ids=["cancelled", "entered all the same", "leaving"],
)
def test_a_thread_interrupted_at_the_bounds_of_a_block_leaves_nothing_open(
    block: Interrupting, said: list[str]
) -> None:
    with BlockingPortalProvider("trio") as portal:
        with pytest.raises(KeyboardInterrupt), ThreadBridge(portal).stand_in(block):
            pass
        assert block.said == said


@pytest.mark.req("A9", "A15")
@in_asyncio
async def test_a_handler_that_cancels_itself_releases_its_message() -> None:
    tries = 0

    @node("q")
    async def take(body: str) -> None:
        nonlocal tries
        tries += 1
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)

    async with a_service(take) as peer, peer.sender("q") as out:
        with pytest.raises(AmqpError, match="released"):
            await out.send("x")
    assert tries == 1


class Database:
    async def ask(self) -> str:
        await asyncio.sleep(0)
        return "row"


@pytest.mark.slow
@pytest.mark.req("A4", "A5", "A15", "A16")
@in_asyncio
async def test_what_a_container_is_given_belongs_to_asyncio_too() -> None:
    said: list[str] = []

    @asynccontextmanager
    async def database() -> AsyncIterator[Database]:
        await asyncio.sleep(0)
        said.append("open")
        yield Database()
        await asyncio.sleep(0)
        said.append("closed")

    async def logged(call_next: Any, context: Any) -> Any:
        await asyncio.sleep(0)
        said.append("before")
        try:
            return await call_next(context)
        finally:
            said.append("after")

    async def verify(user: str, password: str, peer: Any) -> str | None:
        await asyncio.sleep(0)
        return user if password == "secret" else None

    class Shop:
        @rpc("ask")
        async def ask(self, key: str, db: Database) -> str:
            return f"{key} {await db.ask()}"

    async with aio.Container(
        "shop", nodes=[], resources=[database], middleware=[logged], users=verify
    ) as shop:
        shop.add(Shop())
        (url,) = await shop.listen(ANYWHERE)
        with pytest.raises(AmqpError):
            async with aio.connect(url.replace("//", "//me:wrong@")):
                raise AssertionError
        async with aio.connect(url.replace("//", "//me:secret@")) as peer:
            assert await peer.call("ask", "k", reply=str) == "k row"
    assert said == ["open", "before", "after", "closed"]


@pytest.mark.req("A13", "A15")
@pytest.mark.parametrize("where", ["call", "block", "raising block"])
def test_an_error_does_not_take_the_place_of_a_cancellation(where: str) -> None:
    """asyncio cancels a task once: a task that handled the error and continued would never end."""

    class Failing:
        """Fails when the test asks for it, whether it is cancelled or not."""

        def __init__(self) -> None:
            self.go_on = trio.Event()

        async def fail(self) -> None:
            with trio.CancelScope(shield=True):
                await self.go_on.wait()
            raise AmqpError("failed")

        async def __aenter__(self) -> Failing:
            return self

        async def __aexit__(self, *args: object) -> None:
            await self.fail()

    async def main() -> None:
        async with aio.Container("one"):
            guest = aio._GUESTS[asyncio.get_running_loop()]  # type: ignore[attr-defined]
            failing = Failing()

            async def work() -> None:
                with contextlib.suppress(AmqpError):
                    if where == "call":
                        await guest.wait(failing.fail)
                    else:
                        async with guest.stand_in(failing):
                            if where == "raising block":
                                raise AmqpError("in it")
                await asyncio.sleep(3600)

            task = asyncio.create_task(work())
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.sleep(0.01)
            failing.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(asyncio.shield(task), 5)

    asyncio.run(main())


@pytest.mark.req("A15")
@in_asyncio
async def test_a_block_that_ends_by_itself_ends_the_task_in_it() -> None:
    async with aio.Container("one") as one:
        (url,) = await one.listen(ANYWHERE)
        guest = aio._GUESTS[asyncio.get_running_loop()]

        @asynccontextmanager
        async def fragile() -> AsyncIterator[None]:
            async with trio.open_nursery() as nursery:

                async def fail() -> None:
                    await trio.sleep(0.01)
                    raise OSError("gone")

                nursery.start_soon(fail)
                yield

        with pytest.raises(ExceptionGroup) as failed:
            async with guest.stand_in(fragile()):  # type: ignore[attr-defined]
                await asyncio.sleep(60)
        assert isinstance(failed.value.exceptions[0], OSError)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

        # Cancelled from both sides: both cancellations arrive.
        async def inside() -> None:
            async with guest.stand_in(fragile()):  # type: ignore[attr-defined]
                await asyncio.sleep(60)

        both = asyncio.create_task(inside())
        await asyncio.sleep(0)
        both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both
        async with aio.connect(url) as peer:
            assert peer.peer.container_id == "one"


@pytest.mark.req("A15")
@in_asyncio
async def test_what_is_used_after_its_block_says_so() -> None:
    async with aio.Container("one") as one:
        (url,) = await one.listen(ANYWHERE)
        async with aio.connect(url, reconnect=None) as peer:
            pass
        with pytest.raises(AmqpError, match=r"clos(ed|ing)"):
            await peer.call("x")
    with pytest.raises(RuntimeError, match="its block has been left"):
        await peer.call("x")
    # The next block starts everything again.
    async with aio.Container("two") as two:
        assert two.ready


# --- Threads -----------------------------------------------------------------------------------


@pytest.mark.req("A15")
def test_threads_share_a_connection_and_handlers_may_wait() -> None:
    here = threading.current_thread()
    seen: set[int] = set()
    meet = threading.Barrier(4)

    @rpc("work", slots=4)
    def work(number: int) -> int:
        seen.add(threading.get_ident())
        assert threading.current_thread() is not here
        meet.wait(10)  # four at once
        return number * number

    results: dict[int, int] = {}
    with sync.Container("service", nodes=[work]) as service:
        (url,) = service.listen(ANYWHERE)
        with sync.connect(url) as peer:

            def ask(number: int) -> None:
                results[number] = peer.call("work", number, reply=int)

            threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
    assert results == {0: 0, 1: 1, 2: 4, 3: 9}
    assert len(seen) == 4


@pytest.mark.req("A15")
def test_generators_of_threads_are_closed() -> None:
    ended = threading.Event()

    @rpc("endless")
    def endless() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            ended.set()

    with sync.Container("service", nodes=[endless]) as service:
        (url,) = service.listen(ANYWHERE)
        with sync.connect(url) as peer:
            stream = peer.stream("endless", reply=int, credit=5)
            assert [next(stream) for _ in range(3)] == [0, 1, 2]
            stream.aclose()
            assert ended.wait(10)


def test_a_plain_handler_says_outcomes_as_any_other() -> None:
    @node("q")
    def refuse(body: str) -> None:
        raise Release if body == "later" else LocalProtocolError("a mistake of its own")

    with sync.Container("service", nodes=[refuse]) as service:
        (url,) = service.listen(ANYWHERE)
        with sync.connect(url) as peer, peer.sender("q") as out:
            with pytest.raises(AmqpError, match="released"):
                out.send("later")
            with pytest.raises(AmqpError, match="failed attempt"):
                out.send("now")
            assert isinstance(Message("x"), Message)


# --- The wrong door ---


@pytest.mark.req("A15")
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("Container", lambda: amqp_rt.Container("c")),
        ("Broker", amqp_rt.Broker),
        ("connect", lambda: amqp_rt.connect("amqp://127.0.0.1:1")),
    ],
)
def test_a_class_for_trio_names_its_door_under_asyncio(name: str, make: Callable[[], Any]) -> None:
    async def enter() -> None:
        async with make():
            pass

    with pytest.raises(RuntimeError, match=f"under asyncio use amqp_rt.aio.{name}, in a program"):
        asyncio.run(enter())


@pytest.mark.req("A15")
@pytest.mark.parametrize("name", ["Container", "Broker", "connect"])
async def test_a_class_for_asyncio_names_its_own_under_trio(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"under trio use amqp_rt.{name}$"):
        async with getattr(aio, name)("amqp://127.0.0.1:1"):
            pass


class ForeignClient:
    """Object with a block, as sessions of databases and clients of HTTP are."""

    async def __aenter__(self) -> ForeignClient:
        return self

    async def __aexit__(self, *raised: Any) -> None:
        pass


@pytest.mark.req("A15", "A4")
def test_a_resource_of_asyncio_gets_the_exception_of_its_handler() -> None:
    ends: list[str] = []

    @asynccontextmanager
    async def session(client: ForeignClient) -> AsyncIterator[SimpleNamespace]:
        assert type(client) is ForeignClient
        try:
            yield SimpleNamespace(client=client)
        except BaseException as error:
            ends.append(type(error).__name__)
            raise
        else:
            ends.append("committed")

    @node("orders")
    async def place(order: str, session: SimpleNamespace) -> None:
        assert type(session.client) is ForeignClient
        if order == "slow":
            await asyncio.sleep(60)
        if order == "bad":
            raise ZeroDivisionError

    async def use() -> None:
        resources = [ForeignClient(), PerMessage(session)]
        async with (
            aio.Container("c", nodes=[place], resources=resources, drain_s=0.0) as container,
            container.local() as peer,
            peer.sender("orders") as out,
        ):
            await out.send("good")
            with pytest.raises(DeliveryNotAccepted):
                await out.send("bad")
            out.send_nowait("slow")
            await asyncio.sleep(0.1)
            raise KeyError("stop at once")

    with pytest.raises(KeyError):
        asyncio.run(use())
    assert ends == ["committed", "ZeroDivisionError", "CancelledError"]


@pytest.mark.req("A15")
def test_plain_functions_that_ask_for_a_thread_get_one_of_the_door_for_threads() -> None:
    threads: list[str] = []

    @node("orders", thread=True)
    def place(order: str) -> None:
        threads.append(threading.current_thread().name)

    with (
        sync.Container("c", nodes=[place]) as container,
        container.local() as peer,
        peer.sender("orders") as out,
    ):
        out.send("a")
    assert threads != [threading.current_thread().name]


@pytest.mark.req("A15")
def test_an_outbox_says_that_it_is_for_trio() -> None:
    async def use() -> None:
        with closing(sqlite3.connect(":memory:")) as database:
            outbox = SqliteOutbox(database, "o")
            with pytest.raises(RuntimeError, match="a SqliteOutbox runs under trio only"):
                async with outbox.transaction():
                    pass
            for call in (outbox.flush, outbox.retry, outbox.drop):
                with pytest.raises(RuntimeError, match="a SqliteOutbox runs under trio only"):
                    await call()
            with pytest.raises(RuntimeError, match="a SqliteOutbox runs under trio only"):
                await outbox.run(None)  # type: ignore[arg-type]

    asyncio.run(use())


@pytest.mark.slow
@pytest.mark.req("A15")
def test_a_program_ends_that_has_not_left_its_block() -> None:
    program = """
from amqp_rt import sync

block = sync.Broker()
broker = block.__enter__()
broker.listen("amqp://127.0.0.1:0")

raise ValueError("what happened")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: what happened"


@pytest.mark.parametrize(
    ("make", "statement"),
    [
        (lambda: aio.Container("c"), "async with amqp_rt.aio.Container(...) as"),
        (lambda: aio.Broker("b"), "async with amqp_rt.aio.Broker(...) as"),
        (lambda: sync.Container("c"), ": with amqp_rt.sync.Container(...) as"),
        (lambda: sync.connect("amqp://127.0.0.1"), ": with amqp_rt.sync.connect(...) as"),
    ],
)
def test_what_exists_only_inside_a_block_is_named(make: Callable[[], Any], statement: str) -> None:
    outside = make()
    with pytest.raises(AttributeError) as missing:
        outside.node("orders")
    assert "has no 'node' before its block: " in str(missing.value)
    assert statement in str(missing.value)
    with pytest.raises(AttributeError, match=r"has no run\(\): enter its block in a program of"):
        outside.run("amqp://127.0.0.1")
    assert not hasattr(outside, "__deepcopy__")
