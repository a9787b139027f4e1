"""Client on python-qpid-proton that sends and settles in a transaction of a namespace.

    python transacting.py '{"port": 5672, "tokens": [["q", "SharedAccessSignature …"]], "address": "q", "to": "r",
                            "via": "q", "count": 2, "ends": ["commit"]}'

Puts the tokens, then takes ``count`` messages of ``address``, accepts them and sends them to ``to`` in a
transaction for each of ``ends``. With ``via`` the link that sends has that target, and ``to`` is its destination. The
last line of standard output is the result as JSON.
"""

from __future__ import annotations

import json
import sys

from proton import Message, symbol
from proton.handlers import MessagingHandler
from proton.reactor import Container, LinkOption


class Destination(LinkOption):
    """Destination of messages that go by way of the target of their link."""

    def __init__(self, address):
        self.address = address

    def apply(self, link):
        link.properties = {symbol("com.microsoft:transfer-destination-address"): self.address}


class Transacting(MessagingHandler):
    def __init__(self, options):
        super().__init__(prefetch=0, auto_accept=False)
        self.options = options
        self.tokens = list(options["tokens"])
        self.ends = list(options["ends"])
        self.result = {"ended": [], "received": [], "error": None}
        self.transaction = self.sender = self.cbs = None
        self.held = 0

    def on_start(self, event):
        self.container = event.container
        url = f"amqp://127.0.0.1:{self.options['port']}"
        self.connection = self.container.connect(url, reconnect=False, allowed_mechs="ANONYMOUS")
        self.replies = self.container.create_receiver(self.connection, "$cbs", target="replies")
        self.replies.flow(len(self.tokens))
        self.cbs = self.container.create_sender(self.connection, "$cbs")

    def on_link_opened(self, event):
        if event.link == self.cbs:
            self.put()

    def put(self):
        name, token = self.tokens.pop(0)
        named = {
            "operation": "put-token",
            "type": "servicebus.windows.net:sastoken",
            "name": name,
        }
        message = Message(
            id=str(len(self.tokens)), reply_to="replies", properties=named, body=token
        )
        self.cbs.send(message)

    def on_message(self, event):
        if event.link == self.replies:
            self.accept(event.delivery)
            assert event.message.properties["status-code"] == 202, event.message.properties
            if self.tokens:
                self.put()
            else:
                self.attach()
            return
        body = bytes(event.message.body).decode()
        self.result["received"].append(body)
        self.transaction.accept(event.delivery)
        self.transaction.send(self.sender, Message(body=body))
        self.held += 1
        if self.held == self.options["count"]:
            self.held = 0
            self.transaction.discharge(self.ends.pop(0) == "abort")

    def attach(self):
        to, via = self.options["to"], self.options.get("via")
        options = None if via is None else Destination(to)
        self.sender = self.container.create_sender(self.connection, via or to, options=options)
        self.receiver = self.container.create_receiver(self.connection, self.options["address"])
        self.declare()

    def declare(self):
        self.container.declare_transaction(self.connection, handler=self)

    def on_transaction_declared(self, event):
        self.transaction = event.transaction
        self.receiver.flow(self.options["count"])

    def end(self, how):
        self.result["ended"].append(how)
        if self.ends:
            self.declare()
        else:
            self.connection.close()

    def on_transaction_committed(self, event):
        self.end("committed")

    def on_transaction_aborted(self, event):
        self.end("aborted")

    def on_transaction_commit_failed(self, event):
        self.end("failed")

    def on_link_error(self, event):
        condition = event.link.remote_condition
        self.result["error"] = [condition.name, condition.description]
        self.connection.close()


handler = Transacting(json.loads(sys.argv[1]))
Container(handler).run()
print(json.dumps(handler.result))
