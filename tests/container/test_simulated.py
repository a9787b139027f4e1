"""Our client and our broker, where a connection or the broker goes after every frame and commit."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from runs import of_this_run
from worlds import KEPT, LOST, NAMED, PATIENT, SMALL, URL, Client, serving

from amqp_rt.broker import Log, Queue
from amqp_rt.container.connections import Connection
from amqp_rt.testing.faults import Cut
from amqp_rt.testing.ledger import DeliveryLedger
from amqp_rt.testing.simulation import Simulation, amqp_faults, simulate

#: Frames after which connections are cut, and commits at which the broker is killed. The steps of brief runs are prime
#: numbers: an exchange repeats after a few frames, and cuts then meet each frame of what is repeated.
EACH_FRAME = range(1, 400, of_this_run(brief=5, quick=1, long=1))
FRAMES = range(1, 400, of_this_run(brief=11, quick=3, long=1))
COMMITS = range(1, 100, of_this_run(brief=3, quick=1, long=1))


async def one_large_message(net: Simulation) -> None:
    """Sent as soon as there is credit; in doubt, it may be there or not."""
    ledger = DeliveryLedger()
    net.start("broker", serving(net, Queue("work")))
    async with (
        net.connect("client", URL, limits=SMALL, reconnect=PATIENT) as peer,
        peer.sender("work") as out,
    ):
        body = ledger.body("client", 2000)
        try:
            await out.send(body, durable=True)
            ledger.was_acknowledged(body)
        except LOST:
            pass
    net.calm()
    ledger.check(await Client(net, "auditor").read("work"))


@pytest.mark.slow
@pytest.mark.req("X24", "X25")
@pytest.mark.parametrize("seed", range(3))
def test_what_had_not_left_goes_out_whole_on_the_next_connection(seed: int) -> None:
    for frames in range(1, 20):
        simulate(one_large_message, seed=seed, faults=[Cut(frames=frames)])


async def trading(net: Simulation, options: dict[str, Any], **kept: Any) -> DeliveryLedger:
    """Six messages from one to another, who takes them in the end."""
    ledger = DeliveryLedger(**kept)
    net.start("broker", serving(net, Queue("work")))
    sent = trio.Event()
    async with trio.open_nursery() as nursery:

        async def receive() -> None:
            await Client(net, "taker").consume(
                ledger, "work", sent, **(NAMED if options else options)
            )

        nursery.start_soon(receive)
        await Client(net, "giver").produce(ledger, "work", 6, **options)
        sent.set()
    net.calm()
    ledger.check(await Client(net, "auditor").read("work"))
    return ledger


@pytest.mark.slow
@pytest.mark.req("A23", "X24", "X25", "B13")
@amqp_faults(cut_after_frames=EACH_FRAME, kill_at_commits=COMMITS, seed=3)
async def test_exactly_once(net: Simulation) -> None:
    """Over links that both sides keep, whatever becomes of connections and of the broker."""
    ledger = await trading(net, KEPT, duplicates="never")
    assert ledger.settled == ledger.acknowledged == set(ledger.sent)


@pytest.mark.slow
@pytest.mark.req("A23", "B7")
@amqp_faults(cut_after_frames=FRAMES, kill_at_commits=COMMITS, seed=4)
async def test_nothing_acknowledged_is_lost_and_nothing_settled_comes_back(
    net: Simulation,
) -> None:
    await trading(net, {})


@pytest.mark.slow
@pytest.mark.req("A23", "R1")
@amqp_faults(cut_after_frames=FRAMES, kill_at_commits=COMMITS, seed=5)
async def test_a_transaction_is_whole_or_nothing(net: Simulation) -> None:
    ledger = DeliveryLedger(ordered=False)
    net.start("broker", serving(net, Queue("from"), Queue("to")))
    sent = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Client(net, "mover").move, "from", "to", sent)
        await Client(net, "giver").produce(ledger, "from", 4)
        await trio.sleep(3)
        sent.set()
    net.calm()
    auditor = Client(net, "auditor")
    ledger.check([*await auditor.read("from"), *await auditor.read("to")])


@pytest.mark.slow
@pytest.mark.req("A23", "B27")
@amqp_faults(cut_after_frames=FRAMES, kill_at_commits=COMMITS, seed=6)
async def test_a_log_has_what_was_acknowledged_in_its_order(net: Simulation) -> None:
    ledger = DeliveryLedger()
    net.start("broker", serving(net, Log("log")))
    await Client(net, "giver").produce(ledger, "log", 6)
    net.calm()
    start = {"rabbitmq:stream-offset-spec": "first"}
    ledger.check(await Client(net, "auditor").read("log", filter=start))


@pytest.mark.slow
@pytest.mark.req("A23", "B13", "Z11", "B7")
@amqp_faults(cut_after_frames=FRAMES, kill_at_commits=COMMITS, seed=7)
async def test_what_is_sent_again_under_its_id_is_there_once(net: Simulation) -> None:
    """Over links that nobody keeps: whoever does not hear of a message sends it again."""
    net.start("broker", serving(net, Queue("work", duplicate_window_s=36_000)))
    ids = [f"message-{n}" for n in range(8)]
    left = list(ids)

    async def work(peer: Connection) -> None:
        async with peer.sender("work", settled=False) as out:
            while left:
                together = [
                    (each, out.send_nowait(each, durable=True, message_id=each))
                    for each in left[:3]
                ]
                for each, receipt in together:
                    await receipt.accepted()
                    left.remove(each)

    await Client(net, "giver").until(lambda: not left, work)
    net.calm()
    assert sorted(await Client(net, "auditor").read("work")) == ids


@pytest.mark.req("X24", "B13")
def test_a_tag_that_is_used_again_names_another_message() -> None:
    """The broker, started again, remembers what it has taken; what its sender has settled it forgets,
    or else it would take the next message of that tag for the old one, and drop it."""

    async def scenario(net: Simulation) -> None:
        ledger = DeliveryLedger(duplicates="never")
        net.start("broker", serving(net, Queue("work")))
        async with (
            net.connect("client", URL, limits=SMALL, reconnect=PATIENT) as peer,
            peer.sender("work", settled=False, **KEPT) as out,
        ):
            for silent in (False, True):
                body = ledger.body("client")
                if silent:
                    net.kill("broker", silent=True)
                await out.send(body, durable=True)
                ledger.was_acknowledged(body)
                if not silent:
                    net.kill("broker")
                    await trio.sleep(10)
        ledger.check(await Client(net, "auditor").read("work"))

    simulate(scenario, seed=1)
