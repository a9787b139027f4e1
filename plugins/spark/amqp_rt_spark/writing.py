"""Sinks of queries: messages are sent at once, or staged and published in one step.

*Exactly once* is a service of the broker: tasks send to a hidden stage, each attempt to its own, and one
request publishes the attempts that count, under the number of the micro-batch. Repeated after any failure,
the request publishes nothing. So duplicates are harmless, whether a task sends messages twice or a repeated
micro-batch has other partitions; staged messages that are never committed are dropped by the broker.

A number may be reused for other messages: a checkpoint was restored from a backup, or deleted, or two batches
were given one name. The commit therefore carries the query's id, the plan of the micro-batch (:func:`plan_of`),
and a checksum of its messages that is independent of their order and their tasks; the broker refuses it if
the number was published with something else.

Like :mod:`.reading`, this module does not depend on Spark.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote
from uuid import uuid4

from msgspec import Struct

from amqp_rt import Message
from amqp_rt.errors import AmqpError
from amqp_rt.values import Symbol

from . import connections
from .options import Options
from .outlets import PRODUCER, Outlet
from .rows import check_columns, payload_of

_RUN: Final = "amqp_rt:run"
_EPOCH: Final = "amqp_rt:epoch"
_PART: Final = "amqp_rt:part"
_ATTEMPT: Final = "amqp_rt:attempt"
_WRITE: Final = "amqp_rt:write"
_COMMITTED: Final = "amqp_rt:committed-epoch"
_PUBLISHED: Final = "amqp_rt:published"
#: Condition of a commit whose epoch was committed with other messages.
DIFFERENT: Final = "amqp_rt:epoch-different"
#: Condition of a commit whose parts are not staged as they should be.
_MISSING: Final = "amqp:precondition-failed"
#: Annotations of dead letters, as amqp_rt's broker sets them (amqp_rt/broker/expiry.py).
_SOURCE: Final = Symbol("x-opt-deadletter-source")
_REASON: Final = Symbol("x-opt-dead-letter-reason")
_WHY: Final = Symbol("x-opt-dead-letter-description")
_CAPABILITY: Final = "amqp_rt:epoch-publish"
#: Most characters of a plan, which the broker stores.
_PLAN_MAX: Final = 1_024

_log = logging.getLogger("amqp_rt_spark")


#: Remedy for a checkpoint that does not fit the published epochs.
_AGAIN: Final = (
    "restore the latest checkpoint, or take a new one with another producer, and startingOffsets where the "
    "published ones end (with others, rows are published twice or left out)"
)


class Task(Struct, frozen=True):
    """A running task and its micro-batch. In a batch, query and run are empty."""

    part: int
    attempt: int
    epoch: int = 0
    query: str = ""
    run: str = ""


class Written(Struct, frozen=True):
    """Result of a task, sent to the driver, which publishes the attempts that count.

    Attributes:
        count: Messages that were sent and accepted.
        crc: CRC-32 over those, in their order.
        messages: Messages that were made, whether or not they were sent.
        squares: Sum of the squares of their CRC-32s, which is independent of their order.
        skipped: Whether nothing was sent, since this write seemed to be published already.
    """

    producer: str
    run: str
    epoch: int
    part: int
    attempt: int
    count: int
    crc: int
    refused: int
    staged: bool
    query: str = ""
    write: str = ""
    messages: int = 0
    squares: int = 0
    skipped: bool = False


class EpochDiffers(AmqpError):
    """The number of a micro-batch was published with other messages."""

    default_condition = DIFFERENT


def plan_of(checkpoint: str, epoch: int) -> str:
    """Return the plan of micro-batch *epoch* in the folder *checkpoint*; empty if it is unknown.

    Spark writes the plan once, with the time, and repeats the micro-batch by it. So equal texts are the same
    plan, and a plan made anew differs even where the offsets are equal. Only folders of this machine are
    read. The text begins with a hash; the end offsets of the micro-batch follow, for people.
    """
    scheme, colon, rest = checkpoint.partition(":")
    if colon and scheme.lower() == "file":
        # file:/folder and file:///folder alike.
        checkpoint = unquote("/" + rest.lstrip("/"))
    elif not checkpoint or "://" in checkpoint:
        return ""
    try:
        text = (Path(checkpoint) / "offsets" / str(epoch)).read_text("utf-8")
    except (OSError, ValueError):
        return ""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    # The lines are a version, settings and times, and an offset for each source.
    offsets = " ".join(text.splitlines()[2:])
    return f"{digest} {offsets}"[:_PLAN_MAX]


class Sink:
    """Sends the rows of a query to its address.

    Args:
        options: The user's options.
        columns: Names of the columns of the rows.
        streaming: Whether rows come in micro-batches; otherwise there is one epoch, with the number 0.
        body_type: Spark's type of the column body, by which a struct or a map is written as JSON.

    Raises:
        ValueError: Such rows make no message, or the options contradict each other.
    """

    def __init__(
        self,
        options: Options,
        columns: Sequence[str],
        *,
        streaming: bool,
        body_type: Any = None,
    ) -> None:
        check_columns(columns, options)
        delivery = options.delivery
        if not delivery:
            staged = streaming or bool(options.producer)
            delivery = "exactly-once" if staged else "at-least-once"
        if delivery == "exactly-once" and not streaming and not options.producer:
            raise ValueError(
                "a batch that is written exactly once needs the option producer: a name for this "
                "batch, under which it is published once however often it is written"
            )
        self.options = options
        self.staged = delivery == "exactly-once"
        self.streaming = streaming
        self._body_type = body_type
        #: Id of this write, and of the run of a batch. Pickled with the writer for every task.
        self._write = uuid4().hex

    def send(self, rows: Iterable[Mapping[str, Any]], task: Task) -> Written:
        """Send *rows*, or stage them.

        Raises:
            AmqpError: The broker rejects them, or a later run of the query has fenced this one off.
            ValueError: A row makes no message.
        """
        return self.send_payloads(self._payloads(rows), task)

    def _payloads(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
        """Yield the encoded messages of *rows*; the connection is made when the first row is available."""
        named_by: str | None = None
        for row in rows:
            if named_by is None:
                named_by = connections.retried(self.options.endpoint, lambda there: there.named_by)
            yield payload_of(row, self.options, named_by, self._body_type)

    def send_payloads(self, payloads: Iterable[bytes], task: Task) -> Written:
        """Send encoded messages, or stage them.

        The link is attached once the first message is available: a task may compute for long before that.

        Raises:
            AmqpError: As for :meth:`send`.
        """
        producer = self.options.producer or task.query
        run = task.run or self._write
        messages = squares = 0
        waiting = iter(payloads)
        first = list(islice(waiting, 1))
        out = self._outlet(producer, run, task)
        try:
            published = self.staged and self._published(out, producer, task.epoch)
            for payload in chain(first, waiting):
                if self.staged:
                    # Squares, because CRC is linear: rows that have exchanged values would often give an
                    # equal sum.
                    crc = zlib.crc32(payload)
                    squares += crc * crc
                    messages += 1
                if not published:
                    out.send(payload)
                    if out.refusals:
                        self._give_up(out)
            out.finish()
            if out.refusals:
                self._give_up(out)
        finally:
            out.close()
        return Written(
            producer,
            run,
            task.epoch,
            task.part,
            task.attempt,
            out.count,
            out.crc,
            out.refused,
            self.staged,
            task.query,
            self._write,
            messages,
            squares,
            published,
        )

    def committed(self, task: Task) -> int:
        """Return the last epoch that the producer has published, -1 if none, and fence off publishers that
        used its name before *task*.

        Raises:
            AmqpError: The broker cannot publish by epochs, or refuses messages for the address.
        """
        out = self._outlet(self.options.producer or task.query, task.run or self._write, task)
        out.close()
        return self._last(out)

    def _outlet(self, producer: str, run: str, task: Task) -> Outlet:
        options = self.options
        (address,) = options.addresses
        claim: dict[Any, Any] | None = None
        if self.staged:
            claim = {
                PRODUCER: producer,
                _RUN: run,
                _EPOCH: task.epoch,
                _PART: task.part,
                _ATTEMPT: task.attempt,
                _WRITE: self._write,
            }
        answer_s, room_s = options.connect_timeout, options.retry_timeout
        if options.settle_timeout is not None:
            answer_s = room_s = options.settle_timeout
        return connections.retried(
            options.endpoint,
            lambda there: Outlet(
                there,
                address,
                properties=claim,
                max_in_flight=options.max_in_flight,
                max_bytes=options.max_bytes_in_flight,
                timeout_s=answer_s,
                credit_s=max(answer_s, room_s),
                # A batch is refused as a whole: those who go on without a message send each by itself.
                batches=self.staged and options.on_reject == "fail",
                skip=options.on_reject != "fail",
                keep_refused=options.on_reject == "deadletter",
            ),
        )

    def _give_up(self, out: Outlet) -> None:
        """Send the refused messages to the dead-letter address, at least once: a repeated task sends them again."""
        options = self.options
        dead = connections.retried(
            options.endpoint,
            lambda there: Outlet(
                there,
                options.dead_letter_address,
                max_in_flight=options.max_in_flight,
                max_bytes=options.max_bytes_in_flight,
                timeout_s=options.connect_timeout,
                credit_s=max(options.connect_timeout, options.retry_timeout),
            ),
        )
        try:
            for payload, error in out.refusals:
                message = Message.decode(payload)
                message.message_annotations = {
                    **message.message_annotations,
                    _SOURCE: options.addresses[0],
                    _REASON: "rejected",
                    _WHY: error.description or error.condition,
                }
                dead.send(message.encode())
            out.refusals.clear()
            dead.finish()
        finally:
            dead.close()

    def _last(self, out: Outlet) -> int:
        if _CAPABILITY not in out.capabilities:
            raise AmqpError(
                "the broker cannot publish a micro-batch in one step: set delivery=at-least-once",
                condition="amqp:not-implemented",
            )
        return int(out.properties.get(_COMMITTED, -1))

    def _published(self, out: Outlet, producer: str, epoch: int) -> bool:
        """Return whether this write seems to be published already, so that nothing has to be sent for it.

        Raises:
            ValueError: A later epoch is published, so the checkpoint is outdated.
        """
        committed = self._last(out)
        if committed > epoch:
            # Spark repeats the last micro-batch, and none before it.
            raise ValueError(
                f"{producer!r} has published epoch {committed}, and this is epoch {epoch}: its "
                f"checkpoint was deleted or is an old one; {_AGAIN}"
            )
        return bool(out.properties.get(_PUBLISHED, committed == epoch))

    def publish(self, written: Iterable[Written | None]) -> bool:
        """Publish the messages that the tasks have staged, once; return whether they were new.

        Raises:
            EpochDiffers: This number was published with other messages.
            AmqpError: A later run has fenced this one off, or the staged messages are gone.
        """
        parts = [each for each in written if each is not None and each.staged]
        if not parts:
            return False
        first = parts[0]
        messages = sum(each.messages for each in parts)
        squares = sum(each.squares for each in parts) % 2**64
        asked: dict[str, Any] = {
            "producer": first.producer,
            "run": first.run,
            "epoch": first.epoch,
            "parts": [
                # With what was skipped, so that only a repetition is accepted without it: a new write would
                # be published empty.
                [each.part, each.attempt, each.messages if each.skipped else each.count, each.crc]
                for each in sorted(parts, key=lambda each: each.part)
            ],
            "write": first.write,
            "query": first.query,
            "content": f"{messages} messages with the checksum {squares:016x}",
            "plan": plan_of(self.options.checkpoint, first.epoch) if self.streaming else "",
        }
        try:
            published = self._commit(asked)
        except AmqpError as error:
            if error.condition == _MISSING and any(each.skipped for each in parts):
                raise AmqpError(
                    f"a write to {self.options.addresses[0]!r} was taken for a repeated one, and is not published: "
                    "writes of one micro-batch that happen at the same time each need a producer of their own; start "
                    f"the query again ({error.description})",
                    condition=error.condition,
                ) from error
            if error.condition != DIFFERENT:
                raise
            if self.options.on_different_epoch != "skip":
                raise EpochDiffers(f"{error.description}: {self._advice(first)}") from error
            _log.warning("messages dropped because of onDifferentEpoch=skip: %s", error.description)
            return self._commit({**asked, "skip_different": True})
        if not published:
            _log.warning(
                "not published again: epoch %d of %r is there, with %s",
                first.epoch,
                first.producer,
                asked["content"],
            )
        return published

    def _commit(self, asked: dict[str, Any]) -> bool:
        (address,) = self.options.addresses
        answer = connections.call(self.options.endpoint, address, "COMMIT-EPOCH", asked)
        return bool(answer["published"])

    def _advice(self, written: Written) -> str:
        """Return the remedy for an epoch that was published with other messages than *written*."""
        if self.streaming:
            return (
                f"the checkpoint is a backup, or another one; {_AGAIN}. If only the messages differ each time they "
                "are made, restart once with onDifferentEpoch=skip"
            )
        if written.query:
            return (
                f"writes of one micro-batch to {self.options.addresses[0]!r} are known by their order; if it "
                "changes, or they happen at the same time, give each a producer of its own. If the checkpoint is a "
                f"backup, {_AGAIN}"
            )
        return "this name was given to another batch: give each batch a producer of its own"
