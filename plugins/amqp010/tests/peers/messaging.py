"""Performs steps with ``qpid.messaging``, the high-level API of qpid-python; for Python 2.7.

Connections, sessions, senders, receivers and messages keep the names that the steps give them. ``notation`` has the
form of steps and answers.
"""

import os
import sys

from notation import octets, read, serve
from qpid.messaging import REJECTED, RELEASED, UNLIMITED, Connection, Disposition, Empty, Message

HOW = {"accept": None, "reject": REJECTED, "release": RELEASED}
#: What the wire has as octets; text of JSON would break it.
BINARY = ("user_id", "correlation_id")


def named(options):
    """Return options with names and texts as Python 2 writes them."""
    found = {}
    for key, value in (options or {}).items():
        value = read(value)
        if value == "UNLIMITED":
            value = UNLIMITED
        found[str(key)] = octets(value) if hasattr(value, "encode") else value
    return found


class Steps:
    def __init__(self):
        self.things = {}
        self.messages = {}

    def connect(self, name, url, options=None, timeout=20):
        """Open a connection. Options are those of the library; ``host:port`` is enough for the URL."""
        connection = Connection(octets(url), **named(options))
        self.things[name] = connection
        connection.open(timeout=timeout)
        return connection.auth_username and connection.auth_username.decode("utf8")

    def session(self, name, connection, transactional=False, label=None):
        connection = self.things[connection]
        label = None if label is None else octets(label)
        self.things[name] = connection.session(label, transactional=transactional)
        return self.things[name].name.decode("utf8")

    def sender(self, name, session, address, options=None):
        """Make a sender; ``durable`` and ``capacity`` are its options."""
        self.things[name] = self.things[session].sender(octets(address), **named(options))

    def receiver(self, name, session, address, options=None):
        self.things[name] = self.things[session].receiver(octets(address), **named(options))

    def send(self, sender, content, fields=None, sync=True, timeout=20):
        """Send a message. Its fields are those of ``Message``: subject, ttl in seconds, properties and so on.

        Text becomes ``text/plain``, ``{"hex": ...}`` octets, maps and lists ``amqp/map`` and ``amqp/list``.
        """
        fields = {str(key): read(each) for key, each in (fields or {}).items()}
        for key in BINARY:
            if key in fields:
                fields[key] = octets(fields[key])
        message = Message(read(content), **fields)
        self.things[sender].send(message, sync=sync, timeout=timeout)

    def fetch(self, receiver, timeout=20):
        """Return the next message, with a key to acknowledge it by; null where none has come."""
        try:
            message = self.things[receiver].fetch(timeout=timeout)
        except Empty:
            return None
        key = len(self.messages)
        self.messages[key] = message
        found = {
            name: getattr(message, name)
            for name in (
                "id",
                "subject",
                "user_id",
                "reply_to",
                "correlation_id",
                "durable",
                "priority",
                "ttl",
                "redelivered",
                "properties",
                "content_type",
                "content",
            )
            if getattr(message, name) is not None
        }
        return dict(found, key=key)

    def next_receiver(self, session, timeout=20):
        """Return the name of a receiver that has a message; null where none has."""
        try:
            found = self.things[session].next_receiver(timeout=timeout)
        except Empty:
            return None
        return next(name for name, each in self.things.items() if each is found)

    def acknowledge(self, session, key=None, how="accept", options=None, sync=True):
        """Acknowledge a message, or all. Options are fields of the command: ``code``, ``text``, ``set_redelivered``."""
        message = None if key is None else self.messages[key]
        disposition = None
        if how != "accept":
            disposition = Disposition(HOW[how], **named(options))
        self.things[session].acknowledge(message, disposition, sync=sync)

    def capacity(self, name, value):
        self.things[name].capacity = UNLIMITED if value == "UNLIMITED" else value

    def available(self, name):
        found = self.things[name].available()
        return "UNLIMITED" if found is UNLIMITED else found

    def unsettled(self, name):
        return self.things[name].unsettled()

    def commit(self, session, timeout=20):
        self.things[session].commit(timeout=timeout)

    def rollback(self, session, timeout=20):
        self.things[session].rollback(timeout=timeout)

    def sync(self, name, timeout=20):
        self.things[name].sync(timeout=timeout)

    def attached(self, connection):
        """Return whether the connection is there, and not being made again."""
        return self.things[connection]._transport_connected

    def error(self, name):
        """Return the error that waits to be raised: its class, code and text."""
        found = self.things[name].get_error()
        if found is None:
            return None
        kind, text = type(found).__name__.decode("ascii"), str(found).decode("utf8", "replace")
        return [kind, getattr(found, "code", None), text]

    def close(self, name, timeout=20):
        self.things[name].close(timeout=timeout)


serve(Steps())
sys.stdout.flush()
# Connections that a test has left open would be waited for.
os._exit(0)
