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
    ConsumerOptions,
    ConsumerSettleStrategy,
    Environment,
    Event,
    ExchangeSpecification,
    ExchangeToExchangeBindingSpecification,
    ExchangeToQueueBindingSpecification,
    ExchangeType,
    Message,
    MessageProperties,
    OffsetSpecification,
    OutcomeState,
    QuorumConsumerOptions,
    QuorumQueueSpecification,
    StreamConsumerOptions,
    StreamFilterOptions,
    StreamSpecification,
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
    "members": len(info.members.elements),
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

# --- streams (4.1, 4.2) ---


class Gather(AMQPMessagingHandler):
    """Accepts messages, and ends after some."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.found: list[tuple[str, int]] = []

    def on_amqp_message(self, event: Event) -> None:
        self.found.append((bytes(event.message.body).decode(), self.offset))
        self.delivery_context.accept(event)
        if len(self.found) == self.count:
            raise Done


def gathered(address: str, count: int, options: Any = None) -> list[tuple[str, int]]:
    """The first messages that a consumer with *options* gets, with their offsets."""
    connection = environment.connection()
    connection.dial()
    gather = Gather(count)
    consumer = connection.consumer(address, message_handler=gather, consumer_options=options)
    try:
        consumer.run()
    except Done:
        pass
    consumer.close()
    connection.close()
    return gather.found


stream = AddressHelper.queue_address("stream")
management.declare_queue(
    StreamSpecification(name="stream", max_len_bytes=10**6, max_age=timedelta(days=1))
)
publisher = connection.publisher(stream)
for number in range(4):
    publisher.publish(
        Message(
            f"s{number}".encode(),
            annotations={"x-stream-filter-value": "even" if number % 2 == 0 else "odd"},
            application_properties={"number": number},
            subject=f"subject-{number}",
        )
    )
publisher.close()
seen["stream type"] = management.queue_info("stream").queue_type.value
first = OffsetSpecification.first
seen["streams"] = {
    "first": gathered(stream, 4, StreamConsumerOptions(first)),
    "last": gathered(stream, 1, StreamConsumerOptions(OffsetSpecification.last)),
    "offset": gathered(stream, 2, StreamConsumerOptions(2)),
    "values": gathered(
        stream, 2, StreamConsumerOptions(first, StreamFilterOptions(values=["odd"]))
    ),
    "application": gathered(
        stream,
        1,
        StreamConsumerOptions(first, StreamFilterOptions(application_properties={"number": 3})),
    ),
    "properties": gathered(
        stream,
        1,
        StreamConsumerOptions(
            first,
            StreamFilterOptions(message_properties=MessageProperties(subject="subject-1")),
        ),
    ),
    "sql": gathered(
        stream,
        1,
        StreamConsumerOptions(
            first, StreamFilterOptions(sql="properties.subject LIKE '%-2' AND number > 1")
        ),
    ),
}
management.delete_queue("stream")

# --- direct reply-to (4.2) ---
management.declare_queue(ClassicQueueSpecification(name="requests"))
asking = environment.connection()
asking.dial()
replies = Gather(1)
reply_consumer = asking.consumer(
    message_handler=replies,
    consumer_options=ConsumerOptions(settle_strategy=ConsumerSettleStrategy.DirectReplyTo),
)
publisher = connection.publisher(AddressHelper.queue_address("requests"))
publisher.publish(Message(b"ping", reply_to=reply_consumer.address, id="7"))
publisher.close()


class Answer(AMQPMessagingHandler):
    """Answers a request, and ends."""

    def on_amqp_message(self, event: Event) -> None:
        self.asked = event.message
        self.delivery_context.accept(event)
        raise Done


answer = Answer()
responding = environment.connection()
responding.dial()
consumer = responding.consumer(
    AddressHelper.queue_address("requests"), message_handler=answer, consumer_options=None
)
try:
    consumer.run()
except Done:
    pass
publisher = connection.publisher(answer.asked.reply_to)
publisher.publish(Message(b"pong", correlation_id=answer.asked.id))
publisher.close()


replies.delivery_context.accept = lambda event: None  # type: ignore[method-assign]
try:
    reply_consumer.run()
except Done:
    pass
seen["reply"] = [body for body, _ in replies.found]
responding.close()
asking.close()
management.delete_queue("requests")

# --- single active consumer (4.3) ---
management.declare_queue(QuorumQueueSpecification(name="single", single_active_consumer=True))
states: list[tuple[str, bool]] = []


def told(name: str) -> Any:
    return lambda active: states.append((name, active))


consumers: list[Any] = []
for name in ("one", "two"):
    own = environment.connection()
    own.dial()
    gather = Gather(1)
    consumers.append(
        (
            own,
            gather,
            own.consumer(
                AddressHelper.queue_address("single"),
                message_handler=gather,
                consumer_options=QuorumConsumerOptions(sac_state_handler=told(name)),
            ),
        )
    )
publisher = connection.publisher(AddressHelper.queue_address("single"))
publisher.publish(Message(b"for the first"))
try:
    consumers[0][2].run()
except Done:
    pass
consumers[0][0].close()
publisher.publish(Message(b"for the second"))
try:
    consumers[1][2].run()
except Done:
    pass
consumers[1][0].close()
publisher.close()
seen["active"] = states
management.delete_queue("single")
management.close()
environment.close()
print(json.dumps(seen))
