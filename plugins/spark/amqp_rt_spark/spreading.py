"""Sink whose rows name their own destinations, in the column ``to``.

Each address receives its messages as from a sink of its own: with ``exactly-once``, one request for each
address publishes a micro-batch there, one address after the other. A repeated micro-batch skips the
addresses that have published it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from . import connections
from .options import Options
from .rows import check_columns, payload_of
from .writing import Sink, Task, Written

#: Rows after which a task sends those it has gathered. Their bytes are bounded by maxBytesInFlight.
ROWS: Final = 10_000
#: Multiplier of part numbers: gives the chunks of a task ordered numbers among the parts of a micro-batch.
_CHUNKS: Final = 2**32


class Spread(Struct, frozen=True):
    """Messages that a task has sent: address and result of each chunk."""

    written: tuple[tuple[str, Written], ...]


class SpreadSink:
    """Sends each row to the address in its column ``to``.

    Args:
        options: The user's options, without an address.
        columns: Names of the columns of the rows.
        streaming: Whether rows come in micro-batches.
        body_type: Spark's type of the column body.

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
        self.options = options
        self._body_type = body_type
        #: Template of the sinks of all addresses. Pickled with the writer for every task.
        self._sink = Sink(
            replace(options, addresses=("to",)), columns, streaming=streaming, body_type=body_type
        )

    def send(self, rows: Iterable[Mapping[str, Any]], task: Task) -> Spread:
        """Send *rows*, or stage them.

        Rows are gathered by address, and sent once there are ``ROWS`` of them or ``maxBytesInFlight`` bytes.
        Each address receives its rows in order.

        Raises:
            AmqpError: A broker rejects them, or a later run of the query has fenced this one off.
            ValueError: A row makes no message, or names no address.
        """
        named_by = connections.retried(self.options.endpoint, lambda there: there.named_by)
        waiting: dict[str, list[bytes]] = {}
        chunks: dict[str, int] = {}
        written: list[tuple[str, Written]] = []
        count = size = 0
        for row in rows:
            payload = payload_of(row, self.options, named_by, self._body_type)
            waiting.setdefault(_destination(row), []).append(payload)
            count += 1
            size += len(payload)
            if count >= ROWS or size >= self.options.max_bytes_in_flight:
                written += self._flush(waiting, chunks, task)
                count = size = 0
        written += self._flush(waiting, chunks, task)
        return Spread(tuple(written))

    def _flush(
        self, waiting: dict[str, list[bytes]], chunks: dict[str, int], task: Task
    ) -> list[tuple[str, Written]]:
        """Send the payloads in *waiting*, and clear it."""
        written = []
        for address, payloads in waiting.items():
            number = chunks.get(address, 0)
            chunks[address] = number + 1
            part = replace(task, part=task.part * _CHUNKS + number)
            written.append((address, self._at(address).send_payloads(payloads, part)))
        waiting.clear()
        return written

    def _at(self, address: str) -> Sink:
        """Return the sink of one address, of the same run."""
        sink = copy(self._sink)
        sink.options = replace(self.options, addresses=(address,))
        return sink

    def publish(self, written: Iterable[Spread | None]) -> bool:
        """Publish the messages that the tasks have staged, once at each address; return whether any was new.

        Addresses that already have this epoch come first: one that holds a different epoch under the same
        number refuses it before anything is published elsewhere.

        Raises:
            EpochDiffers: This number was published with other messages.
            AmqpError: A later run has fenced this one off, or the staged messages are gone.
        """
        parts: dict[str, list[Written]] = {}
        for spread in written:
            for address, each in spread.written if spread is not None else ():
                parts.setdefault(address, []).append(each)
        order = sorted(
            parts, key=lambda address: (not self._has(address, parts[address][0]), address)
        )
        done = [self._at(address).publish(parts[address]) for address in order]
        return any(done)

    def _has(self, address: str, written: Written) -> bool:
        """Return whether *address* has published the epoch of *written*, or a later one."""
        if not written.staged:
            return False
        endpoint = self.options.endpoint
        found = connections.call(endpoint, address, "EPOCH", producer=written.producer)
        return int(found["epoch"]) >= written.epoch


def _destination(row: Mapping[str, Any]) -> str:
    """Return the address that *row* names.

    Raises:
        ValueError: The row names no address, or one of a broker's own nodes.
    """
    address = row.get("to")
    if not address:
        raise ValueError(
            "the column 'to' is null or empty in a row, so its message has no destination: filter such rows "
            "out, or give the option address"
        )
    # Requests to a broker's own nodes must come from programs, not from data.
    if any(part.startswith("$") for part in str(address).split("/")):
        raise ValueError(
            f"the column 'to' is {str(address)!r:.80} in a row: rows are not sent to a broker's own nodes"
        )
    return str(address)
