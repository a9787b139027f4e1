"""Discovery: seeds become places, and follow what they name."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.resolver
import dns.rrset
import pytest
import trio
import trio.testing

from amqp_rt.addresses import parse_url
from amqp_rt.errors import ConnectFailed
from amqp_rt.loglimit import LogLimiter
from amqp_rt.mesh import discovery
from amqp_rt.mesh.discovery import FOUND_MAX, RESOLVED_S, Discovery, Found, Seed

SERVICE = "_amqps._tcp.shop.test."


def found(*urls: str, name: str | None = None) -> set[Found]:
    return {Found(parse_url(url), name) for url in urls}


class Hosts(trio.abc.HostnameResolver):
    """Addresses of names, as tests set them; counts the questions."""

    def __init__(self) -> None:
        self.known: dict[str, list[str]] = {}
        self.asked = 0

    async def getaddrinfo(self, host: Any, port: Any, *args: Any, **options: Any) -> Any:
        self.asked += 1
        await trio.lowlevel.checkpoint()
        name = host.decode() if isinstance(host, bytes) else host
        if name not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in self.known[name]
        ]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise NotImplementedError


@pytest.fixture
async def hosts() -> Hosts:
    made = Hosts()
    trio.socket.set_custom_hostname_resolver(made)
    return made


class Watched:
    """A discovery whose changes can be waited for."""

    def __init__(self, *seeds: Seed) -> None:
        self._changed = trio.Event()
        self.discovery = Discovery(seeds, self._on_change, LogLimiter())

    def _on_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    @property
    def places(self) -> frozenset[Found]:
        return self.discovery.places

    async def become(self, wanted: Collection[Found]) -> None:
        with trio.fail_after(10):
            while self.places != wanted:
                await self._changed.wait()


@asynccontextmanager
async def running(*seeds: Seed) -> AsyncIterator[Watched]:
    """Run a discovery; it has asked for its names once when the block begins."""
    async with trio.open_nursery() as nursery:
        watched = Watched(*seeds)
        nursery.start_soon(watched.discovery.run)
        await trio.testing.wait_all_tasks_blocked()
        yield watched
        nursery.cancel_scope.cancel()


# --- urls and addresses ----------------------------------------------------------------------------


@pytest.mark.req("P1", "A19")
async def test_urls_are_places_at_once() -> None:
    made = Discovery(["amqp://a:1", "amqps://u:secret@b"], lambda: None, LogLimiter())
    assert made.places == found("amqp://a:1", "amqps://u:secret@b")
    assert "secret" not in repr(made.places)


@pytest.mark.req("P1", "A19")
async def test_all_addresses_of_a_name_are_places(
    hosts: Hosts, autojump_clock: trio.testing.MockClock
) -> None:
    hosts.known["prices.svc"] = ["10.0.0.1", "fd00::2"]
    async with running("dns+a://prices.svc:5671") as made:
        urls = "amqps://10.0.0.1:5671", "amqps://[fd00::2]:5671"
        assert made.places == found(*urls, name="prices.svc")
        hosts.known["prices.svc"] = ["10.0.0.3"]
        await trio.sleep(RESOLVED_S + 0.1)
        assert made.places == found("amqps://10.0.0.3:5671", name="prices.svc")
        assert hosts.asked == 2


@pytest.mark.req("P1", "A19")
@pytest.mark.parametrize(
    ("seed", "urls"),
    [
        ("dns+a://n", ["amqp://10.0.0.1:5672"]),
        ("dns+a://n:7000", ["amqp://10.0.0.1:7000"]),
        ("dns+a://n:7000?scheme=amqps", ["amqps://10.0.0.1:7000"]),
        ("dns+a://n:443/mesh", ["wss://10.0.0.1:443/mesh"]),
        ("dns+a://n?scheme=ws", ["ws://10.0.0.1:80/"]),
    ],
)
async def test_schemes(
    hosts: Hosts, autojump_clock: trio.testing.MockClock, seed: str, urls: list[str]
) -> None:
    hosts.known["n"] = ["10.0.0.1"]
    async with running(seed) as made:
        assert {str(each.url) for each in made.places} == {str(parse_url(url)) for url in urls}


@pytest.mark.req("P1", "A19")
async def test_a_name_that_fails_keeps_what_was_found_and_is_tried_sooner(
    hosts: Hosts, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "amqp_rt.mesh")
    hosts.known["n"] = ["10.0.0.1"]
    async with running("dns+a://n") as made:
        del hosts.known["n"]
        await trio.sleep(RESOLVED_S + 0.5)
        assert made.places == found("amqp://10.0.0.1")
        hosts.known["n"] = ["10.0.0.2"]
        await trio.sleep(1)
        assert made.places == found("amqp://10.0.0.2")
    assert "no members found by dns+a://n: gaierror" in caplog.text


@pytest.mark.req("P1", "A19")
async def test_a_name_with_very_many_addresses_is_cut_off(
    hosts: Hosts, autojump_clock: trio.testing.MockClock
) -> None:
    addresses = [f"10.{n >> 8}.{n & 255}.1" for n in range(FOUND_MAX + 1)]
    hosts.known["n"] = addresses[:FOUND_MAX]
    async with running("dns+a://n") as made:
        assert len(made.places) == FOUND_MAX
        hosts.known["n"] = addresses
        await trio.sleep(RESOLVED_S + 1)
        assert len(made.places) == FOUND_MAX


# --- services --------------------------------------------------------------------------------------


class NameServer:
    """A DNS server at a port of this machine, with one set of SRV records."""

    def __init__(self) -> None:
        self.records: list[str] = []
        #: Questions that are answered with an error before the others.
        self.failing = 0

    async def serve(self, sock: trio.socket.SocketType) -> None:
        while True:
            octets, sender = await sock.recvfrom(4_096)
            question = dns.message.from_wire(octets)
            answer = dns.message.make_response(question)
            if self.failing:
                self.failing -= 1
                answer.set_rcode(dns.rcode.SERVFAIL)
            elif self.records:
                name = question.question[0].name
                answer.answer.append(dns.rrset.from_text(name, 30, "IN", "SRV", *self.records))
            await sock.sendto(answer.to_wire(), sender)


@pytest.fixture
async def names(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[NameServer]:
    server = NameServer()
    with trio.socket.socket(type=socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        nursery.start_soon(server.serve, sock)
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers = ["127.0.0.1"]
        resolver.port = sock.getsockname()[1]
        monkeypatch.setattr(dns.asyncresolver, "default_resolver", resolver)
        yield server
        nursery.cancel_scope.cancel()


@pytest.mark.req("P1", "A19")
async def test_services_are_found_and_followed(
    names: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "RESOLVED_S", 0.2)
    names.records = ["0 0 5671 a.shop.test.", "1 5 7000 b.shop.test."]
    async with running(f"dns+srv://{SERVICE}") as made:
        await made.become(found("amqps://a.shop.test:5671", "amqps://b.shop.test:7000"))
        names.records = ["0 0 5671 c.shop.test."]
        await made.become(found("amqps://c.shop.test:5671"))
        # Not offered at all (RFC 2782).
        names.records = ["0 0 0 ."]
        await made.become(set())


@pytest.mark.req("P1", "A19")
async def test_a_name_server_that_fails_is_asked_again(
    names: NameServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "RETRIED_S", 0.05)
    names.failing = 2
    names.records = ["0 0 5671 a.shop.test."]
    async with running(f"dns+srv://{SERVICE}") as made:
        await made.become(found("amqps://a.shop.test:5671"))
    assert "no members found by dns+srv" in caplog.text


# --- iterables -------------------------------------------------------------------------------------


@pytest.mark.req("P1", "A19")
async def test_an_iterable_is_followed_until_it_ends_or_fails(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def browsed() -> AsyncIterator[list[str]]:
        yield ["amqp://a"]
        await trio.sleep(1)
        yield ["amqp://b", "no url at all://"]
        await trio.sleep(1)
        raise OSError("the interface has gone")

    async with running(browsed()) as made:
        assert made.places == found("amqp://a")
        await trio.sleep(1.5)
        assert made.places == found("amqp://b")
        await trio.sleep(1)
        assert made.places == found("amqp://b")
    assert "the interface has gone" in caplog.text


@pytest.mark.req("P1", "A19")
async def test_changes_are_reported_once_each(
    hosts: Hosts, autojump_clock: trio.testing.MockClock
) -> None:
    hosts.known["n"] = hosts.known["m"] = ["10.0.0.1"]
    reported: list[frozenset[Found]] = []
    made = Discovery(["dns+a://n", "dns+a://m"], lambda: reported.append(made.places), LogLimiter())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await trio.sleep(10 * RESOLVED_S)
        assert reported == [found("amqp://10.0.0.1")]
        # Another seed still names it.
        hosts.known["n"] = ["10.0.0.2"]
        await trio.sleep(RESOLVED_S)
        assert reported[1:] == [found("amqp://10.0.0.1", "amqp://10.0.0.2")]
        nursery.cancel_scope.cancel()


@pytest.mark.req("P1", "A19")
@pytest.mark.parametrize(
    ("seed", "why"),
    [
        ("gopher://a", "gopher"),
        ("dns+mx://a", "dns+a:// and dns+srv://"),
        ("dns+a://", "names a host"),
        ("dns+a://u:p@a", "no user"),
        ("dns+a://a:99999", "ort"),
        ("dns+a://a?scheme=ftp", "amqp, amqps, ws, wss"),
        ("dns+a://a?ttl=3", "no option 'ttl'"),
        ("dns+srv://_amqp._tcp.a:1", "leave out"),
        ("dns+srv://shop.test", "?scheme="),
    ],
)
def test_a_wrong_seed_is_refused_with_its_reason(seed: str, why: str) -> None:
    with pytest.raises(ConnectFailed) as caught:
        Discovery([seed], lambda: None, LogLimiter())
    assert why in str(caught.value)
