"""Measured roles on python-qpid-proton, written like its examples (see processes.py)."""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid

import proton
from proton import Message
from proton.handlers import MessagingHandler
from proton.reactor import ApplicationEvent, AtMostOnce, Container, EventInjector


def say(**line):
    print(json.dumps(line), flush=True)


def filler(size):
    return (bytes(range(251)) * (size // 251 + 1))[:size]


class Role(MessagingHandler):
    def __init__(self, options, **kwargs):
        super().__init__(**kwargs)
        self.options = options
        self.result = {"n": 0, "measured": 0}
        self.cpu = time.process_time()
        self.came = None

    def dial(self, event):
        event.container.sasl_enabled = self.options.get("sasl", False)
        return event.container.connect(
            f"amqp://127.0.0.1:{self.options['port']}", reconnect=False, allowed_mechs="ANONYMOUS"
        )

    def listen(self, event):
        acceptor = event.container.listen("127.0.0.1:0")
        self.end_with_input(event.container)
        say(ready=1, port=acceptor._selectable._delegate.getsockname()[1])

    def end_with_input(self, container):
        """End the role when the parent closes standard input."""
        self.container = container
        injector = EventInjector()
        container.selectable(injector)

        def wait():
            sys.stdin.read()
            injector.trigger(ApplicationEvent("end"))

        threading.Thread(target=wait, daemon=True).start()

    def on_end(self, event):
        self.container.stop()

    def count(self):
        """Count a message, and time it after the warm-up."""
        result = self.result
        now = time.monotonic()
        result["n"] += 1
        if "first" in result:
            result["measured"] += 1
            result["last"] = now
        else:
            self.came = self.came or now
            if now - self.came >= self.options["warmup"]:
                result["first"] = now
                self.cpu = time.process_time()

    def end(self):
        """Stop counting."""
        self.result["cpu"] = time.process_time() - self.cpu


class Sink(Role):
    """Server that accepts all messages."""

    def __init__(self, options):
        super().__init__(options, prefetch=options["credit"])

    def on_start(self, event):
        self.listen(event)

    def on_link_opening(self, event):
        event.link.source.copy(event.link.remote_source)
        event.link.target.copy(event.link.remote_target)

    def on_message(self, event):
        event.message.body  # noqa: B018  # decoded, as an application would
        self.count()

    def on_connection_closing(self, event):
        self.end()


class Source(Role):
    """Client that sends for a while, as fast as credit allows."""

    def on_start(self, event):
        connection = self.dial(event)
        options = AtMostOnce() if self.options["settled"] else None
        self.body = filler(self.options["size"])
        self.confirmed = self.warm = 0
        self.until = None
        self.sender = event.container.create_sender(
            connection, self.options.get("address", "bench"), options=options
        )
        say(ready=1)

    def on_sendable(self, event):
        now = time.monotonic()
        if self.until is None:
            self.warm_at = now + self.options["warmup"]
            self.until = self.warm_at + self.options["seconds"]
        sender, result = self.sender, self.result
        while sender.credit and now < self.until:
            sender.send(Message(id=result["n"], body=self.body, inferred=True))
            result["n"] += 1
            if result["n"] % 32 == 0:
                now = time.monotonic()
                if not self.warm and now >= self.warm_at:
                    self.warm, self.cpu = result["n"], time.process_time()
        if now >= self.until:
            self.over()

    def on_settled(self, event):
        self.confirmed += 1
        self.over()

    def over(self):
        done = self.options["settled"] or self.confirmed == self.result["n"]
        if done and time.monotonic() >= self.until:
            self.result["measured"] = self.result["n"] - self.warm
            self.result["cpu"] = time.process_time() - self.cpu
            self.sender.connection.close()


class Consume(Role):
    """Client that receives from a broker the number of messages given by a line of its input."""

    def __init__(self, options):
        super().__init__(options, prefetch=options["credit"])
        self.expected = None

    def on_start(self, event):
        self.container = event.container
        injector = EventInjector()
        self.container.selectable(injector)

        def wait():
            self.expected = int(sys.stdin.readline() or 0)
            injector.trigger(ApplicationEvent("expected"))

        threading.Thread(target=wait, daemon=True).start()
        event.container.create_receiver(self.dial(event), self.options["address"])

    def on_link_opened(self, event):
        say(ready=1)

    def on_message(self, event):
        event.message.body  # noqa: B018
        self.count()
        if self.expected is not None:
            self.on_expected(event)

    def on_expected(self, event):
        if self.result["n"] >= self.expected:
            self.end()
            self.container.stop()


class Echo(Role):
    """Server that returns requests to their reply-to."""

    def __init__(self, options):
        super().__init__(options, prefetch=options["credit"])
        self.replies = {}

    def on_start(self, event):
        self.listen(event)

    def on_link_opening(self, event):
        link = event.link
        link.source.copy(link.remote_source)
        link.target.copy(link.remote_target)
        if link.is_sender:
            link.source.address = str(uuid.uuid4())
            self.replies[link.source.address] = link

    def on_message(self, event):
        self.count()
        request = event.message
        self.replies[request.reply_to].send(
            Message(
                address=request.reply_to,
                correlation_id=request.id,
                body=request.body,
                inferred=True,
            )
        )

    def on_connection_closing(self, event):
        self.end()


class Call(Role):
    """Client with a number of requests in flight."""

    def __init__(self, options):
        super().__init__(options, prefetch=options["credit"])

    def on_start(self, event):
        connection = self.dial(event)
        self.body = filler(self.options["size"])
        self.sender = event.container.create_sender(connection, "echo")
        self.receiver = event.container.create_receiver(connection, dynamic=True)
        self.until = self.warm = None
        self.sent = 0
        self.times = {}
        self.latencies = []
        say(ready=1)

    def on_link_opened(self, event):
        self.begin()

    def on_sendable(self, event):
        self.begin()

    def begin(self):
        address = self.receiver.remote_source.address
        if self.until is None and address and self.sender.credit:
            self.reply_to = address
            self.warm_at = time.monotonic() + self.options["warmup"]
            self.until = self.warm_at + self.options["seconds"]
            for _ in range(self.options["in_flight"]):
                self.request()

    def request(self):
        self.times[self.sent] = time.monotonic()
        self.sender.send(
            Message(id=self.sent, reply_to=self.reply_to, body=self.body, inferred=True)
        )
        self.sent += 1

    def on_message(self, event):
        now = time.monotonic()
        taken = now - self.times.pop(event.message.correlation_id)
        if self.warm:
            self.latencies.append(taken)
        elif now >= self.warm_at:
            self.warm, self.cpu = now, time.process_time()
        if now < self.until:
            self.request()
        elif not self.times:
            latencies = sorted(self.latencies)
            self.result |= {
                "n": len(latencies),
                "elapsed": now - self.warm,
                "cpu": time.process_time() - self.cpu,
                "p50_ms": latencies[len(latencies) // 2] * 1000,
                "p99_ms": latencies[len(latencies) * 99 // 100] * 1000,
            }
            event.connection.close()


class Dial(Role):
    """Client that repeatedly connects, attaches a sender and closes."""

    def on_start(self, event):
        self.container = event.container
        say(ready=1)
        self.started, self.cpu = time.monotonic(), time.process_time()
        self.event = event
        self.connect()

    def connect(self):
        connection = self.dial(self.event)
        self.container.create_sender(connection, self.options.get("address", "bench"))

    def on_link_opened(self, event):
        event.connection.close()

    def on_connection_closed(self, event):
        self.result["n"] += 1
        elapsed = time.monotonic() - self.started
        if elapsed < self.options["seconds"]:
            self.connect()
        else:
            self.result["elapsed"] = elapsed
            self.result["cpu"] = time.process_time() - self.cpu


class Broker(Role):
    """Broker with queues in memory, like proton's example broker."""

    def __init__(self, options):
        super().__init__(options, prefetch=options["credit"], auto_accept=True)
        self.queues = {}

    def on_start(self, event):
        self.listen(event)

    def queue(self, address):
        return self.queues.setdefault(address, ([], []))

    def on_link_opening(self, event):
        link = event.link
        link.source.copy(link.remote_source)
        link.target.copy(link.remote_target)
        if link.is_sender:
            self.queue(link.source.address)[1].append(link)

    def on_sendable(self, event):
        self.dispatch(event.link.source.address)

    def on_message(self, event):
        address = event.link.target.address
        self.queue(address)[0].append(event.message)
        self.dispatch(address)

    def dispatch(self, address):
        messages, consumers = self.queue(address)
        for link in consumers:
            sent = 0
            while sent < len(messages) and link.credit:
                link.send(messages[sent])
                sent += 1
            del messages[:sent]

    def on_link_closing(self, event):
        if event.link.is_sender:
            self.queue(event.link.source.address)[1].remove(event.link)

    def on_disconnected(self, event):
        for _, consumers in self.queues.values():
            consumers[:] = [link for link in consumers if link.connection != event.connection]

    def on_connection_closing(self, event):
        self.on_disconnected(event)


def codec(options):
    """Measure nanoseconds to make and encode, and to decode, the message of all contestants."""

    def encode():
        return Message(
            id=17,
            user_id=b"guest",
            address="orders",
            subject="new",
            content_type="application/octet-stream",
            properties={"region": "eu", "attempt": 3, "urgent": True},
            body=body,
            inferred=True,
        ).encode()

    def decode():
        message = Message()
        message.decode(encoded)
        return message.id, message.address, message.properties, message.body

    body = filler(100)
    encoded = encode()
    say(ready=1)
    say(
        message_encode=nanoseconds(encode, options["seconds"]),
        message_decode=nanoseconds(decode, options["seconds"]),
        size=len(encoded),
    )


def nanoseconds(operation, seconds):
    """Return the nanoseconds of one call, measured over about *seconds*."""
    for _ in range(100):
        operation()
    done, started = 0, time.process_time()
    while (elapsed := time.process_time() - started) < seconds:
        for _ in range(200):
            operation()
        done += 200
    return elapsed / done * 1e9


ROLES = {
    "sink": Sink,
    "source": Source,
    "consume": Consume,
    "echo": Echo,
    "call": Call,
    "dial": Dial,
    "broker": Broker,
}


def main():
    role, options = sys.argv[1], json.loads(sys.argv[2])
    if role == "version":
        say(version=".".join(map(str, proton.VERSION)))
    elif role == "codec":
        codec(options)
    else:
        handler = ROLES[role](options)
        Container(handler).run()
        say(**handler.result)


main()
