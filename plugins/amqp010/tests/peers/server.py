"""Serves AMQP 0-10 with the server's half of qpid-python, for tests of clients without a broker; for Python 2.7.

It prints its port and serves until its input ends. Queues are lists in memory. Of the rules of 0-10 it has those that
the library has; it answers the commands that the tests use, and no others.
"""

import json
import os
import socket
import sys
import threading

from qpid import connection as connections
from qpid import session as sessions
from qpid.datatypes import Message, RangedSet
from qpid.delegates import Server
from qpid.ops import (
    Acquired,
    DeliveryProperties,
    ExchangeQueryResult,
    GetTimeoutResult,
    MessageTransfer,
    QueueQueryResult,
    RecoverResult,
    XaResult,
)

LOCK = threading.RLock()
QUEUES = {}
SESSIONS = {}
UNLIMITED = 0xFFFFFFFF
#: Mechanism and response of the last client, and its tune-ok and open.
LOGIN = {}


class Login(Server):
    """The server's half of a login, which takes anything."""

    def start(self):
        self.connection.read_header()
        self.connection.write_header(0, 10)
        channel = connections.Channel(self.connection, 0)
        channel.connection_start(mechanisms=["ANONYMOUS", "PLAIN", "EXTERNAL", "TWO-STEPS"])

    def connection_start_ok(self, channel, start_ok):
        LOGIN.update(mechanism=start_ok.mechanism, response=start_ok.response)
        if start_ok.mechanism == "TWO-STEPS":
            channel.connection_secure(challenge="who")
        else:
            self.tune(channel)

    def connection_secure_ok(self, channel, secure_ok):
        LOGIN.update(response=secure_ok.response)
        self.tune(channel)

    def tune(self, channel):
        channel.connection_tune(
            channel_max=9, max_frame_size=4096, heartbeat_min=0, heartbeat_max=60
        )

    def connection_tune_ok(self, channel, tune_ok):
        self.connection.seg_enc.max_payload = 4096 - 12

    def connection_open(self, channel, opened):
        LOGIN.update(virtual_host=opened.virtual_host)
        Server.connection_open(self, channel, opened)

    def session_expected(self, channel, expected):
        pass

    def session_confirmed(self, channel, confirmed):
        pass

    def session_timeout(self, channel, timeout):
        pass

    def session_gap(self, channel, gap):
        channel.session.receiver._completed = merged(
            channel.session.receiver._completed, gap.commands
        )


class Resumable(connections.Connection):
    """A connection whose sessions outlive it, until they are detached. What the server has sent is not replayed."""

    def __init__(self, sock, delegate):
        connections.Connection.__init__(self, sock, delegate)
        self.sessions = SESSIONS

    def attach(self, name, channel, delegate, force=False):
        # The library looks for the session among those of this connection, where the end of the other one has not
        # been noticed yet.
        held = self.sessions.get(name)
        other = held and held.channel and held.channel.connection
        if force and other and other is not self:
            with other.lock:
                if held.channel:
                    other.attached.pop(held.channel.id, None)
                    held.channel = None
                    held.send_id = True
        connections.Connection.attach(self, name, channel, delegate, force)

    def detach_all(self):
        with self.lock:
            self.failed = True
            for each in self.attached.values():
                each.channel = None
                each.send_id = True
            self.attached.clear()


def merged(one, other):
    for each in other:
        one.add_range(each)
    return one


class Subscription:
    def __init__(self, session, command):
        self.session = session
        self.destination = command.destination
        self.queue = command.queue
        self.acquires = command.acquire_mode in (None, 0)
        self.accepts = command.accept_mode in (None, 0)
        self.credit = 0
        self.seen = set()


class Commands(sessions.Delegate):
    """Performs the commands of one session."""

    def __init__(self, session):
        session.auto_sync = False
        self.session = session
        self.subscriptions = {}
        self.unacked = {}

    def fail(self, command, code, text):
        channel = self.session.channel
        if command.sync:
            channel.session_completed(self.session.receiver._completed)
        self.session.execution_exception(
            error_code=code,
            command_id=command.id,
            class_code=command.CODE >> 8,
            command_code=command.CODE & 255,
            description=text,
        )
        channel.session_detach(self.session.name)
        return sessions.INCOMPLETE

    def execution_sync(self, command):
        pass

    def queue_declare(self, command):
        QUEUES.setdefault(command.queue, [])

    def queue_delete(self, command):
        if QUEUES.pop(command.queue, None) is None:
            return self.fail(command, 404, "no such queue: " + command.queue)
        return None

    def queue_query(self, command):
        if command.queue not in QUEUES:
            return QueueQueryResult()
        count = len(QUEUES[command.queue])
        return QueueQueryResult(queue=command.queue, message_count=count, subscriber_count=0)

    def exchange_query(self, command):
        if command.name == "login":
            seen = {key: each for key, each in LOGIN.items() if each is not None}
            return ExchangeQueryResult(type="seen", arguments=seen)
        return ExchangeQueryResult(not_found=True)

    def message_transfer(self, command):
        properties = [
            each for each in command.headers or [] if isinstance(each, DeliveryProperties)
        ]
        key = properties[0].routing_key if properties else None
        with LOCK:
            if key in QUEUES:
                QUEUES[key].append((command.headers, command.payload))
                pump(key)

    def message_subscribe(self, command):
        if command.queue not in QUEUES:
            return self.fail(command, 404, "no such queue: " + command.queue)
        with LOCK:
            self.subscriptions[command.destination] = Subscription(self.session, command)
            SUBSCRIPTIONS.append(self.subscriptions[command.destination])
        return None

    def message_set_flow_mode(self, command):
        pass

    def message_flow(self, command):
        subscription = self.subscriptions[command.destination]
        if command.unit == 0:
            unlimited = command.value in (None, UNLIMITED)
            subscription.credit = UNLIMITED if unlimited else subscription.credit + command.value
            pump(subscription.queue)

    def message_stop(self, command):
        self.subscriptions[command.destination].credit = 0

    message_flush = message_stop

    def message_cancel(self, command):
        SUBSCRIPTIONS.remove(self.subscriptions.pop(command.destination))

    def _taken(self, command):
        found = [number for number in sorted(self.unacked) if number in command.transfers]
        return [self.unacked.pop(number) for number in found]

    def message_accept(self, command):
        with LOCK:
            self._taken(command)

    message_reject = message_accept

    def message_release(self, command):
        with LOCK:
            for queue, headers, body in reversed(self._taken(command)):
                QUEUES[queue].insert(0, (headers, body))

    def message_acquire(self, command):
        found = RangedSet()
        for number in sorted(self.unacked):
            if number in command.transfers:
                found.add(number)
        return Acquired(transfers=found)

    def tx_select(self, command):
        pass

    tx_commit = tx_rollback = dtx_select = dtx_set_timeout = tx_select

    def dtx_start(self, command):
        self.branch = command.xid
        return XaResult(status=0)

    dtx_end = dtx_prepare = dtx_commit = dtx_rollback = dtx_start

    def dtx_get_timeout(self, command):
        return GetTimeoutResult(timeout=60)

    def dtx_recover(self, command):
        return RecoverResult(in_doubt=[self.branch])


SUBSCRIPTIONS = []


def pump(queue):
    """Give the messages of *queue* to subscriptions with credit."""
    with LOCK:
        for each in [one for one in SUBSCRIPTIONS if one.queue == queue]:
            waiting = QUEUES[queue]
            while (
                each.credit
                and waiting
                and not (not each.acquires and len(each.seen) >= len(waiting))
            ):
                if each.acquires:
                    headers, body = waiting.pop(0)
                else:
                    headers, body = waiting[len(each.seen)]
                    each.seen.add(len(each.seen))
                if each.credit != UNLIMITED:
                    each.credit -= 1
                deliver(each, headers, body)


def deliver(subscription, headers, body):
    session = subscription.session
    with session.invoke_lock:
        number = session.sender.next_id.value
        if subscription.accepts:
            session.delegate.unacked[number] = (subscription.queue, headers, body)
        parts = list(headers or [])
        parts.append(body)
        message = Message(*parts)
        words = {
            "destination": subscription.destination,
            "accept_mode": int(not subscription.accepts),
            "acquire_mode": int(not subscription.acquires),
        }
        session.do_invoke(MessageTransfer, (), dict(words, message=message))


def talk(sock):
    def login(connection):
        return Login(connection, delegate=Commands)

    try:
        Resumable(sock, login).start(20)
    except Exception as error:
        sys.stderr.write("connection: " + repr(error) + "\n")


def main():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(5)
    sys.stdout.write(json.dumps({"port": listener.getsockname()[1]}) + "\n")
    sys.stdout.flush()

    def accept():
        while True:
            thread = threading.Thread(target=talk, args=(listener.accept()[0],))
            thread.daemon = True
            thread.start()

    accepting = threading.Thread(target=accept)
    accepting.daemon = True
    accepting.start()
    sys.stdin.read()
    os._exit(0)


main()
