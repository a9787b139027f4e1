"""Several namespaces in one broker: entities, keys and administration of each at its own listeners."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from amqp_rt_servicebus.declarations import Queue, SasKey
from amqp_rt_servicebus.namespace import Namespace, Namespaces
from driven import Dialler

from amqp_rt.broker import Queue as PlainQueue
from amqp_rt.testing import LoopbackBroker

pytestmark = pytest.mark.req("Z3")


class Served:
    """A broker with two namespaces and a queue of its own, and the URLs of their listeners."""

    def __init__(self, broker: LoopbackBroker, first: Namespace, second: Namespace) -> None:
        self.broker = broker
        self.first, self.second = first, second
        broker.declare(PlainQueue("q"))

        async def listen() -> list[str]:
            found: list[str] = []
            for each in (first, second):
                found += await broker.broker.listen("amqp://127.0.0.1:0", profile=each.profile)
            return found

        self.urls = broker.call(listen)

    def active(self, namespace: Namespace, name: str = "q") -> int:
        async def count() -> int:
            return namespace.existing((name,)).entity.sizes().active

        return self.broker.call(count)


@pytest.fixture
def served() -> Iterator[Served]:
    first = Namespace(Queue("q"), keys={"root": SasKey("one")}, name="first")
    second = Namespace(Queue("q"), Queue("r"), keys={"root": SasKey("two")}, name="second")
    with LoopbackBroker(addons=[Namespaces(first, second)]) as broker:
        yield Served(broker, first, second)


def test_two_namespaces_have_two_names() -> None:
    with pytest.raises(ValueError, match="two namespaces are named 'tests'"):
        Namespaces(Namespace(), Namespace())


def test_a_namespace_without_a_broker_has_no_profile() -> None:
    with pytest.raises(RuntimeError, match="in no broker yet"):
        _ = Namespace().profile


def test_requests_reach_the_namespace_of_their_listener(served: Served) -> None:
    for url, status in [*((url, 401) for url in served.urls), (served.broker.url, 404)]:
        client = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        client.request("GET", "/q")
        assert client.getresponse().status == status
        client.close()


@pytest.mark.foreign
@pytest.mark.slow
@pytest.mark.usefixtures("azure_python")
def test_clients_reach_the_namespace_of_their_listener(served: Served) -> None:
    from azure.servicebus import ServiceBusMessage
    from azure.servicebus.exceptions import MessagingEntityNotFoundError, ServiceBusError

    dialler = Dialler("threads")
    first = dialler.client(served.first.connection_string(served.urls[0]))
    second = dialler.client(served.second.connection_string(served.urls[1]))
    # The key of one namespace at the listener of the other.
    wrong = dialler.client(served.first.connection_string(served.urls[1]))
    with second.get_queue_sender("q") as sender:
        sender.send_messages([ServiceBusMessage("a"), ServiceBusMessage("b")])
    with second.get_queue_receiver("q") as receiver:
        assert len(receiver.peek_messages(10)) == 2
    with first.get_queue_receiver("q") as receiver:
        assert receiver.peek_messages(10) == []
    for client, error in ((first, MessagingEntityNotFoundError), (wrong, ServiceBusError)):
        with pytest.raises(error), client.get_queue_sender("r") as sender:
            sender.send_messages(ServiceBusMessage("a"))
    dialler.close()
    assert (served.active(served.first), served.active(served.second)) == (0, 2)
    assert served.broker.queue("q").stats.available == 0
