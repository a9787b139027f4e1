"""A namespace without clients of others: what the fixture and the class for other runners do."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
import trio
import trustme
from amqp_rt_servicebus.addresses import DEAD_LETTERS, TRANSFERS, Place, address_of, place_of
from amqp_rt_servicebus.administration import EntityExists, EntityNotFound, QuotaExceeded
from amqp_rt_servicebus.bounds import DEFAULT_BOUNDS
from amqp_rt_servicebus.declarations import Hub, Queue, Rule, SasKey, Sql, Subscription, Topic
from amqp_rt_servicebus.namespace import Namespace
from amqp_rt_servicebus.testing import ServiceBus
from amqp_rt_servicebus.tokens import resource_of

from amqp_rt import Container, Jwt, Limits, Message, ServerTls
from amqp_rt.errors import AmqpError
from amqp_rt.values import Symbol


@pytest.mark.req("Z6")
@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("Orders", Place("orders")),
        ("sb://host:5672/Orders/", Place("orders")),
        ("a/b/$DeadLetterQueue", Place("a/b", sub_queue=DEAD_LETTERS)),
        ("a/$Transfer/$DeadLetterQueue", Place("a", sub_queue=TRANSFERS)),
        ("t/Subscriptions/S", Place("t", "s")),
        ("a/b/subscriptions/s/$deadletterqueue", Place("a/b", "s", DEAD_LETTERS)),
        ("q/$management", Place("q", management=True)),
        (
            "amqps://h/t/Subscriptions/s/$DeadLetterQueue/$management",
            Place("t", "s", DEAD_LETTERS, management=True),
        ),
        ("$cbs", Place("$cbs")),
        ("", Place("")),
    ],
)
def test_an_address_is_read_suffix_by_suffix(address: str, place: Place) -> None:
    assert place_of(address) == place


def test_addresses_made_for_links_keep_their_case() -> None:
    assert address_of("amqp://h/dynamic/c/AbC") == "dynamic/c/AbC"


@pytest.mark.parametrize(
    "text", ["sb://h/Q", "//a//", "://", "a://b://c", "sb://h/a://b/c", "q", "/Q/"]
)
def test_the_address_of_an_address_is_itself(text: str) -> None:
    assert address_of(address_of(text)) == address_of(text)


@pytest.mark.parametrize(
    ("text", "resource"),
    [
        ("sb://h:1/Q", "q"),
        ("https://h:1/", ""),
        ("h:1/q", "q"),
        ("h:1", ""),
        ("q", "q"),
        ("q/subscriptions/s", "q/subscriptions/s"),
    ],
)
def test_a_resource_without_a_scheme_is_that_of_a_host_only_with_its_port(
    text: str, resource: str
) -> None:
    assert resource_of(text) == resource


@pytest.mark.req("Z6")
def test_entities_are_found_in_any_case() -> None:
    with ServiceBus(Queue("Orders"), Topic("T", [Subscription("S")])) as bus:
        bus.queue("ORDERS").send("a")
        bus.topic("t").send("b")
        assert [each.body for each in bus.queue("orders").messages] == [b"a"]
        assert [each.body for each in bus.subscription("t", "s").messages] == [b"b"]


def test_a_name_is_taken_once() -> None:
    with ServiceBus(Queue("a")) as bus:
        bus.declare(Queue("a"))
        with pytest.raises(EntityExists):
            bus.declare(Topic("A"))
        with pytest.raises(EntityExists):
            bus.declare(Queue("a", lock_duration=5))


def test_an_entity_is_declared_with_all_its_parts_or_not_at_all() -> None:
    with ServiceBus() as bus:
        with pytest.raises(ValueError, match="rule 'bad'"):
            bus.declare(Topic("t", [Subscription("s", [Rule("bad", Sql("a ="))])]))
        with pytest.raises(EntityNotFound):
            bus.topic("t").purge()


def test_an_entity_forwards_to_one_that_exists_or_is_declared_with_it() -> None:
    with ServiceBus(Queue("a", forward_to="b"), Queue("b")) as bus:
        bus.queue("a").send("x")
        assert bus.queue("b").stats.active == 1
        with pytest.raises(ValueError, match="does not exist"):
            bus.declare(Queue("c", forward_to="nowhere"))
        with pytest.raises(ValueError, match="is the entity itself"):
            bus.declare(Queue("d", forward_to="d"))


def test_an_idle_entity_is_deleted() -> None:
    with ServiceBus(Queue("q", auto_delete_on_idle=300)) as bus:
        bus.advance(200)
        bus.queue("q").send("a")
        bus.advance(200)
        assert bus.queue("q").stats.active == 1
        bus.advance(101)
        with pytest.raises(EntityNotFound):
            bus.queue("q").purge()


def test_the_default_time_to_live_of_a_topic_counts_in_its_subscriptions() -> None:
    topic = Topic("t", [Subscription("s")], default_message_time_to_live=10)
    with ServiceBus(topic) as bus:
        bus.topic("t").send("a")
        bus.advance(9)
        assert bus.subscription("t", "s").stats.active == 1
        bus.advance(2)
        assert bus.subscription("t", "s").stats.active == 0


def test_a_topic_is_full_with_the_messages_of_its_subscriptions() -> None:
    topic = Topic("t", [Subscription("s")], max_size_in_megabytes=1)
    with ServiceBus(topic) as bus:
        body = b"x" * 400_000
        bus.topic("t").send(body)
        bus.topic("t").send(body)
        with pytest.raises(AmqpError, match="no room"):
            bus.topic("t").send(body)
        bus.subscription("t", "s").purge()
        bus.topic("t").send(body)
        assert bus.subscription("t", "s").stats.active == 1


@pytest.mark.slow
def test_copies_of_a_message_are_bounded_where_subscriptions_forward_to_their_topic() -> None:
    bus = ServiceBus(
        Topic("t", [Subscription(f"s{number}", forward_to="t") for number in range(30)])
    )
    with bus:
        bus.topic("t").send("a")
        stats = [bus.subscription("t", f"s{number}").stats for number in range(30)]
    # Without the bound there would be 30 ** 5 of them. Copies that went on are not counted here.
    copies = sum(each.dead_letters + each.transfer_dead_letters for each in stats)
    assert 0.9 * DEFAULT_BOUNDS.copies_max < copies < 1.1 * DEFAULT_BOUNDS.copies_max


@pytest.mark.slow
@pytest.mark.req("Z2")
def test_limits_of_the_service_apply_if_asked() -> None:
    with ServiceBus(realistic=True) as bus:
        with pytest.raises(ValueError, match="lock_duration is 301 s, not 5 to 300"):
            bus.declare(Queue("q", lock_duration=301))
        bus.declare(Topic("t", [Subscription(f"s{number}") for number in range(2000)]))
        with pytest.raises(QuotaExceeded):
            bus.declare_subscription("t", Subscription("more"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"message_id": "i" * 129}, "the message id has 129 characters, and may have 128"),
        ({"group_id": "i" * 129}, "the session id has 129 characters"),
        ({"message_annotations": {Symbol("x-opt-partition-key"): "k" * 129}}, "the partition key"),
        ({"application_properties": {"a": "x" * 32_769}}, "property 'a' has 32769 octets"),
        ({"application_properties": {str(n): "x" * 16_384 for n in range(4)}}, "may have 65536"),
    ],
)
def test_messages_are_no_larger_than_at_the_service_if_asked(
    fields: dict[str, Any], said: str
) -> None:
    with ServiceBus(Queue("q"), realistic=True) as bus, pytest.raises(AmqpError, match=said):
        bus.queue("q").send("a", **fields)
    with ServiceBus(Queue("q")) as bus:
        bus.queue("q").send("a", **fields)
        assert bus.queue("q").stats.active == 1


@pytest.mark.req("Z2")
def test_messages_may_be_as_large_as_at_the_service() -> None:
    with ServiceBus(Queue("q"), realistic=True) as bus:
        properties = {"a": "x" * 32_768, "b": b"x" * 32_000}
        bus.queue("q").send("a", message_id="i" * 128, application_properties=properties)
        assert bus.queue("q").stats.active == 1


@pytest.mark.req("Z4")
def test_a_connection_string_has_the_key_of_a_policy() -> None:
    keys = {"app": SasKey("k")}
    with ServiceBus(Queue("q", keys={"own": SasKey("o")}), keys=keys) as bus:
        place = f"Endpoint=sb://127.0.0.1:{bus.port};"
        assert bus.connection_string == (
            f"{place}SharedAccessKeyName=app;SharedAccessKey=k;UseDevelopmentEmulator=true;"
        )
        assert "SharedAccessKeyName=own;SharedAccessKey=o;" in bus.connection_string_for("own", "q")
        with pytest.raises(ValueError, match="there is no policy 'own'; there are app"):
            bus.connection_string_for("own")


def test_a_namespace_reads_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "bus.toml"
    file.write_text('[queues.q]\nmax_delivery_count = 1\n[keys.app]\nkey = "k"\n')
    with ServiceBus(config=file) as bus:
        assert "SharedAccessKey=k;" in bus.connection_string
        assert bus.queue("q").stats.active == 0


def test_a_namespace_is_in_one_broker() -> None:
    namespace = Namespace()
    with pytest.raises(RuntimeError, match="in no broker yet"):
        namespace.declare(("q",), Queue("q"))


@pytest.mark.req("Z6")
def test_sub_queues_are_purged(tmp_path: Path) -> None:
    with ServiceBus(
        Queue("q", default_message_time_to_live=5, dead_lettering_on_message_expiration=True),
        Queue("from", forward_to="to"),
        Queue("to"),
    ) as bus:
        bus.queue("q").send("a")
        bus.advance(6)
        bus.queue("q").send("b")
        assert bus.queue("q").purge("dead_letters") == 1
        assert (bus.queue("q").stats.active, bus.queue("q").stats.dead_letters) == (1, 0)
        bus.delete("to")
        bus.queue("from").send("a")
        assert bus.queue("from").purge("transfer_dead_letters") == 1
        assert bus.queue("from").purge() == 0


def test_a_test_sees_the_time_that_it_has_moved() -> None:
    with ServiceBus(Queue("q")) as bus:
        before = bus.now
        bus.advance(3600)
        assert 3600 <= (bus.now - before).total_seconds() < 3660


def test_the_certificate_is_for_names_of_this_machine() -> None:
    with ServiceBus() as bus:
        context = ssl.create_default_context(cafile=bus.ca_file)
        for name in ("localhost", "127.0.0.1"):
            client = http.client.HTTPSConnection(name, bus.port, timeout=10, context=context)
            client.request("GET", "/health")
            assert client.getresponse().status == 200
            client.close()


def test_a_certificate_of_the_test_is_left_to_it(tmp_path: Path) -> None:
    certificate = trustme.CA().issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    with (
        ServiceBus(tls=ServerTls(tmp_path / "server.pem")) as bus,
        pytest.raises(RuntimeError, match="no certificate of its own"),
    ):
        _ = bus.ca_file


# --- Web tokens --------------------------------------------------------------------------------

SECRET = b"0123456789abcdef0123456789abcdef"
AUDIENCE = "https://servicebus.azure.net"


def web_token(**claims: object) -> str:
    return jwt.encode(
        {"aud": AUDIENCE, "exp": time.time() + 60, **claims}, SECRET, algorithm="HS256"
    )


@pytest.mark.parametrize(
    ("claims", "status"),
    [
        ({"roles": ["Azure Service Bus Data Owner"]}, 200),
        ({"roles": ["Azure Service Bus Data Sender", "Azure Service Bus Data Receiver"]}, 401),
        ({"roles": []}, 401),
        ({"scope": "manage"}, 200),
        ({}, 401),
        ({"roles": ["Azure Service Bus Data Owner"], "exp": 1}, 401),
        ({"roles": ["Azure Service Bus Data Owner"], "aud": "https://elsewhere"}, 401),
    ],
)
def test_a_web_token_in_a_header_administers_by_its_roles(
    claims: dict[str, object], status: int
) -> None:
    with ServiceBus(Queue("q"), validators=[Jwt(audience=AUDIENCE, secret=SECRET)]) as bus:
        client = http.client.HTTPConnection("127.0.0.1", bus.port, timeout=10)
        client.request("GET", "/q", headers={"Authorization": f"Bearer {web_token(**claims)}"})
        answer = client.getresponse()
        assert answer.status == status
        assert (b"<entry" in answer.read()) == (status == 200)
        client.close()


@pytest.mark.req("X2")
def test_http_and_amqp_share_the_port() -> None:
    with ServiceBus() as bus:
        http_client = http.client.HTTPConnection("127.0.0.1", bus.port, timeout=10)
        for _ in range(2):
            http_client.request("GET", "/health")
            answer = http_client.getresponse()
            assert (answer.status, b"healthy" in answer.read()) == (200, True)
        http_client.close()
        with socket.create_connection(("127.0.0.1", bus.port), timeout=10) as amqp:
            amqp.sendall(b"AMQP\x03\x01\x00\x00")
            assert amqp.recv(8) == b"AMQP\x03\x01\x00\x00"


def test_a_request_without_a_token_is_refused() -> None:
    with ServiceBus(Queue("q")) as bus:
        client = http.client.HTTPConnection("127.0.0.1", bus.port, timeout=10)
        client.request("GET", "/q")
        assert client.getresponse().status == 401
        client.close()


@pytest.mark.req("Z1")
def test_no_thread_and_no_port_is_left() -> None:
    with ServiceBus() as bus:
        port = bus.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


@pytest.mark.req("Z17")
@pytest.mark.parametrize(
    ("options", "size", "channels"),
    [({}, 1024 * 1024, 63), ({"frame_size_max": 262_144, "one_session": True}, 262_144, 0)],
)
def test_the_size_of_frames_and_the_number_of_sessions_are_options(
    options: dict[str, Any], size: int, channels: int
) -> None:
    async def look(url: str) -> tuple[int, int]:
        limits = Limits(frame_size_max=2 * 1024 * 1024)
        async with (
            Container("c", limits=limits) as container,
            container.connect(url, reconnect=None) as peer,
        ):
            engine: Any = peer.engine
            return engine.frame_size_out, engine._remote_channel_max

    with ServiceBus(**options) as bus:
        assert trio.run(look, bus.broker.url) == (size, channels)


def test_a_text_is_put_as_the_clients_of_the_service_send_it() -> None:
    with ServiceBus(Queue("q"), Hub("h")) as bus:
        bus.queue("q").send("é")
        assert [each.message.body_kind for each in bus.queue("q").messages] == ["data"]
        assert bus.queue("q").messages[0].body == "é".encode()
        assert bus.hub("h").send("é").body == "é".encode()
        # A whole message is put as it is.
        bus.queue("q").send(Message("a"))
        assert bus.queue("q").messages[1].body == "a"


def test_a_right_or_a_part_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="the right 'Sned' is none of Send, Listen, Manage"):
        SasKey("k", ("Sned",))  # type: ignore[arg-type]
    no_part = pytest.raises(ValueError, match="part is 'letters', not one of messages")
    with ServiceBus(Queue("q")) as bus, no_part:
        bus.queue("q").purge("letters")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("declare", "expected"),
    [
        (lambda: Namespace(Queue("q"), keys={"a": "b"}), "the key of policy 'a' is no SasKey"),  # type: ignore[dict-item]
        (lambda: Topic("t", ["s"]), "topic 't': subscriptions has 's', which is no Subscription"),  # type: ignore[list-item]
        (lambda: Subscription("s", ["r"]), "subscription 's': rules has 'r', which is no Rule"),  # type: ignore[list-item]
        (lambda: ServiceBus("q").__enter__(), "'q' is no Queue, Topic or Hub"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_declaration_is_named(declare: Any, expected: str) -> None:
    with pytest.raises(TypeError, match=expected):
        declare()


def test_names_and_keys_fit_into_connection_strings() -> None:
    with pytest.raises(ValueError, match="semicolon, which would end it"):
        SasKey("a;b")
    with pytest.raises(ValueError, match="policy 'a;b'"):
        Queue("q", keys={"a;b": SasKey("key")})


def test_a_fault_is_for_an_entity_that_exists() -> None:
    with ServiceBus(Topic("t", [Subscription("s")])) as bus:
        bus.fault("com.microsoft:server-busy", entity="T/Subscriptions/s/$DeadLetterQueue")
        with pytest.raises(EntityNotFound, match="'u' could not be found"):
            bus.fault("com.microsoft:server-busy", entity="u")


def test_a_connection_string_is_for_a_transport_that_is_there() -> None:
    with ServiceBus() as bus, pytest.raises(ValueError, match="not one of amqp, amqps, wss"):
        bus.connection_string_for(over="tcp")  # type: ignore[arg-type]
