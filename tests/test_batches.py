"""Batches of records and of messages: reading, writing and refusing malformed ones."""

from __future__ import annotations

import pytest

from amqp_rt.batches import RECORD_HEAD, read_messages, read_records, write_messages
from amqp_rt.errors import DecodeError

pytestmark = pytest.mark.req("K4")


def record(
    offset: int, payload: bytes = b"", *, time_ms: int = 0, size: int | None = None
) -> bytes:
    return RECORD_HEAD.pack(offset, time_ms, 0, len(payload) if size is None else size) + payload


LAST = (2**63 - 1) // 1000


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (record(0), ([0], [0], [b""])),
        (record(7, b"a", time_ms=-1) + record(9, b"bc"), ([7, 9], [-1, 0], [b"a", b"bc"])),
        (record(2**63 - 1, time_ms=LAST), ([2**63 - 1], [LAST], [b""])),
        # A batch in a batch is a record like any other.
        (record(3, record(0, b"x")), ([3], [0], [record(0, b"x")])),
    ],
)
def test_a_batch_is_its_records(
    batch: bytes, found: tuple[list[int], list[int], list[bytes]]
) -> None:
    assert read_records(batch) == found
    # Cut anywhere except between two records, it is malformed.
    whole = {RECORD_HEAD.size + len(found[2][0])} if len(found[0]) > 1 else set()
    for cut in range(len(batch)):
        if cut not in whole:
            with pytest.raises(DecodeError, match="a batch of records"):
                read_records(batch[:cut])


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (b"", "has none"),
        (b"\0" * 23, "ends within the head of one: 23 octets at octet 0"),
        (record(1, b"abc", size=4), "has 3 octets at octet 24, and the record there 4"),
        (record(1, size=2**32 - 1), "has 0 octets at octet 24, and the record there 4294967295"),
        (record(1) + record(1), "the offset 1 after 1"),
        (record(2) + record(1), "the offset 1 after 2"),
        (record(2**63), "the offset 9223372036854775808 after -1"),
        (record(5, time_ms=LAST + 1), "out of range, at offset 5"),
        (record(5, time_ms=-LAST - 1), "out of range, at offset 5"),
    ],
)
def test_what_is_no_batch_is_refused_with_a_sentence(batch: bytes, sentence: str) -> None:
    with pytest.raises(DecodeError, match=sentence):
        read_records(batch)


@pytest.mark.parametrize("messages", [[b""], [b"a"], [b"a", b"", b"b" * 300]])
def test_a_batch_is_its_messages(messages: list[bytes]) -> None:
    batch = write_messages(messages)
    assert read_messages(batch, 3) == messages
    # Cut anywhere except between two messages, it is malformed.
    ends = {len(write_messages(messages[:count])) for count in range(1, len(messages))}
    for cut in range(len(batch)):
        if cut not in ends:
            with pytest.raises(DecodeError, match="a batch of messages"):
                read_messages(batch[:cut], 3)


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (b"", "has none"),
        (b"\x00\x53\x75\xa0", "no data section at octet 0"),
        (b"\x00\x53\x75\xa0\x02a", "has 1 octets at octet 5, and the message there 2"),
        (b"\x00\x53\x75\xb0\xff\xff\xff\xff", "has 0 octets at octet 8, and the message there 429"),
        (write_messages([b"a"]) + b"\x00\x53\x77\x45", "no data section at octet 9"),
        (write_messages([b"a"] * 3), "has more than 2"),
    ],
)
def test_what_is_no_batch_of_messages_is_refused(batch: bytes, sentence: str) -> None:
    with pytest.raises(DecodeError, match=sentence):
        read_messages(batch, 2)


def test_both_sizes_of_data_sections_are_read() -> None:
    short = b"\x00\x53\x75\xa0\x01a"
    assert read_messages(short + write_messages([b"b"]) + short, 3) == [b"a", b"b", b"a"]
