"""AMQP clients and a server on python-qpid-proton; README.md beside this file is the contract."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import threading
import time
import uuid
from collections import deque

import proton
from proton import Condition, Data, Delivery, Endpoint, Link, Message, SSLDomain, Terminus
from proton.handlers import MessagingHandler
from proton.reactor import (
    ApplicationEvent,
    Container,
    Copy,
    DurableSubscription,
    EventInjector,
    Filter,
    ReceiverOption,
    Selector,
    SenderOption,
)

# ---- typed values ------------------------------------------------------------------------------

INTEGERS = {
    "ubyte": proton.ubyte,
    "ushort": proton.ushort,
    "uint": proton.uint,
    "byte": proton.byte,
    "short": proton.short,
    "int": proton.int32,
    "ulong": proton.ulong,
    "long": int,
    "timestamp": proton.timestamp,
}
ARRAY_TYPES = {
    name: getattr(Data, name.upper())
    for name in (
        "null boolean ubyte byte ushort short uint int char ulong long timestamp float double "
        "decimal32 decimal64 decimal128 uuid binary string symbol list map array"
    ).replace("boolean", "bool").split()
}  # fmt: skip
ARRAY_TYPES["boolean"] = ARRAY_TYPES.pop("bool")
ARRAY_NAMES = {code: name for name, code in ARRAY_TYPES.items()}


def native(typed):
    """Return *typed* as the Python value that proton sends for it."""
    kind, value = typed
    if kind in INTEGERS:
        return INTEGERS[kind](int(value))
    if kind in ("null", "boolean", "string"):
        return value
    if kind == "symbol":
        return proton.symbol(value)
    if kind == "char":
        return proton.char(chr(value))
    if kind == "float":
        return proton.float32(struct.unpack(">f", bytes.fromhex(value))[0])
    if kind == "double":
        return struct.unpack(">d", bytes.fromhex(value))[0]
    if kind == "decimal32":
        return proton.decimal32(int(value, 16))
    if kind == "decimal64":
        return proton.decimal64(int(value, 16))
    if kind == "decimal128":
        return proton.decimal128(bytes.fromhex(value))
    if kind == "uuid":
        return uuid.UUID(value)
    if kind == "binary":
        return bytes.fromhex(value)
    if kind == "list":
        return [native(item) for item in value]
    if kind == "map":
        return {native(key): native(item) for key, item in value}
    if kind == "described":
        return proton.Described(native(value[0]), native(value[1]))
    if kind == "array":
        of, items, descriptor = value
        return proton.Array(
            native(descriptor) if descriptor else proton.UNDESCRIBED,
            ARRAY_TYPES[of],
            *(native([of, item]) for item in items),
        )
    raise ValueError(f"no such type: {kind}")


def typed(value):
    """Return the notation from which :func:`native` makes *value*."""
    kind = type(value)
    for name, cls in INTEGERS.items():
        if kind is cls:
            wide = name in ("ulong", "long", "timestamp")
            return [name, str(int(value)) if wide else int(value)]
    if value is None:
        return ["null", None]
    if kind is bool:
        return ["boolean", value]
    if kind is str:
        return ["string", value]
    if kind is proton.symbol:
        return ["symbol", str(value)]
    if kind is proton.char:
        return ["char", ord(value)]
    if kind is proton.float32:
        return ["float", struct.pack(">f", value).hex()]
    if kind is float:
        return ["double", struct.pack(">d", value).hex()]
    if kind is proton.decimal32:
        return ["decimal32", f"{int(value):08x}"]
    if kind is proton.decimal64:
        return ["decimal64", f"{int(value):016x}"]
    if kind is proton.decimal128:
        return ["decimal128", bytes(value).hex()]
    if kind is uuid.UUID:
        return ["uuid", value.hex]
    if isinstance(value, bytes | bytearray | memoryview):
        return ["binary", bytes(value).hex()]
    if isinstance(value, list | tuple):
        return ["list", [typed(item) for item in value]]
    if isinstance(value, dict):
        return ["map", [[typed(key), typed(item)] for key, item in value.items()]]
    if kind is proton.Described:
        return ["described", [typed(value.descriptor), typed(value.value)]]
    if kind is proton.Array:
        plain = value.descriptor == proton.UNDESCRIBED
        items = [typed(item)[1] for item in value.elements]
        return [
            "array",
            [ARRAY_NAMES[value.type], items, None if plain else typed(value.descriptor)],
        ]
    raise ValueError(f"proton gave {value!r}")


# ---- messages ----------------------------------------------------------------------------------

TYPED_PROPERTIES = {"message_id": "id", "correlation_id": "correlation_id"}
PLAIN_PROPERTIES = {
    "to": "address",
    "subject": "subject",
    "reply_to": "reply_to",
    "content_type": "content_type",
    "content_encoding": "content_encoding",
    "group_id": "group_id",
    "group_sequence": "group_sequence",
}


def filler(size):
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def outgoing(shown):
    """Return *shown* as a proton message."""
    message = Message()
    section, value = shown["body"]
    if section == "data":
        message.inferred, message.body = True, bytes.fromhex(value)
    elif section == "sequence":
        message.inferred, message.body = True, [native(item) for item in value]
    else:
        message.body = native(value)
    for name, value in shown.get("properties", {}).items():
        if name in TYPED_PROPERTIES:
            setattr(message, TYPED_PROPERTIES[name], native(value))
        else:
            setattr(message, PLAIN_PROPERTIES[name], value)
    if "application_properties" in shown:
        message.properties = {
            name: native(value) for name, value in shown["application_properties"].items()
        }
    if "message_annotations" in shown:
        message.annotations = {
            proton.symbol(name): native(value)
            for name, value in shown["message_annotations"].items()
        }
    for name, value in shown.get("header", {}).items():
        setattr(message, name, value / 1000 if name == "ttl" else value)
    return message


def show(message):
    """Return *message* in the notation of the contract."""
    body = message.body
    if message.inferred and isinstance(body, bytes | memoryview):
        octets = bytes(body)
        if len(octets) > 64:
            shown = ["data", len(octets), hashlib.sha256(octets).hexdigest()]
        else:
            shown = ["data", octets.hex()]
    elif message.inferred and isinstance(body, list):
        shown = ["sequence", [typed(item) for item in body]]
    else:
        shown = ["value", typed(body)]
    properties = {
        name: typed(proton.ulong(value) if type(value) is int else value)
        for name, attribute in TYPED_PROPERTIES.items()
        if (value := getattr(message, attribute)) is not None
    } | {
        name: value
        for name, attribute in PLAIN_PROPERTIES.items()
        if (value := getattr(message, attribute)) and value != "None"
    }
    return {
        "body": shown,
        "properties": properties,
        "application_properties": {
            str(name): typed(value) for name, value in (message.properties or {}).items()
        },
        "header": {
            "durable": message.durable,
            "priority": message.priority,
            "ttl": round(message.ttl * 1000),
            "delivery_count": message.delivery_count,
        },
    }


def shown_messages(options):
    """Return the messages for a ``send``."""
    if "messages" in options:
        return [outgoing(shown) for shown in options["messages"]]
    count, size = options.get("count", 1), options.get("size")
    if size is None:
        return [Message(body=number) for number in range(count)]
    body = filler(size)
    return [Message(body=body, inferred=True) for _ in range(count)]


def state_of(delivery):
    """Return the remote state of *delivery*, in the notation of the contract."""
    remote, kind = delivery.remote, delivery.remote_state
    if kind == Delivery.ACCEPTED:
        return ["accepted"]
    if kind == Delivery.RELEASED:
        return ["released"]
    if kind == Delivery.REJECTED:
        return ["rejected", condition_of(remote.condition)]
    if kind == Delivery.MODIFIED:
        return ["modified", {"failed": remote.failed, "undeliverable": remote.undeliverable}]
    return ["received"] if kind == Delivery.RECEIVED else None


def condition_of(condition):
    return condition and {"condition": condition.name, "description": condition.description}


def say(**line):
    print(json.dumps(line), flush=True)


def settle(delivery, outcome, second):
    """Update *delivery* with *outcome*; if the receiver settles second, wait for the sender to settle."""
    if outcome == "none":
        return
    if outcome == "reject":
        delivery.local.condition = Condition("test:unwanted", "not wanted")
        delivery.update(Delivery.REJECTED)
    elif outcome == "modify":
        delivery.local.failed = delivery.local.undeliverable = True
        delivery.update(Delivery.MODIFIED)
    else:
        delivery.update(Delivery.ACCEPTED if outcome == "accept" else Delivery.RELEASED)
    if not second or delivery.settled:
        delivery.settle()


# ---- clients -----------------------------------------------------------------------------------


class Client(MessagingHandler):
    """A connection with a result, which is printed at its end."""

    def __init__(self, options):
        super().__init__(prefetch=0, auto_accept=False)
        self.options = options
        self.result = {}
        self.connection = None

    def on_start(self, event):
        options = self.options
        container = event.container
        container.container_id = options.get("container") or f"proton-{uuid.uuid4()}"
        container.sasl_enabled = options.get("sasl", True)
        kwargs = {
            name: options[name] for name in ("user", "password", "max_frame_size") if name in options
        }  # fmt: skip
        scheme, host = "amqp", options.get("host", "127.0.0.1")
        if tls := options.get("tls"):
            scheme, host = "amqps", "localhost"
            kwargs["ssl_domain"] = domain = SSLDomain(SSLDomain.MODE_CLIENT)
            domain.set_trusted_ca_db(tls["ca"])
            domain.set_peer_authentication(SSLDomain.VERIFY_PEER_NAME)
            if "cert" in tls:
                domain.set_credentials(tls["cert"], tls["cert"], None)
        if "user" not in options:
            kwargs["allowed_mechs"] = "EXTERNAL" if tls and "cert" in tls else "ANONYMOUS"
        self.connection = container.connect(
            f"{scheme}://{host}:{options['port']}",
            reconnect=False,
            **kwargs,
        )
        self.timer = container.schedule(options.get("timeout_s", 20), self)
        self.begin(container)

    def begin(self, container):
        """Attach links; the connection need not be open yet."""

    def end(self):
        self.timer.cancel()
        self.connection.close()

    def on_timer_task(self, event):
        self.result["timeout"] = True
        event.container.stop()

    def failed(self, scope, condition):
        self.result.setdefault("error", {"scope": scope, **(condition_of(condition) or {})})
        self.end()

    def on_transport_error(self, event):
        self.failed("transport", event.transport.condition)

    def on_connection_error(self, event):
        self.failed("connection", event.connection.remote_condition)

    def on_connection_remote_close(self, event):
        # amqp:connection:forced does not reach on_connection_error.
        if condition := event.connection.remote_condition:
            self.failed("connection", condition)

    def on_session_error(self, event):
        self.failed("session", event.session.remote_condition)

    def on_link_error(self, event):
        self.failed("link", event.link.remote_condition)

    def on_link_closing(self, event):
        self.failed("link", None)

    def on_disconnected(self, event):
        self.result.setdefault("error", {"scope": "transport"})


class Open(Client):
    def on_connection_opened(self, event):
        self.result |= {
            "container": event.connection.remote_container,
            "offered_capabilities": list(event.connection.remote_offered_capabilities or ()),
            "max_frame_size": event.transport.remote_max_frame_size,
        }
        self.end()


SND_MODES = {
    "mixed": Link.SND_MIXED,
    "unsettled": Link.SND_UNSETTLED,
    "settled": Link.SND_SETTLED,
}


class Settlement(SenderOption):
    """Settle modes that ``settle`` and ``second`` request."""

    def __init__(self, options):
        self.options = options

    def test(self, link):
        return True

    def apply(self, link):
        link.snd_settle_mode = SND_MODES[self.options.get("settle", "mixed")]
        if self.options.get("second"):
            link.rcv_settle_mode = Link.RCV_SECOND


class Send(Client):
    def begin(self, container):
        options = self.options
        self.messages = shown_messages(options)
        if relayed := options.get("to"):
            self.messages = [
                Message(body=number, address=address) for number, address in enumerate(relayed)
            ]
        self.waiting = deque(self.messages)
        self.deliveries = {}
        self.states = [None] * len(self.messages)
        self.settled = 0
        self.result |= {"sent": 0, "states": self.states, "settled": 0}
        self.sender = container.create_sender(
            self.connection, options.get("address"), options=[Settlement(options)]
        )

    def on_link_opened(self, event):
        say(attached=event.link.remote_target.address, size_max=event.link.remote_max_message_size)

    def on_sendable(self, event):
        while self.waiting and self.sender.credit:
            delivery = self.sender.send(self.waiting.popleft())
            self.deliveries[delivery.tag] = self.result["sent"]
            self.result["sent"] += 1
        if not self.waiting and (
            self.options.get("settle") == "settled" or self.options.get("hasty")
        ):
            self.end()

    def on_delivery(self, event):
        delivery = event.delivery
        if not delivery.updated:
            return
        if (state := state_of(delivery)) is not None:
            self.states[self.deliveries[delivery.tag]] = state
        if self.options.get("second") and not delivery.settled:
            delivery.settle()  # settled by us first, so no further event comes
            self.settled += 1
        elif delivery.settled:
            self.settled += 1
            self.result["settled"] = self.settled
        if self.settled == len(self.messages):
            self.end()


EXPIRY_POLICIES = {
    "link-detach": Terminus.EXPIRE_WITH_LINK,
    "session-end": Terminus.EXPIRE_WITH_SESSION,
    "connection-close": Terminus.EXPIRE_WITH_CONNECTION,
    "never": Terminus.EXPIRE_NEVER,
}


class Expiry(ReceiverOption):
    """The expiry policy and the timeout of a source."""

    def __init__(self, options):
        self.options = options

    def apply(self, link):
        link.source.expiry_policy = EXPIRY_POLICIES[self.options["expiry_policy"]]
        link.source.timeout = self.options.get("timeout", 0)


class Receive(Client):
    def begin(self, container):
        options = self.options
        self.messages = []
        self.second = options.get("second", False)
        self.outcomes = options.get("outcomes", ["accept"])
        self.result |= {"received": 0, "settled": 0, "messages": self.messages}
        self.last = time.monotonic()
        link_options = [Settlement(options)]
        if options.get("browse"):
            link_options.append(Copy())
        if "selector" in options:
            link_options.append(Selector(options["selector"]))
        if "filter" in options:
            found = {
                proton.symbol(name): native(value) for name, value in options["filter"].items()
            }
            link_options.append(Filter(found))
        if options.get("durable"):
            link_options.append(DurableSubscription())
        if "expiry_policy" in options:
            link_options.append(Expiry(options))
        self.receiver = container.create_receiver(
            self.connection, options["address"], name=options.get("name"), options=link_options
        )
        self.to_grant = options.get("count", 1 << 30)
        if options.get("drain"):
            self.receiver.drain(options["credit"])
        else:
            self.grant()
        if quiet := options.get("quiet_ms"):
            container.schedule(quiet / 1000, Quiet(self, quiet / 1000))

    def grant(self):
        """Grant a full window of credit, but never for more messages than wanted."""
        credit = min(self.options.get("credit", 100), self.to_grant)
        self.to_grant -= credit
        self.receiver.flow(credit)

    def on_link_opened(self, event):
        say(attached=event.link.remote_source.address)

    def on_message(self, event):
        options = self.options
        self.messages.append(show(event.message))
        outcome = self.outcomes[self.result["received"] % len(self.outcomes)]
        self.result["received"] += 1
        self.last = time.monotonic()
        if not event.delivery.settled:
            settle(event.delivery, outcome, self.second)
        if self.result["received"] == options.get("count") and not self.second:
            self.finish()
        elif not options.get("drain") and self.receiver.credit == 0:
            self.grant()

    def on_settled(self, event):
        if self.second:
            event.delivery.settle()
            self.result["settled"] += 1
            if self.result["settled"] == self.options.get("count"):
                self.finish()

    def on_link_flow(self, event):
        if self.options.get("drain") and not self.receiver.draining():
            self.result["drained"] = True
            self.finish()

    def finish(self):
        self.result["credit"] = self.receiver.credit
        if self.options.get("unsubscribe"):
            self.receiver.close()
        elif self.options.get("durable") or "expiry_policy" in self.options:
            self.receiver.detach()
        self.end()


class Quiet:
    """Ends a receiver that has not received a message for a while."""

    def __init__(self, receive, quiet_s):
        self.receive, self.quiet_s = receive, quiet_s

    def on_timer_task(self, event):
        left = self.receive.last + self.quiet_s - time.monotonic()
        if left > 0:
            event.container.schedule(left, self)
        elif self.receive.connection.state & Endpoint.LOCAL_ACTIVE:
            self.receive.finish()


class Transact(Client):
    """Successive transactions: receive, send, accept, discharge."""

    def begin(self, container):
        options = self.options
        self.ends = deque(options["ends"])
        self.container = container
        self.transaction = None
        self.deliveries = []
        self.ended = []
        self.result |= {"received": [], "ended": self.ended}
        self.sender = container.create_sender(self.connection, options["to"])
        self.receiver = container.create_receiver(self.connection, options["address"])

    def on_connection_opened(self, event):
        self.declare()

    def declare(self):
        self.container.declare_transaction(
            self.connection,
            handler=self,
            settle_before_discharge=self.options.get("settle_before_discharge", False),
        )

    def on_transaction_declared(self, event):
        self.transaction = event.transaction
        self.receiver.flow(self.options["count"])

    def on_message(self, event):
        self.result["received"].append(event.message.body)
        self.deliveries.append(event.delivery)
        self.transaction.accept(event.delivery)
        self.transaction.send(self.sender, Message(body=event.message.body))
        if len(self.deliveries) == self.options["count"]:
            self.deliveries = []
            self.transaction.discharge(self.ends.popleft() == "abort")

    def go_on(self, how):
        self.ended.append(how)
        if self.ends:
            self.declare()
        else:
            self.end()

    def on_transaction_committed(self, event):
        self.go_on("committed")

    def on_transaction_aborted(self, event):
        # Accepted deliveries are released after this.
        self.go_on("aborted")

    def on_transaction_commit_failed(self, event):
        self.go_on("failed")

    def on_transaction_declare_failed(self, event):
        self.go_on("not declared")


class Rpc(Client):
    def begin(self, container):
        self.requests = self.options["requests"]
        self.replies = [None] * len(self.requests)
        self.result |= {"replies": self.replies}
        self.next = 0
        self.sender = container.create_sender(self.connection, self.options["address"])
        self.receiver = container.create_receiver(self.connection, dynamic=True)
        self.receiver.flow(len(self.requests))

    def on_link_opened(self, event):
        if event.link.is_receiver:
            self.result["reply_to"] = event.link.remote_source.address
            self.request(self.options.get("in_flight", 1))

    def on_sendable(self, event):
        if "reply_to" in self.result and self.next == 0:
            self.request(self.options.get("in_flight", 1))

    def request(self, count):
        while count and self.sender.credit and self.next < len(self.requests):
            self.sender.send(
                Message(
                    id=proton.ulong(self.next),
                    reply_to=self.result["reply_to"],
                    body=native(self.requests[self.next]),
                )
            )
            self.next += 1
            count -= 1

    def on_message(self, event):
        self.replies[int(event.message.correlation_id)] = show(event.message)
        self.accept(event.delivery)
        if all(self.replies):
            self.end()
        else:
            self.request(1)


class Answer(Client):
    """Serves an address as a receiver: sends each message back to where its replies go."""

    def begin(self, container):
        self.result |= {"answered": 0}
        self.replies = container.create_sender(self.connection, None)
        self.receiver = container.create_receiver(self.connection, self.options["address"])
        self.receiver.flow(self.options.get("credit", 10))

    def on_link_opened(self, event):
        if event.link.is_receiver:
            say(attached=event.link.remote_source.address)

    def on_message(self, event):
        request = event.message
        self.replies.send(
            Message(address=request.reply_to, correlation_id=request.id, body=request.body)
        )
        self.accept(event.delivery)
        self.result["answered"] += 1
        self.receiver.flow(1)

    def on_settled(self, event):
        if event.link.is_sender and self.result["answered"] == self.options["count"]:
            self.end()


class Mirror(Client):
    def begin(self, container):
        self.result |= {"messages": []}
        self.sent = False
        self.sender = container.create_sender(self.connection, self.options["address"])
        self.receiver = container.create_receiver(self.connection, self.options["address"])
        self.receiver.flow(1)

    def on_sendable(self, event):
        if not self.sent:
            self.sent = True
            self.sender.send(with_values(self.options["values"]))

    def on_message(self, event):
        self.result["messages"].append(show(event.message))
        self.accept(event.delivery)
        self.end()


class Authorize(Client):
    """Puts tokens one by one, each after the answer to the last, then sends."""

    def begin(self, container):
        self.container = container
        self.result |= {"statuses": [], "states": []}
        self.left = list(self.options["tokens"])
        self.sender = self.out = None
        self.began = False
        if not self.left:
            self.go_on()
            return
        self.replies = container.create_receiver(self.connection, "$cbs", target="replies")
        self.replies.flow(len(self.left))
        self.sender = container.create_sender(self.connection, "$cbs")

    def on_sendable(self, event):
        if event.link == self.sender and not self.began:
            self.began = True
            self.put()
        elif event.link == self.out:
            while self.count and self.out.credit:
                self.count -= 1
                self.out.send(Message(body="x"))

    def put(self):
        given = self.left.pop(0)
        named = {"operation": "put-token", "type": given["type"], "name": given["name"]}
        self.sender.send(
            Message(
                id=str(len(self.left)), reply_to="replies", properties=named, body=given["token"]
            )
        )

    def on_message(self, event):
        self.result["statuses"].append(event.message.properties["status-code"])
        self.accept(event.delivery)
        if self.left:
            self.put()
        else:
            self.go_on()

    def go_on(self):
        self.count = self.options["count"]
        self.out = self.container.create_sender(self.connection, self.options["address"])

    def on_settled(self, event):
        if event.link == self.out:
            self.result["states"].append(state_of(event.delivery))
            if len(self.result["states"]) == self.options["count"] and "stay" not in self.options:
                self.end()


def with_values(values):
    """Return a message with *values* wherever the standard allows them."""
    return Message(
        body=[native(value) for _, value in values.items()],
        properties={
            name: native(value)
            for name, value in values.items()
            if value[0] not in ("list", "map", "array", "described")
        },
    )


# ---- server ------------------------------------------------------------------------------------


class Queue:
    """Queue that delivers messages in order, to consumers in the order of their requests."""

    def __init__(self):
        self.messages = deque()
        self.consumers = deque()

    def put(self, message):
        self.messages.append(message)
        self.dispatch()

    def dispatch(self):
        for _ in range(len(self.consumers)):
            link = self.consumers[0]
            while self.messages and link.credit:
                message = self.messages.popleft()
                delivery = link.send(message)
                delivery.message = message
            if link.drain_mode:
                link.drained()
            self.consumers.rotate(-1)


class Serve(MessagingHandler):
    def __init__(self, options):
        super().__init__(prefetch=0, auto_accept=False)
        self.options = options
        self.queues = {}
        self.sinks = {}
        self.sources = {}
        self.result = {"sinks": self.sinks}

    def on_start(self, event):
        self.container = event.container
        self.container.container_id = "proton-server"
        scheme = "amqp"
        if tls := self.options.get("tls"):
            scheme = "amqps"
            self.container.ssl.server.set_credentials(tls["cert"], tls["cert"], None)
        acceptor = self.container.listen(f"{scheme}://127.0.0.1:{self.options.get('port', 0)}")
        injector = EventInjector()
        self.container.selectable(injector)
        threading.Thread(target=self.wait_for_end, args=[injector], daemon=True).start()
        port = acceptor._selectable._delegate.getsockname()[1]
        say(ready=1, port=port)

    @staticmethod
    def wait_for_end(injector):
        sys.stdin.read()
        injector.trigger(ApplicationEvent("end"))

    def on_end(self, event):
        self.container.stop()

    # -- attach

    def on_connection_opening(self, event):
        event.connection.container = self.container.container_id

    def on_link_opening(self, event):
        link = event.link
        link.snd_settle_mode = link.remote_snd_settle_mode
        link.rcv_settle_mode = link.remote_rcv_settle_mode
        address = (link.remote_source if link.is_sender else link.remote_target).address
        link.kind = address or ""
        if link.kind == "refuse":
            link.source.type = link.target.type = Terminus.UNSPECIFIED
            return
        link.source.copy(link.remote_source)
        link.target.copy(link.remote_target)
        if link.is_sender:
            self.open_source(link)
        else:
            self.open_target(link)

    def on_link_opened(self, event):
        link = event.link
        if link.kind == "refuse":
            link.condition = Condition("amqp:not-found", "no such node")
            link.close()

    def open_source(self, link):
        head, _, rest = link.kind.partition("/")
        if link.remote_source.dynamic:
            link.kind = f"dynamic-{uuid.uuid4()}"
            link.source.address = link.kind
            self.queue(link.kind).consumers.append(link)
        elif head == "count":
            self.sources[link.name] = deque(Message(body=number) for number in range(int(rest)))
        elif head == "large":
            self.sources[link.name] = deque([Message(body=filler(int(rest)), inferred=True)])
        elif head == "values":
            self.sources[link.name] = deque([with_values(self.options["values"])])
        elif head == "abort":
            self.sources[link.name] = deque(["abort"])
        elif link.remote_source.distribution_mode == Terminus.DIST_MODE_COPY:
            self.sources[link.name] = deque(self.queue(link.kind).messages)
        else:
            self.queue(link.kind).consumers.append(link)

    def open_target(self, link):
        if link.kind == "small":
            link.max_message_size = 100
        link.flow(1 if link.kind == "slow" else 100)

    def queue(self, address):
        return self.queues.setdefault(address, Queue())

    # -- traffic

    def on_sendable(self, event):
        link = event.link
        if (source := self.sources.get(link.name)) is None:
            self.queue(link.kind).dispatch()
            return
        while source and link.credit:
            message = source.popleft()
            if message == "abort":
                delivery = link.delivery("aborted")
                link.stream(b"\0Sw\xa1\x64half")
                # Streamed octets leave with the next pass over the transport; abort after it.
                self.container.schedule(0.05, Abort(delivery))
                return
            link.send(message)
        if link.drain_mode:
            link.drained()

    def on_delivery(self, event):
        link, delivery = event.link, event.delivery
        if not (link.is_sender and delivery.updated):
            return
        if link.rcv_settle_mode == Link.RCV_SECOND and not delivery.settled:
            delivery.settle()  # the receiver has sent its outcome and waits for the sender to settle
        if (message := getattr(delivery, "message", None)) is None:
            return
        delivery.message = None
        if delivery.remote_state in (Delivery.RELEASED, Delivery.MODIFIED):
            if delivery.remote_state == Delivery.MODIFIED:
                message.delivery_count += bool(delivery.remote.failed)
            queue = self.queue(link.kind)
            queue.messages.appendleft(message)
            queue.dispatch()

    def on_message(self, event):
        link, delivery, message = event.link, event.delivery, event.message
        head, _, outcome = link.kind.partition("/")
        second = link.rcv_settle_mode == Link.RCV_SECOND
        if link.kind == "detach":
            link.condition = Condition("amqp:resource-deleted", "the first message was enough")
            link.close()
            return
        if link.kind == "close":
            event.connection.condition = Condition("amqp:internal-error", "told to")
            event.connection.close()
            return
        if link.kind == "slow":
            self.container.schedule(0.02, Later(link, delivery))
            return
        if head == "sink":
            sink = self.sinks.setdefault(link.kind, {"received": 0, "settled": 0, "messages": []})
            sink["received"] += 1
            if len(sink["messages"]) < 10:
                sink["messages"].append(show(message))
        elif link.kind == "echo":
            reply = Message(
                body=message.body,
                address=message.reply_to,
                correlation_id=message.correlation_id or message.id,
                properties=message.properties,
                inferred=message.inferred,
            )
            self.queue(message.reply_to).put(reply)
        else:
            self.queue(link.kind or message.address).put(message)
        settle(delivery, outcome or "accept", second)
        link.flow(1)

    def on_settled(self, event):
        if event.link.is_receiver and event.link.rcv_settle_mode == Link.RCV_SECOND:
            event.delivery.settle()
            if event.link.kind in self.sinks:
                self.sinks[event.link.kind]["settled"] += 1

    # -- ends of links and connections

    def forget(self, link):
        for queue in self.queues.values():
            if link in queue.consumers:
                queue.consumers.remove(link)

    def on_link_closing(self, event):
        self.forget(event.link)

    def on_link_error(self, event):
        self.forget(event.link)

    def on_disconnected(self, event):
        link = event.connection.link_head(0)
        while link:
            self.forget(link)
            link = link.next(0)

    def on_connection_closing(self, event):
        self.on_disconnected(event)


class Survive(MessagingHandler):
    """Passes half of the numbers before the connection is lost, and half after; proton must attach the
    links again by itself."""

    def __init__(self, options):
        super().__init__(prefetch=10)
        self.options = options
        self.result = {}
        self.received = set()
        self.accepted = 0
        self.waiting = self.halfway = False
        self.connections = 0

    def on_start(self, event):
        options = self.options
        self.timer = event.container.schedule(options.get("timeout_s", 20), self)
        self.connection = event.container.connect(
            f"amqp://127.0.0.1:{options['port']}", allowed_mechs="ANONYMOUS"
        )
        self.sender = event.container.create_sender(self.connection, options["address"])
        event.container.create_receiver(self.connection, options["address"])

    def go(self):
        count = self.options["count"]
        limit = count if self.connections > 1 else count // 2
        if not self.waiting and self.accepted < limit and self.sender.credit:
            self.waiting = True
            self.sender.send(Message(body=self.accepted, durable=True))
        elif self.accepted == limit == len(self.received):
            if limit == count:
                self.result = {"received": list(self.received), "connections": self.connections}
                self.timer.cancel()
                self.connection.close()
            elif not self.halfway:
                self.halfway = True
                say(halfway=True)

    def on_connection_opened(self, event):
        self.connections += 1
        self.waiting = False

    def on_sendable(self, event):
        self.go()

    def on_accepted(self, event):
        self.waiting = False
        self.accepted += 1
        self.go()

    def on_message(self, event):
        self.received.add(event.message.body)
        self.go()

    def on_link_closing(self, event):
        self.result["ended"] = "link"
        event.container.stop()

    on_link_error = on_link_closing

    def on_connection_closing(self, event):
        self.result["ended"] = "connection"
        event.container.stop()

    def on_timer_task(self, event):
        self.result["timeout"] = True
        event.container.stop()


class Later:
    def __init__(self, link, delivery):
        self.link, self.delivery = link, delivery

    def on_timer_task(self, event):
        settle(self.delivery, "accept", second=False)
        self.link.flow(1)


class Abort:
    def __init__(self, delivery):
        self.delivery = delivery

    def on_timer_task(self, event):
        link = self.delivery.link
        self.delivery.abort()
        link.send(Message(body="whole"))


ROLES = {
    "open": Open,
    "send": Send,
    "receive": Receive,
    "transact": Transact,
    "rpc": Rpc,
    "answer": Answer,
    "mirror": Mirror,
    "authorize": Authorize,
    "serve": Serve,
    "survive": Survive,
}


def main():
    role, options = sys.argv[1], json.loads(sys.argv[2])
    handler = ROLES[role](options)
    if role != "serve":
        say(ready=1)
    Container(handler).run()
    say(**handler.result)


main()
