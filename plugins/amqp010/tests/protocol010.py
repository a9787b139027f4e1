"""Client's half of AMQP 0-10 without I/O: the project's own test client.

``Connection`` turns octets of a broker into operations, and operations into frames. ``Session`` numbers commands,
keeps them for replay, and knows which are complete. Both judge the broker on the way, and raise ``Violation`` where it
breaks a rule, so that each test that talks through them tests these rules as well. What a client does by itself can be
switched off, and any octets can be sent, so that a test can be a client that misbehaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from octets010 import (
    FRAME_HEADER,
    HEADER,
    MASK,
    Assembler,
    FrameReader,
    Operation,
    Ranges,
    Struct,
    Typed,
    before,
    frames,
    holds,
    ranges_of,
    within,
)

EXPLICIT, NONE = 0, 1
PRE_ACQUIRED, NOT_ACQUIRED = 0, 1
CREDIT, WINDOW = 0, 1
MESSAGES, BYTES = 0, 1
UNLIMITED = 0xFFFF_FFFF


#: Commands that clients must handle by the specification, and which this one leaves to the test.
FOR_CLIENTS = {
    "message.resume",
    "message.set-flow-mode",
    "message.flow",
    "message.stop",
    "file.qos-ok",
    "file.consume-ok",
    "file.open",
    "file.open-ok",
    "file.stage",
    "file.return",
    "file.deliver",
    "stream.qos-ok",
    "stream.consume-ok",
    "stream.return",
    "stream.deliver",
}


class Violation(Exception):
    """The broker has broken a rule of the protocol."""


class Cut(Exception):
    """The connection ends here, as the test has asked."""


class Failed(Exception):
    """A command has failed, or its session is gone.

    Args:
        code: That of ``execution.exception``, ``session.detached`` or ``connection.close``.
        text: Description.
        operation: The operation that told it; None where the connection went away.
    """

    def __init__(self, code: int | None, text: str, operation: Operation | None = None) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text
        self.operation = operation


@dataclass
class Login:
    """A SASL mechanism with its answers.

    Args:
        mechanism: Its name.
        response: The initial response; absent where None, which is not the same as empty.
        answer: Answers each challenge.
    """

    mechanism: str
    response: bytes | None = None
    answer: Callable[[bytes], bytes | None] = lambda challenge: None

    @classmethod
    def plain(cls, user: str, password: str, *, acts_for: str = "") -> Login:
        return cls("PLAIN", f"{acts_for}\0{user}\0{password}".encode())

    @classmethod
    def anonymous(cls, trace: bytes | None = None) -> Login:
        return cls("ANONYMOUS", trace)

    @classmethod
    def external(cls, identity: bytes | None = b"") -> Login:
        return cls("EXTERNAL", identity)


class Connection:
    """The client's side of a connection.

    Args:
        login: How to log in; ANONYMOUS where not given.
        virtual_host: Name in ``connection.open``; absent where None.
        heartbeat_s: Interval that ``tune-ok`` asks for; absent where None.
        tune_ok: Fields of ``tune-ok`` in place of the greatest that the broker permits.
        properties: Properties of the client.
        by_hand: Names of operations which the test answers itself, such as ``connection.tune``.
    """

    def __init__(
        self,
        login: Login | None = None,
        *,
        virtual_host: str | None = None,
        heartbeat_s: int | None = None,
        tune_ok: dict[str, Any] | None = None,
        properties: dict[str, Any] | None = None,
        by_hand: Iterable[str] = (),
    ) -> None:
        self.login = login or Login.anonymous()
        self.virtual_host = virtual_host
        self.heartbeat_s = heartbeat_s
        self.tune_ok = tune_ok
        self.properties = {"product": "client010"} if properties is None else properties
        self.by_hand = set(by_hand)
        #: Every operation of the broker, in order.
        self.received: list[Operation] = []
        self.frames_received = 0
        #: Frames that still go out, or come in, before the connection is cut.
        self.cut_out: int | None = None
        self.cut_in: int | None = None
        self.server_header: bytes | None = None
        self.opened = False
        self.closed = False
        #: The broker's ``connection.close``.
        self.close_of_broker: Operation | None = None
        self.max_frame_size = 65535
        self.channel_max = 0
        self.sessions: dict[int, Session] = {}
        self._frames: list[bytes] = []
        self._reader = FrameReader()
        self._assemblers: dict[tuple[int, int], Assembler] = {}

    # ---- out

    def start(self) -> None:
        self.raw(HEADER)

    def raw(self, octets: bytes) -> None:
        """Send *octets* as they are. They count as one frame."""
        self._frames.append(octets)

    def put(self, operation: Operation, channel: int = 0, max_payload: int | None = None) -> None:
        """Send an operation, in frames as large as agreed or *max_payload*."""
        for each in self.frames_of(operation, channel, max_payload):
            self.raw(each)

    def frames_of(
        self, operation: Operation, channel: int, max_payload: int | None = None
    ) -> list[bytes]:
        size = max_payload or self.max_frame_size - FRAME_HEADER.size
        return frames(operation.segments(), channel, size)

    def control(self, name: str, channel: int = 0, /, **fields: Any) -> None:
        """Send a control. Words of its fields are joined by underscores."""
        self.put(Operation(name, dashed(fields)), channel)

    def take(self) -> list[bytes]:
        """Take the frames that are to be sent.

        The last of them is followed by the end of the connection where ``cut_out`` is 0 after this.
        """
        found, self._frames = self._frames, []
        if self.cut_out is not None:
            found = found[: self.cut_out]
            self.cut_out -= len(found)
        return found

    @property
    def is_cut(self) -> bool:
        return self.cut_out == 0 or self.cut_in == 0

    # ---- in

    def receive(self, octets: bytes) -> None:
        """Handle *octets* of the broker.

        Raises:
            Violation: They break a rule.
            Malformed: They are not AMQP 0-10.
            Cut: ``cut_in`` frames have come. The rest is dropped.
        """
        if self.is_cut:
            raise Cut
        self._reader.feed(octets)
        if self.server_header is None:
            self.server_header = self._reader.take_header()
            if self.server_header is None:
                return
            if self.server_header != HEADER:
                self.closed = True
                raise Violation(f"the header {self.server_header.hex()}")
        for each in self._reader:
            if each.size > self.max_frame_size:
                raise Violation(f"a frame of {each.size} octets, {self.max_frame_size} agreed")
            if self.opened and each.channel > self.channel_max:
                raise Violation(f"the channel {each.channel}, {self.channel_max} is the last")
            self.frames_received += 1
            assembler = self._assemblers.setdefault((each.channel, each.track), Assembler())
            operation = assembler.add(each)
            if operation is not None:
                self._handle(operation)
            if self.cut_in is not None:
                self.cut_in -= 1
                if self.cut_in == 0:
                    raise Cut

    def _handle(self, operation: Operation) -> None:
        if self.closed:
            raise Violation(f"{operation} after the end")
        self.received.append(operation)
        group, _, name = operation.name.partition(".")
        if group == "connection":
            if operation.channel:
                raise Violation(f"{operation.name} on channel {operation.channel}")
            if operation.name not in self.by_hand:
                getattr(self, "_on_" + name.replace("-", "_"), self._on_wrong)(operation)
            return
        if not self.opened:
            raise Violation(f"{operation.name} before connection.open-ok")
        session = self.sessions.get(operation.channel)
        if session is None:
            # A session whose detach crossed this on its way.
            if operation.layout.kind == "command":
                raise Violation(f"{operation.name} on channel {operation.channel} without session")
            return
        session._handle(operation)

    def _on_wrong(self, operation: Operation) -> None:
        raise Violation(f"{operation.name} is not for clients")

    def _on_start(self, start: Operation) -> None:
        self.control(
            "connection.start-ok",
            client_properties=self.properties,
            mechanism=self.login.mechanism,
            response=self.login.response,
            locale="en_US",
        )

    def _on_secure(self, secure: Operation) -> None:
        self.control("connection.secure-ok", response=self.login.answer(secure.challenge))

    def _on_tune(self, tune: Operation) -> None:
        """Agree to all that the broker permits, and open."""
        channel_max = 65535 if tune.channel_max is None else tune.channel_max
        fields = {
            "channel-max": channel_max,
            "max-frame-size": tune.max_frame_size,
            "heartbeat": self.heartbeat_s,
        }
        fields.update(self.tune_ok or {})
        self.control("connection.tune-ok", **{key.replace("-", "_"): fields[key] for key in fields})
        self.max_frame_size = fields["max-frame-size"] or 65535
        self.channel_max = fields["channel-max"] or 0
        self.heartbeat_s = fields["heartbeat"]
        self.control("connection.open", virtual_host=self.virtual_host)

    def _on_open_ok(self, open_ok: Operation) -> None:
        self.opened = True

    def _on_redirect(self, redirect: Operation) -> None:
        self.closed = True

    def _on_heartbeat(self, heartbeat: Operation) -> None:
        pass

    def _on_close(self, close: Operation) -> None:
        self.close_of_broker = close
        self.control("connection.close-ok")
        self.closed = True
        self.lost()

    def _on_close_ok(self, close_ok: Operation) -> None:
        self.closed = True
        self.lost()

    def lost(self) -> None:
        """Note that the connection is gone: its sessions are detached, and can be resumed on another one."""
        for session in self.sessions.values():
            session.attached = False
        self.sessions.clear()

    def session(self, name: bytes, channel: int | None = None) -> Session:
        """Return a session without state, on *channel* or the lowest free one."""
        return self.adopt(Session(name), channel)

    def adopt(self, session: Session, channel: int | None = None) -> Session:
        """Put a session of an earlier connection on *channel* or the lowest free one; it is not attached yet."""
        if channel is None:
            channel = next(each for each in range(65536) if each not in self.sessions)
        session._move(self, channel)
        self.sessions[channel] = session
        return session


class Session:
    """The client's side of a session, which outlives connections.

    Args:
        name: Its name.
        first_id: Id of its first command.
    """

    def __init__(self, name: bytes, *, first_id: int = 0) -> None:
        self.name = name
        self.connection: Connection = Connection()
        self.channel = 0
        self.attached = False
        #: Whether known-completed follows a ``completed`` with the bit timely-reply.
        self.knows = True
        #: Whether commands of the broker are completed as they come.
        self.completes = True
        #: Whether the broker's flush is answered.
        self.answers = True
        # Ours.
        self.next_id = first_id
        #: Commands of ours that are not confirmed, by id.
        self.unconfirmed: dict[int, Operation] = {}
        self.results: dict[int, Struct | None] = {}
        self.incomplete: set[int] = set()
        #: Ids of which known-completed has told the broker.
        self._known: set[int] = set()
        #: The last ``completed``.
        self._completed: Ranges = []
        self._with_results: set[int] = set()
        self._sent_point = False
        # Theirs.
        self.expected_id: int | None = None
        self.processed: set[int] = set()
        #: Commands that came once more, after a resumption.
        self.repeated: list[Operation] = []
        self._fresh_id: int | None = None
        self._theirs_first: int | None = None
        self._pointed = False
        # What has come.
        self.messages: list[Operation] = []
        #: ``message.accept``, ``reject`` and ``release`` of our transfers.
        self.answers_of_broker: list[Operation] = []
        #: Commands of ``FOR_CLIENTS``.
        self.others: list[Operation] = []
        self.detached: Operation | None = None
        self.exception: Operation | None = None
        self.timeout_s: int | None = None
        #: The broker's sets, since the last attachment.
        self.expected: Ranges | None = None
        self.confirmed: Ranges | None = None

    def _move(self, connection: Connection, channel: int) -> None:
        self.connection = connection
        self.channel = channel
        self.attached = False
        self.detached = None
        self.expected = self.confirmed = None
        self._sent_point = self._pointed = False

    # ---- controls

    def control(self, name: str, /, **fields: Any) -> None:
        self.connection.control(f"session.{name}", self.channel, **fields)

    def attach(self, *, force: bool = False, point: bool = True) -> None:
        """Attach, and send the point of the next command unless *point* is False."""
        self.control("attach", name=self.name, force=force)
        if point:
            self.point()

    def point(self, number: int | None = None, offset: int = 0) -> None:
        self._sent_point = True
        number = self.next_id if number is None else number
        self.control("command-point", command_id=number, command_offset=offset)

    def detach(self) -> None:
        self.control("detach", name=self.name)

    def ask_timeout(self, seconds: int | None) -> None:
        self.control("request-timeout", timeout=seconds)

    def flush(self) -> None:
        """Ask for all three sets."""
        self.expected = self.confirmed = None
        self.control("flush", expected=True, confirmed=True, completed=True)

    def know(self, *numbers: int) -> None:
        """Tell the broker that it can forget *numbers*."""
        self._known.update(numbers)
        self.control("known-completed", commands=ranges_of(numbers))

    def gap(self, *numbers: int) -> None:
        """Tell the broker that nothing more comes of *numbers*."""
        self.control("gap", commands=ranges_of(numbers))

    def complete(self, *numbers: int, timely: bool = False) -> None:
        """Tell the broker which of its commands are complete: all so far, and *numbers*."""
        self.processed.update(numbers)
        self.control("completed", commands=self._told(), timely_reply=timely)

    def _told(self) -> Ranges:
        first = self._theirs_first or 0
        return ranges_of(sorted(self.processed, key=lambda each: (each - first) & MASK))

    # ---- commands

    def command(
        self,
        name: str,
        /,
        *,
        sync: bool = False,
        headers: list[Struct | Typed] | None = None,
        body: bytes | None = None,
        **fields: Any,
    ) -> Operation:
        """Give a command its id and keep it for replay, without sending it."""
        operation = Operation(name, dashed(fields), sync, headers, body, self.channel, self.next_id)
        assert operation.layout.kind == "command"
        self.next_id = (self.next_id + 1) & MASK
        assert operation.id is not None
        self.unconfirmed[operation.id] = operation
        self.incomplete.add(operation.id)
        if operation.layout.result is not None:
            self._with_results.add(operation.id)
        return operation

    def send(self, name: str, /, **words: Any) -> int:
        """Send a command, and return its id."""
        operation = self.command(name, **words)
        if not self._sent_point:
            assert operation.id is not None
            self.point(operation.id)
        self.connection.put(operation, self.channel)
        assert operation.id is not None
        return operation.id

    def transfer(
        self,
        destination: str,
        body: bytes | None = b"",
        *,
        key: str | None = None,
        delivery: dict[str, Any] | None = None,
        properties: dict[str, Any] | None = None,
        accept_mode: int | None = EXPLICIT,
        acquire_mode: int | None = PRE_ACQUIRED,
        sync: bool = False,
    ) -> int:
        """Send a message to an exchange, and return the id of the command.

        Args:
            destination: Name of the exchange.
            body: Its content; None for a message without body segment.
            key: The routing key.
            delivery: More delivery-properties.
            properties: Message-properties.
            accept_mode: Absent where None, which is not the same as explicit.
            acquire_mode: Absent where None.
            sync: Whether its completion is asked for at once.
        """
        headers: list[Struct | Typed] = []
        fields = {**(delivery or {}), **({} if key is None else {"routing_key": key})}
        if fields:
            headers.append(Struct("delivery-properties", **fields))
        if properties is not None:
            headers.append(Struct("message-properties", **properties))
        return self.send(
            "message.transfer",
            sync=sync,
            headers=headers or None,
            body=body,
            destination=destination,
            accept_mode=accept_mode,
            acquire_mode=acquire_mode,
        )

    def accept(self, *numbers: int, sync: bool = False) -> int:
        return self.send("message.accept", transfers=ranges_of(numbers), sync=sync)

    def reject(self, *numbers: int, code: int | None = 0, text: str | None = None) -> int:
        ids = ranges_of(numbers)
        return self.send("message.reject", transfers=ids, code=code, text=text, sync=True)

    def release(self, *numbers: int, redelivered: bool = False) -> int:
        ids = ranges_of(numbers)
        return self.send("message.release", transfers=ids, set_redelivered=redelivered, sync=True)

    def replay(self) -> list[int]:
        """Send anew what the broker's ``expected`` asks for, and return the ids.

        ``attach(point=False)``, ``flush()`` and the broker's answer come before this. Runs of ids begin with a
        command-point. A broker without state gets all that is not confirmed.
        """
        assert self.expected is not None, "the broker has not answered flush()"
        numbers = list(self.unconfirmed)
        if self.expected:
            # The last id is of the command after the highest that the broker has seen: it lacks all that follow.
            following = self.expected[-1][1]
            numbers = [
                each for each in numbers if holds(self.expected, each) or before(following, each)
            ]
        last = None
        for number in numbers:
            if last is None or number != (last + 1) & MASK:
                self.point(number)
            self.connection.put(self.unconfirmed[number], self.channel)
            last = number
        if last is None or (last + 1) & MASK != self.next_id:
            self.point()
        return numbers

    def is_complete(self, number: int) -> bool:
        return number not in self.incomplete

    def result(self, number: int) -> Struct | None:
        """Return the result of a complete command."""
        return self.results[number]

    # ---- in

    def _handle(self, operation: Operation) -> None:
        if operation.layout.kind == "control":
            if operation.name not in self.connection.by_hand:
                name = operation.name.partition(".")[2].replace("-", "_")
                getattr(self, f"_on_{name}")(operation)
            return
        if not self.attached:
            raise Violation(f"{operation.name} before session.attached")
        if not self._pointed:
            raise Violation(f"{operation.name} before session.command-point")
        assert self.expected_id is not None
        operation.id = self.expected_id
        self.expected_id = (self.expected_id + 1) & MASK
        if self._fresh_id is not None and before(operation.id, self._fresh_id):
            self.repeated.append(operation)
            return
        self._fresh_id = self.expected_id
        if operation.name == "message.transfer":
            self.messages.append(operation)
        elif operation.name == "execution.result":
            self._on_result(operation)
        elif operation.name == "execution.exception":
            self.exception = operation
        elif operation.name in ("message.accept", "message.reject", "message.release"):
            self._on_answer(operation)
        elif operation.name in FOR_CLIENTS:
            self.others.append(operation)
        elif operation.name != "execution.sync":
            raise Violation(f"{operation.name} is not for clients")
        if self.completes:
            self.processed.add(operation.id)
            if operation.sync or operation.name == "execution.sync":
                self.complete()

    def _on_result(self, operation: Operation) -> None:
        number = operation.command_id
        if number not in self._with_results or number in self.results:
            raise Violation(f"a result of the command {number}, which has none, or twice")
        if number not in self.incomplete:
            raise Violation(f"the result of {number} after its completion")
        self.results[number] = operation.value

    def _on_answer(self, operation: Operation) -> None:
        """Note accept, reject or release of our transfers."""
        for low, high in operation.transfers:
            for each in (low, high):
                if before(self.next_id, each) or each == self.next_id:
                    raise Violation(f"{operation.name} of {each}, {self.next_id} is the next")
        self.answers_of_broker.append(operation)

    def _on_attach(self, attach: Operation) -> None:
        raise Violation("session.attach of the broker, which we never ask for")

    def _on_attached(self, attached: Operation) -> None:
        if attached.name_ != self.name:
            raise Violation(f"attached is {attached.name_!r}, {self.name!r} was meant")
        self.attached = True

    def _on_detach(self, detach: Operation) -> None:
        self.control("detached", name=self.name, code=0)
        self._on_detached(detach)

    def _on_detached(self, detached: Operation) -> None:
        self.detached = detached
        self.attached = False
        self.connection.sessions.pop(self.channel, None)

    def _on_request_timeout(self, request: Operation) -> None:
        self.control("timeout", timeout=0)

    def _on_timeout(self, timeout: Operation) -> None:
        self.timeout_s = timeout.timeout

    def _on_command_point(self, point: Operation) -> None:
        if point.command_offset:
            raise Violation("a command-point within a command, which we never ask for")
        if self.expected_id is None:
            self._theirs_first = point.command_id
        elif before(self.expected_id, point.command_id):
            raise Violation(f"command-point {point.command_id}, expected {self.expected_id}")
        self.expected_id = point.command_id
        self._pointed = True

    def _on_expected(self, expected: Operation) -> None:
        self.expected = expected.commands or []

    def _on_confirmed(self, confirmed: Operation) -> None:
        self.confirmed = confirmed.commands or []
        self._check_sent(self.confirmed)

    def _check_sent(self, ranges: Ranges) -> None:
        for low, high in ranges:
            if before(high, low):
                raise Violation(f"an inverted range: {low}, {high}")
            if not before(high, self.next_id):
                raise Violation(f"{high} was not sent, {self.next_id} is the next")

    def _on_completed(self, completed: Operation) -> None:
        ranges = completed.commands or []
        self._check_sent(ranges)
        # Every such set holds all that we have not said to know: clients take it for the whole.
        missing = [
            each
            for low, high in self._completed
            if not within(ranges, low, high)
            for each in ((low + place) & MASK for place in range(((high - low) & MASK) + 1))
            if each not in self._known and not holds(ranges, each)
        ]
        if missing:
            raise Violation(f"{missing} were complete before, and are missing now")
        self._completed = ranges
        for number in [each for each in self.incomplete if holds(ranges, each)]:
            if number in self._with_results and number not in self.results:
                raise Violation(f"{number} is complete without its result")
            if self.exception is not None and self.exception.command_id == number:
                raise Violation(f"{number} has failed, and is complete")
            self.incomplete.discard(number)
            self.unconfirmed.pop(number, None)
            self.results.setdefault(number, None)
        if completed.timely_reply and self.knows:
            for low, high in ranges:
                self._known.update(
                    (low + place) & MASK for place in range(((high - low) & MASK) + 1)
                )
            self.control("known-completed", commands=ranges)

    def _on_known_completed(self, known: Operation) -> None:
        ranges = known.commands or []
        if any(not holds(self._told(), each) for pair in ranges for each in pair):
            raise Violation(f"known are {ranges}, told was {self._told()}")
        self.processed = {each for each in self.processed if not holds(ranges, each)}

    def _on_flush(self, flush: Operation) -> None:
        if not self.answers:
            return
        if flush.expected:
            # Empty if and only if we hold no state of the session.
            number = self.expected_id
            self.control("expected", commands=[] if number is None else [(number, number)])
        if flush.confirmed:
            self.control("confirmed", commands=self._told())
        if flush.completed:
            self.complete()

    def _on_gap(self, gap: Operation) -> None:
        raise Violation("session.gap of the broker, which keeps what it has sent")


def dashed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return *fields* with their names of the wire. A trailing underscore keeps a name off Python's words."""
    return {key.rstrip("_").replace("_", "-"): value for key, value in fields.items()}


def xid(global_id: bytes, branch_id: bytes = b"", format_: int = 0) -> Struct:
    """Return the name of a branch of a distributed transaction."""
    return Struct("xid", format=format_, global_id=global_id, branch_id=branch_id)
