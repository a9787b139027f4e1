"""The pytest plug-in, as projects meet it: each test here runs pytest on a project of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini(
        """
        [pytest]
        addopts = --strict-markers
        filterwarnings =
            error
            ignore:Unknown config option
        asyncio_default_fixture_loop_scope = function
        """
    )
    return pytester


def passed(project: pytest.Pytester, count: int, *arguments: str) -> None:
    result = project.runpytest_subprocess(*arguments, timeout=100)
    result.assert_outcomes(passed=count)


@pytest.mark.slow
@pytest.mark.req("A21", "A22", "L4")
def test_plain_tests_in_virtual_time(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest, trio
        from amqp_rt import Container, node, rpc
        from amqp_rt.broker import Queue
        from amqp_rt.errors import AmqpError, DeadlineExceeded

        class Orders:
            def __init__(self):
                self.placed = []
            @node("orders")
            async def place(self, sku: str):
                self.placed.append(sku)
            @rpc("orders/price")
            async def price(self, sku: str) -> int:
                return len(sku)
            @rpc("slow")
            async def slow(self):
                await trio.sleep(86_400)
            @rpc("fails")
            async def fails(self):
                raise AmqpError("no such sku", condition="amqp:not-found")

        def test_call(amqp):
            bus = amqp.container(Orders())
            assert amqp.run(bus.call, "orders/price", "A-1") == 3

        def test_send(amqp):
            orders = Orders()
            bus = amqp.container(orders)
            amqp.run(bus.send, "orders", "A-1")
            assert orders.placed == ["A-1"]

        def test_time_costs_nothing(amqp):
            bus = amqp.container(Orders())
            with pytest.raises(DeadlineExceeded):
                amqp.run(lambda: bus.call("slow", within=3600))

        def test_errors_come_as_they_are(amqp):
            with pytest.raises(AmqpError, match="no such sku"):
                amqp.run(amqp.container(Orders()).call, "fails")

        def test_times_to_live_are_virtual(amqp):
            broker = amqp.broker()
            async def scenario():
                await broker.declare(Queue("work", ttl_s=3600, dead_letter="dead"))
                await broker.listen("memory://broker")
                client = amqp.container(name="client")
                async with client, client.connect("memory://broker") as peer:
                    async with peer.sender("work") as sender:
                        await sender.send("x", durable=True)
                    await trio.sleep(3599)
                    before = broker.stats("dead").available
                    await trio.sleep(2)
                    return before, broker.stats("dead").available
            assert amqp.run(scenario) == (0, 1)

        def test_a_broker_on_the_network_of_a_program(amqp):
            app = Container("shop")
            @app.rpc("orders/price")
            async def price(sku: str) -> int:
                return len(sku)
            with pytest.raises(TypeError, match="@app.node declares a function for that container alone"):
                amqp.container(price)
            broker = amqp.broker(network=app.network, volatile=True)
            async def scenario():
                await broker.listen("memory://broker")
                async with app, app.connect("memory://broker") as peer:
                    return peer.peer.container_id
            assert amqp.run(scenario) == "broker"

        def test_two_worlds_do_not_meet(amqp):
            bus = amqp.container(Orders())
            amqp.run(bus.call, "orders/price", "A-1")
            with pytest.raises(RuntimeError, match="does not run"):
                amqp.run(bus.call, "orders/price", "A-1")
        """
    )
    passed(project, 7, "-p", "no:anyio", "-p", "no:asyncio", "-p", "no:trio")


@pytest.mark.slow
@pytest.mark.req("A22")
def test_trio_tests_get_virtual_time(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest, trio
        from amqp_rt import rpc

        @rpc("slow")
        async def slow() -> float:
            await trio.sleep(3600)
            return trio.current_time()

        @pytest.mark.trio
        async def test_an_hour(amqp):
            async with amqp.container(slow) as bus:
                assert await bus.call("slow") >= 3600

        @pytest.mark.trio
        async def test_run_is_for_others(amqp):
            with pytest.raises(RuntimeError, match="runs under trio already"):
                amqp.run(slow)

        @pytest.mark.trio
        async def test_its_own_clock(amqp, mock_clock):
            assert trio.current_time() == 0
        """
    )
    passed(project, 3)


@pytest.mark.slow
def test_virtual_time_is_not_for_asyncio(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest
        @pytest.mark.asyncio
        async def test_it(amqp): pass
        """
    )
    result = project.runpytest_subprocess(timeout=100)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*the fixture amqp keeps virtual time, which trio has*"])


BROKER = """
    import pytest, trio
    from amqp_rt import Container
    from amqp_rt.broker import Queue
    from amqp_rt.errors import ConnectionLost

    async def send(url, *bodies):
        async with Container("client") as us, us.connect(url) as peer:
            async with peer.sender("work") as sender:
                for body in bodies:
                    await sender.send(body)
"""


@pytest.mark.slow
@pytest.mark.req("A21", "P7")
def test_a_broker_for_plain_tests(project: pytest.Pytester) -> None:
    project.makepyfile(
        BROKER
        + """
    def test_messages(amqp_broker):
        work = amqp_broker.declare("work")
        trio.run(send, amqp_broker.url, "a", "b")
        assert [message.body for message in work.messages] == ["a", "b"]
        assert [message.body for message in amqp_broker.queue("work").wait_for(2)] == ["a", "b"]
        assert (work.count, work.unsettled, work.delayed) == (2, 0, 0)
        assert work.purge() == 2
        work.wait_empty()

    def test_isolated(amqp_broker):
        assert amqp_broker.url.startswith("amqp://127.0.0.1:")
        assert amqp_broker.connections == 0
        with pytest.raises(Exception, match="there is no node 'work'"):
            amqp_broker.queue("work").messages

    def test_sentences(amqp_broker):
        work = amqp_broker.declare("work")
        work.send("only one", subject="s")
        with pytest.raises(AssertionError) as caught:
            work.wait_for(2, timeout_s=0.05)
        said = str(caught.value)
        assert "no 2 messages at 'work' within 0.05 s: it has 1 messages available" in said
        assert "only one" in said
        with pytest.raises(ValueError, match="by 0 seconds or more"):
            amqp_broker.advance(-1)
        with pytest.raises(AssertionError, match="no 1 consumers"):
            work.wait_consumers(timeout_s=0.01)

    @pytest.mark.amqp_broker(auto_create=["queue:*"], users={"u": "p"})
    def test_options(amqp_broker):
        url = amqp_broker.url.replace("//", "//u:p@")
        trio.run(send, url, "a")
        assert amqp_broker.queue("work").count == 1
        with pytest.raises(Exception, match="(?i)sasl|log|auth"):
            trio.run(send, amqp_broker.url, "a")

    def test_declarations(amqp_broker):
        first = amqp_broker.declare(Queue("a", ttl_s=1), "topic:b", "queue:c?lock_s=3")
        assert first.name == "a"
        assert amqp_broker.node("b").stats.kind == "topic"
        assert amqp_broker.node("c").consumers == amqp_broker.node("b").producers == 0
    """
    )
    passed(project, 5, "-p", "no:anyio", "-p", "no:asyncio", "-p", "no:trio")


@pytest.mark.slow
@pytest.mark.req("A21", "A22")
def test_time_moves_messages_and_not_connections(project: pytest.Pytester) -> None:
    project.makepyfile(
        BROKER
        + """
    def test_advance(amqp_broker):
        work = amqp_broker.declare(Queue("work", lock_s=60, dead_letter="dead"))
        dead = amqp_broker.queue("dead")

        async def client():
            async with Container("client") as us, us.connect(amqp_broker.url) as peer:
                async with peer.sender("work") as sender:
                    await sender.send("locked")
                    async with peer.receiver("work", credit=2) as receiver:
                        await receiver.receive()
                        assert work.unsettled == 1
                        amqp_broker.advance(59)
                        assert work.unsettled == 1
                        amqp_broker.advance(2)
                        assert (await receiver.receive()).body == "locked"
                    await sender.send("expires", ttl_s=7_000)
                    work.wait_for(2)
                    amqp_broker.advance(7_200)
                    assert [message.body for message in work.messages] == ["locked"]
                    assert [message.body for message in dead.messages] == ["expires"]
                    # Either side would have been given up after a minute without a word.
                    assert amqp_broker.connections == 1
                    await sender.send("still there")

        trio.run(client)
        assert amqp_broker.queue("work").wait_for(2)

    def test_disconnect(amqp_broker):
        amqp_broker.declare("work")

        async def client():
            async with Container("client") as us, us.connect(amqp_broker.url) as peer:
                async with peer.sender("work") as sender:
                    await sender.send("a")
                    assert amqp_broker.disconnect() == 1
                    try:
                        await sender.send("b")
                    except ConnectionLost:  # it left before the close was read: in doubt
                        await sender.send("b")

        trio.run(client)
        assert len(amqp_broker.queue("work").wait_for(2)) == 2
    """
    )
    passed(project, 2)


@pytest.mark.slow
@pytest.mark.req("A21")
def test_a_broker_for_tests_in_event_loops(project: pytest.Pytester) -> None:
    project.makepyfile(
        BROKER
        + """
    import asyncio, anyio

    async def arrives(amqp_broker, sleep):
        work = amqp_broker.declare("work")
        with pytest.raises(AssertionError, match="no 2 messages"):
            await work.await_for(2, timeout_s=0.01)
        work.send("a")
        assert [message.body for message in await work.await_for(1)] == ["a"]
        work.purge()
        await work.await_empty()
        await sleep(0)

    @pytest.mark.trio
    async def test_trio(amqp_broker):
        await arrives(amqp_broker, trio.sleep)
        await send(amqp_broker.url, "b")
        with trio.move_on_after(0.05) as scope:
            await amqp_broker.queue("work").await_consumers(timeout_s=30)
        assert scope.cancelled_caught

    @pytest.mark.asyncio
    async def test_asyncio(amqp_broker):
        await arrives(amqp_broker, asyncio.sleep)
        reader, writer = await asyncio.open_connection(amqp_broker.host, amqp_broker.port)
        writer.write(b"AMQP\\0\\1\\0\\0")
        assert await reader.readexactly(8) == b"AMQP\\0\\1\\0\\0"
        writer.close()
        await writer.wait_closed()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await amqp_broker.queue("work").await_until(lambda stats: False, timeout_s=30)

    @pytest.mark.anyio
    @pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
    async def test_anyio(amqp_broker, anyio_backend):
        await arrives(amqp_broker, anyio.sleep)
    """
    )
    passed(project, 4)


@pytest.mark.slow
@pytest.mark.req("A21")
@pytest.mark.parametrize("statement", ["", "def test_it(): pass"])
def test_who_does_not_use_it_does_not_pay(project: pytest.Pytester, statement: str) -> None:
    project.makeconftest(
        """
        import sys
        def pytest_sessionfinish():
            heavy = {"trio", "anyio", "msgspec", "asyncio", "amqp_rt.broker.broker", "amqp_rt.broker"}
            print("loaded:", *sorted(heavy & set(sys.modules)))
        """
    )
    project.makepyfile(statement)
    # The other plug-ins bring event loops with them.
    off = [word for name in ("anyio", "asyncio", "trio", "timeout", "hypothesispytest", "schemathesis") for word in ("-p", f"no:{name}")]  # fmt: skip
    result = project.runpytest_subprocess("-s", *off, timeout=100)
    result.stdout.re_match_lines([r".*loaded:\s*$"])


@pytest.mark.slow
def test_the_plug_in_module_imports_pytest_only() -> None:
    program = (
        "import sys, amqp_rt.testing.plugin as found; "
        "print(*({'trio', 'anyio', 'msgspec', 'asyncio', 'click'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.split()) == (0, []), run.stderr


@pytest.mark.slow
def test_a_client_that_hangs_does_not_delay_the_end(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import socket
        def test_it(amqp_broker, request):
            mute = socket.create_connection((amqp_broker.host, amqp_broker.port))
            request.addfinalizer(mute.close)
            mute.sendall(b"AMQP\\0\\1\\0\\0")
            assert mute.recv(8)
        """
    )
    passed(project, 1)
