"""Rules of a mesh: values, fallbacks, outcomes and slow destinations of multicast, in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from meshed import client, line, members, until
from trio.testing import MockClock

from amqp_rt import Message
from amqp_rt.errors import DeliveryNotAccepted
from amqp_rt.mesh import MeshRule
from amqp_rt.mesh.hops import LEG as LEG_PROPERTY
from amqp_rt.mesh.hops import LOW, LegUse, read_leg, write_leg
from amqp_rt.mesh.records import Offer
from amqp_rt.mesh.routing import MeshRoute
from amqp_rt.mesh.ways import spread
from amqp_rt.net.memory import MemoryNetwork

pytestmark = [pytest.mark.req("P2"), pytest.mark.req("P3")]


def noting(got: list[str], name: str) -> Callable[[str], Awaitable[None]]:
    async def take(text: str) -> None:
        got.append(f"{name} {text}")

    return take


@pytest.mark.parametrize(
    "values",
    [
        {"distribution": "fair"},
        {"absent": "drop"},
        {"slow": "drop", "distribution": "multicast"},
        {"outcomes": "best", "distribution": "multicast"},
        {"outcomes": "worst"},
        {"slow": "skip"},
        {"fallback": "later", "distribution": "multicast"},
        {"fallback": "later", "route": "link"},
        {"fallback": ""},
        {"fallback": "later/*"},
        {"fallback": "jobs"},
        {"resend": -1},
    ],
)
def test_a_rule_has_only_values_that_can_be_used(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rule for 'jobs'"):
        MeshRule("jobs", **values)


@pytest.mark.parametrize("worst", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_a_leg_says_how_its_link_branches(worst: bool, skips: bool) -> None:
    leg = LegUse("a", LOW, worst=worst, skips=skips)
    assert read_leg({LEG_PROPERTY: write_leg(leg)}) == leg


@pytest.mark.parametrize(
    ("zones", "chosen"),
    [
        ("bbaa", "0123"),
        ("bbbbbbaaa", "67801234"),
        # Two of other zones are kept for messages that find the own zone busy.
        ("aaaaaaaaabbb", "0123459ab"[:6] + "9a"),
        ("aaaaaaaaaa", "01234567"),
        ("bbbbbbbbbb", "01234567"),
    ],
)
def test_legs_lead_to_the_own_zone_first_and_to_some_others(zones: str, chosen: str) -> None:
    found = [MeshRoute(f"{at:x}", Offer(), 1, (), zone) for at, zone in enumerate(zones)]
    assert "".join(each.node for each in spread(found, 8, zone="a")) == chosen
    assert [each.node for each in spread(found, 2)] == ["0", "1"]


async def test_the_fallback_gets_messages_while_there_is_no_destination(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    rules = [MeshRule("jobs", fallback="later")]
    async with line("A", "B", "C", network=network, rules=rules) as made:
        got: list[str] = []
        made.boxes["C"].node("later")(noting(got, "later"))
        await made.meshes["A"].reachable("later")
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.sender("jobs") as out,
            peer.sender() as relayed,
        ):
            await out.send("1")
            await relayed.send(Message("2", to="jobs"))
            made.boxes["C"].node("jobs")(noting(got, "jobs"))
            await until(lambda: made.meshes["A"].instances("jobs"))
            await out.send("3")
            await relayed.send(Message("4", to="jobs"))
            made.boxes["C"].remove("jobs")
            await until(lambda: not made.meshes["A"].instances("jobs"))
            await out.send("5")
        assert got == ["later 1", "later 2", "jobs 3", "jobs 4", "later 5"]


async def test_links_to_the_only_instance_get_others_where_a_rule_distributes(
    autojump_clock: MockClock,
) -> None:
    """The client is connected to the node that alone has the address when it attaches."""
    network = MemoryNetwork()
    rules = [MeshRule("jobs"), MeshRule("news", "multicast")]
    async with line("A", "B", network=network, rules=rules) as made:
        got: list[str] = []
        for address in ("jobs", "news"):
            made.boxes["A"].node(address)(noting(got, "A"))
        await until(lambda: made.meshes["B"].instances("news"))
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.sender("jobs") as jobs,
            peer.sender("news") as news,
        ):
            await jobs.send("1")
            await news.send("2")
            for address in ("jobs", "news"):
                made.boxes["B"].node(address)(noting(got, "B"))
            await until(lambda: len(made.meshes["A"].instances("news")) == 2)
            await trio.sleep(0.5)
            made.meshes["A"].health("jobs", False)
            await trio.sleep(0.5)
            await jobs.send("3")
            await news.send("4")
        assert got[:3] == ["A 1", "A 2", "B 3"]
        assert sorted(got[3:]) == ["A 4", "B 4"]


@pytest.mark.parametrize("outcomes", ["handled", "worst"])
async def test_outcomes_of_a_multicast_are_combined_at_each_node(
    outcomes: Any, autojump_clock: MockClock
) -> None:
    """A – B – C and B – D: B joins the copies for C, which accepts, and D, which does not."""
    network = MemoryNetwork()
    rules = [MeshRule("news", "multicast", outcomes=outcomes)]
    async with members(network) as made:
        for name, *seeds in (("A",), ("B", "A"), ("C", "B"), ("D", "B")):
            await made.start(name, *seeds, rules=rules)
        got: list[str] = []

        async def fail(text: str) -> None:
            raise ValueError("out of order")

        made.boxes["C"].node("news")(noting(got, "C"))
        made.boxes["D"].node("news")(fail)
        await until(lambda: len(made.meshes["A"].instances("news")) == 2)
        async with client(made.urls["A"], network=network) as peer, peer.sender("news") as out:
            if outcomes == "handled":
                await out.send("x")
            else:
                with pytest.raises(DeliveryNotAccepted):
                    await out.send("x")
            assert got == ["C x"]


@pytest.mark.parametrize("slow", ["wait", "skip"])
async def test_settled_messages_skip_slow_destinations_or_wait_for_them(
    slow: Any, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork()
    rules = [MeshRule("news", "multicast", slow=slow)]
    async with members(network) as made:
        for name, *seeds in (("A",), ("B", "A"), ("C", "B"), ("D", "B")):
            await made.start(name, *seeds, rules=rules)
        got: list[str] = []
        go = trio.Event()

        async def stuck(text: str) -> None:
            await go.wait()
            got.append(f"D {text}")

        made.boxes["C"].node("news")(noting(got, "C"))
        made.boxes["D"].node("news", prefetch=4)(stuck)
        await until(lambda: len(made.meshes["A"].instances("news")) == 2)
        async with (
            client(made.urls["A"], network=network) as peer,
            peer.sender("news", settled=True) as out,
        ):
            with trio.move_on_after(5) as scope:
                for number in range(50):
                    await out.send(f"{number}")
                    await trio.sleep(0.01)
            assert scope.cancelled_caught == (slow == "wait")
            await trio.sleep(1)
            if slow == "skip":
                assert len(got) == 50
                assert made.meshes["B"]._host.hops > 0
            go.set()
            await trio.sleep(1)
        late = [each for each in got if each.startswith("D")]
        assert 4 <= len(late) < 50
        if slow == "skip":
            await trio.sleep(1)
            skipped = sum(each._host.skipped for each in made.meshes.values())
            assert skipped == 50 - len(late)
