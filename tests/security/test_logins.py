"""Logins from end to end: every mechanism, over the wire, with what is right and what is not."""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import wire
from stalls import beside

from amqp_rt.addresses import parse_url
from amqp_rt.broker import Broker
from amqp_rt.container.container import Container
from amqp_rt.container.logins import FairGate, _in_a_thread
from amqp_rt.container.tokens import Sas
from amqp_rt.core.frames import SASL_HEADER
from amqp_rt.core.sasl_frames import SaslInit, SaslResponse
from amqp_rt.errors import AuthenticationFailed, ConnectFailed
from amqp_rt.events import LoginRequested, Peer
from amqp_rt.limits import Limits
from amqp_rt.net.memory import memory_stream_pair
from amqp_rt.security.bearer import BearerServer, CbsLogin, Login, OAuthBearer, XOAuth2
from amqp_rt.security.identities import Users, password_line
from amqp_rt.security.jwts import Jwt
from amqp_rt.security.mechanisms import (
    Anonymous,
    Challenge,
    External,
    Failure,
    Plain,
    Step,
    Success,
)
from amqp_rt.security.scram import Scram
from amqp_rt.security.tokens import SAS_TYPE, BearerToken, Cbs, SasKeys, Swt, sas_token

HASTY = Limits(failed_login_delay_s=0)


async def login(server: dict[str, Any], kind: Any = Container, **client: Any) -> Peer:
    """Who we are to a server after connecting."""
    async with kind("server", limits=HASTY, **server) as made:
        container = made.container if kind is Broker else made
        (url,) = await made.listen("amqp://127.0.0.1:0")
        if "user" in client:
            url = url.replace("://", f"://{client.pop('user')}@")
        async with (
            Container("client") as ours,
            ours.connect(url, reconnect=None, **client),
        ):
            (connection,) = container.connections
            return connection.peer


async def verify(token: str, peer: Peer) -> Login | None:
    return Login("ada", {"token": token}) if token == "good" else None


USERS = {"ada": "pw"}
GOOD = [
    (["SCRAM-SHA-512"], Scram("ada", "pw", "SHA-512"), "ada"),
    (["SCRAM-SHA-256"], Scram("ada", "pw", "SHA-256"), "ada"),
    (["SCRAM-SHA-1"], Scram("ada", "pw", "SHA-1"), "ada"),
    (["PLAIN"], Plain("ada", "pw"), "ada"),
    (["OAUTHBEARER"], OAuthBearer("good"), "ada"),
    (["OAUTHBEARER"], OAuthBearer("good", user="ada"), "ada"),
    (["XOAUTH2"], XOAuth2("good"), "ada"),
    (["XOAUTH2"], XOAuth2("good", user="ada"), "ada"),
    (["ANONYMOUS"], Anonymous(), None),
    (
        ["AMQPCBS"],
        CbsLogin([BearerToken(sas_token("q", "a", "k", 4_000_000_000), type=SAS_TYPE)]),
        None,
    ),
    (["MSSBCBS"], CbsLogin(), None),
]


@pytest.mark.req("SE1", "SE2", "SE3", "SE4", "SE16")
@pytest.mark.parametrize(("sasl", "auth", "user"), GOOD, ids=lambda each: str(each)[:30])
async def test_who_is_right_gets_in(sasl: list[str], auth: Any, user: str | None) -> None:
    cbs = Cbs([SasKeys({"a": "k"})]) if sasl[0].endswith("CBS") else None
    server = {"sasl": sasl, "users": USERS, "tokens": verify, "cbs": cbs}
    peer = await login(server, auth=auth)
    assert (peer.user, peer.mechanism) == (user, sasl[0])


BAD = [
    (["SCRAM-SHA-256"], Scram("ada", "guess")),
    (["SCRAM-SHA-256"], Scram("nobody", "pw")),
    (["SCRAM-SHA-256"], Scram("ada", "pw", authorize_as="bob")),
    (["PLAIN"], Plain("ada", "guess")),
    (["PLAIN"], Plain("nobody", "pw")),
    (["OAUTHBEARER"], OAuthBearer("bad")),
    (["OAUTHBEARER"], OAuthBearer("good", user="bob")),
    (["XOAUTH2"], XOAuth2("bad")),
    (["XOAUTH2"], XOAuth2("good", user="bob")),
    (["SCRAM-SHA-256"], Anonymous()),
    (["ANONYMOUS"], Plain("ada", "pw")),
    (["PLAIN"], External()),
    (["EXTERNAL"], External()),
]


@pytest.mark.req("SE1", "SE2", "SE3", "SE4")
@pytest.mark.parametrize(("sasl", "auth"), BAD, ids=lambda each: str(each)[:30])
async def test_who_is_wrong_does_not(sasl: list[str], auth: Any) -> None:
    # A peer without a certificate is offered nothing where there is only EXTERNAL.
    expected = ConnectFailed if sasl == ["EXTERNAL"] else AuthenticationFailed
    with pytest.raises(expected):
        await login({"sasl": sasl, "users": USERS, "tokens": verify}, auth=auth)


@pytest.mark.req("SE3")
@pytest.mark.parametrize(
    ("sasl", "mechanism"),
    [
        (None, "SCRAM-SHA-512"),
        (["PLAIN"], "PLAIN"),
        (["PLAIN", "SCRAM-SHA-256"], "SCRAM-SHA-256"),
    ],
)
async def test_a_password_is_not_shown_where_it_need_not_be(
    sasl: Collection[str] | None, mechanism: str
) -> None:
    peer = await login({"users": USERS, "sasl": sasl}, user="ada:pw")
    assert (peer.user, peer.mechanism) == ("ada", mechanism)


@pytest.mark.req("SE3")
async def test_users_of_a_file_use_what_all_of_them_have(tmp_path: Path) -> None:
    path = tmp_path / "users"
    lines = [password_line("ada", "pw", scram=["SHA-256"]), password_line("bob", "pw")]
    path.write_text(lines[0], "utf-8")
    users = Users()
    users.load(path)
    assert (users.scram_hashes, users.check("ada", "pw")) == (("SHA-256",), "ada")
    peer = await login({"users": users}, user="ada:pw")
    assert peer.mechanism == "SCRAM-SHA-256"
    path.write_text("\n".join(lines), "utf-8")
    users = Users()
    users.load(path)
    assert users.scram_hashes == ()
    assert (await login({"users": users}, user="bob:pw")).mechanism == "PLAIN"


@pytest.mark.req("SE4")
async def test_a_token_is_asked_for_before_each_connection() -> None:
    asked = []

    async def token() -> str:
        asked.append(1)
        await trio.lowlevel.checkpoint()
        return "good"

    auth = OAuthBearer(token)
    for _ in range(2):
        peer = await login({"tokens": verify}, auth=auth)
        assert peer.identity == {"token": "good"}
    assert len(asked) == 2

    async def none() -> str:
        return "no\x01token"

    with pytest.raises(AuthenticationFailed, match="there is no token"):
        await login({"tokens": verify}, auth=OAuthBearer(none))
    assert "good" not in repr(auth) + repr(XOAuth2("good"))


@pytest.mark.req("SE4", "SE1")
@pytest.mark.parametrize("name", ["OAUTHBEARER", "XOAUTH2"])
@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"\xff",
        b"n,,",
        b"n,,\x01auth=Bearer good",
        b"n,,\x01auth=Basic good\x01\x01",
        b"n,,\x01auth=Bearer a b\x01\x01",
        b"n,,\x01auth=Bearer good\x01auth=Bearer bad\x01\x01",
        b"p=x,,\x01auth=Bearer good\x01\x01",
        b"user=ada\x01auth=\x01\x01",
        b"user=ada\x01auth=Bearer good\x01",
    ],
)
async def test_a_malformed_token_login_fails(name: str, response: bytes) -> None:
    step = await BearerServer(name, verify).begin().respond(response, Peer())
    assert isinstance(step, Failure)


@pytest.mark.req("SE4")
async def test_why_a_token_is_refused_is_said_in_its_own_words() -> None:
    exchange = BearerServer("OAUTHBEARER", verify).begin()
    assert await exchange.respond(None, Peer()) == Challenge(b"")
    step = await exchange.respond(OAuthBearer("bad").initial(), Peer())
    assert step == Challenge(b'{"status":"invalid_token"}')
    assert isinstance(await exchange.respond(b"\x01", Peer()), Failure)
    # However good what comes then.
    assert isinstance(await exchange.respond(OAuthBearer("good").initial(), Peer()), Failure)


@pytest.mark.req("SE9")
def test_secrets_do_not_cross_a_network_in_clear() -> None:
    from amqp_rt.security.mechanisms import offered

    container = Container(
        "server",
        users=USERS,
        tokens=verify,
        cbs=Cbs([SasKeys({})]),
        sasl=["PLAIN", "SCRAM-SHA-256", "OAUTHBEARER", "XOAUTH2", "AMQPCBS", "ANONYMOUS"],
    )

    def names(*, secure: bool) -> tuple[str, ...]:
        mechanisms = container.entry._logins_of[None].mechanisms.values()
        return offered(mechanisms, secure=secure, local=False, plain_in_clear=False)

    assert names(secure=False) == ("SCRAM-SHA-256", "ANONYMOUS")
    assert names(secure=True) == (
        *("SCRAM-SHA-256", "OAUTHBEARER", "XOAUTH2", "PLAIN", "AMQPCBS", "ANONYMOUS"),
    )


# --- mechanisms of one's own -----------------------------------------------------------------------


class Riddle:
    """A mechanism of several steps that waits: twice the number, please."""

    name = "X-RIDDLE"

    def __init__(self) -> None:
        self.number = 0

    def begin(self) -> Riddle:
        return Riddle()

    async def respond(self, response: bytes | None, peer: Peer) -> Step:
        await trio.sleep(0.01)
        if response is None:
            self.number = 21
            return Challenge(b"21")
        if response == b"%d" % (2 * self.number):
            return Success("sphinx", {"asked": self.number}, b"well done")
        return Failure("a wrong answer")


class Answer:
    name = "X-RIDDLE"

    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.told: bytes | None = None
        self.ready = 0

    async def prepare(self) -> None:
        await trio.sleep(0.01)
        self.ready += 1

    def initial(self) -> bytes | None:
        return None

    def respond(self, challenge: bytes) -> bytes:
        return b"%d" % (self.factor * int(challenge))

    def finish(self, data: bytes | None) -> None:
        self.told = data


@pytest.mark.req("SE5", "A16", "U1")
async def test_a_mechanism_of_ones_own() -> None:
    right = Answer(2)
    peer = await login({"sasl": [Riddle(), "ANONYMOUS"]}, auth=[right, Anonymous()])
    assert (peer.user, peer.mechanism, peer.identity) == ("sphinx", "X-RIDDLE", {"asked": 21})
    assert (right.told, right.ready) == (b"well done", 1)
    with pytest.raises(AuthenticationFailed):
        await login({"sasl": [Riddle()]}, auth=Answer(3))


@pytest.mark.req("SE5", "SE4")
async def test_a_secret_that_does_not_come_in_time(autojump_clock: trio.testing.MockClock) -> None:
    async def never() -> str:
        await trio.sleep_forever()
        raise AssertionError

    async with Container("server", tokens=verify) as container:
        await container.listen("memory://server")
        async with Container("client", network=container.network) as ours:
            with pytest.raises(ConnectFailed, match="was not ready"):
                async with ours.connect(
                    "memory://server", auth=OAuthBearer(never), reconnect=None, within=3
                ):
                    pass
    assert trio.current_time() == pytest.approx(3)


# --- policies --------------------------------------------------------------------------------------


@pytest.mark.req("SE6")
@pytest.mark.parametrize("kind", [Container, Broker])
@pytest.mark.parametrize("policy", [None, "required", "optional"])
async def test_whether_clients_must_log_in_is_a_policy(kind: Any, policy: Any) -> None:
    server = {"users": USERS, "sasl_policy": policy}
    assert (await login(server, kind, user="ada:pw")).user == "ada"
    if policy == "optional":
        peer = await login(server, kind, sasl=False)
        assert (peer.user, peer.mechanism) == (None, None)
    else:
        with pytest.raises(ConnectFailed):
            await login(server, kind, sasl=False)
    anonymous = {"sasl": ["ANONYMOUS"], "sasl_policy": policy}
    if policy == "required":
        with pytest.raises(ConnectFailed):
            await login(anonymous, kind, sasl=False)
    else:
        assert (await login(anonymous, kind, sasl=False)).user is None


@pytest.mark.req("SE6")
async def test_there_may_be_no_sasl_layer_at_all() -> None:
    server = {"sasl_policy": "off"}
    assert (await login(server, sasl=False)).mechanism is None
    with pytest.raises(ConnectFailed):
        await login(server, auth=Anonymous())
    for more in ({"users": USERS}, {"sasl": ["ANONYMOUS"]}, {"tokens": verify}):
        with pytest.raises(ValueError, match="leave sasl, users and tokens out"):
            Container("server", **server, **more)
    with pytest.raises(ValueError, match="required, optional, off"):
        Container("server", sasl_policy="maybe")  # type: ignore[arg-type]


@pytest.mark.req("SE2", "SE3")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sasl": ["PLAIN"]}, "there are no users"),
        ({"sasl": ["SCRAM-SHA-256"]}, "there are no users"),
        ({"sasl": ["OAUTHBEARER"]}, "no validator of tokens"),
        ({"sasl": ["AMQPCBS"]}, "no tokens are taken"),
        ({"sasl": ["CRAM-MD5"]}, "the mechanism 'CRAM-MD5' is not known: EXTERNAL, SCRAM-SHA-512"),
    ],
)
def test_what_a_mechanism_needs(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Container("server", **options)


@pytest.mark.req("SE2", "SE18")
async def test_each_failure_is_told_later(autojump_clock: trio.testing.MockClock) -> None:
    """Whatever its cause: a wrong answer, a mechanism that was not offered, too long a response."""

    class Wrong(Answer):
        def __init__(self, name: str, response: bytes) -> None:
            super().__init__(3)
            self.name = name
            self.response = response

        def initial(self) -> bytes | None:
            return self.response

    async with Container(
        "server", sasl=[Riddle()], limits=Limits(sasl_response_max=100)
    ) as container:
        await container.listen("memory://server")
        took = []
        for auth in (Wrong("X-RIDDLE", b"1"), Wrong("X-RIDDLE", b"x" * 101), Answer(3)):
            began = trio.current_time()
            async with Container("client", network=container.network) as ours:
                with pytest.raises(AuthenticationFailed):
                    async with ours.connect("memory://server", auth=auth, reconnect=None):
                        pass
            took.append(round(trio.current_time() - began))
    assert took == [1, 2, 4]


SECRETS = [
    Plain("ada", "s3cret"),
    Scram("ada", "s3cret", "SHA-256"),
    OAuthBearer("s3cret"),
    XOAuth2("s3cret", user="ada"),
    BearerToken("s3cret"),
    CbsLogin([BearerToken("s3cret")]),
    SasKeys({"rule": "s3cret"}),
    Swt(b"s3cret"),
    Jwt(audience="a", secret=b"s3cret" * 10),
    Cbs([SasKeys({"rule": "s3cret"})]),
    Users({"ada": "s3cret"}),
    Sas("rule", "s3cret"),
    LoginRequested("PLAIN", b"\0ada\0s3cret", None, None),
    SaslInit("PLAIN", b"\0ada\0s3cret"),
    SaslResponse(b"s3cret"),
    parse_url("amqp://ada:s3cret@host"),
]


@pytest.mark.parametrize("each", SECRETS, ids=lambda each: type(each).__name__)
def test_no_repr_shows_a_secret(each: Any) -> None:
    assert "s3cret" not in repr(each) + str(each)


@pytest.mark.req("SE18", "O1")
async def test_no_log_and_no_error_shows_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    """Neither of who is let in, nor of who is not, at the level that says most."""
    caplog.set_level("DEBUG")
    cbs = Cbs([SasKeys({"a": "k"})])
    good = sas_token("amqp://host/", "a", "k", 4_000_000_000)
    said = []
    for sasl, auth in (
        (["PLAIN"], Plain("ada", "pw-right")),
        (["PLAIN"], Plain("ada", "pw-wrong")),
        (["SCRAM-SHA-256"], Scram("ada", "pw-wrong", "SHA-256")),
        (["OAUTHBEARER"], OAuthBearer("t0ken-wrong")),
        (["XOAUTH2"], XOAuth2("t0ken-wrong", user="ada")),
        (["AMQPCBS"], CbsLogin([BearerToken(good, type=SAS_TYPE)])),
        (["AMQPCBS"], CbsLogin([BearerToken("t0ken-wrong", type=SAS_TYPE)])),
    ):
        server = {"sasl": sasl, "users": {"ada": "pw-right"}, "tokens": verify, "cbs": cbs}
        try:
            said.append(str((await login(server, auth=auth)).user))
        except AuthenticationFailed as error:
            said.append(str(error))
    text = caplog.text + "".join(said)
    assert "login from 127.0.0.1" in text
    for secret in ("pw-right", "pw-wrong", "t0ken", "sig="):
        assert secret not in text


class SlowUsers(Users):
    """Users whose checks come to their end when a test says so."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.checked, self.go = threading.Event(), threading.Event()

    def check(self, user: str, password: str) -> str | None:
        found = super().check(user, password)
        self.checked.set()
        assert self.go.wait(10)
        return found


@pytest.mark.req("SE2")
@pytest.mark.parametrize("change", ["delete", "password", None])
async def test_a_user_that_changes_while_the_password_is_checked_is_not_let_in(
    change: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "users"
    path.write_text(password_line("ada", "pw") + "\n", "utf-8")
    users = SlowUsers()
    users.load(path)
    verify = _in_a_thread(users)
    async with trio.open_nursery() as nursery:
        answer = beside(nursery, verify, "ada", "pw", Peer())
        await trio.to_thread.run_sync(users.checked.wait, 10)
        if change == "delete":
            users.forget("ada")
        elif change == "password":
            users.store("ada", "new")
        users.go.set()
        assert await answer.get() == (None if change else "ada")


@pytest.mark.req("SE18")
async def test_checks_of_passwords_take_turns_by_address() -> None:
    gate = FairGate(1)
    began = trio.Event()
    order: list[str] = []

    async def check(address: str) -> None:
        async with gate.turn(address):
            await began.wait()
            order.append(address)

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(check, "attacker")
        await trio.testing.wait_all_tasks_blocked()
        for address in ("one", "two", "one"):
            nursery.start_soon(check, address)
            await trio.testing.wait_all_tasks_blocked()
        began.set()
    # A check was running when they came; then each address has one turn in a round.
    assert order[:7] == ["attacker", "attacker", "one", "two", "attacker", "one", "attacker"]
    assert len(order) == 103
    assert gate._waiting == {}
    assert gate._free == 1


@pytest.mark.req("SE18")
async def test_a_place_given_to_one_who_has_just_gone_is_passed_on() -> None:
    gate = FairGate(1)
    inside: list[str] = []

    async def enter(name: str, scope: trio.CancelScope) -> None:
        with scope:
            async with gate.turn(name):
                inside.append(name)

    first, second, third = (trio.CancelScope() for _ in range(3))
    async with trio.open_nursery() as nursery, gate.turn("holder"):
        nursery.start_soon(enter, "first", first)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(enter, "second", second)
        nursery.start_soon(enter, "third", third)
        await trio.testing.wait_all_tasks_blocked()
        second.cancel()
        await trio.testing.wait_all_tasks_blocked()
        first.cancel()
        # The waiting task gets the place before it runs again.
    assert inside == ["third"]
    assert gate._free == 1
    assert gate._waiting == {}


@pytest.mark.req("SE18")
async def test_a_login_is_judged_as_long_as_its_connection_is_there() -> None:
    judged: list[str] = []
    begun = trio.Event()

    async def verify(user: str, password: str, peer: Peer) -> str | None:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            judged.append(user)
        return None

    ours, theirs = memory_stream_pair()
    async with Container("c", users=verify, plain_in_clear=True) as container:
        container.connection_nursery.start_soon(container.accept, ours, "192.0.2.1:5")
        await theirs.send_all(SASL_HEADER)
        await theirs.send_all(wire.frame(SaslInit("PLAIN", b"\0ada\0pw"), kind=1))
        await begun.wait()
        await theirs.aclose()
        with trio.fail_after(5):
            while not judged:
                await trio.lowlevel.checkpoint()
    assert judged == ["ada"]
