"""Messages that a job publishes, each once, however often the job is begun again.

The numbers of the messages say how far it has got: they rise, and mean the same message whenever the
job is run. A piece of them is published as an epoch of the broker whose number is the one after its last
message. What has a lower number than the last epoch is therefore there already, and is not sent. The
broker keeps that number; nothing else has to be kept anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any, Final
from uuid import uuid4

from amqp_rt import Message
from amqp_rt.values import Symbol

from .. import wire
from ..options import Options
from ..rows import PLACE
from ..writing import Sink, Task
from .conf import JobConf

#: The message annotation of what was replayed: the id of the replay.
REPLAY_ID: Final = Symbol("x-opt-replay-id")

#: What is published in one step, at most: it is staged meanwhile.
PIECE_MESSAGES: Final = 5_000
PIECE_BYTES: Final = 8 * 1024 * 1024

#: Characters that a broker takes as the name of a producer or of a group.
_NAME_MAX: Final = 256


def short(name: str) -> str:
    """*name*, or what stands for it if it is longer than a broker takes."""
    if len(name) <= _NAME_MAX:
        return name
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{name[: _NAME_MAX - 33]}#{digest}"


class Publisher:
    """Publishes to one address under the name *producer*.

    Making one shuts out whoever had that name before.

    Args:
        conf: Where the broker is.
        address: Where to publish.
        producer: The name.
        chosen: Says which messages the job publishes. With another choice the numbers before the last one that is
            published do not say which messages are there; empty if the job itself sees to that.

    Attributes:
        next: The first number that is not published yet.

    Raises:
        AmqpError: The address cannot be sent to.
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
            asked = wire.call(options.endpoint, address, "EPOCH", producer=options.producer)
            earlier = asked["query"]
            if earlier and earlier != self._chosen:
                raise ValueError(
                    f"{options.producer!r} has begun to publish {earlier!r} at {address!r}, and this is "
                    f"{self._chosen!r}: what it left out before its last message would be left out now; give it "
                    "another id"
                )

    def publish(self, messages: Iterable[tuple[int, bytes]], end: int) -> int:
        """Publish those of *messages* that are not yet; how many these were.

        Args:
            messages: Numbers, which rise, and encoded messages.
            end: The number after the last one.

        Raises:
            AmqpError: They cannot be published, and none of them is; or somebody else has begun to
                publish under this name.
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
    """Keeps to *rate* messages a second on the average, None for as fast as it goes."""

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
        """Messages that go at once: about as many as are due in one second."""
        if self._rate is None:
            return PIECE_MESSAGES
        return max(1, min(PIECE_MESSAGES, round(self._rate)))

    def wait(self, count: int) -> None:
        """Wait until *count* more messages may go."""
        if self._rate is None:
            return
        left = self._due - self._now()
        if left > 0:
            self._sleep(left)
        # What was missed is not caught up with.
        self._due = max(self._due, self._now()) + count / self._rate


def replayed(message: Message, replay: str) -> bytes:
    """*message* as it is sent once more: nobody has failed at it yet, and it says *replay* of itself."""
    annotations = {
        key: value for key, value in message.message_annotations.items() if str(key) not in PLACE
    }
    message.message_annotations = {**annotations, REPLAY_ID: replay}
    message.delivery_annotations = {}
    message.first_acquirer = False
    message.delivery_count = 0
    return message.encode()
