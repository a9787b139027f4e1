"""Life cycle of RabbitMQ's Python client 1.0.1, unmodified, against the broker at the URL in the first argument.

Prints one JSON object with what it saw.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

from rabbitmq_amqp_python_client import (
    AddressHelper,
    AMQPMessagingHandler,
    ClassicQueueSpecification,
    Environment,
    Event,
    ExchangeSpecification,
    ExchangeToExchangeBindingSpecification,
    ExchangeToQueueBindingSpecification,
    ExchangeType,
    Message,
    OutcomeState,
    QuorumQueueSpecification,
)

seen: dict[str, Any] = {}
HANDLED: list[Event] = []


def refusal(call: Any, *arguments: Any) -> str:
    """The exception of a call that has to fail; those of the client extend BaseException."""
    try:
        call(*arguments)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")


class Done(BaseException):
    """Ends ``consumer.run()``, as the examples of the client do."""


class Collect(AMQPMessagingHandler):
    """Accepts the first message, discards the second, requeues the third once, and ends after the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[str] = []
        self.annotations: list[dict[str, Any]] = []

    def on_amqp_message(self, event: Event) -> None:
        self.bodies.append(bytes(event.message.body).decode())
        self.annotations.append({str(k): v for k, v in event.message.annotations.items()})
        if len(self.bodies) == 2:
            self.delivery_context.discard(event)
        elif len(self.bodies) == 3:
            self.delivery_context.requeue(event)
        else:
            self.delivery_context.accept(event)
        if len(self.bodies) == 4:
            raise Done


environment = Environment(uri=sys.argv[1])
connection = environment.connection()
connection.dial()
management = connection.management()

management.declare_exchange(ExchangeSpecification(name="ex.one", exchange_type=ExchangeType.topic))
management.declare_exchange(ExchangeSpecification(name="ex-two", exchange_type=ExchangeType.fanout))
management.declare_queue(
    QuorumQueueSpecification(name="orders ä/1", deliver_limit=3, dead_letter_exchange="ex-two")
)
management.declare_queue(
    ClassicQueueSpecification(name="dead", message_ttl=timedelta(minutes=5), max_len=100)
)
# The same again is no error; another one of this name is.
management.declare_queue(
    QuorumQueueSpecification(name="orders ä/1", deliver_limit=3, dead_letter_exchange="ex-two")
)
seen["conflict"] = refusal(management.declare_queue, ClassicQueueSpecification(name="orders ä/1"))
seen["unknown"] = refusal(management.queue_info, "no-such")
binding = management.bind(
    ExchangeToQueueBindingSpecification(
        source_exchange="ex.one", destination_queue="orders ä/1", binding_key="a.*"
    )
)
management.bind(
    ExchangeToQueueBindingSpecification(
        source_exchange="ex-two", destination_queue="dead", binding_key=""
    )
)
chain = management.bind(
    ExchangeToExchangeBindingSpecification(
        source_exchange="ex.one", destination_exchange="ex-two", binding_key="chained"
    )
)
seen["unbound exchange"] = refusal(
    management.bind,
    ExchangeToQueueBindingSpecification(
        source_exchange="no-such", destination_queue="dead", binding_key=""
    ),
)

publisher = connection.publisher(AddressHelper.exchange_address("ex.one", "a.b"))
outcomes = [publisher.publish(Message(f"m{n}".encode())).remote_state for n in range(3)]
publisher.close()
lost = connection.publisher(AddressHelper.exchange_address("ex.one", "nowhere"))
seen["unroutable"] = refusal(lost.publish, Message(b"lost"))
lost.close()
# Without an address the messages name their own.
anonymous = connection.publisher()
outcomes.append(
    anonymous.publish(
        Message(b"m3", address=AddressHelper.queue_address("orders ä/1"))
    ).remote_state
)
anonymous.close()
seen["accepted"] = [state == OutcomeState.ACCEPTED for state in outcomes]

info = management.queue_info("orders ä/1")
seen["info"] = {
    "name": info.name,
    "durable": info.is_durable,
    "type": info.queue_type.value,
    "messages": info.message_count,
    "consumers": info.consumer_count,
    "members": len(info.members),
    "arguments": info.arguments,
}

consuming = environment.connection()
consuming.dial()
handler = Collect()
consumer = consuming.consumer(AddressHelper.queue_address("orders ä/1"), message_handler=handler)
try:
    consumer.run()
except Done:
    pass
consumer.close()
consuming.close()
seen["bodies"] = handler.bodies
seen["annotations"] = [
    {name: each.get(name) for name in ("x-exchange", "x-routing-key")}
    for each in handler.annotations
]

until = time.monotonic() + 5
while management.queue_info("dead").message_count != 1 and time.monotonic() < until:
    time.sleep(0.05)
# Messages that came to an exchange by another one.
chained = connection.publisher(AddressHelper.exchange_address("ex.one", "chained"))
chained.publish(Message(b"by two exchanges"))
chained.close()
seen["dead"] = management.queue_info("dead").message_count
seen["purged"] = management.purge_queue("dead")
management.unbind(binding)
management.unbind(chain)
late = connection.publisher(AddressHelper.exchange_address("ex.one", "a.b"))
seen["unbound"] = refusal(late.publish, Message(b"late"))
late.close()
management.delete_exchange("ex.one")
management.delete_exchange("ex-two")
management.delete_queue("orders ä/1")
management.delete_queue("dead")
management.delete_queue("dead")
seen["deleted"] = refusal(management.queue_info, "orders ä/1")
management.close()
environment.close()
print(json.dumps(seen))
