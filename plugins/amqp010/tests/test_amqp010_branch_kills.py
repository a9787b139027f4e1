"""A broker process that is killed again and again among the branches of several sessions: the ledger balances.

Messages move between two queues, in branches of which some stay prepared through several restarts.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import trio
from client010 import Attached
from coordinated010 import FORMAT, OK, PERSISTENT, BrokerProcess, bodies_of, client_of
from octets010 import Struct, plain
from protocol010 import CREDIT, Failed, xid

#: ``make test-long`` kills the broker a hundred times.
KILLS = 100 if os.environ.get("AMQP_RT_LONG") == "1" else 4
MESSAGES = 60
WORKERS = 3
#: Most messages of a branch, and branches that stay in doubt from one kill to the next.
MOST = 3
IN_DOUBT = 3
#: A round has about so many steps before the broker is killed.
STEPS = 60
QUEUES = "from", "to"


class Ledger:
    """What the coordinator knows: where each message is, and what it has decided.

    Args:
        bodies: The messages, which are in the first queue.
    """

    def __init__(self, bodies: list[bytes]) -> None:
        self.place = dict.fromkeys(bodies, QUEUES[0])
        #: Branches that are not known to have ended: where they move what.
        self.open: dict[bytes, tuple[str, list[bytes]]] = {}
        #: Branches that are to be committed, that are to be rolled back, and all that were prepared.
        self.committed: set[bytes] = set()
        self.undone: set[bytes] = set()
        self.prepared: set[bytes] = set()
        self._begun = 0

    def begin(self, target: str) -> bytes:
        self._begun += 1
        key = b"branch-%d" % self._begun
        self.open[key] = target, []
        return key

    def end(self, key: bytes) -> None:
        """Note that a branch has ended as it was decided."""
        target, bodies = self.open.pop(key)
        if key in self.committed:
            self.place.update(dict.fromkeys(bodies, target))

    def recovered(self, listed: set[bytes]) -> None:
        """Compare the branches in doubt after a restart with the decisions; the others have ended."""
        assert listed <= set(self.open)
        for key in set(self.open) - listed:
            # Prepared work ends by a decision and not by a restart.
            assert key not in self.prepared or key in self.committed or key in self.undone
            self.end(key)


class Mover:
    """Sessions that move messages, until the broker is killed.

    Args:
        broker: The broker.
        ledger: The ledger.
        chance: Decides.
    """

    def __init__(self, broker: BrokerProcess, ledger: Ledger, chance: random.Random) -> None:
        self._broker = broker
        self._ledger = ledger
        self._chance = chance
        self._left = 0

    async def run_until_killed(self, source: str, target: str) -> None:
        """Move messages from *source* to *target*; kill the broker under way."""
        self._left = self._chance.randrange(1, STEPS)
        async with trio.open_nursery() as nursery:
            for number in range(WORKERS):
                nursery.start_soon(self._work, number, source, target)
        if self._left > 0:
            await trio.to_thread.run_sync(self._broker.kill)

    def _step(self) -> None:
        self._left -= 1
        if not self._left:
            self._broker.kill()

    async def _work(self, number: int, source: str, target: str) -> None:
        try:
            async with client_of(self._broker.port) as client:
                session = await client.session(b"worker-%d" % number)
                await session.call("dtx.select")
                for round_ in range(2):
                    await self._move(session, b"%d" % round_, source, target)
        except (Failed, OSError, ExceptionGroup):
            assert self._left <= 0

    async def _move(self, session: Attached, name: bytes, source: str, target: str) -> None:
        ledger, chance = self._ledger, self._chance
        key = ledger.begin(target)
        branch = xid(key, b"", FORMAT)
        bodies = ledger.open[key][1]
        await self._call(session, "start", branch)
        count = chance.randrange(1, MOST + 1)
        destination = name.decode()
        await session.subscribe(source, destination, flow_mode=CREDIT, messages=count)
        for _ in range(count):
            message = await session.message()
            assert message.body is not None
            bodies.append(message.body)
            self._step()
            session.accept(message.id or 0)
            sent = session.transfer(
                "",
                message.body,
                key=target,
                delivery={"delivery_mode": PERSISTENT},
                accept_mode=1,
                sync=True,
            )
        await session.done(sent)
        self._step()
        await self._call(session, "end", branch)
        await self._call(session, "prepare", branch)
        ledger.prepared.add(key)
        self._step()
        decision = chance.choice(["commit", "rollback", None])
        if decision is None and len(ledger.open) <= IN_DOUBT + WORKERS:
            return
        await self._decide(session, key, commit=decision != "rollback")

    async def _decide(self, session: Attached, key: bytes, *, commit: bool) -> None:
        (self._ledger.committed if commit else self._ledger.undone).add(key)
        await self._call(session, "commit" if commit else "rollback", xid(key, b"", FORMAT))
        self._ledger.end(key)
        self._step()

    async def _call(self, session: Attached, command: str, branch: Struct) -> None:
        number = session.send(f"dtx.{command}", sync=True, xid=branch)
        await session.client.flush()
        self._step()
        result = await session.done(number)
        assert result is not None
        assert result.status == OK, (command, result)

    async def recover(self, *, all_of_them: bool) -> None:
        """Ask for the branches in doubt, carry out what was decided, and decide about some or all others."""
        self._left = -1
        ledger = self._ledger
        async with client_of(self._broker.port) as client:
            session = await client.session(b"recover")
            result = await session.call("dtx.recover")
            assert result is not None
            listed = {each.global_id for each in plain(result.in_doubt)}
            ledger.recovered(listed)
            for key in sorted(listed):
                if key in ledger.committed or key in ledger.undone:
                    await self._decide(session, key, commit=key in ledger.committed)
                elif all_of_them or len(ledger.open) > IN_DOUBT or self._chance.random() < 0.3:
                    await self._decide(session, key, commit=self._chance.random() < 0.5)

    async def check(self) -> None:
        """Compare the queues with the ledger: nothing is lost, doubled, or in the wrong place."""
        hidden = {body for _, bodies in self._ledger.open.values() for body in bodies}
        for queue in QUEUES:
            expected = {
                body
                for body, place in self._ledger.place.items()
                if place == queue and body not in hidden
            }
            assert sorted(await bodies_of(self._broker.port, queue)) == sorted(expected), queue


@pytest.mark.slow
@pytest.mark.req("R13")
async def test_the_ledger_balances_though_the_broker_is_killed_again_and_again(
    tmp_path: Path,
) -> None:
    chance = random.Random(10)
    bodies = [b"%03d" % number for number in range(MESSAGES)]
    broker = BrokerProcess(tmp_path, "broker")
    survived = 0
    try:
        await broker.fill(*bodies)
        ledger = Ledger(bodies)
        mover = Mover(broker, ledger, chance)
        for _ in range(KILLS):
            there = sum(place == "from" for place in ledger.place.values())
            source, target = QUEUES if there >= MESSAGES // 2 else reversed(QUEUES)
            await mover.run_until_killed(source, target)
            await trio.to_thread.run_sync(broker.start)
            await mover.recover(all_of_them=False)
            survived += len(ledger.open)
            await mover.check()
        # Branches stayed prepared from one kill to the next, and messages were moved.
        assert survived
        await mover.recover(all_of_them=True)
        assert not ledger.open
        await mover.check()
        assert ledger.committed
        assert ledger.undone
    finally:
        broker.kill()
