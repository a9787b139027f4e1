"""Publish a job's messages, each once, however often the job is restarted.

The numbers of the messages record its progress: they ascend, and denote the same messages in every run of
the job. A piece of them is published as an epoch of the broker whose number follows that of its last
message. Messages with a number below the last epoch are therefore published already, and are skipped. The
broker keeps that number; no other state is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any, Final
from uuid import uuid4

from amqp_rt import Message
from amqp_rt.values import Symbol

from .. import connections
from ..options import Options
from ..rows import PLACE
from ..writing import Sink, Task
from .conf import JobConf

#: Message annotation of replayed messages: the id of the replay.
REPLAY_ID: Final = Symbol("x-opt-replay-id")

#: Bounds of one piece, which is staged until it is published.
PIECE_MESSAGES: Final = 5_000
PIECE_BYTES: Final = 8 * 1024 * 1024

#: Most characters that a broker accepts in the name of a producer or a group.
_NAME_MAX: Final = 256


def short(name: str) -> str:
    """Shorten *name* to a length that a broker accepts, with a digest for uniqueness."""
    if len(name) <= _NAME_MAX:
        return name
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{name[: _NAME_MAX - 33]}#{digest}"


class Publisher:
    """Publishes to one address under the name *producer*.

    Creating a publisher fences off the previous one of that name.

    Args:
        conf: Connection settings.
        address: The address to publish to.
        producer: Name of the producer.
        chosen: Description of the job's choice of messages. With another choice, the number of the last
            published message would not determine which messages are published; empty if the job itself
            ensures that.

    Attributes:
        next: The first number that is not published yet.

    Raises:
        AmqpError: The broker cannot be reached, or refuses messages for the address.
        ValueError: Another choice was published under this name.
    """

    def __init__(self, conf: JobConf, address: str, producer: str, chosen: str = "") -> None:
        endpoint = conf.endpoint
        options = Options(
            url=endpoint.url,
            addresses=(address,),
            credentials_file=endpoint.credentials_file,
            credentials_env=endpoint.credentials_env,
            mechanism=endpoint.mechanism,
            tls_ca=endpoint.tls_ca,
            tls_cert=endpoint.tls_cert,
            tls_key=endpoint.tls_key,
            producer=short(producer),
        )
        self._sink = Sink(options, ("message",), streaming=True)
        self._run = uuid4().hex
        self._chosen = short(chosen)
        self.next = max(0, self._sink.committed(self._task(0)))
        if self.next and chosen:
            asked = connections.call(options.endpoint, address, "EPOCH", producer=options.producer)
            earlier = asked["query"]
            if earlier and earlier != self._chosen:
                raise ValueError(
                    f"{options.producer!r} has begun to publish {earlier!r} at {address!r}, and this is "
                    f"{self._chosen!r}: the messages that it skipped then would be skipped now; give it "
                    "another id"
                )

    def publish(self, messages: Iterable[tuple[int, bytes]], end: int) -> int:
        """Publish those of *messages* that are not published yet, and return their count.

        Args:
            messages: Ascending numbers, and encoded messages.
            end: Number after the last message.

        Raises:
            AmqpError: The broker rejects them, and none is published; or another publisher has taken
                over this name.
        """
        payloads = [payload for number, payload in messages if number >= self.next]
        if payloads:
            written = self._sink.send_payloads(payloads, self._task(end))
            self._sink.publish([written])
            self.next = end
        return len(payloads)

    def _task(self, epoch: int) -> Task:
        return Task(0, 0, epoch, self._chosen, self._run)


class Pace:
    """Limits messages to an average of *rate* a second; None is unlimited."""

    def __init__(
        self,
        rate: float | None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Any] = time.sleep,
    ) -> None:
        self._rate = rate
        self._now = now
        self._sleep = sleep
        self._due = now()

    @property
    def piece(self) -> int:
        """Messages to send at once: about as many as are due in one second."""
        if self._rate is None:
            return PIECE_MESSAGES
        return max(1, min(PIECE_MESSAGES, round(self._rate)))

    def wait(self, count: int) -> None:
        """Wait until *count* more messages are due."""
        if self._rate is None:
            return
        left = self._due - self._now()
        if left > 0:
            self._sleep(left)
        # Time lost is not made up for by a higher rate.
        self._due = max(self._due, self._now()) + count / self._rate


def replayed(message: Message, replay: str) -> bytes:
    """Encode *message* for its replay: with fresh delivery counts, and annotated with the id *replay*."""
    annotations = {
        key: value for key, value in message.message_annotations.items() if str(key) not in PLACE
    }
    message.message_annotations = {**annotations, REPLAY_ID: replay}
    message.delivery_annotations = {}
    message.first_acquirer = False
    message.delivery_count = 0
    return message.encode()
