"""Lists of a running broker as scripts read them, and changes of what they list."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from click.testing import CliRunner, Result
from commands import COMMAND, Served
from msgspec import Struct

from amqp_rt import Connection, Container, Sender
from amqp_rt.cli import main
from amqp_rt.cli.listing import LISTINGS
from amqp_rt.errors import AmqpError

pytestmark = pytest.mark.slow

RULES = """
[groups]
staff = ["ada"]

[[rule]]
address = "*"
rights = ["manage"]
users = ["root"]

[[rule]]
address = "work"
rights = ["send"]
groups = ["staff"]

[[rule]]
address = "work"
rights = ["listen"]
users = ["*"]
virtual_host = ""
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("broker")
    (folder / "access.toml").write_text(RULES, "utf-8")
    served = Served(
        *("--user", "root:secret", "--user", "ada:secret", "--access", "access.toml"),
        *("--volatile", "--node", "queue:work", "--node", "topic:news"),
        cwd=folder,
    )
    yield served
    assert served.stop()[0] == 0


@pytest.fixture
def url(broker: Served) -> str:
    return broker.url.replace("amqp://", "amqp://root:secret@")


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


def ok(*arguments: str, stdin: str = "") -> str:
    done = run(*arguments, stdin=stdin)
    assert done.exit_code == 0, done.stderr
    return done.stdout


class NodeObject(Struct, forbid_unknown_fields=True):
    name: str
    kind: str
    dynamic: bool
    available: int
    acquired: int
    delayed: int
    messages: int
    bytes: int
    consumers: int
    producers: int
    enqueued: int
    delivered: int
    accepted: int
    requeued: int
    dead_lettered: int
    expired: int
    dropped: int
    failure: str | None


class HostObject(Struct, forbid_unknown_fields=True):
    name: str
    nodes: int


class ConnectionObject(Struct, forbid_unknown_fields=True):
    name: str
    container_id: str
    user: str | None
    address: str
    virtual_host: str
    protocol: str
    mechanism: str | None
    state: str
    sessions: int
    tokens: int


class SessionObject(Struct, forbid_unknown_fields=True):
    name: str
    connection: str
    channel: int
    links: int
    oldest_unsettled_s: float | None


class LinkObject(Struct, forbid_unknown_fields=True):
    name: str
    link_name: str
    connection: str
    session: str
    role: str
    address: str | None
    credit: int


class SubscriptionObject(Struct, forbid_unknown_fields=True):
    name: str
    topic: str
    connection: str
    container_id: str
    link: str


class TransactionObject(Struct, forbid_unknown_fields=True):
    name: str
    format: int
    global_id: str
    branch_id: str
    user: str | None
    state: str
    prepared_at: float


class OpenTransactionObject(Struct, forbid_unknown_fields=True):
    name: str
    connection: str | None
    container_id: str
    user: str | None
    state: str
    posts: int
    deliveries: int
    age_s: float
    error: str | None


class TerminusObject(Struct, forbid_unknown_fields=True):
    name: str
    user: str | None
    container_id: str
    link: str
    role: str
    address: str
    shared: bool
    durable: int
    expiry_policy: str
    timeout_s: int
    links: int
    expires_in_s: float | None


class ScheduleObject(Struct, forbid_unknown_fields=True):
    name: str
    to: str
    cron: str | None
    tz: str
    every_s: float | None
    catch_up: str
    durable: bool
    sent: int
    next_at: float | None
    last_at: float | None
    error: str | None


class UserObject(Struct, forbid_unknown_fields=True):
    name: str
    groups: list[str]
    connections: int


#: Schema of each object of a list: a change of one breaks scripts of users.
SCHEMAS: dict[str, type[Struct]] = {
    "node list": NodeObject,
    "node hosts": HostObject,
    "connections list": ConnectionObject,
    "sessions list": SessionObject,
    "links list": LinkObject,
    "subscriptions list": SubscriptionObject,
    "transactions list": TransactionObject,
    "transactions open": OpenTransactionObject,
    "termini list": TerminusObject,
    "schedules list": ScheduleObject,
    "user list": UserObject,
}


def objects(name: str, url: str) -> list[Any]:
    """Return the objects of the list *name*, each of its schema."""
    lines = ok(*name.split(), "--url", url, "--json").splitlines()
    return [msgspec.json.decode(line, type=SCHEMAS[name], strict=True) for line in lines]


@pytest.mark.req("G6")
def test_every_list_has_a_schema() -> None:
    assert set(SCHEMAS) == set(LISTINGS)
    for name, listing in LISTINGS.items():
        schema = msgspec.json.schema(SCHEMAS[name])["$defs"][SCHEMAS[name].__name__]
        assert schema["additionalProperties"] is False
        assert list(schema["properties"]) == schema["required"] == list(listing.keys), name
        assert set(listing.columns) <= {*listing.keys, "times"}


@pytest.mark.req("G6")
async def test_lists_of_what_is_connected(url: str) -> None:
    async with (
        Container("clerk") as container,
        container.connect(url, reconnect=None) as peer,
        peer.receiver("news", credit=7),
        peer.sender("work") as sender,
    ):
        await sender.send("x")
        # Commands run a loop of their own.
        found = {
            name: await trio.to_thread.run_sync(objects, name, url)
            for name in SCHEMAS
            if name.partition(" ")[0] not in ("transactions", "termini")
        }
        # Each command lists its own connection, too.
        [ours] = [each for each in found["connections list"] if each.container_id == "clerk"]
        assert (ours.user, ours.protocol, ours.state) == ("root", "amqp1.0", "open")
        assert {(each.role, each.address) for each in found["links list"]} >= {
            ("receiver", "news"),
            ("sender", "work"),
        }
        [subscription] = found["subscriptions list"]
        assert (subscription.topic, subscription.container_id) == ("news", "clerk")
        assert f"{ours.name}/0" in [each.name for each in found["sessions list"]]
        work = next(each for each in found["node list"] if each.name == "work")
        assert (work.kind, work.available, work.producers) == ("queue", 1, 1)
        assert [each.name for each in found["user list"]] == ["ada", "root"]
        assert found["user list"][0].groups == ["staff"]
        assert found["node hosts"][0].name == ""

        def shown_and_closed() -> None:
            shown = json.loads(ok("connections", "show", ours.name, "--url", url, "--json"))
            assert shown["container_id"] == "clerk"
            assert "clerk" in ok("connections", "list", "--url", url)
            ok("subscriptions", "close", subscription.name, "--url", url)
            ok("connections", "close", ours.name, "--url", url)
            assert "clerk" not in ok("connections", "list", "--url", url)
            assert ok("node", "purge", "work", "--yes", "--url", url) == "1 messages dropped\n"

        await trio.to_thread.run_sync(shown_and_closed)


@pytest.mark.req("G6")
async def test_open_transactions_are_listed_and_rolled_back(url: str) -> None:
    async def transact(peer: Connection, sender: Sender) -> None:
        async with peer.transaction() as transaction:
            await sender.send("held", transaction=transaction)
            [found] = await trio.to_thread.run_sync(objects, "transactions open", url)
            assert (found.state, found.user, found.container_id) == ("open", "root", "clerk")
            assert (found.posts, found.deliveries, found.error) == (1, 0, None)
            assert 0 <= found.age_s < 60
            connections = await trio.to_thread.run_sync(objects, "connections list", url)
            [ours] = [each.name for each in connections if each.container_id == "clerk"]
            assert found.connection == ours

            def rolled_back() -> None:
                assert "clerk" in ok("transactions", "open", "--url", url)
                unknown = run("transactions", "rollback", "999", "--yes", "--url", url)
                assert unknown.exit_code == 1
                ok("transactions", "rollback", found.name, "--yes", "--url", url)

            await trio.to_thread.run_sync(rolled_back)
            [found] = await trio.to_thread.run_sync(objects, "transactions open", url)
            assert (found.state, found.posts) == ("rolled back", 0)
            assert found.error == "an operator has rolled it back"

    async with (
        Container("clerk") as container,
        container.connect(url, reconnect=None) as peer,
        peer.sender("work") as sender,
    ):
        # The client learns of it when it commits.
        with pytest.raises(AmqpError, match="an operator has rolled it back"):
            await transact(peer, sender)
        assert await trio.to_thread.run_sync(objects, "transactions open", url) == []


@pytest.mark.req("G6")
async def test_termini_are_listed_and_ended(url: str) -> None:
    async with (
        Container("reader") as container,
        container.connect(url, reconnect=None) as peer,
    ):
        receiver = peer.receiver("news", name="inbox", timeout=600)
        async with receiver:
            [found] = await trio.to_thread.run_sync(objects, "termini list", url)
            assert (found.container_id, found.link, found.role) == ("reader", "inbox", "receiver")
            assert (found.address, found.links, found.timeout_s) == ("news", 1, 600)
            assert found.expires_in_s is None
            refused = await trio.to_thread.run_sync(
                run, "termini", "close", found.name, "--url", url
            )
            assert "detach it first" in refused.output
            await receiver.suspend()
        [found] = await trio.to_thread.run_sync(objects, "termini list", url)
        assert found.links == 0

        def shown_and_ended() -> None:
            shown = json.loads(ok("termini", "show", found.name, "--url", url, "--json"))
            assert shown["link"] == "inbox"
            assert "inbox" in ok("termini", "list", "--url", url)
            ok("termini", "close", found.name, "--url", url)

        await trio.to_thread.run_sync(shown_and_ended)
        assert await trio.to_thread.run_sync(objects, "termini list", url) == []


@pytest.mark.req("G6")
def test_nodes_are_created_changed_and_deleted(url: str) -> None:
    ok("node", "create", "queue:jobs?max_deliveries=3", "log:clicks", "--url", url)
    ok("node", "update", "jobs", "max_deliveries=5", "lock_s=30", "--url", url)
    shown = json.loads(ok("node", "show", "jobs", "--url", url, "--json"))
    assert (shown["max_deliveries"], shown["lock_s"]) == (5, 30)
    ok("node", "update", "jobs", "max_deliveries=", "--url", url)
    shown = json.loads(ok("node", "show", "jobs", "--url", url, "--json"))
    assert (shown.get("max_deliveries"), shown["lock_s"]) == (None, 30)
    for arguments, sentence in (
        (["update", "jobs", "max_deliverys=3"], "is 'max_deliveries' meant?"),
        (["update", "jobs", "priorities"], "'priorities' is not OPTION=VALUE"),
        (["update", "jobs", "priorities=many"], "'jobs': "),
        (["create", "jobs"], "'jobs' is not KIND:NAME"),
        (["create", "queue:jobs?priorities=2"], "jobs"),
        (["delete", "nothing", "--yes"], "no node 'nothing'"),
    ):
        done = run("node", *arguments, "--url", url)
        assert done.exit_code in (1, 2), arguments
        assert sentence in done.stderr
    done = run("node", "delete", "jobs", "--url", url, stdin="n\n")
    assert "Delete queue jobs with 0 messages?" in done.stdout
    assert done.exit_code == 1
    ok("node", "delete", "jobs", "--url", url, stdin="y\n")
    ok("node", "delete", "clicks", "--yes", "--url", url)
    assert [each.name for each in objects("node list", url)] == ["news", "work"]
    assert json.loads(ok("node", "purge", "work", "--yes", "--json", "--url", url)) == {
        "messages": 0
    }


@pytest.mark.req("G6")
def test_schedules_are_listed_with_their_next_time(url: str) -> None:
    ok("node", "create", "schedule:tick?to=work&every_s=3600&payload=x", "--url", url)
    [tick] = objects("schedules list", url)
    assert (tick.to, tick.every_s, tick.cron, tick.sent) == ("work", 3600, None, 0)
    assert tick.next_at is not None
    assert 0 < tick.next_at - time.time() <= 3600
    assert ok("schedules", "list", "--url", url).splitlines()[1].split()[:5] == [
        *("tick", "work", "every", "3600", "s")
    ]
    assert json.loads(ok("schedules", "show", "tick", "--json", "--url", url))["payload"] == "x"
    ok("schedules", "close", "tick", "--url", url)
    assert objects("schedules list", url) == []


@pytest.mark.req("G6")
def test_users_of_a_broker(url: str, tmp_path: Path) -> None:
    ok("user", "add", "bob:first", "--url", url)
    ok("user", "add", "bob", "--url", url, stdin="second\n")
    bob = url.replace("root:secret", "bob:second")
    done = run("receive", "work", "--count", "1", "--timeout", "0.1", "--url", bob)
    assert "0 of 1 messages came" in done.stderr
    assert "bob" in ok("user", "list", "--url", url)
    ok("user", "remove", "bob", "--url", url)
    done = run("user", "remove", "bob", "--url", url)
    assert "there is no user 'bob'" in done.stderr
    done = run("user", "list", str(tmp_path / "none"), "--url", url)
    assert "give one of them" in done.stderr
    done = run("user", "add", "--scram", "sha-256", "bob:x", "--url", url)
    assert "--scram goes with a FILE" in done.stderr
    file = str(tmp_path / "users")
    ok("user", "add", file, "cy:pass-word")
    assert json.loads(ok("user", "list", file, "--json")) == {"name": "cy", "mechanisms": ["PLAIN"]}


@pytest.mark.req("G6")
@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize(
    ("user", "right", "address", "allowed", "reason"),
    [
        (
            "ada",
            "send",
            "work",
            True,
            "decided by the rule for address 'work' (groups staff): send",
        ),
        ("ada", "listen", "work", True, "(users *; virtual host ''): listen"),
        ("ada", "manage", "work", False, "user 'ada' has the right to send and listen there; "),
        ("cy", "send", "news", False, "no rule gives user 'cy' a right at 'news'"),
        ("-", "listen", "work", False, "no rule gives a peer without a user name a right"),
        ("root", "manage", "x", True, "(users root): manage"),
        # The right to listen at every address does not open the management node.
        ("ada", "listen", "$management", False, "'$management'"),
        ("ada", "listen", "work/$management", True, "a right that opens this address"),
    ],
)
def test_rules_are_explained(
    broker: Served,
    url: str,
    tmp_path: Path,
    offline: bool,
    user: str,
    right: str,
    address: str,
    allowed: bool,
    reason: str,
) -> None:
    (tmp_path / "rules.toml").write_text(RULES, "utf-8")
    where = ["--access", str(tmp_path / "rules.toml")] if offline else ["--url", url]
    done = run("access", "explain", user, right, address, *where)
    assert done.exit_code == (0 if allowed else 3), done.stderr
    assert done.stdout.startswith("yes: " if allowed else "no: ")
    assert reason in done.stdout
    found = json.loads(run("access", "explain", user, right, address, *where, "--json").stdout)
    assert list(found) == ["address", "right", "allowed", "rules", "reason"]
    assert found["allowed"] is allowed


@pytest.mark.req("G6")
def test_a_watched_list_is_written_again_until_its_reader_goes(url: str) -> None:
    with subprocess.Popen(
        [*COMMAND, "node", "list", "--json", "--watch", "100ms", "--url", url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        lines = [json.loads(watching.stdout.readline())["name"] for _ in range(6)]
        assert lines == ["news", "work"] * 3
        watching.stdout.close()
        assert watching.stderr.read() == ""
        assert watching.wait(timeout=30) == 1
    assert "at least 100ms" in run("node", "list", "--watch", "0", "--url", url).stderr
