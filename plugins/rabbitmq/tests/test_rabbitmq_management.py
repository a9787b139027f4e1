"""Management of RabbitMQ 4 as octets and over links of our own client: rights, order of sections, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
from amqp_rt_rabbitmq.requests import HttpRequest, HttpResponse, encode_response, read_request
from rabbit_requests import managing, request

from amqp_rt import Access, Broker, Connection, Message, Plain, Rights, Rule, connect
from amqp_rt.errors import AmqpError, ConnectFailed, DecodeError, LinkDetached
from amqp_rt.limits import DEFAULT_LIMITS
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Recorder

pytestmark = pytest.mark.req("G4")


def with_id(octets: bytes) -> bytes:
    """Return a request whose message-id has the encoding *octets*."""
    # Properties: a list8 with two octets of sizes, and the id as smallulong 1.
    payload = request("GET", "/queues/none").encode()
    before, properties, after = payload.partition(b"\x00\x53\x73\xc0")
    size = properties and after[0] + len(octets) - 2
    assert after[2:4] == b"\x53\x01"
    return before + properties + bytes([size, after[1]]) + octets + after[4:]


def test_sections_may_be_in_any_order() -> None:
    payload = request("PUT", "/queues/q", {"durable": True}).encode()
    at = payload.index(b"\x00\x53\x77")
    for octets in (payload, payload[at:] + payload[:at]):
        assert read_request(octets, DEFAULT_LIMITS) == HttpRequest(
            1, "PUT", "/queues/q", {"durable": True}
        )
        for end in range(1, len(octets)):
            try:
                read_request(octets[:end], DEFAULT_LIMITS)
            except DecodeError:
                pass


@pytest.mark.parametrize(
    ("octets", "why"),
    [
        (b"", "no message-id"),
        (b"\x40", "no section of a message"),
        (b"\x00\x53\x10\x45", "no section of a message"),
        (b"\x00\x53\x73\x43", "properties of the request are no list"),
        (request("GET", "/queues/q", message_id=None).encode(), "no message-id"),
        (request("GET", "/queues/q", reply_to="elsewhere").encode(), "reply-to is '\\$me'"),
        (request("GET", "/queues/q", to=None).encode(), "no subject"),
        (b"\x00\x53\x77" + b"\xe0" * 9, "."),
        *(
            (with_id(octets), "not a ulong, a UUID, a binary or a string")
            for octets in (b"\x41", b"\x54\xff", b"\x72\x3f\x80\x00\x00", b"\x45", b"\xc1\x01\x00")
        ),
    ],
)
def test_what_is_no_request_is_refused(octets: bytes, why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        read_request(octets, DEFAULT_LIMITS)


def test_a_response_names_its_request() -> None:
    answer = Message.decode(
        encode_response(HttpRequest("id-7", "GET", "/", None), HttpResponse(404, "no"))
    )
    assert (answer.subject, answer.correlation_id, answer.body) == ("404", "id-7", "no")
    assert answer.application_properties == {"http:response": "1.1"}


# --- over links ------------------------------------------------------------------------------------


async def test_each_operation_takes_a_right() -> None:
    access = Access([
        Rule("mine-*", Rights.SEND | Rights.LISTEN | Rights.MANAGE, users=("ada",)),
        Rule("/exchanges/mine", Rights.SEND | Rights.LISTEN | Rights.MANAGE, users=("ada",)),
    ])  # fmt: skip
    async with Broker(
        volatile=True, access=access, users={"ada": "pw", "eve": "pw"}, plain_in_clear=True
    ) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with (
            connect(url, auth=Plain("ada", "pw"), reconnect=None) as peer,
            managing(peer) as manage,
        ):
            assert (await manage("PUT", "/queues/mine-1", {}))[0] == "201"
            assert (await manage("PUT", "/queues/mine-1", {}))[0] == "200"
            assert (await manage("PUT", "/exchanges/mine", {"type": "fanout"}))[0] == "204"
            binding = {"source": "mine", "destination_queue": "mine-1", "binding_key": ""}
            assert (await manage("POST", "/bindings", binding))[0] == "204"
            async with peer.sender("/exchanges/mine") as out:
                await out.send(b"x")
            # Deleting and purging what belongs to others, and learning of it, are refused.
            for method, path, body in (
                ("PUT", "/queues/theirs", {}),
                ("PUT", "/exchanges/theirs", {}),
                ("DELETE", "/queues/theirs", None),
                ("DELETE", "/queues/theirs/messages", None),
                ("DELETE", "/exchanges/theirs", None),
                ("GET", "/queues/theirs", None),
                ("POST", "/bindings", {**binding, "destination_queue": "theirs"}),
            ):
                status, why = await manage(method, path, body)
                assert status == "403", (method, path, why)
            status, state = await manage("GET", "/queues/mine-1")
            assert (status, state["message_count"], state["vhost"]) == ("200", 1, "/")
            assert (await manage("DELETE", "/queues/mine-1")) == ("200", {"message_count": 1})
        # Without any right there is no link to the management.
        with pytest.raises(AmqpError):
            async with (
                connect(url, auth=Plain("eve", "pw"), reconnect=None) as peer,
                managing(peer),
            ):
                pass


async def test_wrong_requests_are_answered() -> None:
    async with Broker(volatile=True) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with connect(url, reconnect=None) as peer, managing(peer) as manage:
            for method, path, body, status in (
                ("BREW", "/queues/q", None, "400"),
                ("GET", "/bindings", None, "400"),
                ("GET", "/bindings?src=amq.direct&key=", None, "400"),
                ("GET", "/bindings?src=amq.direct&dstq=q&dste=e&key=", None, "400"),
                ("GET", "/bindings?src=amq.direct&dstq=none&key=", None, "404"),
                ("GET", "/bindings?src=none&dste=amq.direct&key=", None, "404"),
                ("PUT", "/auth/tokens", "token", "400"),
                ("PUT", "/auth/tokens", "tökén".encode(), "400"),
                ("PUT", "/auth/tokens", b"token", "400"),
                ("PUT", "/exchanges/a%0Ab", {}, "409"),
                ("PUT", "/exchanges/" + "%C3%A4" * 128, {}, "409"),
                ("PUT", "/queues/%FF", {}, "400"),
                ("PUT", "/queues/", {}, "400"),
                ("PUT", "/queues/q", None, "400"),
                ("PUT", "/queues/q", {"durable": "yes"}, "400"),
                ("PUT", "/queues/q", {"arguments": {"x-max-length": "many"}}, "409"),
                ("POST", "/bindings", {"source": "e"}, "400"),
                ("DELETE", "/bindings/nonsense", None, "400"),
                ("DELETE", "/bindings/src=e;dstq=q;key=;args=abc", None, "204"),
                ("DELETE", "/bindings/src=amq.direct;dste=amq.fanout;key=;args=abc", None, "204"),
                ("DELETE", "/bindings/src=amq.direct;dstq=q;key=;args=", None, "204"),
                ("DELETE", "/exchanges/none", None, "204"),
                ("DELETE", "/queues/none", None, "200"),
                ("DELETE", "/queues/none/messages", None, "404"),
            ):
                found, why = await manage(method, path, body)
                assert found == status, (method, path, why)


async def test_an_exclusive_queue_ends_with_its_connection() -> None:
    async with Broker(volatile=True) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with connect(url, reconnect=None) as peer, managing(peer) as manage:
            assert (await manage("PUT", "/queues/own", {"exclusive": True}))[0] == "201"
            async with connect(url, reconnect=None) as other, managing(other) as elsewhere:
                assert (await elsewhere("GET", "/queues/own"))[0] == "409"
        async with connect(url, reconnect=None) as peer, managing(peer) as manage:
            assert (await manage("GET", "/queues/own"))[0] == "404"


async def _send(peer: Connection, message: Message) -> None:
    async with managing(peer) as manage:
        await manage.sender.send(message)
        await manage.receiver.receive()


class Half(Recorder):
    """A link of a pair, without a container: what arrives, and how it ended."""

    async def until(self, condition: Callable[[], object]) -> None:
        with trio.fail_after(10):
            while not condition():  # noqa: ASYNC110  # engines notify no task
                await trio.sleep(0.005)


def attach(session: Any, role: str, half: Half, **options: Any) -> Any:
    """Attach one link of the pair *half*."""
    options = {"properties": {"paired": True}, **options}
    if role == "sender":
        target = Target(address="/management")
        return session.attach_sender("half", half, source=Source(), target=target, **options)
    source = Source(address="/management")
    return session.attach_receiver("half", half, source=source, target=Target(), **options)


@pytest.mark.parametrize("octets", [b"\x41", b"\x45", b"\xc1\x01\x00", b"\x82" + bytes(8)])
async def test_a_wrong_message_id_ends_the_link_alone(octets: bytes) -> None:
    async with Broker(volatile=True) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with connect(url, reconnect=None) as peer, managing(peer) as manage:
            half = Half()
            out = attach(peer.engine.begin(), "sender", half)
            await half.until(lambda: out.credit)
            out.send(with_id(octets), settled=True)
            await half.until(lambda: half.detached)
            assert (await manage("GET", "/queues/none"))[0] == "404"


async def test_an_answer_above_the_clients_size_ends_its_link_alone() -> None:
    async with Broker(volatile=True) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with connect(url, reconnect=None) as peer, managing(peer) as manage:
            session = peer.engine.begin()
            half = Half()
            replies = attach(session, "receiver", half, max_message_size=16)
            out = attach(session, "sender", half)
            await half.until(lambda: out.credit and replies.attached)
            replies.grant(10)
            out.send(request("GET", "/queues/none").encode(), settled=True)
            await half.until(lambda: half.detached)
            assert out.attached
            assert (await manage("GET", "/queues/none"))[0] == "404"


async def test_a_pair_ends_with_its_links() -> None:
    """Drop the answers of a pair without a reply link; links of the same name form a new pair."""
    async with Broker(volatile=True) as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with connect(url, reconnect=None) as peer:
            session = peer.engine.begin()
            for number in range(3):
                half = Half()
                replies = attach(session, "receiver", half)
                out = attach(session, "sender", half)
                await half.until(lambda: out.credit and replies.attached)  # noqa: B023  # within the round
                assert out.credit == 100
                replies.grant(1)
                for at in range(80):
                    fields = {"message_id": f"{number}-{at}"}
                    out.send(request("GET", "/queues/none", **fields).encode(), settled=True)
                await half.until(lambda: half.deliveries)  # noqa: B023
                answer = Message.decode(half.deliveries[0].payload)
                assert answer.correlation_id == f"{number}-0"
                out.detach()
                replies.detach()
                await half.until(lambda: len(half.detached) == 2)  # noqa: B023


async def test_nodes_of_the_application_come_before_queues_to_create() -> None:
    got: list[object] = []
    broker = Broker(volatile=True, auto_create=("queue:*",))

    @broker.container.node("orders")
    async def orders(message: Message) -> None:
        got.append(message.body)

    @broker.container.node("rows/{number}")
    async def rows(message: Message, number: int) -> None:
        got.append(number)

    async with broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with connect(url, reconnect=None) as peer:
            async with peer.sender("orders") as out:
                await out.send("to the handler")
            async with peer.sender("rows/7") as out:
                await out.send("x")
            with pytest.raises(AmqpError):
                async with peer.sender("rows/x") as out:
                    await out.send("x")
            async with peer.sender("created") as out:
                await out.send("to a queue")
    assert got == ["to the handler", 7]


async def test_other_links_to_the_management_are_refused() -> None:
    async with Broker() as broker:
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with connect(url, reconnect=None) as peer:
            with pytest.raises(AmqpError, match="paired"):
                async with peer.sender("/management") as out:
                    await out.send(request("GET", "/queues/q"))
            with pytest.raises(LinkDetached, match="no message-id"):
                await _send(peer, Message("no request"))


async def test_a_profile_that_no_plugin_has_is_named() -> None:
    async with Broker() as broker:
        with pytest.raises(AmqpError, match="no plug-in has a profile 'nope'"):
            await broker.listen("amqp://127.0.0.1:0?profile=nope")
        with pytest.raises(ConnectFailed, match="profiles of plug-ins are for brokers"):
            await broker.container.listen("amqp://127.0.0.1:0?profile=rabbitmq")
