"""Tokens over the wire: ``$cbs`` of a container, and the links that tokens allow and end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jwt
import pytest
import trio
from brokers import client_of
from far_end import FarEnd

from amqp_rt.broker import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.clock import SystemClock
from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container
from amqp_rt.container.receiving import Receiver
from amqp_rt.container.sending import Sender
from amqp_rt.container.tokens import Sas
from amqp_rt.errors import (
    AmqpError,
    AuthenticationFailed,
    DeliveryRejected,
    LinkDetached,
    LinkRefused,
)
from amqp_rt.events import Peer
from amqp_rt.fronts.base import SENDER
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, Error
from amqp_rt.security.access import Access, Rights, Rule
from amqp_rt.security.bearer import CbsLogin, CbsLoginServer, Login, OAuthBearer, XOAuth2
from amqp_rt.security.jwts import Jwt
from amqp_rt.security.mechanisms import Challenge, Failure, Plain, Success
from amqp_rt.security.tokens import (
    SAS_TYPE,
    BearerToken,
    Cbs,
    SasKey,
    SasKeys,
    sas_token,
)
from amqp_rt.termini import Target
from amqp_rt.testing.pairs import Recorder

UNAUTHORIZED = "amqp:unauthorized-access"
EPOCH = 1_600_000_000


class Following:
    """Wall clock that advances with the clock of the tests."""

    def wall(self) -> float:
        return EPOCH + trio.current_time()

    def monotonic(self) -> float:
        return trio.current_time()


KEYS = SasKeys(
    {
        "both": SasKey(("k",), Rights.SEND | Rights.LISTEN),
        "send": SasKey(("k",), Rights.SEND),
        "listen": SasKey(("k",), Rights.LISTEN),
        "manage": SasKey(("k",), Rights.MANAGE),
    }
)


def sas(address: str, seconds: float = 1000, rule: str = "both", key: str = "k") -> str:
    until = int(EPOCH + trio.current_time() + seconds)
    return sas_token(f"sb://b/{address}", rule, key, until)


class Putter:
    """Client's links to ``$cbs``, in the form that deployed clients use."""

    def __init__(self, out: Sender, replies: Receiver) -> None:
        self.out = out
        self.replies = replies
        self.count = 0

    async def ask(self, message: Message) -> tuple[int, str]:
        self.count += 1
        await self.out.send(message.replace(message_id=f"{self.count}", reply_to="cbs-replies"))
        async with await self.replies.receive() as delivery:
            reply = delivery.message
            assert reply.correlation_id == f"{self.count}"
            said = reply.application_properties
            return said["status-code"], said["status-description"]

    async def put(self, address: str, token: str | None = None, **given: Any) -> int:
        asked = {"operation": "put-token", "type": SAS_TYPE, "name": f"sb://b/{address}", **given}
        body = sas(address) if token is None else token
        return (await self.ask(Message(body, application_properties=asked)))[0]


@asynccontextmanager
async def putter(peer: Connection) -> AsyncIterator[Putter]:
    async with (
        peer.sender("$cbs") as out,
        peer.receiver("$cbs", target="cbs-replies") as replies,
    ):
        yield Putter(out, replies)


@asynccontextmanager
async def broker_with(**options: Any) -> AsyncIterator[Broker]:
    options.setdefault("cbs", Cbs([KEYS], clock=Following()))
    async with Broker("b", **options) as broker:
        await broker.declare(Queue("q"), Queue("r"))
        await broker.listen("memory://b")
        yield broker


async def refused(link: Any) -> str:
    with pytest.raises(LinkRefused) as caught:
        await link.wait_attached()
    return caught.value.condition


@pytest.mark.req("SE10", "SE13")
async def test_before_a_token_only_cbs_is_there(autojump_clock: Any) -> None:
    async with broker_with() as broker, client_of(broker) as peer:
        assert "AMQP_CBS_V1_0" in peer.peer.offered_capabilities
        for link in (
            peer.sender("q"),
            peer.receiver("q"),
            peer.sender("nowhere"),
            peer.sender(None),
            peer.receiver(dynamic=True),
            peer.sender("$management"),
            peer.receiver("$management"),
            peer.sender("q/$management"),
            peer.sender("$cbs/x"),
        ):
            assert await refused(link) == UNAUTHORIZED
        with pytest.raises(AmqpError) as caught:
            async with peer.transaction():
                pass
        assert caught.value.condition == UNAUTHORIZED
        async with putter(peer) as cbs:
            assert await cbs.put("q") == 202
            async with peer.sender("q") as out, peer.receiver("q") as back:
                await out.send("x")
                (await back.receive()).accept()
            assert await refused(peer.sender("r")) == UNAUTHORIZED
            # Any time, any node.
            assert await cbs.put("r") == 202
            async with peer.sender("r"):
                pass
        async with client_of(broker) as other:
            # Tokens belong to one connection.
            assert await refused(other.sender("q")) == UNAUTHORIZED


@pytest.mark.req("SE14")
async def test_tokens_go_with_their_connection(autojump_clock: Any) -> None:
    async with broker_with() as broker:
        for _ in range(2):
            async with client_of(broker) as peer:
                assert await refused(peer.sender("q")) == UNAUTHORIZED
                async with putter(peer) as cbs:
                    await cbs.put("q")
                async with peer.sender("q"):
                    pass
        assert not broker.container.entry._watches


@pytest.mark.req("SE11")
@pytest.mark.parametrize(
    ("rule", "sends", "listens", "manages"),
    [
        ("send", True, False, False),
        ("listen", False, True, False),
        ("both", True, True, False),
        ("manage", True, True, True),
    ],
)
async def test_rights_are_what_the_token_gives(
    autojump_clock: Any, rule: str, sends: bool, listens: bool, manages: bool
) -> None:
    async def may(link: Any) -> bool:
        try:
            await link.wait_attached()
        except LinkRefused:
            return False
        await link.close()
        return True

    async with broker_with() as broker, client_of(broker) as peer, putter(peer) as cbs:
        assert await cbs.put("q", sas("q", rule=rule)) == 202
        assert await may(peer.sender("q")) == sends
        assert await may(peer.receiver("q")) == listens
        assert await may(peer.receiver("q", mode="copy")) == listens
        assert await may(peer.sender("$management")) == manages
        async with peer.sender(None) as relay:
            if sends:
                assert await relay.send("x", to="q") == ACCEPTED
            else:
                with pytest.raises(DeliveryRejected):
                    await relay.send("x", to="q")
            with pytest.raises(DeliveryRejected):
                await relay.send("x", to="r")


@pytest.mark.req("SE17")
async def test_the_application_sees_the_token_for_each_transfer_of_the_relay(
    autojump_clock: Any,
) -> None:
    asked: list[tuple[str, str, Rights]] = []

    async def authorize(peer: Peer, address: str, role: str) -> bool:
        asked.append((address, role, peer.tokens.rights(address)))
        return address != "r"

    async with (
        broker_with(authorize=authorize) as broker,
        client_of(broker) as peer,
        putter(peer) as cbs,
    ):
        for address in ("q", "r"):
            assert await cbs.put(address, sas(address, rule="both")) == 202
        asked.clear()
        async with peer.sender(None) as relay:
            assert await relay.send("x", to="q") == ACCEPTED
            with pytest.raises(DeliveryRejected):
                await relay.send("x", to="r")
    given = Rights.SEND | Rights.LISTEN
    assert [each for each in asked if each[0] in "qr"] == [
        ("q", "sender", given),
        ("r", "sender", given),
    ]


@pytest.mark.req("SE12")
async def test_expiry_takes_exactly_the_links_of_its_entity(autojump_clock: Any) -> None:
    async with broker_with() as broker, client_of(broker) as peer, putter(peer) as cbs:
        assert await cbs.put("q", sas("q", 30)) == 202
        assert await cbs.put("r", sas("r", 60)) == 202
        async with peer.sender("r") as other, peer.sender(None) as relay:
            gone, back = peer.sender("q"), peer.receiver("q")
            await gone.wait_attached()
            await back.wait_attached()
            await relay.send("x", to="q")
            await relay.send("x", to="r")
            await trio.sleep(29)
            await gone.send("still")
            await trio.sleep(2)
            for link in (gone, back):
                with pytest.raises(LinkDetached) as caught:
                    await link.wait_attached()
                assert caught.value.condition == UNAUTHORIZED
                assert "expired" in str(caught.value)
            await other.send("x")
            with pytest.raises(DeliveryRejected):
                await relay.send("x", to="q")
            await relay.send("x", to="r")
            assert peer.state == "open"
            assert await refused(peer.sender("q")) == UNAUTHORIZED
            # The messages of the ended link are available to others.
            assert broker.stats("q").acquired == 0
            assert await cbs.put("q") == 202
            async with peer.sender("q") as again:
                await again.send("x")


@pytest.mark.req("SE12")
async def test_a_refresh_replaces_all_rights_and_touches_no_traffic(autojump_clock: Any) -> None:
    async with broker_with() as broker, client_of(broker) as peer, putter(peer) as cbs:
        await cbs.put("q", sas("q", 30))
        out, back = peer.sender("q"), peer.receiver("q")
        await out.wait_attached()
        await back.wait_attached()
        for _ in range(5):
            await trio.sleep(20)
            assert await cbs.put("q", sas("q", 30)) == 202
            await out.send("x")
            (await back.receive()).accept()
        # A right that the newer token lacks ends at once.
        assert await cbs.put("q", sas("q", 30, "send")) == 202
        with pytest.raises(LinkDetached) as caught:
            await back.receive()
        assert caught.value.condition == UNAUTHORIZED
        await out.send("x")
        said = await cbs.ask(
            Message(None, application_properties={"operation": "delete-token", "name": "q"})
        )
        assert said[0] == 202
        with pytest.raises(LinkDetached):
            await out.send("x")


@pytest.mark.req("SE13")
@pytest.mark.parametrize("bad", [True, False])
async def test_the_first_token_has_to_come_in_time(autojump_clock: Any, bad: bool) -> None:
    async with broker_with() as broker, client_of(broker) as peer:
        if bad:
            async with putter(peer) as cbs:
                assert await cbs.put("q", sas("q", key="wrong")) == 401
        await trio.sleep(19)
        assert peer.state == "open"
        await trio.sleep(2)
        assert peer.state == "closed"
        with pytest.raises(AmqpError, match="no valid token within 20 seconds"):
            peer.refuse_if_closed()
    async with broker_with() as broker, client_of(broker) as peer:
        await trio.sleep(19)
        async with putter(peer) as cbs:
            assert await cbs.put("q") == 202
            await trio.sleep(1000)
        assert peer.state == "open"


@pytest.mark.req("SE13")
@pytest.mark.parametrize("end", ["deleted", "expired", "at once"])
async def test_a_token_that_has_gone_has_to_be_followed_in_time(
    autojump_clock: Any, end: str
) -> None:
    delete = Message(None, application_properties={"operation": "delete-token", "name": "q"})
    async with broker_with() as broker, client_of(broker) as peer, putter(peer) as cbs:
        for _ in range(3):
            # A client that puts a token from time to time stays connected.
            assert await cbs.put("q", sas("q", 10)) == 202
            assert (await cbs.ask(delete))[0] == 202
            await trio.sleep(19)
        assert peer.state == "open"
        assert await cbs.put("q", sas("q", 10)) == 202
        if end == "deleted":
            await trio.sleep(5)
        if end != "expired":
            assert (await cbs.ask(delete))[0] == 202
        else:
            await trio.sleep(10)
        await trio.sleep(19)
        assert peer.state == "open"
        await trio.sleep(2)
        assert peer.state == "closed"
        with pytest.raises(AmqpError, match="no valid token within 20 seconds"):
            peer.refuse_if_closed()


async def test_a_login_with_rights_owes_no_token() -> None:
    access = Access([Rule("q", Rights.SEND, users=("ann",))])
    limits = Limits(token_deadline_s=0.05)
    async with (
        broker_with(
            users={"ann": "a"},
            access=access,
            cbs=Cbs([KEYS]),
            plain_in_clear=True,
            limits=limits,
        ) as broker,
        client_of(broker, auth=Plain("ann", "a")) as peer,
        peer.sender("q") as out,
        putter(peer) as cbs,
    ):
        await trio.sleep(0.1)
        await out.send("x")
        assert await refused(peer.receiver("q")) == UNAUTHORIZED
        # Rights of tokens are additional, and their end leaves the other rights.
        token = sas_token("sb://b/q", "listen", "k", 4_000_000_000)
        assert await cbs.put("q", token) == 202
        async with peer.receiver("q"):
            pass
        said = await cbs.ask(
            Message(None, application_properties={"operation": "delete-token", "name": "q"})
        )
        assert said[0] == 202
        await out.send("x")


@pytest.mark.req("SE10")
@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 202),
        ({"application_properties": {"operation": "put-token", "type": SAS_TYPE}}, 400),
        ({"application_properties": {"operation": "put-token", "name": 1}}, 400),
        ({"application_properties": {"operation": "put-token", "name": "q", "type": "jwt"}}, 202),
        ({"body": "a.b.c"}, 401),
        ({"application_properties": {"operation": "put-token", "name": "q", "type": 3}}, 202),
        ({"application_properties": {"operation": "get-token", "name": "q"}}, 501),
        ({"application_properties": {"operation": 5, "name": "q"}}, 501),
        ({"application_properties": {"operation": "delete-token", "name": "q"}}, 404),
        ({"body": None}, 400),
        ({"body": b"\xff", "body_kind": "data"}, 400),
        ({"body": ""}, 400),
        ({"body": {"a": 1}}, 400),
        ({"body": "x" * 8193}, 403),
    ],
)
async def test_what_is_wrong_with_a_request_is_said(
    autojump_clock: Any, change: dict[str, Any], status: int
) -> None:
    async with broker_with() as broker, client_of(broker) as peer, putter(peer) as cbs:
        good = Message(
            sas("q"),
            application_properties={"operation": "put-token", "type": SAS_TYPE, "name": "q"},
        )
        assert (await cbs.ask(good.replace(**change)))[0] == status


@pytest.mark.req("SE16")
async def test_the_drafts_set_token_is_answered_by_its_outcome(autojump_clock: Any) -> None:
    async with broker_with() as broker, client_of(broker) as peer, peer.sender("$cbs") as out:
        good = Message(
            sas("q"), subject="set-token", application_properties={"token-type": SAS_TYPE}
        )
        assert await out.send(good) == ACCEPTED
        async with peer.sender("q"):
            pass
        bare = Message(sas("r"), subject="set-token")
        assert await out.send(bare) == ACCEPTED
        async with peer.sender("r"):
            pass
        bad = Message(sas("q", key="wrong"), subject="set-token")
        with pytest.raises(DeliveryRejected) as caught:
            await out.send(bad)
        assert caught.value.condition == UNAUTHORIZED
        async with peer.sender("q"):
            pass


async def test_too_many_tokens(autojump_clock: Any) -> None:
    limits = Limits(tokens_max=3)
    async with broker_with(limits=limits) as broker, client_of(broker) as peer, putter(peer) as cbs:
        assert [await cbs.put(name) for name in "abcda"] == [202, 202, 202, 403, 202]


async def test_a_request_for_a_token_is_small(autojump_clock: Any) -> None:
    async with broker_with() as broker, client_of(broker) as peer, putter(peer) as cbs:
        assert cbs.out.link.max_message_size == Limits().token_message_size_max


@pytest.mark.req("SE13")
async def test_who_owes_a_token_is_still_a_stranger(autojump_clock: Any) -> None:
    limits = Limits(connections_unauthenticated_max=1)
    async with broker_with(limits=limits) as broker:
        assert len(broker.container.entry._strangers) == 0
        async with client_of(broker) as peer, putter(peer) as cbs:
            assert len(broker.container.entry._strangers) == 1
            await cbs.put("q")
            assert len(broker.container.entry._strangers) == 0


@pytest.mark.req("SE12")
async def test_links_that_wait_for_the_application_are_judged_again(autojump_clock: Any) -> None:
    async def authorize(peer: Any, address: str, role: str) -> bool:
        if address == "q":
            await trio.sleep(60)
        return True

    async with (
        broker_with(authorize=authorize) as broker,
        client_of(broker) as peer,
        putter(peer) as cbs,
    ):
        await cbs.put("q", sas("q", 50))
        assert await refused(peer.sender("q")) == UNAUTHORIZED


@pytest.mark.req("SE11", "SE12")
@pytest.mark.parametrize("ends", [True, False])
async def test_a_reply_needs_the_right_to_send_when_it_is_sent(
    autojump_clock: Any, ends: bool
) -> None:
    async with (
        broker_with() as broker,
        client_of(broker) as peer,
        putter(peer) as cbs,
    ):

        @broker.container.rpc("slow")
        async def slow() -> str:
            await trio.sleep(100)
            return "done"

        await cbs.put("slow")
        await cbs.put("q", sas("q", 50 if ends else 200))
        async with peer.sender("slow") as out:
            await out.send(Message(None, reply_to="q", message_id="1"))
        assert broker.stats("q").enqueued == (0 if ends else 1)


async def test_two_clocks(autojump_clock: Any) -> None:
    """A jump of the wall clock ends no token that was put before it."""

    class Jumping(Following):
        offset = 0.0

        def wall(self) -> float:
            return super().wall() + self.offset

    clock = Jumping()
    async with (
        broker_with(cbs=Cbs([KEYS], clock=clock)) as broker,
        client_of(broker) as peer,
        putter(peer) as cbs,
    ):
        await cbs.put("q", sas("q", 100))
        async with peer.sender("q") as out:
            clock.offset = 86_400.0
            await trio.sleep(50)
            await out.send("x")
            assert await cbs.put("q", sas("q", 100)) == 401


# --- bringing tokens ----------------------------------------------------------------------------


class Provider:
    """Provider of tokens that last 100 seconds, which notes their audiences."""

    def __init__(self, seconds: float = 100.0) -> None:
        self.seconds = seconds
        self.asked: list[tuple[str, float]] = []
        self.fails: Exception | None = None
        self.key = "k"

    async def __call__(self, audience: str) -> BearerToken:
        await trio.lowlevel.checkpoint()
        self.asked.append((audience, trio.current_time()))
        if self.fails is not None:
            raise self.fails
        until = EPOCH + trio.current_time() + self.seconds
        return BearerToken(sas_token(audience, "both", self.key, int(until)), until, SAS_TYPE)

    @property
    def audiences(self) -> list[str]:
        return [audience for audience, _ in self.asked]


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the system's clock advance with the clock of the tests."""
    monkeypatch.setattr(SystemClock, "wall", Following.wall)


@pytest.mark.req("SE10", "SE12", "SE16")
@pytest.mark.usefixtures("wall")
@pytest.mark.parametrize(("set_token", "operation"), [(None, "set"), (True, "set"), (False, "put")])
async def test_how_tokens_go_to_the_peer(
    autojump_clock: Any, set_token: bool | None, operation: str
) -> None:
    """Tokens use the draft's way if the peer offers it, and the deployed one if configured."""
    async with (
        broker_with() as broker,
        client_of(broker, token=Provider(), set_token=set_token) as peer,
        peer.sender("q") as out,
        peer.sender("r"),
    ):
        for _ in range(10):
            await out.send("x")
            await trio.sleep(50)
        (there,) = broker.container.connections
        assert len(there.peer.tokens) == 2
        (link,) = [
            each
            for each in broker.container.attaching._links.values()
            if isinstance(each.target, Target) and each.target.address == "$cbs"
        ]
        assert link.rcv_settle_mode == 0
        if operation == "set":
            # §3.2 of the draft.
            assert link.snd_settle_mode == 0
            assert link.source is not None
            assert link.source.outcomes == ("amqp:accepted:list", "amqp:rejected:list")


@pytest.mark.req("SE10", "SE12")
@pytest.mark.usefixtures("wall")
async def test_a_provider_keeps_links_going(autojump_clock: Any) -> None:
    provider = Provider()
    async with broker_with() as broker, client_of(broker, token=provider) as peer:
        async with peer.sender("q") as out, peer.receiver("q") as back:
            for _ in range(20):
                await out.send("x")
                (await back.receive()).accept()
                await trio.sleep(50)
        assert set(provider.audiences) == {"amqp://b/q"}
        assert 10 <= len(provider.asked) <= 20
        async with peer.sender("r"):
            pass
        assert provider.audiences.count("amqp://b/r") == 1
        # A terminus without an address needs a login, but no token.
        async with peer.receiver(dynamic=True), peer.sender(None) as relay:
            await relay.send("x", to="q")
        await peer.authorize("q")
        assert set(provider.audiences) == {"amqp://b/q", "amqp://b/r"}


@pytest.mark.req("SE10")
@pytest.mark.usefixtures("wall")
@pytest.mark.parametrize(
    ("set_token", "role"),
    [(True, "sender"), (False, "sender"), (False, "receiver"), (False, "both")],
)
async def test_links_for_tokens_that_are_refused_share_one_session(
    autojump_clock: Any, set_token: bool, role: str
) -> None:
    def refuse(link: Any) -> None:
        # The peer's receiver is our sender.
        ours = "receiver" if link.role == SENDER else "sender"
        if role in ("both", ours):
            link.refuse(Error("amqp:not-allowed", "not now"))
        else:
            link.accept(Recorder())

    far = FarEnd(on_attach=refuse)
    async with trio.open_nursery() as nursery:
        await nursery.start(far.listen, "far")
        async with (
            Container("c", network=far.network) as container,
            container.connect("memory://far", token=Provider(), set_token=set_token) as peer,
        ):
            for _ in range(5):
                with pytest.raises(AmqpError):
                    await peer.authorize("q")
                await trio.sleep(10)
            (session,) = peer.engine.sessions.values()
            # The link that was not refused is closed as well.
            assert len(session.links) <= 1
        nursery.cancel_scope.cancel()


@pytest.mark.req("SE10")
@pytest.mark.usefixtures("wall")
async def test_no_token_is_asked_for_while_a_close_is_not_answered(autojump_clock: Any) -> None:
    provider = Provider()
    far = FarEnd()
    async with trio.open_nursery() as nursery:
        await nursery.start(far.listen, "far")
        async with (
            Container("c", network=far.network) as container,
            container.connect("memory://far", token=provider) as peer,
        ):
            far.mute()
            peer.sender("q")
            while not provider.asked:
                await trio.lowlevel.checkpoint()
            peer.close()
            for _ in range(100):
                await trio.lowlevel.checkpoint()
            assert peer.state == "open"
            assert len(provider.asked) == 1
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("wall")
async def test_links_to_one_address_share_a_token(autojump_clock: Any) -> None:
    provider = Provider()
    async with broker_with() as broker, client_of(broker, token=provider) as peer:
        links = [peer.sender("q") for _ in range(5)]
        for link in links:
            await link.wait_attached()
        assert len(provider.asked) == 1
        # Closed before it could attach, a link is not attached afterwards.
        gone = peer.sender("r")
        gone.abandon()
        await peer.authorize("r")
        assert broker.stats("r").producers == 0


@pytest.mark.usefixtures("wall")
async def test_calls_and_management_need_tokens_like_everything(autojump_clock: Any) -> None:
    provider = Provider()
    broker = Broker("b", cbs=Cbs([KEYS], clock=Following()))
    broker.container.rpc("echo")(lambda body: body)
    async with broker:
        await broker.listen("memory://b")
        async with client_of(broker, token=provider) as peer:
            assert await peer.call("echo", "x") == "x"
            assert await refused(peer.sender("$management")) == UNAUTHORIZED
        assert provider.audiences == ["amqp://b/echo", "amqp://b/"]


@pytest.mark.req("SE14", "X25")
@pytest.mark.usefixtures("wall")
async def test_tokens_are_put_again_after_a_lost_connection(autojump_clock: Any) -> None:
    provider = Provider()
    async with (
        broker_with() as broker,
        Container("c", network=broker.container.network) as container,
        container.connect("memory://b", token=provider) as peer,
        peer.sender("q") as out,
    ):
        await out.send("x")
        (there,) = broker.container.connections
        there.engine.close()
        await there.wait_closed()
        await out.wait_attached()
        await out.send("x")
        assert provider.audiences == ["amqp://b/q"] * 2
        await trio.sleep(1000)
        await out.send("x")


@pytest.mark.usefixtures("wall")
@pytest.mark.parametrize("fault", ["provider", "key"])
async def test_no_token_no_link(autojump_clock: Any, fault: str) -> None:
    provider = Provider()
    if fault == "provider":
        provider.fails = ValueError("no network")
    else:
        provider.key = "wrong"
    async with broker_with() as broker, client_of(broker, token=provider) as peer:
        for _ in range(2):
            with pytest.raises(AuthenticationFailed) as caught:
                await peer.sender("q").wait_attached()
            assert caught.value.condition == UNAUTHORIZED
            with pytest.raises(AuthenticationFailed):
                await peer.authorize("q")
        provider.fails, provider.key = None, "k"
        async with peer.sender("q"):
            pass


@pytest.mark.usefixtures("wall")
async def test_a_renewal_that_fails_is_tried_again(autojump_clock: Any) -> None:
    provider = Provider()
    async with (
        broker_with() as broker,
        client_of(broker, token=provider) as peer,
        peer.sender("q") as out,
    ):
        await trio.sleep(70)
        provider.fails = ValueError("no network")
        await trio.sleep(20)
        provider.fails = None
        await trio.sleep(60)
        await out.send("x")
        provider.fails = ValueError("no network")
        await trio.sleep(200)
        with pytest.raises(LinkDetached):
            await out.send("x")


async def test_a_key_makes_tokens() -> None:
    token = Sas("both", "k", clock=Following())("sb://b/q")
    assert token.expires_at == int(EPOCH + trio.current_time() + 3600)
    assert "k" not in repr(Sas("both", "k")).replace("both", "")
    assert token.text not in repr(token)
    assert (await KEYS.validate(token.text, EPOCH)).subject == "both"


# --- tokens that come with the login --------------------------------------------------------------

SECRET = b"a secret of at least 32 octets, for HS256"


def json_token(scope: str, seconds: float = 30, secret: bytes = SECRET, **claims: Any) -> str:
    until = int(EPOCH + trio.current_time() + seconds)
    said = {"aud": "shop", "sub": "ada", "exp": until, "scope": scope, **claims}
    return jwt.encode(said, secret, "HS256")


def both() -> Cbs:
    """Return a validator for signatures and JSON web tokens."""
    return Cbs([KEYS, Jwt(audience="shop", secret=SECRET)], clock=Following())


async def judged(token: str, peer: Any) -> Login | None:
    """Validate *token* as an application would that asks another service first."""
    found = await both().validate("jwt", token, None, Limits())
    return Login("grace", token=found)


@pytest.mark.req("SE4", "SE12", "SE16")
@pytest.mark.parametrize(
    ("auth", "options", "user"),
    [
        (lambda token: CbsLogin([BearerToken(token)]), {}, None),
        (lambda token: CbsLogin([BearerToken(token, type="")]), {}, None),
        (OAuthBearer, {}, "ada"),
        (lambda token: XOAuth2(token, user="ada"), {}, "ada"),
        (OAuthBearer, {"tokens": judged}, "grace"),
    ],
)
async def test_tokens_of_a_login_are_like_any_other(
    autojump_clock: Any, auth: Any, options: Any, user: str | None
) -> None:
    """Tokens of a login give rights, newer ones replace them, and their end closes exactly their links."""
    text = json_token("send:q listen:q")
    async with (
        broker_with(cbs=both(), **options) as broker,
        client_of(broker, auth=auth(text)) as peer,
        peer.sender("$cbs") as cbs,
    ):
        (there,) = broker.container.connections
        assert (there.peer.user, len(there.peer.tokens)) == (user, 1)
        out, back = peer.sender("q"), peer.receiver("q")
        await out.send("x")
        assert await refused(peer.sender("r")) == UNAUTHORIZED
        # No token is due after the login: nothing happens after 20 seconds.
        await trio.sleep(25)
        for _ in range(3):
            newer = json_token("send:q listen:q")
            await cbs.send(
                Message(newer, subject="set-token", application_properties={"token-type": "jwt"})
            )
            await trio.sleep(25)
            await out.send("x")
            (await back.receive()).accept()
        assert len(there.peer.tokens) == 1
        # Another resource needs another token.
        await cbs.send(Message(json_token("send:r", 1000), subject="set-token"))
        async with peer.sender("r") as other:
            await trio.sleep(10)
            with pytest.raises(LinkDetached) as caught:
                await out.send("x")
            assert caught.value.condition == UNAUTHORIZED
            assert "expired" in str(caught.value)
            await other.send("x")
        assert peer.state == "open"


@pytest.mark.req("SE16")
async def test_many_tokens_take_several_responses(autojump_clock: Any) -> None:
    names = [f"q{number}" for number in range(200)]
    asked = 0

    async def tokens() -> list[BearerToken]:
        nonlocal asked
        asked += 1
        return [BearerToken(sas(name), type=SAS_TYPE) for name in names]

    async with broker_with(sasl=["AMQPCBS"]) as broker:
        for count in (1, 2):
            async with client_of(broker, auth=CbsLogin(tokens)) as peer:
                (there,) = broker.container.connections
                assert (asked, len(there.peer.tokens)) == (count, 200)
                assert await refused(peer.sender("q")) == UNAUTHORIZED


@pytest.mark.req("SE1", "SE16")
@pytest.mark.parametrize("size", [1, 2, 3, 50, 1_000])
async def test_a_list_of_tokens_however_it_is_cut(size: int) -> None:
    texts = [sas_token(f"sb://b/q{number}", "both", "k", 4_000_000_000) for number in range(5)]
    said = "".join(f"{SAS_TYPE}\0{text}\0" for text in texts).encode() + b"\0\0"
    exchange = CbsLoginServer(Cbs([KEYS]), Limits()).begin()
    pieces = [said[start : start + size] for start in range(0, len(said), size)]
    for piece in pieces[:-1]:
        assert await exchange.respond(piece, Peer()) == Challenge(b"")
    step = await exchange.respond(pieces[-1], Peer())
    assert isinstance(step, Success)
    assert [token.scope for token in step.tokens] == [f"q{number}" for number in range(5)]


@pytest.mark.req("SE1", "SE16")
@pytest.mark.parametrize(
    "said",
    [
        b"\0\0",
        b"\0\0\0\0",
        b"jwt\0a.b.c\0\0\0",
        b"nothing\0x\0\0\0",
        b"\xff\0x\0\0\0",
        b"jwt\0\xff\0\0\0",
        b"%(good)s\0\0more",
        b"%(good)s\0\0%(good)s\0\0",
        b"%(good)s%(bad)s\0\0",
        b"%(good)s" * 11 + b"\0\0",
        b"x" * 9_000,
        b"jwt\0" + b"x" * 9_000,
    ],
)
async def test_a_list_of_tokens_that_does_not_let_in(said: bytes) -> None:
    good = f"{SAS_TYPE}\0{sas_token('sb://b/q', 'both', 'k', 4_000_000_000)}\0".encode()
    said = said.replace(b"%(good)s", good).replace(b"%(bad)s", good.replace(b"both", b"nobody"))
    exchange = CbsLoginServer(Cbs([KEYS]), Limits(tokens_max=10)).begin()
    assert isinstance(await exchange.respond(said, Peer()), Failure)


@pytest.mark.req("SE16")
@pytest.mark.parametrize("tokens", [[], [""], ["a\0b"], ["x" * 8_000]])
async def test_what_is_no_token_is_not_sent(tokens: list[str]) -> None:
    async def given() -> list[BearerToken]:
        return [BearerToken(text) for text in tokens]

    with pytest.raises(AuthenticationFailed, match="token"):
        await CbsLogin(given).prepare()


@pytest.mark.req("SE4", "SE16")
@pytest.mark.parametrize(
    "auth",
    [
        lambda: CbsLogin([BearerToken(json_token("send:q", secret=b"y" * 32))]),
        lambda: CbsLogin([BearerToken(json_token("send:q", -1))]),
        lambda: CbsLogin([BearerToken(json_token("send:q")), BearerToken(json_token("none"))]),
        lambda: OAuthBearer(json_token("send:q", secret=b"y" * 32)),
        lambda: OAuthBearer(json_token("send:q", -1)),
        lambda: OAuthBearer(json_token("send:q"), user="bob"),
        lambda: XOAuth2(json_token("send:q", sub=None), user="bob"),
    ],
)
async def test_a_login_with_a_bad_token_fails(autojump_clock: Any, auth: Any) -> None:
    async with broker_with(cbs=both()) as broker:
        with pytest.raises(AuthenticationFailed) as caught:
            async with client_of(broker, auth=auth()):
                pass
        assert "ey" not in str(caught.value)
        assert not broker.container.entry._watches


async def test_a_login_with_a_token_needs_where_to_keep_it(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with broker_with(cbs=None, tokens=judged) as broker:
        with pytest.raises(AuthenticationFailed):
            async with client_of(broker, auth=OAuthBearer(json_token("send:q"))):
                pass
    assert "pass cbs=Cbs(…)" in caplog.text


@pytest.mark.req("SE13")
async def test_nobody_without_a_token_owes_one(autojump_clock: Any) -> None:
    """MSSBCBS is ANONYMOUS by another name: tokens follow, in time."""
    async with (
        broker_with(sasl=["MSSBCBS"]) as broker,
        client_of(broker, auth=CbsLogin()) as peer,
    ):
        assert await refused(peer.sender("q")) == UNAUTHORIZED
        await trio.sleep(21)
        assert peer.state == "closed"


@pytest.mark.req("X12", "X21")
@pytest.mark.parametrize("second", [True, False])
async def test_who_settles_second_is_a_policy(autojump_clock: Any, second: bool) -> None:
    """Senders of Azure's clients request it, and wait for a settled outcome nevertheless."""
    async with (
        broker_with(cbs=None, settle_second=second) as broker,
        client_of(broker) as peer,
        peer.sender("q", rcv_settle_mode=1) as out,
    ):
        await out.send("x")
        (link,) = broker.container.attaching._links.values()
        assert link.rcv_settle_mode == int(second)
