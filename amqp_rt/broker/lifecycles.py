"""``$journal``: a log of the events in the life of messages.

Each virtual host has such a log if the broker is configured for it; otherwise none of this code
runs. Events are collected as they occur, which costs a tuple each, and appended to the log several
times a second. Events beyond a rate are not recorded but counted, and the log records how many were
lost, so that its cost is bounded and gaps are visible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec
import trio
from msgspec import Struct

from ..addresses import Wildcards
from ..clock import Clock
from ..errors import AmqpError, DecodeError
from ..limits import DEFAULT_LIMITS, Limits, check_seconds
from ..message import MESSAGE_FORMAT, Message
from ..values import Symbol, Timestamp, UInt
from .entries import Entry
from .filtering.views import MessageView
from .nodes import similar
from .queue.keyed import MessageField
from .queue.observed import ACCEPTED, DELIVERED, MODIFIED, PUBLISHED, REJECTED, RELEASED
from .queue.subscriptions import ConsumerLink

#: Address of the log.
JOURNAL: Final = "$journal"
#: Seconds between two appends.
INTERVAL_S: Final = 0.1
#: Event that reports the number of events not recorded.
LOST: Final = "lost"

_MESSAGE_ID: Final = MessageField("properties.message-id")
#: Longest text in an event, in characters.
_TEXT_MAX: Final = 256


class LifeCycles(Struct, frozen=True, kw_only=True):
    """Options of ``$journal``: which messages are recorded, and for how long.

    Args:
        addresses: Addresses of the nodes to record; ``*`` stands for any characters.
        every: Record every N-th message of a node, with all its events there.
        per_second: Events recorded per second in each virtual host.
        max_age_s: Seconds after which events are deleted.
        max_bytes: Bytes of events that are kept.
    """

    addresses: tuple[str, ...] = ("*",)
    every: int = 1
    per_second: int = 1_000
    max_age_s: float = 86_400.0
    max_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in ("every", "per_second", "max_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")
        if self.max_age_s <= 0:
            raise ValueError(f"max_age_s is more than 0, not {self.max_age_s}")
        check_seconds("max_age_s", self.max_age_s)


def life_cycles_by(text: str) -> LifeCycles:
    """Parse ``OPTION=VALUE&OPTION=VALUE``; ``addresses`` may occur several times.

    Raises:
        AmqpError: An option is unknown or invalid.
    """
    options: dict[str, Any] = {}
    try:
        for key, value in parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text)):
            if key not in LifeCycles.__struct_fields__:
                hint = similar(key, LifeCycles.__struct_fields__)
                raise ValueError(f"there is no option {key!r:.50}{hint}")
            if key == "addresses":
                options.setdefault(key, []).append(value)
            else:
                options[key] = value
        return msgspec.convert(options, LifeCycles, strict=False)
    except ValueError as error:
        raise AmqpError(f"{text!r}: {error}", condition="amqp:invalid-field") from error


#: Events that end a delivery: they record how long it was held, others how long the message waited.
_OUTCOMES: Final = frozenset((ACCEPTED, REJECTED, RELEASED, MODIFIED))
#: Events after which the message stays in the queue or with a consumer, and is timed again.
_GOES_ON: Final = frozenset((DELIVERED, RELEASED, MODIFIED))

#: Wall-clock time, address of the node, event, message-id, sequence number, size, delivery-count,
#: container-id, link name, reason, attempt, and microseconds since the previous event of the
#: message (-1 if unknown).
_Event = tuple[float, str, str, str, int, int, int, str, str, str, int, int]


class LifeCycleRecorder:
    """Collector of the events of one virtual host, which appends them to its log.

    Args:
        options: Events to record.
        clock: Clock for the time of events and for their rate.
        append: Appends an encoded message to the log.
        wake: Called when there is something to append and there was nothing before.
        limits: Bounds.
    """

    def __init__(
        self,
        options: LifeCycles,
        clock: Clock,
        append: Callable[[bytes], None],
        wake: Callable[[], None],
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.options = options
        self.clock = clock
        self.limits = limits
        self._append = append
        self._wake = wake
        self._events: list[_Event] = []
        #: Events that may still be recorded, the time of that count, and the number of lost events.
        self._left = float(options.per_second)
        self._counted_at = clock.monotonic()
        self._lost = 0

    def note(self, event: _Event) -> None:
        """Record *event*, or count it as lost if the rate is exceeded."""
        if self._left < 1:
            self._refill()
        if self._left < 1:
            self._lost += 1
        else:
            self._left -= 1
            self._events.append(event)
        if len(self._events) + self._lost == 1:
            self._wake()

    def _refill(self) -> None:
        now = self.clock.monotonic()
        most = float(self.options.per_second)
        self._left = min(most, self._left + (now - self._counted_at) * most)
        self._counted_at = now

    def flush(self) -> None:
        """Append the collected events to the log."""
        events, self._events = self._events, []
        lost, self._lost = self._lost, 0
        for event in events:
            self._append(_encoded(event))
        if lost:
            said = {
                "event": LOST,
                "count": lost,
                "time": Timestamp(int(self.clock.wall() * 1000)),
            }
            self._append(Message(None, application_properties=said).encode())


class Watch:
    """Recorder of the messages of one node."""

    def __init__(self, recorder: LifeCycleRecorder, address: str) -> None:
        self._recorder = recorder
        self._address = address
        self._every = recorder.options.every
        #: Maps the sequence number of a message to the time it arrived, was requeued or was
        #: delivered.
        self._since: dict[int, float] = {}

    def note(
        self, event: str, entry: Entry, sequence: int, link: ConsumerLink | None, reason: str
    ) -> None:
        """Record that *event* happened to *entry*, on *link* if that is not None."""
        if sequence % self._every:
            return
        recorder = self._recorder
        micros = self._elapsed_us(event, sequence)
        recorder.note(
            (
                recorder.clock.wall(),
                self._address,
                event,
                self._message_id(entry),
                sequence,
                len(entry.payload) + entry.rest,
                entry.delivery_count,
                (entry.publisher or "") if link is None else link.peer.container_id,
                "" if link is None else link.name,
                reason,
                entry.attempts,
                micros,
            )
        )

    def _elapsed_us(self, event: str, sequence: int) -> int:
        """Return the microseconds since the previous event of the message, -1 if unknown.

        Unknown for messages that the broker restored at its start, and for those that arrived while
        ``journal_timed_max`` others were being timed.
        """
        now = self._recorder.clock.monotonic()
        since = self._since
        if event == PUBLISHED:
            if len(since) < self._recorder.limits.journal_timed_max:
                since[sequence] = now
            return -1
        before = since.pop(sequence, None)
        if before is None:
            return -1
        if event in _GOES_ON:
            since[sequence] = now
        return int((now - before) * 1_000_000)

    def _message_id(self, entry: Entry) -> str:
        if entry.message_format != MESSAGE_FORMAT:
            return ""
        try:
            found = _MESSAGE_ID.read(MessageView(entry, self._recorder.limits))
        except DecodeError:
            return ""
        return "" if found is None else str(found)[:_TEXT_MAX]


def _encoded(event: _Event) -> bytes:
    at, address, name, message_id, sequence, size, delivery_count = event[:7]
    container, link, reason, attempt, micros = event[7:]
    said: dict[str, Any] = {
        "event": name,
        "address": address,
        "sequence": sequence,
        "size": size,
        "delivery-count": UInt(delivery_count),
        "time": Timestamp(int(at * 1000)),
    }
    if attempt and (name == DELIVERED or name in _OUTCOMES):
        said["attempt"] = UInt(attempt)
    if micros >= 0:
        said["held-us" if name in _OUTCOMES else "waited-us"] = micros
    for key, text in (
        ("message-id", message_id),
        ("container", container),
        ("link", link),
        ("reason", reason),
    ):
        if text:
            said[key] = text[:_TEXT_MAX]
    return Message(
        None,
        subject=name,
        message_annotations={Symbol("x-opt-event"): name},
        application_properties=said,
    ).encode()


class Journals:
    """Recorders of all virtual hosts.

    Args:
        options: Events to record.
        clock: Clock for the time of events and for their rate.
        limits: Bounds.
        on_fault: Called with a virtual host and an unexpected error in its recording.
    """

    def __init__(
        self,
        options: LifeCycles,
        clock: Clock,
        limits: Limits,
        on_fault: Callable[[str, Exception], None],
    ) -> None:
        self.options = options
        self.clock = clock
        self.limits = limits
        self._on_fault = on_fault
        self._recorders: dict[str, LifeCycleRecorder] = {}
        self._work = trio.Event()
        self._wanted: Wildcards[bool] = Wildcards()
        for address in options.addresses:
            self._wanted.add(address, True)

    def watch(
        self, virtual_host: str, address: str, append: Callable[[bytes], None]
    ) -> Watch | None:
        """Return a recorder for the messages of a node; None if the options do not include it.

        Events of a virtual host are recorded by the *append* of its first node.
        """
        if self._wanted.find(address) is None:
            return None
        recorder = self._recorders.get(virtual_host)
        if recorder is None:
            recorder = self._recorders[virtual_host] = LifeCycleRecorder(
                self.options, self.clock, append, self._wake, self.limits
            )
        return Watch(recorder, address)

    def _wake(self) -> None:
        self._work.set()

    def flush(self) -> None:
        """Append the collected events of all virtual hosts."""
        for virtual_host, recorder in self._recorders.items():
            try:
                recorder.flush()
            except Exception as error:
                self._on_fault(virtual_host, error)

    async def run(self) -> None:
        """Append events every ``INTERVAL_S`` seconds while there are any, until cancelled."""
        while True:
            await self._work.wait()
            await trio.sleep(INTERVAL_S)
            self._work = trio.Event()
            self.flush()
