"""The security matrix (docs/security-matrix.md), cell by cell, against a live broker."""

from __future__ import annotations

import datetime
import importlib.util
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import jwt
import pytest
import rights010
import security_matrix as matrix
import trio
from certificates import certificates

from amqp_rt.broker import Broker
from amqp_rt.broker.nodes import Queue
from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container
from amqp_rt.errors import AmqpError, CallFailed, ConnectFailed
from amqp_rt.events import ConnectionFailed, Event, Opened
from amqp_rt.fronts import Exchange, amqp10
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.message import Message
from amqp_rt.net.driver import run_connection
from amqp_rt.net.memory import memory_stream_pair
from amqp_rt.net.tls import ClientTls, ServerTls, client_layer, encrypt
from amqp_rt.net.websocket import request_websocket
from amqp_rt.security.access import Access, Rights, Rule
from amqp_rt.security.bearer import CbsLogin, OAuthBearer, XOAuth2
from amqp_rt.security.jwts import Jwt
from amqp_rt.security.mechanisms import Anonymous, External, Plain
from amqp_rt.security.scram import Scram
from amqp_rt.security.tokens import BearerToken, Cbs

KNOWN = certificates()
SECRET = b"a secret of at least 32 octets, for HS256"
HASTY = Limits(failed_login_delay_s=0)
REQUIREMENTS = ("SE1", "SE5", "SE9", "SE18")


def token(
    scope: str = "send:q", seconds: float = 600, secret: bytes = SECRET, **claims: Any
) -> str:
    said = {"aud": "shop", "sub": "ada", "exp": int(time.time() + seconds), "scope": scope}
    return jwt.encode({**said, **claims}, secret, "HS256")


# --- logins ----------------------------------------------------------------------------------------


@cache
def certificate_of(credentials: str) -> Path | None:
    """Return the certificate that a client presents."""
    if credentials == "unknown":
        return None
    if credentials == "bad":
        return KNOWN.stranger
    if credentials == "empty":
        return KNOWN.issue("somebody@example.org")
    if credentials == "expired":
        past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        leaf = KNOWN.authority.issue_cert("ada.example.org", common_name="ada", not_after=past)
        path = KNOWN.folder / "expired.pem"
        leaf.private_key_and_cert_chain_pem.write_to_path(path)
        return path
    return KNOWN.client


def login_of(mechanism: str, credentials: str) -> Any:
    """Return a client's mechanism with *credentials*; None omits the SASL layer."""
    user = "zoe" if credentials == "unknown" else "ada"
    password = {"bad": "guess", "empty": ""}.get(credentials, "pw")
    text = {
        "bad": token(secret=b"another secret of 32 octets or more"),
        "empty": "",
        "expired": token(seconds=-10),
    }.get(credentials, token())
    if mechanism == "PLAIN":
        return Plain(user, password)
    if mechanism.startswith("SCRAM"):
        return Scram(user, password, mechanism.removeprefix("SCRAM-"))  # type: ignore[arg-type]
    if mechanism == "OAUTHBEARER":
        return OAuthBearer(text, user=user)
    if mechanism == "XOAUTH2":
        return XOAuth2(text, user=user)
    if mechanism == "AMQPCBS":
        if credentials == "unknown":
            text = token(aud="another shop")
        return CbsLogin([BearerToken(text)])
    if mechanism == "none":
        return None
    return {"EXTERNAL": External, "ANONYMOUS": Anonymous, "MSSBCBS": CbsLogin}[mechanism]()


class Raw:
    """Login with a response that our own client would not send."""

    def __init__(self, name: str, initial: bytes) -> None:
        self.name = name
        self._initial = initial

    def initial(self) -> bytes:
        return self._initial

    def respond(self, challenge: bytes) -> bytes:
        return b""


@asynccontextmanager
async def shop(mode: str) -> AsyncIterator[Container]:
    logins: dict[str, Any] = {
        "users": {"ada": "pw"},
        "sasl": [each for each in matrix.LOGINS if each != "none"],
        "cbs": Cbs([Jwt(audience="shop", secret=SECRET)]),
    }
    async with Container(
        "shop",
        **({} if mode == "off" else logins),
        sasl_policy=mode,  # type: ignore[arg-type]
        tls=ServerTls(KNOWN.server, client_ca=KNOWN.ca, client_certificate="optional"),
        limits=HASTY,
    ) as container:
        yield container


async def logged_in(container: Container, transport: str, login: Any, shown: Path | None) -> str:
    """Return the result for a client from another machine."""
    ours, theirs = memory_stream_pair()
    schemes = {"tcp": "amqp", "tls": "amqps"}
    events: list[Event] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            partial(
                container.accept,
                ours,
                address="192.0.2.1:50000",
                scheme=schemes.get(transport, transport),
            )
        )
        stream: trio.abc.Stream = theirs
        try:
            if transport in matrix.ENCRYPTED:
                layer = client_layer(ClientTls(KNOWN.ca, certificate=shown), "localhost")
                stream = await encrypt(stream, layer, within=5)
            if transport in ("ws", "wss"):
                stream = await request_websocket(
                    stream, host="shop", path="/", limits=DEFAULT_LIMITS
                )
        except ConnectFailed:
            return matrix.TLS_REFUSED
        options = amqp10.ClientOptions(
            container_id="client", mechanisms=() if login is None else (login,)
        )
        engine = amqp10.client(options, trio.current_time())
        users: list[str | None] = []

        def handle(found: list[Event]) -> None:
            events.extend(found)
            if any(isinstance(event, Opened) for event in found):
                users.extend(each.peer.user for each in container.connections)
                engine.close()

        await run_connection(stream, engine, handle)
        nursery.cancel_scope.cancel()
    for event in events:
        if isinstance(event, Opened):
            return " ".join(f"in as {user or 'nobody'}" for user in users)
        if isinstance(event, ConnectionFailed):
            said = event.error.description or str(event.error)
            if "speaks another protocol" in said:
                return matrix.MUST_LOG_IN if login is None else matrix.NO_SASL
            return next((meaning for words, meaning in SAID.items() if words in said), said)
    return "silence"


#: Part of our engine's error text → its meaning.
SAID = {
    "did not accept the login": matrix.REFUSED,
    "offers only these SASL mechanisms": matrix.NOT_OFFERED,
    "the peer requires a login": matrix.NOT_OFFERED,
    "does not believe who signed our certificate": matrix.TLS_REFUSED,
    "our certificate has expired": matrix.TLS_REFUSED,
}


@pytest.mark.slow
@pytest.mark.req(*REQUIREMENTS)
@pytest.mark.parametrize("mode", matrix.MODES)
@pytest.mark.parametrize("transport", matrix.TRANSPORTS)
async def test_who_gets_in(transport: str, mode: str) -> None:
    wrong = []
    async with shop(mode) as container:
        for mechanism in matrix.LOGINS:
            for credentials in matrix.CREDENTIALS:
                expected = matrix.outcome_of_login(mechanism, transport, mode, credentials)
                if expected is None:
                    continue
                login = login_of(mechanism, credentials)
                if hasattr(login, "prepare"):
                    try:
                        await login.prepare()
                    except AmqpError:
                        # Our client refuses to send this; a foreign one would.
                        login = Raw(mechanism, b"\0\0")
                shown = certificate_of(credentials) if mechanism == "EXTERNAL" else None
                found = await logged_in(container, transport, login, shown)
                if found != expected:
                    wrong.append((mechanism, credentials, found, expected))
    assert wrong == []


# --- operations ------------------------------------------------------------------------------------

HELD = {
    "elsewhere": ("elsewhere", Rights.SEND),
    "send": ("q", Rights.SEND),
    "listen": ("q", Rights.LISTEN),
    "manage": ("q", Rights.MANAGE),
}


@asynccontextmanager
async def broker(
    transport: str, source: str, fronts: list[str]
) -> AsyncIterator[tuple[Broker, str]]:
    """Run a broker whose users are named after their right at q; give it and its URL."""
    rules = [Rule(address, rights, users=(name,)) for name, (address, rights) in HELD.items()]
    async with Broker(
        "shop",
        fronts=fronts,
        users=dict.fromkeys(matrix.RIGHTS, "pw"),
        access=Access(rules if source == "rule" else ()),
        cbs=Cbs([Jwt(audience="shop", secret=SECRET)]) if source == "token" else None,
        tls=ServerTls(KNOWN.server),
        limits=HASTY,
    ) as shop:
        schemes = {"tcp": "amqp", "tls": "amqps"}
        (url,) = await shop.listen(f"{schemes.get(transport, transport)}://127.0.0.1:0")
        yield shop, url


@asynccontextmanager
async def holder(url: str, source: str, right: str) -> AsyncIterator[Connection]:
    """Connect a user who holds *right*."""

    async def provide(address: str) -> BearerToken:
        where, rights = HELD[right]
        words = "manage" if right == "manage" else str(rights)
        return BearerToken(token(f"{words}:{where}"))

    async with (
        Container("client") as client,
        client.connect(
            url.replace("://", f"://{right}:pw@"), tls=ClientTls(KNOWN.ca), reconnect=None
        ) as peer,
    ):
        await peer.wait_open()
        if source == "token" and right != "nothing":
            async with peer.sender("$cbs") as cbs:
                said = Message((await provide("")).text, subject="set-token")
                said.application_properties = {"token-type": "jwt"}
                await cbs.send(said)
        yield peer


def peer_of(protocol: str, url: str, source: str, right: str) -> AbstractAsyncContextManager[Any]:
    """Return a client of *protocol*, whose user holds *right*."""
    if protocol == "AMQP 0-9-1":
        return holder091(url, right)
    if protocol == "AMQP 0-10":
        return rights010.holder010(url, right, ClientTls(KNOWN.ca))
    return holder(url, source, right)


@asynccontextmanager
async def holder091(url: str, right: str) -> AsyncIterator[Any]:
    """Connect a client of 0-9-1 in the same way."""
    amqp091 = pytest.importorskip("amqp_rt_amqp091")
    where = url.replace("://", f"://{right}:pw@")
    async with amqp091.connect(where, tls=ClientTls(KNOWN.ca)) as peer:
        yield peer


Operation = Callable[[Any], Awaitable[Any]]


async def attach(peer: Connection, link: Any) -> None:
    async with link:
        await link.wait_attached()


async def relayed(peer: Connection, to: str = "q") -> None:
    async with peer.sender(None) as relay:
        await relay.send("x", to=to)


async def posted(peer: Connection) -> None:
    async with peer.transaction() as txn, peer.sender("q") as out:
        await out.send("x", transaction=txn)


async def posted_by_relay(peer: Connection) -> None:
    async with peer.transaction() as txn, peer.sender(None) as relay:
        await relay.send("x", to="q", transaction=txn)


async def received(peer: Connection) -> None:
    async with peer.transaction() as txn, peer.receiver("q") as back:
        delivery = await back.receive()
        delivery.accept(transaction=txn)


async def declared(peer: Connection) -> None:
    async with peer.transaction():
        pass


def managing(operation: str, body: Any = None, **given: Any) -> Operation:
    """Return an operation at $management, whose result is its status if that is an error."""

    async def ask(peer: Connection) -> None:
        asked = Message(
            body, body_kind="value", application_properties={"operation": operation, **given}
        )
        await peer.call("$management", asked, reply=Message, within=5)

    return ask


QUEUE = {"kind": "queue"}


def on_channel(step: Operation, *, transactional: bool = False) -> Operation:
    """Return *step* on a channel of its own."""

    async def run(peer: Any) -> None:
        async with peer.channel(confirms=not transactional) as channel:
            if transactional:
                await channel.select()
            await step(channel)
            if transactional:
                await channel.commit()

    return run


async def consumed(channel: Any) -> None:
    async with channel.consume("q") as deliveries:
        (await anext(deliveries)).ack()


async def nothing(channel: Any) -> None:
    await trio.lowlevel.checkpoint()


#: protocol → the front that a broker needs for it.
FRONTS = {"AMQP 0-9-1": "amqp091", "AMQP 0-10": "amqp010"}


def fronts_of(protocol: str) -> list[str]:
    """Return the fronts of a broker for *protocol*; skip the test if one is not installed."""
    if protocol not in FRONTS:
        return []
    pytest.importorskip(f"amqp_rt_{FRONTS[protocol]}")
    return [FRONTS[protocol]]


OPERATIONS: dict[str, dict[str, Operation]] = {
    "AMQP 1.0": {
        "attach a link that sends to q": lambda peer: attach(peer, peer.sender("q")),
        "attach a link that receives from q": lambda peer: attach(peer, peer.receiver("q")),
        "attach a link that browses q": lambda peer: attach(peer, peer.receiver("q", mode="copy")),
        "attach a link that sends to an alias of q": lambda peer: attach(
            peer, peer.sender("alias")
        ),
        "attach a link that receives from an alias of q": lambda peer: attach(
            peer, peer.receiver("alias")
        ),
        "attach a link to a node that is not there": lambda peer: attach(
            peer, peer.sender("nowhere")
        ),
        "attach to a dynamic node": lambda peer: attach(peer, peer.receiver(dynamic=True)),
        "attach to the anonymous terminus": lambda peer: attach(peer, peer.sender(None)),
        "send to q by the anonymous terminus": relayed,
        "send to an alias of q by the anonymous terminus": lambda peer: relayed(peer, "alias"),
        "ask for transactions": declared,
        "post to q in a transaction": posted,
        "post to q in a transaction, by the anonymous terminus": posted_by_relay,
        "receive from q in a transaction": received,
    },
    "AMQP 0-9-1": {
        "declare q": on_channel(lambda channel: channel.declare_queue("q")),
        "declare q passively": on_channel(lambda channel: channel.declare_queue("q", passive=True)),
        "declare passively what is not there": on_channel(
            lambda channel: channel.declare_queue("nowhere", passive=True)
        ),
        "delete what is not there": on_channel(lambda channel: channel.delete_queue("nowhere")),
        "declare another queue": on_channel(lambda channel: channel.declare_queue("mine")),
        "declare a queue without a name": on_channel(lambda channel: channel.declare_queue()),
        "declare an exchange": on_channel(lambda channel: channel.declare_exchange("mine")),
        "bind q to an exchange of others": on_channel(
            lambda channel: channel.bind_queue("q", "amq.fanout")
        ),
        "purge q": on_channel(lambda channel: channel.purge_queue("q")),
        "delete q": on_channel(lambda channel: channel.delete_queue("q")),
        "publish to q": on_channel(lambda channel: channel.publish(b"x", key="q")),
        "publish to an exchange of others": on_channel(
            lambda channel: channel.publish(b"x", exchange="amq.fanout")
        ),
        "publish to q in a transaction": on_channel(
            lambda channel: channel.publish(b"x", key="q"), transactional=True
        ),
        "ask for transactions": on_channel(nothing, transactional=True),
        "consume from q": on_channel(consumed),
        "get from q": on_channel(lambda channel: channel.get("q")),
        "declare an alias of q passively": on_channel(
            lambda channel: channel.declare_queue("alias", passive=True)
        ),
        "purge an alias of q": on_channel(lambda channel: channel.purge_queue("alias")),
        "publish to an alias of q": on_channel(lambda channel: channel.publish(b"x", key="alias")),
        "get from an alias of q": on_channel(lambda channel: channel.get("alias")),
    },
    "AMQP 0-10": rights010.OPERATIONS,
    "AMQP Management": {
        "READ q": managing("READ", name="q"),
        "UPDATE q": managing("UPDATE", {}, name="q"),
        "PEEK at q": managing("PEEK", name="q"),
        "PURGE q": managing("PURGE", name="q"),
        "DELETE q": managing("DELETE", name="q"),
        "CREATE q": managing("CREATE", QUEUE, name="q"),
        "MOVE from q to a node of others": managing("MOVE", name="q", to="others"),
        "READ a node of others": managing("READ", name="others"),
        "CREATE a node of others": managing("CREATE", QUEUE, name="another"),
        "READ the container": managing("READ", type="amqp_rt.container", name="shop"),
        "DELETE a connection": managing("DELETE", type="amqp_rt.connection", name="1"),
        "QUERY": managing("QUERY", {"attributeNames": ["name"]}),
    },
}


async def outcome(shop: Broker, name: str, operation: Operation, peer: Connection) -> str:
    """Return the result of *operation* at a queue with one message."""
    for each in ("q", "others"):
        if each in [node.name for node in shop.host.space().declarations()]:
            shop.host.space().delete(each)
        await shop.declare(Queue(each, aliases=("alias",) if each == "q" else ()))
    shop.host.space().publish("q", Message("x").encode())
    if name == "CREATE q":
        shop.host.space().delete("q")
    try:
        with trio.fail_after(5):
            await operation(peer)
    except CallFailed as error:
        return str(error.info.get("statusCode") or error.condition)
    except AmqpError as error:
        return error.condition
    return matrix.ALLOWED


@pytest.mark.slow
@pytest.mark.req("SE5", "SE11", "SE17", "SE18", "G2")
@pytest.mark.parametrize(
    ("protocol", "transport", "source"),
    [
        (protocol, transport, source)
        for protocol in matrix.RIGHTS_OF
        for transport in matrix.CARRIED_BY.get(protocol, matrix.TRANSPORTS)
        for source in matrix.SOURCES
        if source != "token" or protocol not in matrix.WITHOUT_TOKENS
    ],
)
async def test_who_may_do_what(protocol: str, transport: str, source: str) -> None:
    assert set(OPERATIONS[protocol]) == set(matrix.RIGHTS_OF[protocol])
    wrong = []
    async with broker(transport, source, fronts_of(protocol)) as (shop, url):
        for right in matrix.RIGHTS:
            async with peer_of(protocol, url, source, right) as peer:
                for name, operation in OPERATIONS[protocol].items():
                    found = await outcome(shop, name, operation, peer)
                    expected = matrix.RIGHTS_OF[protocol][name][right]
                    if found != expected:
                        wrong.append((right, name, found, expected))
    assert wrong == []


# --- destinations of messages ----------------------------------------------------------------------

THERE = {
    "nothing": Rights.NONE,
    "send": Rights.SEND,
    "listen": Rights.LISTEN,
    "manage": Rights.MANAGE,
}
#: Nodes that the user manages; the right in question is held at the nodes named q.
MINE = ("mine", "new", "/exchanges/mine", "/exchanges/new")
THEIRS = ("q", "/exchanges/q")


@asynccontextmanager
async def declarer(
    source: str, fronts: list[str], right: str
) -> AsyncIterator[tuple[Broker, Connection, Any]]:
    """Run a broker, and connect a user who has *right* by 1.0 and by another protocol."""
    rules = [Rule(address, Rights.MANAGE, users=("ada",)) for address in MINE]
    if THERE[right]:
        rules += [Rule(address, THERE[right], users=("ada",)) for address in THEIRS]
    words = [f"manage:{address}" for address in MINE]
    words += [f"{right}:{address}" for address in THEIRS if THERE[right]]
    async with (
        Broker(
            "shop",
            fronts=fronts,
            users={"ada": "pw"},
            access=Access(rules if source == "rule" else ()),
            cbs=Cbs([Jwt(audience="shop", secret=SECRET)]) if source == "token" else None,
            plain_in_clear=True,
            volatile=True,
        ) as shop,
        Container("client") as client,
    ):
        (url,) = await shop.listen("amqp://127.0.0.1:0")
        url = url.replace("://", "://ada:pw@")
        async with client.connect(url, reconnect=None) as peer, AsyncExitStack() as stack:
            await peer.wait_open()
            if source == "token":
                async with peer.sender("$cbs") as cbs:
                    said = Message(token(" ".join(words)), subject="set-token")
                    said.application_properties = {"token-type": "jwt"}
                    await cbs.send(said)
            other = None
            if fronts == ["amqp091"]:
                amqp091 = pytest.importorskip("amqp_rt_amqp091")
                other = await stack.enter_async_context(amqp091.connect(url))
            elif fronts:
                where = url.replace("ada:pw@", "")
                other = await stack.enter_async_context(rights010.holder010(where, "ada", None))
            yield shop, peer, other


def dead_lettering(exchange: str, key: str | None) -> Operation:
    arguments = {"x-dead-letter-exchange": exchange}
    if key is not None:
        arguments["x-dead-letter-routing-key"] = key
    return on_channel(lambda channel: channel.declare_queue("new", arguments=arguments))


PASSAGES: dict[str, dict[str, Operation]] = {
    "AMQP Management": {
        "CREATE a queue with dead_letter q": managing("CREATE", {"dead_letter": "q"}, name="new"),
        "CREATE a queue with dead_letter q, which is not there": managing(
            "CREATE", {"dead_letter": "q"}, name="new"
        ),
        "CREATE a queue with the exchange q as dead_letter": managing(
            "CREATE", {"dead_letter": "/exchanges/q/key"}, name="new"
        ),
        **{
            f"CREATE a {kind} with the alias q": managing(
                "CREATE", {"kind": kind, "aliases": ["q"]}, name="new"
            )
            for kind in ("queue", "topic", "log")
        },
        "UPDATE mine to dead_letter q": managing("UPDATE", {"dead_letter": "q"}, name="mine"),
        "UPDATE mine to the alias q": managing("UPDATE", {"aliases": ["q"]}, name="mine"),
        "MOVE from mine to q": managing("MOVE", name="mine", to="q"),
        "MOVE from q to mine": managing("MOVE", name="q", to="mine"),
    },
    "AMQP 0-9-1": {
        "declare a queue with dead letters to q": dead_lettering("", "q"),
        "declare a queue with dead letters to q, which is not there": dead_lettering("", "q"),
        "declare a queue with dead letters to the exchange q": dead_lettering("q", "key"),
        "declare a queue with dead letters to any queue": dead_lettering("", None),
        "declare an exchange with the alternate exchange q": on_channel(
            lambda channel: channel.declare_exchange("new", arguments={"alternate-exchange": "q"})
        ),
        "bind mine to the exchange q": on_channel(lambda channel: channel.bind_queue("mine", "q")),
        "bind q to the exchange mine": on_channel(lambda channel: channel.bind_queue("q", "mine")),
        "unbind q from the exchange mine": on_channel(
            lambda channel: channel.unbind_queue("q", "mine")
        ),
        "bind the exchange mine to the exchange q": on_channel(
            lambda channel: channel.bind_exchange("mine", "q")
        ),
        "bind the exchange q to the exchange mine": on_channel(
            lambda channel: channel.bind_exchange("q", "mine")
        ),
    },
    "AMQP 0-10": rights010.PASSAGES,
}
#: Declarations of nodes that do not exist before.
MADE = ("alias", "not there")


async def release(shop: Broker, name: str, operation: Operation, peer: Any) -> str:
    """Return the result of *operation* where only ``mine`` and ``q`` exist."""
    for each in ("mine", "q", "new"):
        if shop.host.space().has(each):
            shop.host.space().delete(each)
    space = shop.topologies.space("")
    for exchange in ("mine", "q", "new"):
        if exchange in space.exchanges:
            space.exchanges.delete(exchange)
        if exchange != "new":
            space.exchanges.declare(Exchange(name=exchange, type="fanout"))
    made = any(words in name for words in MADE)
    await shop.declare(Queue("mine"), *([] if made else [Queue("q")]))
    try:
        with trio.fail_after(5):
            await operation(peer)
    except CallFailed as error:
        return str(error.info.get("statusCode") or error.condition)
    except AmqpError as error:
        return error.condition
    return matrix.ALLOWED


@pytest.mark.req("SE11", "SE17", "G2")
@pytest.mark.parametrize("right", matrix.RIGHTS_THERE)
@pytest.mark.parametrize(
    ("protocol", "source"),
    [
        (protocol, source)
        for protocol in matrix.PASSAGES_OF
        for source in matrix.SOURCES
        if source != "token" or protocol not in matrix.WITHOUT_TOKENS
    ],
)
async def test_who_may_let_messages_go_where(protocol: str, source: str, right: str) -> None:
    assert set(PASSAGES[protocol]) == set(matrix.PASSAGES_OF[protocol])
    wrong = []
    async with declarer(source, fronts_of(protocol), right) as (shop, peer, other):
        for name, operation in PASSAGES[protocol].items():
            found = await release(shop, name, operation, other or peer)
            expected = matrix.PASSAGES_OF[protocol][name][right]
            if found != expected:
                wrong.append((name, found, expected))
    assert wrong == []


# --- the page --------------------------------------------------------------------------------------


def test_the_page_shows_what_is_proved_here() -> None:
    tools = Path(__file__).parents[2] / "docs" / "_tools" / "security_matrix.py"
    if not tools.exists():
        pytest.skip("the documentation is not here")
    spec = importlib.util.spec_from_file_location("security_matrix_page", tools)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text("utf-8") == module.page(), (
        "run python docs/_tools/security_matrix.py"
    )


def test_every_protocol_has_its_operations() -> None:
    assert set(OPERATIONS) == set(matrix.RIGHTS_OF)
    assert set(PASSAGES) == set(matrix.PASSAGES_OF)
