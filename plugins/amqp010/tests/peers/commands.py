"""Performs steps with ``qpid.connection`` and ``qpid.session``, the low-level API of qpid-python; for Python 2.7.

Any command and control of 0-10 can be sent by its name. ``notation`` has the form of steps and answers.
"""

import os
import sys

from notation import compound, octets, ranged, read, serve
from qpid import ops
from qpid.connection import Connection
from qpid.datatypes import Future, Serial
from qpid.exceptions import Closed
from qpid.ops import COMMANDS, CONTROLS
from qpid.queue import Empty, Queue
from qpid.session import Client, SessionException
from qpid.util import connect, ssl


def load_contents():
    """Load classes file and stream, which the library has in its XML and leaves out."""
    ops.included = lambda node: True
    for name, bases, fields in ops.load_types_from_xml(ops.file):
        for base, known in ((ops.Command, COMMANDS), (ops.Compound, ops.COMPOUND)):
            if bases == (base,) and fields["NAME"] not in known:
                known[fields["NAME"]] = known[fields["CODE"]] = type(name, bases, fields)


class Failed(Exception):
    """A command has failed: the code is that of execution.exception."""

    def __init__(self, code, text):
        Exception.__init__(self, text)
        self.code = code


def told(error):
    """Return *error*, or what the broker's execution.exception in it says."""
    for each in error.args:
        for inner in each if isinstance(each, tuple) else (each,):
            if hasattr(inner, "error_code"):
                return Failed(inner.error_code, inner.description)
    return error


def awaited(call, *arguments, **words):
    """Return what *call* returns.

    Raises:
        Failed: The broker has refused.
    """
    try:
        return call(*arguments, **words)
    except (SessionException, Closed) as error:
        failure = told(error)
    raise failure


def named(text):
    return str(text.replace("-", "_").replace(".", "_"))


class Recording(Client):
    """Delegate of a session that keeps the commands of classes file and stream, which the library's own lacks."""

    def __init__(self, session):
        Client.__init__(self, session)
        self.received = {}

    def __getattr__(self, name):
        if name.startswith(("file_", "stream_")):
            return self.queue(name).put
        raise AttributeError(name)

    def queue(self, name):
        # The thread of the connection and that of the steps may both be the first.
        return self.received.setdefault(name, Queue())


class Steps:
    def __init__(self):
        self.connections = {}
        self.sessions = {}
        self.futures = {}

    def connect(self, name, host, port, options=None, tls=False, timeout=20):
        """Open a connection; options are ``username``, ``password``, ``mechanism`` and ``heartbeat``."""
        sock = connect(octets(host), port)
        options = {str(key): octets(each) for key, each in (options or {}).items()}
        connection = Connection(ssl(sock) if tls else sock, **options)
        self.connections[name] = connection
        connection.start(timeout=timeout)
        return connection.user_id and connection.user_id.decode("utf8")

    def session(self, name, connection, label=None, auto_sync=True, timeout=20):
        """Attach a session. Without *auto_sync* commands are not waited for."""
        session = self.connections[connection].session(
            octets(label or name), timeout=timeout, delegate=Recording
        )
        session.auto_sync = auto_sync
        self.sessions[name] = session

    def command(self, session, name, fields=None, message=None, sync=False):
        """Send a command, and return its id and, with auto_sync, its result.

        Args:
            message: ``{"headers": [structs], "body": {"hex": octets}}`` of a command with content.
            sync: The sync bit; auto_sync sets it in any case.
        """
        session = self.sessions[session]
        kind = COMMANDS[named(name)]
        command = compound(kind, fields or {})
        words = {each.name: command[each.name] for each in kind.FIELDS}
        if message is not None:
            # The library splits a Message for transfers only.
            words["headers"] = read(message.get("headers") or [])
            words["payload"] = read(message.get("body"))
        number = session.sender.next_id.value
        result = awaited(session.invoke, kind, (), dict(words, sync=sync))
        if isinstance(result, Future):
            self.futures[session.name, number] = result
            result = None
        return {"id": number, "result": result}

    def result(self, session, number, timeout=20):
        """Return the result of a command that was sent without waiting."""
        session = self.sessions[session]
        return awaited(self.futures.pop((session.name, number)).get, timeout=timeout)

    def sync(self, session, timeout=20):
        """Wait until all commands of the session are complete."""
        awaited(self.sessions[session].sync, timeout=timeout)

    def control(self, session, name, fields=None):
        """Send a control on the channel of a session."""
        channel = self.sessions[session].channel
        control = compound(CONTROLS[named(name)], fields or {})
        control.channel = channel.id
        channel.connection.write_op(control)

    def message_flow(self, session, destination, messages=0xFFFFFFFF, size=0xFFFFFFFF):
        """Grant credit for messages and octets."""
        session = self.sessions[session]
        session.message_flow(destination, session.credit_unit.byte, size)
        session.message_flow(destination, session.credit_unit.message, messages)

    def incoming(self, session, destination, timeout=20):
        """Return the next message of a destination: id, headers and body; null where none has come."""
        try:
            message = awaited(self.sessions[session].incoming(destination).get, timeout=timeout)
        except Empty:
            return None
        headers = {each.NAME.replace("_", "-"): each for each in message.headers or []}
        return {"id": message.id, "headers": headers, "body": message.body}

    def received(self, session, name, timeout=20):
        """Return the next command *name* of class file or stream: id, fields, headers and body; null if none comes."""
        try:
            found = self.sessions[session].delegate.queue(named(name)).get(timeout=timeout)
        except Empty:
            return None
        headers = {each.NAME.replace("_", "-"): each for each in found.headers or []}
        return {"id": found.id, "fields": found, "headers": headers, "body": found.payload}

    def complete(self, session, pairs):
        """Tell the broker that its commands of *pairs* are complete."""
        session = self.sessions[session]
        for each in ranged(pairs):
            session.receiver._completed.add_range(each)
        session.channel.session_completed(session.receiver._completed)

    def completed(self, session):
        """Return which of our commands are complete."""
        return self.sessions[session].sender._completed

    def error(self, session):
        """Return what execution.exception has told of a session."""
        found = self.sessions[session].exceptions
        return [
            [getattr(each, "error_code", None), getattr(each, "description", None)]
            for each in found
        ]

    def start_at(self, session, number):
        """Send the next command with the id *number*, after a command-point."""
        session = self.sessions[session]
        session.sender.next_id = Serial(number)
        session.send_id = True

    def cut(self, connection):
        """End a connection without a word."""
        self.connections[connection].sock.close()

    def detach(self, session, timeout=20):
        self.sessions[session].close(timeout=timeout)

    def close(self, connection, timeout=20):
        self.connections[connection].close(timeout=timeout)


load_contents()
serve(Steps())
sys.stdout.flush()
# Threads that read from connections a test has left open would be waited for.
os._exit(0)
