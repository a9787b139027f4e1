"""What peers say, on terminals and in logs: their escape sequences are shown and not followed."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio
from click.testing import CliRunner
from commands import Served, amqp_rt, ok
from wire import frame

from amqp_rt.cli import listing, live, nodes, running
from amqp_rt.cli.messages import for_stdout, shown
from amqp_rt.container.container import Container
from amqp_rt.core.frames import SASL_HEADER
from amqp_rt.core.sasl_frames import SaslInit
from amqp_rt.errors import AmqpError, printable
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.net.memory import memory_stream_pair
from amqp_rt.net.traces.drawing import Rung, draw_rung
from amqp_rt.values import Array, Map, Symbol, UByte

#: Sets a terminal's title, clears it, goes up a line, turns the text around.
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b1A\u202e\r\n"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J\\x9b1A\\u202e\\r\\n"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain", "plain"),
        ("żółć 日本 🐇", "żółć 日本 🐇"),
        (EVIL, SHOWN),
        ("\x7f\ud800", "\\x7f\\ud800"),
    ],
)
def test_what_is_no_visible_character_is_written_out(text: str, wanted: str) -> None:
    assert printable(text) == wanted
    assert printable(text).isprintable()


def test_long_texts_are_cut() -> None:
    assert printable("x" * 10, 10) == "x" * 10
    assert printable("place: " * 9 + "cause", 11) == "place:…cause"
    assert printable("a\tb\n", keep="\t\n") == "a\tb\n"


def test_an_error_shows_what_the_peer_said() -> None:
    error = AmqpError(f"no {EVIL}", condition=f"x:{EVIL}")
    assert str(error) == f"no {SHOWN} [x:{SHOWN}]"
    assert error.description == f"no {EVIL}"
    assert len(str(AmqpError("x" * 70_000))) < 1_100


def test_a_body_is_shown_on_a_terminal_and_kept_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    text = shown(Message(f"a\tb\n{EVIL}"), whole=False)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert for_stdout(text) == "a\tb\n" + SHOWN.removesuffix("\\n") + "\n"
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert for_stdout(text) == f"a\tb\n{EVIL}"
    assert "\x1b" not in shown(Message(EVIL, subject=EVIL), whole=True)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (Array([1, 2], of=UByte), "[1, 2]"),
        ({"a": [Array([Symbol("s")])]}, '{"a": [["s"]]}'),
        (Map([(1, "one"), (True, Array([], of=Symbol))]), '{"1": "one", "True": []}'),
    ],
)
def test_arrays_and_maps_are_shown(body: object, text: str) -> None:
    message = Message.decode(Message(body).encode())
    assert shown(message, whole=False) == text
    assert f'"body": {text}' in shown(message, whole=True)


def test_a_line_of_the_ladder_is_one_line() -> None:
    assert SHOWN in draw_rung(Rung(0.0, None, EVIL), width=100)
    assert SHOWN in draw_rung(Rung(0.0, True, EVIL), width=100)


ROW = {"name": EVIL, "kind": EVIL, "available": 0, "dynamic": False}
ANSWERS: dict[str, Any] = {
    "QUERY": {"attributeNames": [*ROW], "results": [[*ROW.values()]]},
    "READ": {"kind": "queue", EVIL: EVIL},
    "PEEK": [Message(EVIL).encode(), b"\x00\x53"],
    "PURGE": {"messages": EVIL},
    "MOVE": {"messages": EVIL},
}


@pytest.mark.parametrize(
    "arguments",
    [["hosts"], ["show", "q"], ["purge", "q", "--yes"], ["move", "q", "r"]],
)
def test_a_hostile_broker_is_shown(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Hostile:
        """Management node of a broker whose texts are hostile."""

        async def request(self, operation: str, **given: object) -> Message:
            return Message(ANSWERS[operation])

        async def query(self, kind: str) -> AsyncIterator[dict[str, str]]:
            yield {"name": EVIL, "nodes": EVIL}

    def ask(where: object, work: Callable[[Any], Awaitable[Any]]) -> Any:
        return trio.run(work, Hostile())

    monkeypatch.setattr(nodes, "ask", ask)
    monkeypatch.setattr(listing, "ask", ask)
    done = CliRunner().invoke(nodes.node, arguments)
    assert done.exit_code == 0
    assert SHOWN in done.output
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(done.output)


@pytest.mark.slow
def test_names_of_nodes_are_shown() -> None:
    served = Served("--auto-create", "queue:*")
    try:
        ok("send", "a\x1b[2Jb", "x", url=served.url)
        assert "a\\x1b[2Jb" in ok("node", "list", url=served.url)
        done = amqp_rt("node", "show", "c\x1b[2Jd", url=served.url)
        assert done.returncode == 1
        assert "\x1b" not in done.stderr
    finally:
        served.stop()


def test_the_sum_of_a_live_trace_is_shown() -> None:
    seen = live._Live.__new__(live._Live)
    seen.connections = 1
    seen.sides = {True: live._Side(), False: live._Side()}
    seen.errors = live.Counter([EVIL])
    seen._drawn = 0
    seen._drawing = live.Drawing(width=80, plain=False, frames=None)
    assert f"{SHOWN}: 1" in seen.summary()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_of_the_log_is_one_line(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    running.set_up_logs("info", form)
    logging.getLogger("amqp_rt.x").warning("login of %s", EVIL)
    assert written.getvalue().count("\n") == 1
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(written.getvalue())


@pytest.mark.req("SE18")
@pytest.mark.usefixtures("short_linger")
@pytest.mark.parametrize(
    "response",
    [
        lambda name: b"\0" + name + b"\0guess",
        lambda name: b"other\0" + name + b"\0guess",
    ],
)
async def test_a_long_name_makes_no_long_line(
    response: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(failed_login_delay_s=0.01)
    ours, theirs = memory_stream_pair()
    async with Container("c", users={"ada": "pw"}, plain_in_clear=True, limits=limits) as container:
        container.connection_nursery.start_soon(container.accept, ours, "192.0.2.1:5")
        name = b"\x1b[2J" + b"n" * 7_000
        said = frame(SaslInit("PLAIN", response(name)), kind=1)
        await theirs.send_all(SASL_HEADER)
        await theirs.send_all(said)
        while await theirs.receive_some():
            pass
        (line,) = [each.getMessage() for each in caplog.records if "login" in each.getMessage()]
        assert line.isprintable()
        assert len(line) < 300
        assert all(len(each) < 300 for each in container.entry._backoff._failures)
