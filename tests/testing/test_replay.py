"""Playing recorded connections again, and drawing them."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from amqp_rt import Broker
from amqp_rt.broker import Queue
from amqp_rt.cli import main as amqp_rt
from amqp_rt.errors import AmqpError
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import ServerOptions
from amqp_rt.net.memory import memory_stream_pair
from amqp_rt.net.traces.drawing import draw_html, draw_svg, draw_text, rungs
from amqp_rt.net.traces.octets import HEADER, composite, encode_frame
from amqp_rt.net.traces.recording import Kind, Trace, TraceRecord
from amqp_rt.testing import read_trace, record, replay
from amqp_rt.testing.virtual import VirtualAmqp

EVIL = "<script>alert(1)</script>\x1b[31m\u202e&\"'"


def trace_of(*chunks: tuple[bool, bytes], at_s: float = 0.5, **options: Any) -> Trace:
    """A trace that a server has recorded: whether the client wrote it, and the octets."""
    records = [
        TraceRecord(Kind.RECEIVED if client else Kind.SENT, at * at_s, data)
        for at, (client, data) in enumerate(chunks)
    ]
    return Trace(client=False, address="them", began=0.0, records=records, **options)


async def recorded(amqp: VirtualAmqp, folder: Path) -> Trace:
    """What a broker hears and says while a client sends it two messages, an hour apart."""
    async with amqp.broker(trace=folder) as broker:
        await broker.declare(Queue("work"))
        await broker.listen("memory://recorded")
        async with (
            amqp.container() as us,
            us.connect("memory://recorded") as peer,
            peer.sender("work", name="out") as sender,
        ):
            await sender.send("one")
            await trio.sleep(3600)
            await sender.send("two")
    (path,) = folder.iterdir()  # noqa: ASYNC240
    return read_trace(path)


# --- playing again -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.req("O5", "A22")
async def test_the_client_is_played_to_a_broker(amqp: VirtualAmqp, tmp_path: Path) -> None:
    trace = await recorded(amqp, tmp_path)
    began = trio.current_time()
    async with amqp.broker() as broker, trio.open_nursery() as nursery:
        await broker.declare(Queue("work"))
        ours, theirs = memory_stream_pair()
        nursery.start_soon(broker.container.accept, theirs)
        played = await replay(trace, ours, client=True)
        await ours.aclose()
        assert broker.stats("work").available == 2
    assert played.differences == []
    assert played.heard[-1].name == "close"
    assert trio.current_time() - began >= 3600


@pytest.mark.slow
@pytest.mark.req("O5")
async def test_a_broker_that_does_otherwise_is_told_of(amqp: VirtualAmqp, tmp_path: Path) -> None:
    trace = await recorded(amqp, tmp_path)
    async with amqp.broker() as broker, trio.open_nursery() as nursery:
        ours, theirs = memory_stream_pair()
        nursery.start_soon(broker.container.accept, theirs)
        # The broker has no such queue.
        played = await replay(trace, ours, client=True)
        await ours.aclose()
    assert any("instead of disposition" in each for each in played.differences)


@pytest.mark.slow
@pytest.mark.req("O5", "A22")
async def test_the_server_is_played_to_a_client(amqp: VirtualAmqp, tmp_path: Path) -> None:
    trace = await recorded(amqp, tmp_path)
    played = []

    async def serve(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        arrivals = amqp.network.listen("played")
        task_status.started()
        played.append(await replay(trace, await arrivals.receive(), client=False))

    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        async with (
            amqp.container() as us,
            us.connect("memory://played", reconnect=None) as peer,
            peer.sender("work", name="out") as sender,
        ):
            await sender.send("one")
            await trio.sleep(3600)
            await sender.send("two")
    assert played[0].differences == []


@pytest.mark.slow
async def test_a_stream_that_ends_early(amqp: VirtualAmqp, tmp_path: Path) -> None:
    trace = await recorded(amqp, tmp_path)
    ours, theirs = memory_stream_pair()
    await theirs.aclose()
    played = await replay(trace, ours, client=True)
    assert played.heard == []
    assert "0 frames instead of" in played.differences[-1]


async def test_what_was_not_kept_is_not_played() -> None:
    omitted = TraceRecord(Kind.OMITTED_SENT, 0.0, bytes(8))
    trace = Trace(client=True, address="", began=0.0, records=[omitted])
    with pytest.raises(AmqpError, match="another protocol"):
        await replay(trace, memory_stream_pair()[0], client=True)


@pytest.mark.req("O5")
def test_engines_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    bare = amqp10.Front().server(ServerOptions(container_id="s", sasl_required=False), 0.0)
    with record(bare, path, client=False, address="test") as engine:
        engine.receive(HEADER, 0.0)
        engine.receive(encode_frame(composite("open", container_id="c")), 0.0)
        engine.take()
        assert engine.peer.container_id == "c"
        assert engine.output_size == 0
        assert engine.tick(0.0) == []
        engine.close()
        engine.take()
        engine.receive_eof(0.0)
        assert engine.finished
    names = [rung.text.split()[1] for rung in rungs(read_trace(path))]
    assert names == ["AMQP", "open", "AMQP", "open", "close", "of", "connection"]


# --- drawing -------------------------------------------------------------------------------------


@pytest.mark.req("O5", "O1")
def test_a_ladder() -> None:
    trace = trace_of(
        (True, HEADER),
        (False, HEADER + encode_frame(composite("open", container_id="server"))),
        (True, encode_frame(composite("attach", name="l", handle=0, role="receiver", source="q"))),
        (True, encode_frame(composite("disposition", role=True, first=1, state="accepted"))),
        (False, encode_frame(composite("transfer", handle=0, delivery_id=0), payload=b"x" * 10)),
        (False, encode_frame(composite("close", error=("amqp:not-found", "no")), channel=7)),
    )
    drawn = draw_text(trace, rungs(trace), width=90).splitlines()
    assert drawn[0] == "1970-01-01 00:00:00 UTC, server's side, with them"
    assert drawn[1].split() == ["client", "server"]
    ladder = [line.strip() for line in drawn[2:]]
    assert ladder[0] == "0.000000  │── header AMQP 1.0.0 " + "─" * 54 + "▶│"
    assert "◀" in ladder[1]
    assert "0 attach name='l' handle=0 role=receiver source='q'" in ladder[3]
    assert "0 disposition role=receiver first=1 state=accepted()" in ladder[4]
    assert "0 transfer handle=0 delivery-id=0 + 10 bytes ──│" in ladder[5]
    assert "7 close error=error(condition='amqp:not-found', description='no')" in ladder[6]
    assert {len(line) for line in drawn[2:]} == {len(drawn[2])}
    assert draw_text(trace, rungs(trace), width=90, plain=True).isascii()


@pytest.mark.req("O5")
def test_what_a_peer_wrote_is_text_and_nothing_else() -> None:
    trace = trace_of(
        (True, encode_frame(composite("open", container_id=EVIL, properties={EVIL[:8]: EVIL}))),
        (False, encode_frame(composite("attach", name=EVIL, handle=0, role=True, source=EVIL))),
        damage=EVIL,
    )
    found = rungs(trace)
    drawn = draw_text(trace, found, width=300)
    assert all(each.isprintable() for each in drawn.replace("\n", ""))
    for picture in (draw_svg(trace, found), draw_html(trace, found)):
        assert "<script" not in picture
        assert all(each.isprintable() for each in picture.replace("\n", ""))
    root = ET.fromstring(draw_svg(trace, found))
    assert {each.tag.rpartition("}")[2] for each in root.iter()} == {"svg", "rect", "text", "path"}
    assert {name for each in root.iter() for name in each.attrib}.isdisjoint({"href", "onload"})


def test_what_is_no_frame_is_drawn_too() -> None:
    trace = trace_of(
        (True, b"\0\0\0\x03rubbish"),
        (False, encode_frame(b"\x9f" + bytes(16))),
        (True, encode_frame(composite("end"), kind=1)),
        (False, b"\0\0\1\0half"),
    )
    trace.records.append(TraceRecord(Kind.CUT, 9.0, b""))
    trace.records.append(TraceRecord(Kind.OMITTED_SENT, 9.0, (77).to_bytes(8, "big")))
    texts = [rung.text for rung in rungs(trace)]
    assert "8 octets or more, not 3" in texts[0]
    assert "no constructor 0x9f" in texts[1]
    assert "in a frame of type 1" in texts[2]
    assert "no room" in texts[3]
    assert texts[4] == "77 bytes of another protocol, not kept"
    assert texts[5] == "8 bytes of a frame that did not become whole"
    assert all(rung.bad for rung in rungs(trace)[:4])


# --- the command line ----------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"

    async def main() -> None:
        async with Broker(trace=folder) as broker, broker.local():
            pass

    trio.run(main)
    (path,) = folder.iterdir()
    return path


@pytest.mark.req("O5")
def test_the_command_draws(file: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(amqp_rt, ["trace", str(file), "--width", "120"])
    assert run.exit_code == 0, run.output
    assert "open container-id='broker'" in run.output
    assert run.output.count("close") >= 2
    page, picture = tmp_path / "page.html", tmp_path / "picture.svg"
    arguments = ["trace", str(file), "--html", str(page), "--svg", str(picture), "--frames", "3"]
    run = CliRunner().invoke(amqp_rt, arguments)
    assert (run.exit_code, run.stdout) == (0, "")
    assert "more: --frames" in run.stderr
    assert picture.read_text() in page.read_text()
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.slow
@pytest.mark.req("O5")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda octets: b"", "is empty: nothing was recorded in it"),
        (lambda octets: octets[1:], "is no trace"),
        (lambda octets: octets[:20], "is a damaged trace: the file ends within a record"),
        (lambda octets: octets[:-1], "is damaged: the file ends within a record, at byte"),
    ],
)
def test_a_damaged_file_is_one_sentence(file: Path, change: Any, says: str) -> None:
    file.write_bytes(change(file.read_bytes()))
    run = CliRunner().invoke(amqp_rt, ["trace", str(file)])
    assert run.exit_code == 1
    assert says in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert run.exception is None or isinstance(run.exception, SystemExit)


def test_files_that_cannot_be(file: Path, tmp_path: Path) -> None:
    for arguments in (
        ["trace", str(tmp_path / "none")],
        ["trace", str(tmp_path)],
        ["trace", str(file), "--svg", str(tmp_path / "no" / "folder.svg")],
    ):
        run = CliRunner().invoke(amqp_rt, arguments)
        assert run.exit_code == 1
        assert len(run.stderr.splitlines()) == 1
