"""Large and hostile messages: pages and answers with many of them are made in short steps of the event loop."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import trio
from amqp_rt_console.pages.texts import BODY_MAX, PAIRS_MAX, body_text, pairs, shown
from browsing import site

from amqp_rt import Message
from amqp_rt.cli.tables import JsonRoom, plain

pytestmark = pytest.mark.req("G6")

HTML = {"accept": "text/html"}
#: Bodies that take long to format, to escape, or to encode.
LONG: dict[str, Callable[[], object]] = {
    "numbers": lambda: [1] * 30_000,
    "maps": lambda: [{"a": [each]} for each in range(6_000)],
    "escapes": lambda: "é\u202e" * 20_000,
    "markup": lambda: "<&" * 30_000,
    "short": lambda: [[]] * 1_000,
}


class LongestStep(trio.abc.Instrument):
    """Seconds of computing in the longest step of a task on the event loop."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = time.thread_time()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.seconds = max(self.seconds, time.thread_time() - self._began)


@pytest.mark.parametrize("kind", LONG)
async def test_many_large_messages_are_shown_in_short_steps(kind: str) -> None:
    async with site() as web, web.client("root", headers=HTML) as root:
        payload = Message(LONG[kind]()).encode()
        for _ in range(10):
            web.broker.publish("other", payload)
        # Templates are compiled once.
        assert (await root.get("/messages?name=other&count=1")).status_code == 200
        steps = LongestStep()
        # A collection of the garbage of all tests may take long.
        gc.disable()
        trio.lowlevel.add_instrument(steps)
        page = await root.get("/messages?name=other&count=10", timeout=120)
        answer = await root.get("/api/v1/nodes/other/peek?count=10", timeout=120)
        trio.lowlevel.remove_instrument(steps)
        gc.enable()
        assert (page.status_code, page.text.count('<article class="message">')) == (200, 10)
        assert len(msgspec.json.decode(answer.content)["items"]) == 10
        # Some milliseconds, where it was more than a second.

        assert steps.seconds < 0.03


class Counted(list[Any]):
    """List that counts the elements that are looked at."""

    seen = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            Counted.seen += 1
            yield each


def test_the_beginning_of_a_value_is_that_of_the_whole() -> None:
    value = [1, "text", {"k\u202e": [None, 2.5, b"octets"]}, b"\xff\x00\xfe", [[], {}], "é" * 50]
    whole = msgspec.json.encode(plain(value))
    for characters in range(len(whole) + 5):
        room = JsonRoom(characters)
        found = msgspec.json.encode(plain(value, room))
        assert found[:characters] == whole[:characters]
        if room.left >= 0:
            assert found == whole
    Counted.seen = 0
    assert len(plain(Counted(range(100_000)), JsonRoom(100))) == 51
    assert Counted.seen <= 52


def test_the_beginning_of_a_body_is_that_of_the_whole() -> None:
    value = [{"a": [each]} for each in range(6_000)]
    text, remark = body_text({"body": value})
    assert text == json.dumps(value, indent=2)[:BODY_MAX]
    assert "beginning" in remark
    # Escapes count.
    text, remark = body_text({"body": "\u202e" * BODY_MAX})
    assert text == ("\\u202e" * BODY_MAX)[:BODY_MAX]
    assert "beginning" in remark


def test_cells_and_properties_are_bounded() -> None:
    assert shown([[0]] * 1_000) == ("[" + "[0], " * 1_000)[:199] + "…"
    assert shown(["ab"] * 1_000) == ("ab, " * 1_000)[:199] + "…"
    found = pairs({f"k{each}": each for each in range(PAIRS_MAX + 5)})
    assert len(found) == PAIRS_MAX + 1
    assert found[-1] == ("…", "5 more are not shown")


async def test_many_properties_are_cut() -> None:
    async with site() as web, web.client("root", headers=HTML) as root:
        properties = {f"{each:04}": "x" * 100 for each in range(2_000)}
        web.broker.publish("other", Message("body", application_properties=properties).encode())
        [row] = (await root.get("/api/v1/nodes/other/peek")).json()["items"]
        assert (row["body"], row["truncated"]) == ("body", True)
        assert 500 < len(row["application_properties"]) < 700
        page = await root.get("/messages?name=other")
        assert "0099" in page.text
        assert "0100" not in page.text
