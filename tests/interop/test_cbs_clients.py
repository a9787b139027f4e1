"""Claims-based security with other people's clients: proton, and Microsoft's own for Service Bus."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from certificates import certificates
from peer_programs import PeerPrograms

from amqp_rt import Broker, Peer
from amqp_rt.broker import Queue
from amqp_rt.errors import ConnectFailed
from amqp_rt.net.tls import ServerTls
from amqp_rt.security.access import Rights
from amqp_rt.security.tokens import SAS_TYPE, Cbs, SasKey, SasKeys, sas_token

KNOWN = certificates()
KEYS = SasKeys({"app": "k", "reader": SasKey(("k",), Rights.LISTEN)})


@asynccontextmanager
async def guarded(at: str = "amqp://127.0.0.1:0", **options: Any) -> AsyncIterator[dict[str, Any]]:
    """A broker that takes tokens; what programs need to know of it."""
    async with Broker(cbs=Cbs([KEYS]), tls=ServerTls(KNOWN.server), **options) as broker:
        await broker.declare(Queue("q"), Queue("r"))
        (url,) = await broker.listen(at)
        where: dict[str, Any] = {"port": int(url.rpartition(":")[2]), "address": "q"}
        if url.startswith("amqps"):
            where["tls"] = {"ca": str(KNOWN.ca)}
        yield where


def given(address: str, seconds: int = 600, rule: str = "app", key: str = "k") -> dict[str, str]:
    """A token as the program of proton puts it."""
    name = f"sb://localhost/{address}"
    token = sas_token(name, rule, key, int(time.time()) + seconds)
    return {"name": name, "type": SAS_TYPE, "token": token}


# --- proton ----------------------------------------------------------------------------------------


@pytest.mark.req("SE10", "SE13")
async def test_protons_client_puts_tokens(proton_programs: PeerPrograms) -> None:
    async with guarded() as where:
        tokens = [given("q", key="wrong"), given("q")]
        result = await proton_programs.run("authorize", tokens=tokens, count=3, **where)
    assert (result["statuses"], result["states"]) == ([401, 202], [["accepted"]] * 3)


@pytest.mark.req("SE10", "SE11", "SE13")
@pytest.mark.parametrize(
    "tokens", [[], [given("r")], [given("q", key="wrong")], [given("q", rule="reader")]]
)
async def test_without_its_token_protons_client_has_no_link(
    proton_programs: PeerPrograms, tokens: list[dict[str, str]]
) -> None:
    async with guarded() as where:
        result = await proton_programs.run("authorize", tokens=tokens, count=1, **where)
    assert result["error"]["scope"] == "link"
    assert result["error"]["condition"] == "amqp:unauthorized-access"


@pytest.mark.req("SE17")
async def test_the_application_sees_the_token_of_protons_client(
    proton_programs: PeerPrograms,
) -> None:
    asked: list[tuple[str, str, Rights]] = []

    async def authorize(peer: Peer, address: str, role: str) -> bool:
        asked.append((address, role, peer.tokens.rights(address)))
        return address != "r"

    async with guarded(authorize=authorize) as where:
        for address, tokens in (("q", [given("q")]), ("r", [given("r")]), ("q", [])):
            where["address"] = address
            result = await proton_programs.run("authorize", tokens=tokens, count=1, **where)
            if address == "q" and tokens:
                assert result["states"] == [["accepted"]]
            else:
                assert result["error"]["condition"] == "amqp:unauthorized-access"
    # Without a token there is nothing that the application could allow.
    both = Rights.SEND | Rights.LISTEN
    assert [each for each in asked if each[0] in "qr"] == [
        ("q", "sender", both),
        ("r", "sender", both),
    ]


@pytest.mark.req("SE12")
async def test_protons_client_hears_that_its_token_has_expired(
    proton_programs: PeerPrograms,
) -> None:
    async with guarded() as where:
        # Seconds enough for a login and a message on a busy machine.
        result = await proton_programs.run(
            "authorize", tokens=[given("q", 5)], count=1, stay=True, **where
        )
    assert result["states"] == [["accepted"]]
    assert result["error"]["condition"] == "amqp:unauthorized-access"
    assert "expired" in result["error"]["description"]


# --- azure-servicebus ------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.req("SE10", "SE15")
async def test_microsofts_client_sends_and_receives(azure_programs: PeerPrograms) -> None:
    """Its senders want to settle second and wait for us to have settled: ``settle_second=False``."""
    async with guarded(settle_second=False) as where:
        account = {"rule": "app", "key": "k", "count": 3}
        assert await azure_programs.run("send", **account, **where) == {"sent": 3}
        result = await azure_programs.run("receive", **account, **where)
    assert result["messages"] == ["0", "1", "2"]


@pytest.mark.req("SE7", "SE10", "SE15")
async def test_microsofts_client_over_tls(azure_programs: PeerPrograms) -> None:
    """It knows the one port that is registered for this."""
    async with AsyncExitStack() as stack:
        try:
            guard = guarded("amqps://localhost:5671", settle_second=False)
            where = await stack.enter_async_context(guard)
        except ConnectFailed as error:
            pytest.skip(str(error))
        account = {"rule": "app", "key": "k", "count": 2}
        assert await azure_programs.run("send", **account, **where) == {"sent": 2}
        result = await azure_programs.run("send", **{**account, "key": "wrong"}, **where)
    assert result["error"]["condition"] == "ServiceBusAuthenticationError"


@pytest.mark.req("SE10", "SE11")
@pytest.mark.parametrize(("rule", "key"), [("app", "wrong"), ("nobody", "k")])
async def test_microsofts_client_says_that_its_key_is_wrong(
    azure_programs: PeerPrograms, rule: str, key: str
) -> None:
    async with guarded() as where:
        result = await azure_programs.run("send", rule=rule, key=key, count=1, **where)
    assert result["error"]["condition"] == "ServiceBusAuthenticationError"


@pytest.mark.req("SE11")
async def test_microsofts_client_says_what_it_has_no_right_to(
    azure_programs: PeerPrograms,
) -> None:
    async with guarded() as where:
        result = await azure_programs.run("send", rule="reader", key="k", count=1, **where)
    assert result["error"]["condition"] == "ServiceBusAuthorizationError"
