"""Compressed bodies: what is sent, what nodes, calls and receivers get, and bombs."""

from __future__ import annotations

import sys
import tracemalloc
import zlib
from typing import Any

import msgspec
import pytest

from amqp_rt import Container, Delivery, Limits, Message, node, rpc
from amqp_rt.container import compression
from amqp_rt.container.codecs import Codecs
from amqp_rt.container.compression import compressed, decompressed
from amqp_rt.container.payloads import decode_payload
from amqp_rt.errors import CallFailed, DecodeError, DeliveryRejected, EncodeError
from amqp_rt.limits import DEFAULT_LIMITS, KIB, MIB
from amqp_rt.outcomes import Rejected

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    zstd = pytest.importorskip("backports.zstd")

ENCODINGS = ["gzip", "zstd"]
JSON = "application/json"


class Row(msgspec.Struct):
    number: int
    name: str = ""


ROWS = [Row(number, "a name") for number in range(100)]


@pytest.mark.req("A3")
@pytest.mark.parametrize("compress", ENCODINGS)
async def test_what_is_sent_compressed_arrives_as_it_was(compress: Any) -> None:
    taken: list[Any] = []
    sizes: list[int] = []

    @node("rows")
    async def rows(payload: list[Row], message: Message) -> None:
        assert message.content_encoding == compress
        sizes.append(len(message.body))
        taken.append(payload)

    @node("octets")
    async def octets(payload: bytes) -> None:
        taken.append(payload)

    @node("text")
    async def text(payload: str) -> None:
        taken.append(payload)

    @node("deliveries")
    async def deliveries(delivery: Delivery) -> None:
        taken.append(delivery.decode(list[Row]))  # type: ignore[arg-type]

    @rpc("count")
    async def count(payload: list[Row]) -> Message:
        reply = Message(msgspec.json.encode(payload[:2]), content_type=JSON)
        return compressed(reply, compress)

    nodes = [rows, octets, text, deliveries, count]
    async with Container("c", nodes=nodes) as container, container.local() as peer:
        for address, payload in {
            "rows": ROWS,
            "octets": b"x" * 1000,
            "text": "Grüße " * 100,
            "deliveries": ROWS,
        }.items():
            async with peer.sender(address) as out:
                await out.send(payload, compress=compress)
                await out.send_many([payload], compress=compress)
                await out.send(payload, compress=None) if address != "rows" else None
            assert taken
            assert all(each == payload for each in taken)
            taken.clear()
        assert max(sizes) < len(msgspec.json.encode(ROWS)) / 5
        found = await peer.call("count", ROWS, reply=list[Row], compress=compress)
        assert found == ROWS[:2]
        found = await peer.call("count", ROWS, reply=bytes, compress=compress)
        assert found == msgspec.json.encode(ROWS[:2])


@pytest.mark.parametrize(
    ("message", "compress", "said"),
    [
        (Message(5), "gzip", "only data can be compressed"),
        (Message({"a": 1}, body_kind="value"), "gzip", "only data can be compressed"),
        (Message(b"x", content_encoding="gzip"), "gzip", "is encoded already: 'gzip'"),
        (Message(b"x"), "lzma", "compress= is 'gzip' or 'zstd', not 'lzma'"),
    ],
)
async def test_what_cannot_be_compressed_is_not_sent(
    message: Message, compress: Any, said: str
) -> None:
    @node("a")
    async def handle(payload: Any) -> None:
        raise AssertionError

    async with (
        Container("c", nodes=[handle]) as container,
        container.local() as peer,
        peer.sender("a") as out,
    ):
        with pytest.raises(EncodeError, match=said):
            await out.send(message, compress=compress)


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.version_info >= (3, 14):
        pytest.skip("this Python has Zstandard")
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    monkeypatch.delattr(sys.modules["backports"], "zstd", raising=False)
    with pytest.raises(EncodeError, match=r"pip install 'amqp-rt\[zstd\]'"):
        compressed(Message(b"x"), "zstd")
    with pytest.raises(DecodeError, match=r"pip install 'amqp-rt\[zstd\]'") as caught:
        decompressed(b"\x28\xb5\x2f\xfd", "zstd", DEFAULT_LIMITS)
    assert caught.value.condition == "amqp:not-implemented"


def test_names_of_encodings_are_found_in_any_case_and_unknown_ones_stay() -> None:
    octets = compressed(Message(b"x" * 100), "gzip").body
    for name in ("gzip", "GZIP", "x-gzip"):
        message = Message(octets, content_encoding=name)
        assert decode_payload(message, bytes) == b"x" * 100
    # Octets alone tell nothing, and of other encodings bytes can be had as they are.
    assert decode_payload(Message(octets), bytes) == octets
    assert decode_payload(Message(octets, content_encoding="br"), bytes) == octets


# --- Octets of strangers ---


def _zeros(size: int, encoding: str) -> bytes:
    body: bytes = compressed(Message(bytes(size)), encoding).body
    return body


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("cut", [1, 8, 9, 20])
def test_truncated_octets_are_a_decode_error(encoding: str, cut: int) -> None:
    octets = compressed(Message(bytes(range(256)) * 8), encoding).body
    with pytest.raises(DecodeError, match=f"octets of {encoding} end too early"):
        decompressed(octets[:-cut], encoding, DEFAULT_LIMITS)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_damaged_octets_and_what_follows_the_end_are_decode_errors(encoding: str) -> None:
    octets = compressed(Message(b"x" * 1000), encoding).body
    for more in (b"\0", octets, b"x" * 70_000):
        with pytest.raises(DecodeError, match=f"octets follow the end of {encoding}"):
            decompressed(octets + more, encoding, DEFAULT_LIMITS)
    with pytest.raises(DecodeError, match=f"the octets are no {encoding}"):
        decompressed(b"x" * 100, encoding, DEFAULT_LIMITS)
    with pytest.raises(DecodeError, match=f"octets of {encoding} end too early"):
        decompressed(b"", encoding, DEFAULT_LIMITS)


@pytest.mark.req("A3")
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_decompressed_bodies_are_bounded_in_size(encoding: str) -> None:
    limits = Limits(decompressed_max=3 * MIB, decompressed_ratio_max=1 << 40)
    assert decompressed(_zeros(3 * MIB, encoding), encoding, limits) == bytes(3 * MIB)
    with pytest.raises(DecodeError, match=f"larger than {3 * MIB} octets") as caught:
        decompressed(_zeros(3 * MIB + 1, encoding), encoding, limits)
    assert caught.value.condition == "amqp:link:message-size-exceeded"


@pytest.mark.req("A3")
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_decompressed_bodies_are_bounded_in_their_ratio(encoding: str) -> None:
    # Small bodies of any ratio, for rows that repeat.
    assert len(decompressed(_zeros(MIB, encoding), encoding, DEFAULT_LIMITS)) == MIB
    octets = _zeros(2 * MIB, encoding)
    with pytest.raises(DecodeError) as caught:
        decompressed(octets, encoding, DEFAULT_LIMITS)
    assert caught.value.condition == "amqp:link:message-size-exceeded"
    ratio = -(-2 * MIB // len(octets))
    assert decompressed(octets, encoding, Limits(decompressed_ratio_max=ratio))
    with pytest.raises(DecodeError):
        decompressed(octets, encoding, Limits(decompressed_ratio_max=ratio - 1))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_bomb_takes_no_more_memory_than_its_bound(encoding: str) -> None:
    bomb = _zeros(40 * MIB, encoding)
    limits = Limits(decompressed_max=4 * MIB)
    decompressed(_zeros(10, encoding), encoding, limits)
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decompressed(bomb, encoding, limits)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 24 * MIB


def test_a_window_of_zstd_beyond_the_bound_is_refused() -> None:
    # A decoder allocates the window that the frame announces before any octet arrives.
    parameters = zstd.CompressionParameter
    options = {parameters.window_log: 27, parameters.content_size_flag: 0}
    compressor = zstd.ZstdCompressor(options=options)
    octets = compressor.compress(bytes(range(256)) * 20) + compressor.flush()
    with pytest.raises(DecodeError, match="the octets are no zstd"):
        decompressed(octets, "zstd", Limits(decompressed_max=MIB))


async def test_bombs_are_rejected_and_the_next_message_is_handled() -> None:
    taken: list[bytes] = []

    @node("octets")
    async def octets(payload: bytes) -> None:
        taken.append(payload)

    @node("rows")
    async def rows(payload: list[Row]) -> None: ...

    @rpc("rows/count")
    async def count(payload: list[Row]) -> int:
        return len(payload)

    limits = Limits(decompressed_max=100 * KIB)
    bomb = Message(_zeros(100 * KIB + 1, "gzip"), content_type=JSON, content_encoding="gzip")
    async with (
        Container("c", nodes=[octets, rows, count], limits=limits) as container,
        container.local() as peer,
    ):
        for address in ("octets", "rows"):
            async with peer.sender(address) as out:
                with pytest.raises(DeliveryRejected) as caught:
                    await out.send(bomb)
                assert caught.value.condition == "amqp:link:message-size-exceeded"
                await out.send([] if address == "rows" else b"next")
        with pytest.raises(CallFailed) as failed:
            await peer.call("rows/count", bomb)
        assert failed.value.condition == "amqp:link:message-size-exceeded"
        assert failed.value.info["statusCode"] == 413
        assert taken == [b"next"]


async def test_bombs_in_replies_and_deliveries_are_errors_of_the_receiver() -> None:
    @rpc("bomb")
    async def bomb() -> Message:
        return Message(_zeros(20 * KIB, "gzip"), content_encoding="gzip")

    limits = Limits(decompressed_max=10 * KIB)
    async with (
        Container("c", nodes=[bomb], limits=limits) as container,
        container.local() as peer,
        peer.receiver(dynamic=True) as inward,
        peer.sender(inward.address) as out,
    ):
        for kind in (bytes, str, Any, list[Row]):
            with pytest.raises(DecodeError, match="larger than 10240 octets"):
                await peer.call("bomb", reply=kind)
        assert (await peer.call("bomb", reply=Message)).content_encoding == "gzip"
        receipt = out.send_nowait(bytes(20 * KIB), compress="gzip")
        delivery = await inward.receive()
        with pytest.raises(DecodeError), delivery:
            delivery.decode(bytes)
        outcome = await receipt.outcome()
    assert isinstance(outcome, Rejected)
    assert outcome.error is not None
    assert outcome.error.condition == "amqp:link:message-size-exceeded"


def test_limits_of_the_container_apply_to_codecs_and_lists_of_arguments() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Model", a=(int, 1))
    codecs = Codecs((), Limits(decompressed_max=KIB))
    message = Message(_zeros(2 * KIB, "gzip"), content_type=JSON, content_encoding="gzip")
    for decode in (
        codecs.decoding(model),
        codecs.decoding(int),
        codecs.decoding_parts([int, str]),
        codecs.decoding_parts([int, model]),
    ):
        with pytest.raises(DecodeError, match="larger than 1024 octets"):
            decode(message, tuple)
    assert Codecs().decoding(int) is decode_payload


def test_gzip_in_pieces_costs_one_pass() -> None:
    # zlib copies what it has not decoded: with all octets at once that would be each time all the rest.
    noise = zlib.compress(b"".join(bytes([number % 251]) * 7 for number in range(600_000)), 0, 31)
    assert len(noise) > 4 * MIB
    found = list(compression._gzip_pieces(noise))
    assert max(map(len, found)) <= 256 * KIB
    assert sum(map(len, found)) == 4_200_000
