"""The clients in tests/peers, over edge – interior – interior – edge, each of them a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from peer_programs import PeerPrograms, digest, end_program, filler, numbers

pytestmark = [pytest.mark.slow, pytest.mark.req("P1", "P4")]

#: A member, with nodes if it is F, which dials the URLs that follow its name and role. It leaves at the end of its input.
MEMBER = """
import sys, trio
from collections.abc import AsyncIterator
from amqp_rt import Container, Message, Reject
from amqp_rt.mesh import Mesh

async def main():
    name, role, *seeds = sys.argv[1:]
    async with Container(name) as box:
        if name == "F":
            @box.node("orders", slots=50)
            async def orders(message: Message) -> None:
                if message.body == b"":
                    raise Reject("nothing in it", condition="amqp:not-allowed")

            @box.rpc("double")
            async def double(number: int) -> int:
                return 2 * number

            @box.source("numbers/{count}")
            async def numbers(count: int) -> AsyncIterator[int]:
                for number in range(count):
                    yield number
                await trio.sleep_forever()
        (url,) = await box.listen("amqp://127.0.0.1:0")
        async with Mesh(box, seeds, role=role, urls=()) as mesh:
            await mesh.wait_ready()
            print(url, flush=True)
            await trio.to_thread.run_sync(sys.stdin.read)
trio.run(main)
"""


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    """The ports of two interior nodes, A and B, of E, an edge of A, and of F, an edge of B."""
    urls: dict[str, str] = {}
    started = []
    try:
        for name, role, *seeds in (
            ("A", "interior"),
            ("B", "interior", "A"),
            ("F", "edge", "B"),
            ("E", "edge", "A"),
        ):
            process = subprocess.Popen(
                [sys.executable, "-c", MEMBER, name, role, *(urls[each] for each in seeds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            started.append(process)
            assert process.stdout is not None
            urls[name] = process.stdout.readline().strip()
        yield {name: int(url.rpartition(":")[2]) for name, url in urls.items()}
    finally:
        for process in reversed(started):
            end_program(process)


async def test_sending(peer: PeerPrograms, ports: dict[str, int]) -> None:
    empty = {"body": ["data", ""]}
    sent = await peer.run(
        "send",
        port=ports["E"],
        address="orders",
        messages=[{"body": ["value", ["string", "x"]]}, empty],
    )
    # rhea says the outcome of the first of two deliveries for both, if they are settled in one pass.
    assert sent["states"][0] == ["accepted"]
    refused = await peer.run("send", port=ports["E"], address="orders", messages=[empty])
    ((outcome, why),) = refused["states"]
    assert (outcome, why["condition"]) == ("rejected", "amqp:not-allowed")
    for options in ({"count": 100}, {"size": 1_000_000, "count": 2}, {"count": 20, "second": True}):
        sent = await peer.run("send", port=ports["E"], address="orders", **options)
        assert sent["states"] == [["accepted"]] * options["count"]
        assert sent["settled"] == options["count"]
    relayed = await peer.run("send", port=ports["E"], to=["orders"] * 3)
    assert relayed["states"] == [["accepted"]] * 3
    missing = await peer.run("send", port=ports["E"], address="nowhere")
    assert missing["error"]["scope"] == "link"
    assert missing["error"]["condition"] == "amqp:not-found"


async def test_receiving(peer: PeerPrograms, ports: dict[str, int]) -> None:
    source = {"port": ports["E"], "address": "numbers/30"}
    received = await peer.run("receive", **source, count=30, credit=7)
    assert numbers(received["messages"]) == list(range(30))
    second = await peer.run("receive", **source, count=30, second=True, settle="unsettled")
    assert (second["received"], second["settled"]) == (30, 30)
    drained = await peer.run("receive", **{**source, "address": "numbers/3"}, credit=10, drain=True)
    assert (drained["drained"], drained["credit"]) == (True, 0)
    assert numbers(drained["messages"]) == list(range(drained["received"]))


async def test_calls(peer: PeerPrograms, ports: dict[str, int]) -> None:
    requests = [["long", str(number)] for number in range(20)]
    result = await peer.run(
        "rpc", port=ports["E"], address="double", requests=requests, in_flight=5
    )
    assert numbers(result["replies"]) == list(range(0, 40, 2))
    assert result["reply_to"].startswith("$mesh/E/")


@pytest.mark.parametrize("server", ["proton", "rhea"])
async def test_a_receiver_of_theirs_serves_an_address(
    server: str, peer: PeerPrograms, ports: dict[str, int], request: pytest.FixtureRequest
) -> None:
    """A program attaches to F and is called by another one at E."""
    serving = PeerPrograms(server, request.getfixturevalue(server))
    address = f"served/{server}/{peer}"
    requests = [["string", str(number)] for number in range(20)]
    async with serving.start("answer", port=ports["F"], address=address, count=20) as answering:
        await answering.said("attached")
        result = await peer.run(
            "rpc", port=ports["E"], address=address, requests=requests, in_flight=5
        )
        assert [each["body"] for each in result["replies"]] == [
            ["value", each] for each in requests
        ]
        assert (await answering.result())["answered"] == 20
    async with serving.start(
        "receive", port=ports["F"], address=address, count=2, credit=1
    ) as receiving:
        await receiving.said("attached")
        sent = await peer.run("send", port=ports["E"], address=address, size=300_000, count=2)
        assert sent["states"] == [["accepted"]] * 2
        bodies = [each["body"] for each in (await receiving.result())["messages"]]
        assert bodies == [digest(filler(300_000))] * 2
