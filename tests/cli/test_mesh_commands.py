"""``amqp-rt serve --mesh`` and ``amqp-rt mesh``: real processes, their output and exit codes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import certificates
from click.testing import CliRunner
from commands import Served, amqp_rt, ok

from amqp_rt import sync
from amqp_rt.cli.mesh import mesh
from amqp_rt.cli.serve import serve

pytestmark = pytest.mark.req("P7")


APPLICATION = """
from amqp_rt import Container, rpc


@rpc("price/{sku}")
async def price(sku: str) -> str:
    return f"{sku}: 9.50"


@rpc("echo")
async def echo(text: str | None = None) -> str:
    return f"{text}!"


app = Container("two", nodes=[price, echo])
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """A broker, and the container of a file, in one mesh."""
    file = tmp_path_factory.mktemp("mesh") / "shop.py"
    file.write_text(APPLICATION)
    interior = ("--mesh-name", "shop", "--mesh-role", "interior")
    one = Served("--dev", "--name", "one", *interior)
    two = Served(f"{file}:app", "--mesh", one.url, *interior, "--zone", "eu-1")
    deadline = time.monotonic() + 30
    while amqp_rt("mesh", "health", "--address", "price/1", url=one.url).returncode:
        assert time.monotonic() < deadline, "the members have not found each other"
    yield one, two
    for each in (two, one):
        code, errors = each.stop()
        assert code == 0, errors


@pytest.mark.slow
def test_what_a_member_knows(pair: tuple[Served, Served]) -> None:
    one, two = pair
    shown = ok("mesh", "show", url=one.url)
    assert shown.startswith("one, interior of mesh 'shop': ready, 2 nodes within reach")
    assert [line.split()[:4] for line in shown.splitlines()[2:]] == [
        # It has a broker, which coordinates transactions.
        ["one", "here", "0", "1"],
        ["two", "up", "eu-1", "1"],
    ]
    addresses = ok("mesh", "show", "addresses", "price/*", url=two.url)
    assert addresses.splitlines()[1].split() == ["price/{sku}", "balanced", "1", "two"]
    path = ok("mesh", "show", "path", "price/A-1", url=one.url)
    assert path.splitlines()[0] == "price/A-1: balanced, 1 node"
    assert path.splitlines()[2].endswith("one > two")
    # A client of one sends to two, by a leg of one.
    amqp_rt("send", "price/A-1", "x", url=one.url)
    (leg,) = ok("mesh", "show", "legs", "--json", url=one.url).splitlines()
    assert json.loads(leg)["path"] == ["two"]
    absent = amqp_rt("mesh", "show", "path", "prices", url=one.url)
    assert absent.returncode == 1
    assert absent.stderr.startswith("Error: no node within reach of 'one' serves 'prices'")


@pytest.mark.slow
def test_requests_are_answered_wherever_they_are_sent(pair: tuple[Served, Served]) -> None:
    for member in pair:
        assert ok("request", "price/A-1", url=member.url) == "A-1: 9.50\n"
        assert ok("request", "echo", url=member.url) == "None!\n"
        assert ok("request", "echo", "hello", url=member.url) == "hello!\n"
        assert ok("request", "echo", "-", stdin="typed", url=member.url) == "typed!\n"
        with sync.Container("caller") as box, box.connect(member.url) as peer:
            assert peer.call("echo", "hello", reply=str, within=10) == "hello!"


@pytest.mark.slow
def test_probes_have_exit_codes(pair: tuple[Served, Served]) -> None:
    one, _ = pair
    assert json.loads(ok("mesh", "health", "--json", url=one.url))["ready"] is True
    absent = amqp_rt("mesh", "health", "--address", "none", url=one.url)
    assert (absent.returncode, absent.stdout.strip().rpartition("; ")[2]) == (
        3,
        "no node alive serves 'none'",
    )
    assert amqp_rt("mesh", "health", url="amqp://127.0.0.1:1").returncode == 1


@pytest.mark.slow
def test_a_drained_member_is_live_and_not_ready(tmp_path: Path) -> None:
    alone = Served("--dev", "--name", "alone", "--mesh-name", "shop", "--mesh-role", "interior")
    assert ok("mesh", "drain", url=alone.url).startswith("alone is drained")
    drained = json.loads(ok("mesh", "drain", "--json", url=alone.url))
    assert (drained["node"], drained["draining"], drained["busy"]) == ("alone", True, False)
    assert amqp_rt("mesh", "health", url=alone.url).returncode == 3
    assert ", draining" in ok("mesh", "health", "--live", url=alone.url) + ", draining"
    assert alone.stop()[0] == 0


@pytest.mark.slow
def test_a_broker_without_a_mesh_says_so() -> None:
    plain = Served("--dev")
    try:
        done = amqp_rt("mesh", "show", url=plain.url)
        assert done.returncode == 1
        assert "is no member of a mesh: start it with amqp-rt serve --mesh SEED" in done.stderr
    finally:
        plain.stop()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "path"], "which address? amqp-rt mesh show path ADDRESS"),
        (["show", "nodes", "x"], "leave ADDRESS out"),
        (["show", "nods"], "'nods' is not one of"),
    ],
)
def test_mistakes_are_sentences(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(mesh, arguments)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--zone", "eu"],
            "--zone, --mesh-role, --mesh-direct and --mesh-rule go with --mesh SEED",
        ),
        (["--mesh-name", "m", "--mesh-direct"], "give --mesh-role interior as well"),
        (["--mesh", "dns+a://"], "is no seed: it names a host"),
        (["--mesh", "amqp://h", "--name", "a/b"], "no '/' in it: give another --name"),
        (
            ["--mesh-name", "m", "--mesh-rule", "a?distributon=multicast"],
            "did you mean 'distribution'?",
        ),
        (["--mesh-name", "m", "--mesh-rule", "a?distribution=all"], "Invalid enum value 'all'"),
        (["--mesh-name", "m", "--mesh-rule", "a?resend=x"], "resend"),
    ],
)
def test_mistakes_in_options_of_the_mesh_are_sentences(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(serve, ["--listen", "amqp://127.0.0.1:0", *arguments])
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())


@pytest.mark.slow
@pytest.mark.req("P4")
def test_certificates_are_the_logins_of_members(tmp_path: Path) -> None:
    made = certificates()
    tls = ("--tls-client-ca", str(made.ca), "--mesh-name", "shop", "--mesh-role", "interior")
    access = tmp_path / "access.toml"
    access.write_text(
        '[[rule]]\naddress = "$mesh"\nrights = ["manage"]\nusers = ["one", "two"]\n'
        '[[rule]]\naddress = "*"\nrights = ["send", "listen", "manage"]\nusers = ["ada"]\n'
    )
    login = ("--ca", str(made.ca), "--cert", str(made.client))
    started: list[Served] = []

    def serve_as(name: str, *seeds: str) -> Served:
        certificate = made.issue("localhost", "127.0.0.1", common_name=name)
        dialled = [part for each in seeds for part in ("--mesh", each)]
        options = ("--name", name, "--tls-cert", str(certificate), "--access", str(access))
        member = Served("--volatile", *options, *tls, *dialled, listen="amqps://127.0.0.1:0")
        started.append(member)
        return member

    def nodes_of(member: Served) -> list[str]:
        shown = ok("mesh", "show", "--json", *login, url=member.url)
        return [json.loads(line)["name"] for line in shown.splitlines()]

    try:
        one = serve_as("one")
        two = serve_as("two", one.url)
        deadline = time.monotonic() + 30
        while nodes_of(two) != ["two", "one"]:
            assert time.monotonic() < deadline, "the members have not found each other"
        # The certificate of a stranger to the rules is good for TLS, and makes no member.
        other = serve_as("three", one.url)
        while True:
            asked = ok("mesh", "health", "--live", "--json", *login, url=one.url)
            if any(reason.startswith("member: ") for reason in json.loads(asked)["refused"]):
                break
            assert time.monotonic() < deadline, asked
        assert nodes_of(other) == ["three"]
        assert nodes_of(one) == ["one", "two"]
    finally:
        ends = [each.stop() for each in reversed(started)]
    assert [code for code, _ in ends] == [0, 0, 0], ends


def test_the_example_of_the_help_states_the_role_of_each_member() -> None:
    """On one machine a member without a role is an edge, and two edges form no mesh."""
    said = CliRunner().invoke(mesh, ["--help"]).output.replace("\\\n", "")
    commands = [line for line in said.splitlines() if "amqp-rt serve" in line]
    assert len(commands) == 2
    assert all("--mesh-role interior" in each for each in commands)
