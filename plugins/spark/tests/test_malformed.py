"""Octets that are no message do not keep anybody from the messages beside them, in any mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from amqp_rt_spark import connections
from amqp_rt_spark.batch import Batch
from amqp_rt_spark.leasing import LeaseStream
from amqp_rt_spark.log_streams import LogStream
from amqp_rt_spark.options import read_options
from amqp_rt_spark.outlets import Outlet
from amqp_rt_spark.spooling import SpoolStream

from amqp_rt import Message
from amqp_rt.errors import DecodeError

#: A body that ends before it is whole.
BROKEN = b"\x00\x53\x75\xa0\x05ab"
#: Likewise, behind an annotation.
ANNOTATED = Message(message_annotations={"x-opt-note": "n"}).encode_front() + BROKEN


def send(served: Any, address: str) -> None:
    """Two good messages, and bad ones between them, which a broker takes: it looks at their heads only."""
    out = Outlet(connections.wire(served.endpoint), address, max_in_flight=1, timeout_s=30)
    for payload in (Message(b"one").encode(), BROKEN, ANNOTATED, Message(b"two").encode()):
        out.send(payload)
    out.finish()
    out.close()


def spans_of(stream: Any) -> list[Any]:
    start = stream.initialOffset()
    return list(stream.partitions(start, stream.latestOffset(start)))


def rows_of(reading: Any, spans: list[Any]) -> list[Any]:
    return [row for span in spans for row in reading.read(span)]


@pytest.mark.req("K1", "K2", "K5", "K6")
@pytest.mark.parametrize("mode", ["log", "batch", "browse", "lease", "spool"])
def test_what_is_no_message_is_a_row_if_that_is_asked_for(
    served: Any, tmp_path: Path, mode: str
) -> None:
    address = "one" if mode in ("log", "batch") else "in"
    send(served, address)
    given = {"url": served.url, "address": address, "columns": "body_kind,body"}
    if mode != "batch":
        given["mode"] = mode
    if mode in ("log", "lease"):
        given["group"] = "g"
    if mode == "spool":
        given["spoolDir"] = str(tmp_path)
    make = {"log": LogStream, "lease": LeaseStream, "spool": SpoolStream}.get(mode, Batch)

    reading = make(read_options({**given, "onUndecodable": "row"}, "source"))
    spans = list(reading.partitions()) if make is Batch else spans_of(reading)
    found = rows_of(reading, spans)
    assert [kind for kind, _ in found] == ["data", "undecodable", "undecodable", "data"]
    assert [bytes(body) for kind, body in found if kind == "data"] == [b"one", b"two"]
    assert all(bytes(body).endswith(BROKEN) for kind, body in found if kind != "data")

    # Nothing was settled: it is there for whoever does not ask for that, and hears what to do.
    strict = make(read_options(given, "source"))
    with pytest.raises(DecodeError, match="with onUndecodable=row it would be a row"):
        rows_of(strict, spans)
