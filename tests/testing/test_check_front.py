"""``check_front``: our front passes, and fronts with a mistake fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from amqp_rt.core.frames import AMQP_HEADER
from amqp_rt.events import AttachRequested, Event, LoginRequested
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import RCV_FIRST, SND_UNSETTLED, ServerOptions
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED, Accepted, Error
from amqp_rt.security.mechanisms import Plain
from amqp_rt.termini import Source, Target
from amqp_rt.testing.fronts import FRONT_CHECKS, FrontWorld, check_front


class NativeClient:
    """Client of AMQP 1.0 with our own engine."""

    def __init__(self) -> None:
        self.closed = False
        self.failed = False
        self.accepted: list[int] = []
        self.refused: list[int] = []
        self.received: list[tuple[Any, bytes]] = []
        self._engine: Any = None
        self._session: Any = None
        self._window = 0
        self._links = 0
        self._waiting: list[tuple[int, bytes]] = []
        self._in_hand = 0
        #: To be done when we have been let in.
        self._later: list[Callable[[], Any]] = []

    @property
    def opened(self) -> bool:
        return self._engine is not None and bool(self._engine.peer.container_id)

    def open(self, user: str, password: str) -> None:
        self._engine = amqp10.client(
            amqp10.ClientOptions(
                container_id="client",
                mechanisms=(Plain(user, password),) if user else (),
            ),
            0.0,
        )

    def _attach(self, call: Callable[[], Any]) -> None:
        if not self.opened:
            self._later.append(call)
            return
        if self._session is None:
            self._session = self._engine.begin()
        call()

    def _name(self) -> str:
        self._links += 1
        return f"link {self._links}"

    def send(self, address: str, number: int, body: bytes) -> None:
        self._waiting.append((number, bytes(Message(body).encode())))
        if len(self._waiting) == 1:
            self._attach(
                lambda: self._session.attach_sender(
                    self._name(),
                    self,
                    target=Target(address=address),
                    snd_settle_mode=SND_UNSETTLED,
                )
            )

    def subscribe(self, address: str, window: int) -> None:
        self._window = window
        self._attach(
            lambda: self._session.attach_receiver(
                self._name(), self, source=Source(address=address), rcv_settle_mode=RCV_FIRST
            )
        )

    def accept(self, key: Any) -> None:
        self._settle(key, ACCEPTED)

    def release(self, key: Any) -> None:
        self._settle(key, RELEASED)

    def _settle(self, key: Any, outcome: Any) -> None:
        key.settle(outcome)
        self._in_hand -= 1
        key.link.grant(self._window - self._in_hand)

    def close(self) -> None:
        self._engine.close()

    def receive(self, data: bytes) -> None:
        self._engine.receive(data, 0.0)
        if self.opened:
            later, self._later = self._later, []
            for call in later:
                self._attach(call)
        self.closed = self.closed or self._engine.finished or self._engine.over

    def take(self) -> bytes:
        return b"".join(self._engine.take())

    # --- Callbacks of its links ---

    def on_attached(self, link: Any) -> None:
        if link.role:
            link.grant(self._window)

    def on_credit(self, link: Any) -> None:
        while self._waiting and link.credit:
            number, payload = self._waiting.pop(0)
            link.send(payload, number)

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        self._in_hand += len(deliveries)
        self.received += [(each, Message.decode(each.payload).body) for each in deliveries]

    def on_outcomes(self, link: Any, deliveries: list[Any]) -> None:
        for each in deliveries:
            taken = isinstance(each.state, Accepted)
            (self.accepted if taken else self.refused).append(each.context)

    def on_settled(self, link: Any, deliveries: list[Any]) -> None: ...

    def on_flow(self, link: Any) -> None: ...

    def on_data(self, link: Any, deliveries: list[Any]) -> None: ...

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        self.failed = self.failed or error is not None


@pytest.mark.slow
@pytest.mark.req("U1")
@pytest.mark.parametrize("check", FRONT_CHECKS, ids=lambda check: check.__name__)
def test_our_front_is_one(check: Callable[[FrontWorld], None]) -> None:
    check(FrontWorld(amqp10.Front(), NativeClient))


# --- fronts with mistakes -------------------------------------------------------------------------


class Engine:
    """Our engine, as the base of fronts with mistakes."""

    def __init__(self, options: ServerOptions, now: float) -> None:
        self.inner = amqp10.Front().server(options, now)

    @property
    def on_output(self) -> Callable[[], None]:
        return self.inner.on_output

    @on_output.setter
    def on_output(self, call: Callable[[], None]) -> None:
        self.inner.on_output = call

    @property
    def finished(self) -> bool:
        return self.inner.finished

    @property
    def unread(self) -> bool:
        return self.inner.unread

    @property
    def congested(self) -> bool:
        return self.inner.congested

    @property
    def output_size(self) -> int:
        return self.inner.output_size

    @property
    def peer(self) -> Any:
        return self.inner.peer

    @property
    def deadline(self) -> float:
        return self.inner.deadline

    def changed(self, events: list[Event]) -> list[Event]:
        return events

    def receive(self, data: bytes, now: float) -> list[Event]:
        return self.changed(self.inner.receive(data, now))

    def receive_eof(self, now: float) -> list[Event]:
        return self.changed(self.inner.receive_eof(now))

    def tick(self, now: float) -> list[Event]:
        return self.changed(self.inner.tick(now))

    def take(self) -> list[bytes]:
        return self.inner.take()

    def close(self, error: Error | None = None) -> None:
        self.inner.close(error)


class NeverFinishes(Engine):
    @property
    def finished(self) -> bool:
        return False


class OverhearsTheEnd(Engine):
    def receive_eof(self, now: float) -> list[Event]:
        return []


class TellsNobody(Engine):
    @property
    def on_output(self) -> Callable[[], None]:
        return self.inner.on_output

    @on_output.setter
    def on_output(self, call: Callable[[], None]) -> None:
        pass


class Miscounts(Engine):
    @property
    def output_size(self) -> int:
        return self.inner.output_size + 8


class HasNoClock(Engine):
    @property
    def deadline(self) -> float:
        return float("inf")

    def tick(self, now: float) -> list[Event]:
        return []


class WantsWholeFrames(Engine):
    """Front that loses single octets."""

    def receive(self, data: bytes, now: float) -> list[Event]:
        return [] if len(data) == 1 else super().receive(data, now)


class Raises(Engine):
    """Front that raises on input that it does not understand."""

    def receive(self, data: bytes, now: float) -> list[Event]:
        events = super().receive(data, now)
        if any(type(event).__name__ == "ConnectionFailed" for event in events):
            raise ValueError("what is this?")
        return events


class LetsAnybodyIn(Engine):
    def __init__(self, options: ServerOptions, now: float) -> None:
        super().__init__(ServerOptions(container_id="x", sasl_required=False), now)
        self.inner.peer.address = options.address


class LosesThePassword(Engine):
    def changed(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, LoginRequested):
                event.response = b""
        return events


class DoesNotClose(Engine):
    def close(self, error: Error | None = None) -> None:
        pass


class Proxy:
    """Proxy of an object of the engine, except for the changes of a mistake."""

    def __init__(self, inner: Any) -> None:
        object.__setattr__(self, "inner", inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)


class WrongLinks(Engine):
    """Front whose links differ slightly from correct ones."""

    link: type[Proxy] = Proxy

    def changed(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, AttachRequested):
                event.link = self.link(event.link)
        return events


class Early(Proxy):
    """Endpoint that settles deliveries before the broker, which settles them again."""

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        for delivery in deliveries:
            delivery.settle(ACCEPTED)
        self.inner.deliver(link, deliveries)


class Always(Proxy):
    """Endpoint whose deliveries are accepted, despite the outcome of the broker."""

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        self.inner.deliver(link, [AlwaysAccepted(each) for each in deliveries])


class AlwaysAccepted(Proxy):
    def settle(self, outcome: Any) -> None:
        self.inner.settle(ACCEPTED)


class Silent(Proxy):
    """Endpoint that does not notify the broker of the end of its link."""

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        pass


class Deaf(Proxy):
    """Endpoint that ignores the outcomes of consumers."""

    def on_outcomes(self, link: Any, deliveries: list[Any]) -> None:
        pass


def through(endpoint: type[Proxy]) -> type[Engine]:
    """Return an engine with *endpoint* between its links and the broker."""

    class Between(Proxy):
        def accept(self, bound: Any, **options: Any) -> None:
            self.inner.accept(endpoint(bound), **options)

    return type(endpoint.__name__, (WrongLinks,), {"link": Between})


@pytest.mark.slow
@pytest.mark.req("U1")
@pytest.mark.parametrize(
    ("engine", "found"),
    [
        (NeverFinishes, "not finished|goes on"),
        (OverhearsTheEnd, "left behind|in the hands"),
        (TellsNobody, "on_output was not called"),
        (Miscounts, "output_size says"),
        (HasNoClock, "may stay for ever"),
        (WantsWholeFrames, "in pieces of 1|not let in"),
        (Raises, "what is this"),
        (LetsAnybodyIn, "does not ask who that is"),
        (LosesThePassword, "the password does not arrive"),
        (DoesNotClose, "on_output was not called|is not notified"),
        (through(Early), "before it was settled"),
        (through(Always), r"\[0, 1, 2\] as accepted"),
        (through(Silent), "left behind|in the hands"),
        (through(Deaf), "in the hands|left behind|there again|stop talking|received|3"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_mistake_is_found(engine: type[Engine], found: str) -> None:
    class Front:
        name = "amqp1.0"
        headers = amqp10.Front.headers
        preferred_header = AMQP_HEADER

        def server(self, options: ServerOptions, now: float) -> Any:
            return engine(options, now)

    with pytest.raises((AssertionError, ValueError), match=found):
        check_front(Front(), NativeClient)


@pytest.mark.req("U1")
def test_a_front_has_its_own_name() -> None:
    class Front(amqp10.Front):
        name = "amqp0-9-1"

    with pytest.raises(AssertionError, match="its protocol"):
        check_front(Front(), NativeClient)
