"""Two real sessions, their frames, and the model of the execution layer, in lockstep."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import pytest
from amqp_rt_amqp010.assembling import Assembler, Assembly
from amqp_rt_amqp010.attachments import Attachment
from amqp_rt_amqp010.codec import (
    read_command,
    read_control,
    write_command,
    write_control,
    write_entries,
)
from amqp_rt_amqp010.faults import CommandFault
from amqp_rt_amqp010.frames import CONTROL, FrameReader, assembly_frames, control_frames
from amqp_rt_amqp010.handlers import LATER, Answer
from amqp_rt_amqp010.layouts import (
    Command,
    Control,
    DeliveryProperties,
    ErrorCode,
    ExecutionException,
    ExecutionResult,
    ExecutionSync,
    MessageAccept,
    MessageReject,
    MessageTransfer,
    QueueDeclare,
    QueueDelete,
    QueuePurge,
    QueueQuery,
    QueueQueryResult,
    SessionAttach,
    SessionAttached,
    SessionCommandPoint,
    SessionDetach,
    SessionDetached,
    SessionFlush,
    SessionGap,
    SessionRequestTimeout,
)
from amqp_rt_amqp010.registry import SessionRegistry
from amqp_rt_amqp010.serials import RangeSet
from amqp_rt_amqp010.sessions import Session, SessionKey
from execution010 import ExecutionModel, Kind
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

MASK = 0xFFFF_FFFF
EXPLICIT = 0
NAME = b"s"
KEY = SessionKey("h", "u", NAME)
TIMEOUT = 1_000
#: Frames of few octets: most commands take several.
FRAME_MAX = 40
KINDS: dict[str, Callable[[str], Command]] = {
    "now": lambda token: QueueDeclare(queue=token),
    "later": lambda token: QueueDelete(queue=token),
    "result": lambda token: QueueQuery(queue=token),
    "result later": lambda token: QueueQuery(queue="later " + token),
    "failure": lambda token: QueuePurge(queue=token),
    "failure later": lambda token: QueuePurge(queue="later " + token),
    "transfer": lambda token: MessageTransfer(destination=token),
    "answered": lambda token: MessageTransfer(destination=token, accept_mode=EXPLICIT),
}
#: Failures end sessions: rare, so that sessions become old.
DRAWN = ["now", "later", "result", "result later", "transfer", "answered", "answered"] * 7 + [
    "failure",
    "failure later",
]


class Actor:
    """Layer above a session of either peer."""

    def __init__(self, world: Peers, session: Session) -> None:
        self.world = world
        self.session = session
        #: Commands to be completed later.
        self.pending: dict[int, Command] = {}
        self.is_congested = False

    def execute(self, number: int, command: Command, assembly: Assembly, *, sync: bool) -> Answer:
        if isinstance(command, (MessageAccept, MessageReject)):
            assert command.transfers is not None
            numbers = command.transfers.among(dict.fromkeys(self.world.known(self.session)))
            assert len(numbers) == len(command.transfers)
            for each in numbers:
                self.world.models[self.session].dispose(self.world.index(each))
            return None
        token = token_of(command)
        self.world.executed[token] += 1
        model = self.world.models[self.world.tokens[token]]
        if isinstance(command, MessageTransfer):
            assert b"".join(assembly.body or ()) == token.encode() * 9
        if isinstance(command, QueueDelete) or waits(command) or is_answered(command):
            self.pending[number] = command
            return LATER
        if isinstance(command, QueuePurge):
            model.fail(self.world.index(number))
            raise CommandFault("no", ErrorCode.NOT_FOUND)
        model.process(self.world.index(number))
        return QueueQueryResult(queue=token) if isinstance(command, QueueQuery) else None

    def finish(self, number: int) -> None:
        if is_answered(self.pending[number]):
            self.answer([number])
            return
        command = self.pending.pop(number)
        token = token_of(command)
        model = self.world.models[self.world.tokens[token]]
        if isinstance(command, QueuePurge):
            model.fail(self.world.index(number))
            self.session.fail(CommandFault("no", ErrorCode.NOT_FOUND), number)
            return
        model.process(self.world.index(number))
        result = QueueQueryResult(queue=token) if isinstance(command, QueueQuery) else None
        self.session.complete(number, result)

    def answerable(self) -> list[int]:
        """Return the transfers whose outcome has not been told."""
        return [number for number, command in self.pending.items() if is_answered(command)]

    def answer(self, numbers: Sequence[int], *, rejected: bool = False) -> None:
        """Tell of the outcome of transfers in one command, and complete them."""
        transfers = RangeSet((number, number) for number in numbers)
        outcome = (MessageReject if rejected else MessageAccept)(transfers=transfers)
        self.session.send(write_command(outcome), urgent=True)
        for number in numbers:
            token = token_of(self.pending.pop(number))
            self.world.models[self.world.tokens[token]].process(self.world.index(number))
            self.session.complete(number)

    def on_result(self, number: int, value: object) -> None:
        token = self.world.issued[self.session, number]
        assert value == QueueQueryResult(queue=token)
        self.world.models[self.session].dispose(self.world.index(number))

    def on_exception(self, exception: ExecutionException) -> None:
        if exception.command_id is not None:
            self.world.models[self.session].dispose(self.world.index(exception.command_id))

    def on_completed(self, commands: RangeSet) -> None:
        numbers = commands.among(dict.fromkeys(self.world.known(self.session)))
        assert len(numbers) == len(commands)
        self.world.models[self.session].report(map(self.world.index, numbers))
        for number in numbers:
            self.world.completed[self.session, number] += 1

    def on_ready(self) -> None:
        raise AssertionError("the sessions of this test are never full")

    def on_suspended(self) -> None:
        assert not self.session.can_send

    def on_resumed(self) -> None:
        assert self.session.carrier is not None

    def on_ended(self) -> None:
        assert self.session.ended
        self.pending.clear()


def token_of(command: Command) -> str:
    if isinstance(command, MessageTransfer):
        return command.destination or ""
    assert isinstance(command, (QueueDeclare, QueueDelete, QueuePurge, QueueQuery))
    return (command.queue or "").removeprefix("later ")


def waits(command: Command) -> bool:
    return isinstance(command, (QueueQuery, QueuePurge)) and (command.queue or "").startswith(
        "later "
    )


def is_answered(command: Command) -> bool:
    return isinstance(command, MessageTransfer) and command.accept_mode == EXPLICIT


class End:
    """One end of a connection with one channel: writes frames, and reads those of the other end."""

    def __init__(self, world: Peers) -> None:
        self.world = world
        self.out: deque[bytes] = deque()
        self.reader = FrameReader(FRAME_MAX)
        self.assembler = Assembler(10_000)
        self.carrier: Attachment | Client | None = None
        self.wants_turn = False
        #: Number of the next command that goes out.
        self.position = -1

    @property
    def has_room(self) -> bool:
        return len(self.out) < 12

    @property
    def has_begun(self) -> bool:
        return self.assembler.has_begun(1)

    def _queue(self, buffers: list[bytes]) -> None:
        octets = b"".join(buffers)
        while octets:
            size = int.from_bytes(octets[2:4], "big")
            self.out.append(octets[:size])
            octets = octets[size:]

    def send_control(self, control: Control) -> None:
        model = self._model()
        if isinstance(control, SessionCommandPoint):
            self.position = control.command_id or 0
        elif isinstance(control, SessionGap) and model is not None:
            assert self.carrier is not None
            assert self.carrier.session is not None
            kept = self.carrier.session.sender._kept
            for number in self._numbers(control.commands):
                # Commands before it may have been sent while the session was detached.
                while len(model.kinds) <= number:
                    command = kept.get((self.world.first + len(model.kinds)) & MASK)
                    known = (
                        Kind.MODEL if command is None else kind_of(read_command(command.octets)[0])
                    )
                    model.command(len(model.kinds), known)
                model.skip(number)
                # Also what was sent before a timeout was granted, and was not kept.
                lost = (self.carrier.session, (self.world.first + number) & MASK)
                if lost in self.world.issued:
                    self.world.gapped.add(self.world.issued[lost])
        self._queue(control_frames(1, write_control(control), FRAME_MAX))

    def send_command(
        self, octets: bytes, header: bytes | None, body: Sequence[bytes] | None
    ) -> None:
        assert self.position >= 0
        model = self._model()
        assert model is not None
        assert self.carrier is not None
        assert self.carrier.session is not None
        number = self.world.index(self.position)
        sent = self.world.sent.setdefault((self.carrier.session, number), octets)
        # What is repeated is what was sent, under the same number.
        assert sent == octets
        if number >= len(model.kinds):
            model.command(number, kind_of(read_command(octets)[0]))
        self.position = self.position + 1 & MASK
        self._queue(assembly_frames(1, octets, header, body, FRAME_MAX))

    def forget(self) -> None:
        self.assembler.forget(1)

    def request_turn(self) -> None:
        self.wants_turn = True

    def _model(self) -> ExecutionModel | None:
        if self.carrier is None or self.carrier.session is None:
            return None
        return self.world.models[self.carrier.session]

    def _numbers(self, commands: RangeSet | None) -> list[int]:
        assert commands is not None
        return sorted(
            self.world.index(number)
            for first, last in commands.ranges()
            for number in range(first, first + ((last - first) & MASK) + 1)
        )

    def read(self, octets: bytes) -> None:
        """Handle one frame of the other end."""
        carrier = self.carrier
        assert carrier is not None
        for frame in self.reader.feed(octets):
            joined = self.assembler.receive(frame)
            if joined is None:
                continue
            if joined.kind != CONTROL:
                carrier.receive_command(joined, self.world.now)
                continue
            carrier.receive_control(read_control(joined.content), self.world.now)

    def turn(self) -> None:
        self.wants_turn = False
        if self.carrier is not None:
            self.carrier.turn(self.world.now)


def kind_of(command: Command) -> Kind:
    if isinstance(command, ExecutionSync):
        return Kind.BARRIER
    if isinstance(command, (ExecutionResult, ExecutionException, MessageAccept, MessageReject)):
        return Kind.ARRIVAL
    is_told = isinstance(command, QueueQuery) or is_answered(command)
    return Kind.RESULT if is_told else Kind.MODEL


class Client:
    """The carrier of a client: it attaches, and knows one session."""

    def __init__(self, world: Peers, end: End) -> None:
        self.world = world
        self.end = end
        self.session: Session | None = None
        #: Whether the session has been attached, and whether the channel will not carry it again.
        self.begun = self.closed = False

    @property
    def transport(self) -> End:
        return self.end

    def attach(self, *, force: bool) -> None:
        self.end.send_control(SessionAttach(name=NAME, force=force))
        self.end.send_control(SessionRequestTimeout(timeout=TIMEOUT))

    def receive_control(self, control: Control, now: float) -> None:
        if isinstance(control, SessionAttached):
            if not self.begun:
                self.begun = True
                self.session = self.world.client_session()
                self.session.begin(self)
        elif isinstance(control, SessionDetached):
            self.closed = True
            self.lose()
        elif isinstance(control, SessionDetach):
            # After an exception, with which the state of both has ended.
            self.end.send_control(SessionDetached(name=NAME, code=0))
            self.closed = True
            if self.session is not None:
                # The exception may be among commands that wait.
                self.session.turn()
                assert self.session.timeout_s == 0
                self.world.client = None
                session, self.session = self.session, None
                session.end()
        elif self.session is not None:
            self.session.receive_control(control)

    def receive_command(self, assembly: Assembly, now: float) -> None:
        if self.session is not None:
            self.session.receive_command(assembly)

    def turn(self, now: float) -> None:
        if self.session is not None:
            self.session.turn()

    def lose(self) -> None:
        session, self.session = self.session, None
        if session is not None and session.receiver.known:
            session.suspend()
        elif session is not None:
            self.world.client = None
            session.end()

    def session_failed(self) -> None:
        self.session = self.world.client = None
        self.end.forget()

    def renew_session(self) -> None:
        old = self.session
        assert old is not None
        old.end()
        self.world.client = None
        self.session = self.world.client_session()
        self.session.inherit(old)
        self.session.begin(self)

    def give_up(self, now: float) -> None:
        raise AssertionError("a client has one channel at a time")


class Peers(RuleBasedStateMachine):
    """A client and a server, whose connection is cut at any frame."""

    @initialize(first=st.sampled_from([0, 2**32 - 3, 2**31 - 2]))
    def begin(self, first: int) -> None:
        self.first = first
        self.now = 0.0
        self.registry = SessionRegistry()
        self.client: Session | None = None
        #: Sessions → the model of the commands that they send.
        self.models: dict[Session, ExecutionModel] = {}
        self.ends: list[End] = []
        #: Ends of the server whose connection is gone, which it has not noticed.
        self.ghosts: list[End] = []
        #: Token of a command → session that sent it; session and number → token.
        self.tokens: dict[str, Session] = {}
        self.issued: dict[tuple[Session, int], str] = {}
        self.gapped: set[str] = set()
        self.executed: Counter[str] = Counter()
        self.completed: Counter[tuple[Session, int]] = Counter()
        self.sent: dict[tuple[Session, int], bytes] = {}

    # --- the world --------------------------------------------------------------------------------

    def index(self, number: int) -> int:
        """Return how many commands come before *number*."""
        return (number - self.first) & MASK

    def known(self, session: Session) -> list[int]:
        count = len(self.models[session].kinds)
        return [(self.first + index) & MASK for index in range(count)]

    def open_handler(self, session: Session) -> Actor:
        self.models[session] = ExecutionModel()
        # As if it had been used for a long time.
        session.sender.next = self.first
        session.receiver.next = session.receiver.received = self.first
        return Actor(self, session)

    def client_session(self) -> Session:
        if self.client is None:
            self.client = Session(KEY, self.open_handler)
            self.client.set_timeout(TIMEOUT)
        return self.client

    def sessions(self) -> list[Session]:
        """Return the sessions that are attached, the client's first."""
        found = [end.carrier.session for end in self.ends if end.carrier is not None]
        return [session for session in found if session is not None]

    def actors(self) -> list[Actor]:
        living = [self.client, self.registry.find(KEY)]
        found = [session.handler for session in living if session is not None]
        assert all(isinstance(actor, Actor) for actor in found)
        return found  # type: ignore[return-value]

    # --- rules ------------------------------------------------------------------------------------

    @precondition(lambda self: not self.ends)
    @rule(force=st.booleans(), whole=st.booleans())
    def connect(self, force: bool, whole: bool) -> None:
        """Connect, and attach the session, unless the connection is to be cut within that."""
        near, far = End(self), End(self)
        client = near.carrier = Client(self, near)
        far.carrier = Attachment(self.registry, far, KEY.host, KEY.user, self.open_handler)
        self.ends = [near, far]
        client.attach(force=force)
        if whole:
            self.deliver_all()

    @precondition(lambda self: self.ends)
    @rule(noticed=st.booleans(), chance=st.integers(0, 5))
    def cut(self, noticed: bool, chance: int) -> None:
        if chance:
            # Rare, so that much has happened before.
            return
        near, far = self.ends
        self.ends = []
        assert isinstance(near.carrier, Client)
        near.carrier.lose()
        self.ghosts.append(far)
        if noticed:
            self.notice()

    @precondition(lambda self: self.ghosts)
    @rule()
    def notice(self) -> None:
        for ghost in self.ghosts:
            assert isinstance(ghost.carrier, Attachment)
            ghost.carrier.lose(self.now)
        self.ghosts.clear()

    @precondition(lambda self: any(end.out for end in self.ends))
    @rule(side=st.integers(0, 1), count=st.integers(1, 12))
    def deliver(self, side: int, count: int) -> None:
        """Deliver frames to an end as one chunk; a side without any stands for the other."""
        if not self.ends[1 - side].out:
            side = 1 - side
        self._deliver(side, count)

    def _deliver(self, side: int, count: int) -> None:
        end, other = self.ends[side], self.ends[1 - side]
        for _ in range(min(count, len(other.out))):
            end.read(other.out.popleft())
        end.turn()
        other.turn()

    @precondition(lambda self: any(end.out or end.wants_turn for end in self.ends))
    @rule()
    def deliver_all(self) -> None:
        for _ in range(200):
            if not any(end.out or end.wants_turn for end in self.ends):
                return
            for side in (0, 1):
                self._deliver(side, 1_000)
        raise AssertionError("the peers do not come to rest")

    @precondition(lambda self: self.sessions())
    @rule(
        side=st.integers(0, 1),
        kinds=st.lists(st.sampled_from(DRAWN), min_size=1, max_size=6),
        sync=st.booleans(),
    )
    def send(self, side: int, kinds: list[str], sync: bool) -> None:
        for kind in kinds:
            self._send(side, kind, sync=sync)

    def _send(self, side: int, kind: str, *, sync: bool) -> None:
        sessions = self.sessions()
        session = sessions[min(side, len(sessions) - 1)]
        token = str(len(self.tokens))
        octets = write_command(KINDS[kind](token), sync=sync)
        self.tokens[token] = session
        if kind in ("transfer", "answered"):
            header = write_entries([DeliveryProperties(routing_key="k")])
            number = session.send(octets, header, [token.encode() * 4, token.encode() * 5])
        else:
            number = session.send(octets)
        if number >= 0:
            self.issued[session, number] = token

    @precondition(lambda self: self.sessions())
    @rule(side=st.integers(0, 1), what=st.sampled_from(["sync", "flush", "flush all", "attach"]))
    def ask(self, side: int, what: str) -> None:
        """Send what asks for an answer: one rule, since none of these makes another state."""
        sessions = self.sessions()
        if what == "sync":
            sessions[min(side, len(sessions) - 1)].send(write_command(ExecutionSync(), sync=True))
        elif what == "attach":
            self.ends[0].send_control(SessionAttach(name=NAME))
        elif len(sessions) == 2:
            every = what == "flush all"
            control = SessionFlush(expected=every, confirmed=every, completed=True)
            self.ends[side].send_control(control)

    @precondition(lambda self: any(actor.pending for actor in self.actors()))
    @rule(which=st.integers(0, 30), every=st.integers(0, 2), rejected=st.booleans())
    def finish(self, which: int, every: int, rejected: bool) -> None:
        """Complete a command, in any order, or many transfers whose outcome is told at once."""
        pending = [(actor, number) for actor in self.actors() for number in actor.pending]
        actor, number = pending[which % len(pending)]
        if every and is_answered(actor.pending[number]):
            actor.answer(actor.answerable()[::every], rejected=rejected)
        else:
            actor.finish(number)

    def losable(self) -> list[tuple[Session, int]]:
        """Return the commands that are kept for replay, and may be lost."""
        return [
            (session, number)
            for actor in self.actors()
            if not (session := actor.session)._resuming
            for number in session.sender._kept
            if (session, number) in self.issued
        ]

    @precondition(lambda self: self.losable())
    @rule(which=st.integers(0, 30), chance=st.integers(0, 3))
    def lose_kept(self, which: int, chance: int) -> None:
        """Lose a command that was kept for replay: a gap takes its place."""
        if chance == 0:
            found = self.losable()
            session, number = found[which % len(found)]
            session.sender._drop([number])
            self.gapped.add(self.issued[session, number])

    @precondition(lambda self: self.registry.deadline is not None)
    @rule(seconds=st.sampled_from([1.0, TIMEOUT / 2, float(TIMEOUT)]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.registry.tick(self.now)

    @precondition(lambda self: not self.ends and self.client is not None)
    @rule()
    def restart_client(self) -> None:
        assert self.client is not None
        self.client.end()
        self.client = None

    # --- in the end -------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "models"):
            return
        self.rest()
        for session in self.sessions():
            model = self.models[session]
            # Nothing is left to be done, told or repeated.
            assert model.mark == len(model.kinds) - 1
            assert not session.sender.outstanding
            assert session.sender.kept_count == 0
            assert session.sender.octets == 0
            # All of them, since no peer has asked what the other knows.
            assert len(session.receiver.completed.ranges()) <= 1
            assert session.receiver.executing == 0
        assert not self.executed or max(self.executed.values()) == 1
        for (session, number), token in self.issued.items():
            assert self.completed[session, number] <= 1
            if not session.ended:
                assert self.executed[token] == 1 or token in self.gapped
                assert self.completed[session, number] == 1

    def rest(self) -> None:
        """Connect, deliver everything, and complete every command."""
        for _ in range(100):
            if not self.ends:
                self.connect(force=True, whole=False)
            self.deliver_all()
            client = self.ends[0].carrier
            assert isinstance(client, Client)
            if client.session is None or len(self.sessions()) < 2:
                self.cut(noticed=True, chance=0)
            elif any(actor.pending for actor in self.actors()):
                self.finish(0, every=0, rejected=False)
            else:
                return
        raise AssertionError("the peers do not come to rest")


# Three times as many examples as others have, since most failures need a session that has become old: about ten
# seconds where runs are quick. Long runs (``make test-long``) have 5,000: some 220,000 steps.
Peers.TestCase.settings = settings(
    max_examples=min(5_000, 3 * settings().max_examples),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestPeers = pytest.mark.slow(
    pytest.mark.req("D10", "D11", "D12", "D13", "D14", "D15", "D16")(Peers.TestCase)
)


# --- the model itself --------------------------------------------------------------------------------


def model(*kinds: Kind) -> ExecutionModel:
    made = ExecutionModel()
    for number, kind in enumerate(kinds):
        made.command(number, kind)
    return made


def twice(made: ExecutionModel) -> None:
    made.process(0)
    made.process(0)


def result_late(made: ExecutionModel) -> None:
    made.process(0)
    made.report([0])
    made.dispose(0)


def failed(made: ExecutionModel) -> None:
    made.fail(0)
    made.dispose(0)
    made.report([0])


@pytest.mark.req("D12", "D15")
@pytest.mark.parametrize(
    ("kinds", "breach"),
    [
        ([], lambda made: made.command(1, Kind.MODEL)),
        ([Kind.MODEL], twice),
        ([Kind.MODEL], lambda made: made.report([0])),
        ([Kind.MODEL], lambda made: made.report([1])),
        ([Kind.RESULT], result_late),
        ([Kind.RESULT], lambda made: (made.process(0), made.report([0]))),
        ([Kind.MODEL], failed),
        ([Kind.MODEL, Kind.BARRIER], lambda made: made.report([1])),
        ([Kind.MODEL], lambda made: made.dispose(1)),
        ([Kind.RESULT], lambda made: (made.dispose(0), made.dispose(0))),
    ],
)
def test_the_model_finds_breaches(
    kinds: list[Kind], breach: Callable[[ExecutionModel], object]
) -> None:
    made = model(*kinds)
    with pytest.raises(AssertionError):
        breach(made)


@pytest.mark.req("D12", "D15")
def test_the_mark_follows_what_is_reported() -> None:
    made = model(Kind.MODEL, Kind.RESULT, Kind.ARRIVAL, Kind.BARRIER)
    made.process(1)
    made.dispose(1)
    made.report([1, 2])
    assert made.mark == -1
    made.process(0)
    made.report([0, 3])
    assert made.mark == 3
