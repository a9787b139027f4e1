"""Options of a server's engine for clients that are particular: repeated addresses, whole errors."""

from __future__ import annotations

from typing import Any

import pytest

from amqp_rt.codec.composites import encode_composite
from amqp_rt.errors import LocalProtocolError
from amqp_rt.events import Closed
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import ServerOptions
from amqp_rt.outcomes import Error, Rejected, Released
from amqp_rt.termini import Coordinator, Source, Target
from amqp_rt.testing.pairs import Joined, Recorder
from amqp_rt.transactions import TransactionalState

REFUSED = Error("amqp:not-found", "no such node")


def joined_with(**options: Any) -> tuple[Joined, Any]:
    """Return both ends, the server with *options*, and a session of the client."""
    server = amqp10.Front().server(
        ServerOptions(container_id="server", sasl_required=False, **options), 0.0
    )
    joined = Joined(server=server)
    joined.pump()
    return joined, joined.client.begin()


# --- Repeated addresses ---------------------------------------------------------------------


@pytest.mark.parametrize(("echoes", "answered"), [(False, "q"), (True, "amqps://ns/q")])
@pytest.mark.parametrize("sends", [False, True])
def test_an_answer_repeats_the_address_that_was_asked_for(
    echoes: bool, answered: str, sends: bool
) -> None:
    joined, session = joined_with(echo_addresses=echoes)

    def accept(link: Any) -> None:
        link.asked = "amqps://ns/q"
        if sends:
            link.accept(joined.endpoint, target=Target(address="q"))
            assert link.target.address == "q"
        else:
            link.accept(joined.endpoint, source=Source(address="q"))
            assert link.source.address == "q"

    joined.on_attach = accept
    if sends:
        link = session.attach_sender("l", Recorder(), target=Target(address="amqps://ns/q"))
    else:
        link = session.attach_receiver("l", Recorder(), source=Source(address="amqps://ns/q"))
    joined.pump()
    assert (link.target if sends else link.source).address == answered


def test_the_address_of_the_peers_own_terminus_is_answered_as_it_was() -> None:
    joined, session = joined_with(echo_addresses=True)

    def accept(link: Any) -> None:
        link.asked = "amqps://ns/q"
        link.accept(joined.endpoint)

    joined.on_attach = accept
    link = session.attach_sender(
        "l", Recorder(), source=Source(address="mine"), target=Target(address="q")
    )
    joined.pump()
    assert (link.source.address, link.target.address) == ("mine", "amqps://ns/q")


@pytest.mark.parametrize("target", [Coordinator(), Target(address="made", dynamic=True)])
def test_a_link_that_asked_for_no_address_is_answered_as_agreed(target: Any) -> None:
    joined, session = joined_with(echo_addresses=True)
    joined.on_attach = lambda link: link.accept(joined.endpoint, target=target)
    asked = Coordinator() if isinstance(target, Coordinator) else Target(dynamic=True)
    link = session.attach_sender("l", Recorder(), source=Source(), target=asked)
    joined.pump()
    assert link.target == target


def test_a_refusal_repeats_no_address() -> None:
    joined, session = joined_with(echo_addresses=True)

    def refuse(link: Any) -> None:
        link.asked = "q"
        link.refuse(REFUSED)

    joined.on_attach = refuse
    recorder = Recorder()
    link = session.attach_receiver("l", recorder, source=Source(address="q"))
    joined.pump()
    assert link.refused
    assert [error for error, _ in recorder.detached] == [REFUSED]


# --- Whole errors ---------------------------------------------------------------------------


def test_an_empty_info_is_encoded_and_an_absent_one_is_not() -> None:
    assert encode_composite(Error("a:b", None, {})).endswith(b"\xa3\x03a:b\x40\xc1\x01\x00")
    assert encode_composite(Error("a:b")).endswith(b"\xa3\x03a:b")


@pytest.mark.parametrize(("whole", "info"), [(False, None), (True, {})])
def test_errors_of_the_server_have_all_their_fields(whole: bool, info: Any) -> None:
    joined, session = joined_with(whole_errors=whole)
    joined.on_attach = lambda link: link.refuse(REFUSED)
    recorder = Recorder()
    session.attach_receiver("l", recorder, source=Source(address="q"))
    joined.pump()
    (error, _) = recorder.detached[0]
    assert error is not None
    assert error.info == info
    (their_session,) = joined.server.sessions.values()
    their_session.end(REFUSED)
    joined.pump()
    assert session.error.info == info
    joined.server.close(REFUSED)
    joined.pump()
    (closed,) = [each for each in joined.client_events if isinstance(each, Closed)]
    assert closed.error is not None
    assert closed.error.info == info


@pytest.mark.parametrize(
    ("state", "seen"),
    [
        (Rejected(Error("a:b", "c")), Rejected(Error("a:b", "c", {}))),
        (Rejected(Error("a:b", "c", {"x": 1})), Rejected(Error("a:b", "c", {"x": 1}))),
        (Rejected(), Rejected()),
        (Released(), Released()),
        (
            TransactionalState(b"t", Rejected(Error("a:b"))),
            TransactionalState(b"t", Rejected(Error("a:b", None, {}))),
        ),
    ],
)
def test_errors_of_outcomes_have_all_their_fields(state: Any, seen: Any) -> None:
    joined, session = joined_with(whole_errors=True)
    joined.endpoint = Recorder(credit=10)
    joined.on_attach = lambda link: link.accept(joined.endpoint)
    link = session.attach_sender("l", Recorder(), source=Source(), target=Target(address="q"))
    joined.pump()
    first, second = link.send(b"\x00Sw@"), link.send(b"\x00Sw@")
    joined.pump()
    for each in joined.endpoint.deliveries:
        each.update(state)
    joined.pump()
    assert (first.state, second.state) == (seen, seen)


def test_a_shortened_error_keeps_all_its_fields() -> None:
    joined, session = joined_with(whole_errors=True)
    joined.on_attach = lambda link: link.refuse(Error("amqp:not-found", "x" * 100_000))
    recorder = Recorder()
    session.attach_receiver("l", recorder, source=Source(address="q"))
    joined.pump()
    (error, _) = recorder.detached[0]
    assert error is not None
    assert error.info == {}
    assert set(error.description or "") == {"x"}
    assert len(error.description or "") < 100_000


def test_a_state_that_is_too_large_only_with_its_empty_info_is_refused() -> None:
    joined, session = joined_with(whole_errors=True)
    joined.endpoint = Recorder(credit=10)
    joined.on_attach = lambda link: link.accept(joined.endpoint)
    link = session.attach_sender("l", Recorder(), source=Source(), target=Target(address="q"))
    joined.pump()
    link.send(b"\x00Sw@")
    joined.pump()
    (delivery,) = joined.endpoint.deliveries
    room = joined.links[0].session.payload_max
    bare = Rejected(Error("a:b", "x" * (room - 100)))
    while len(encode_composite(bare)) < room:
        bare = Rejected(Error("a:b", (bare.error.description or "") + "x"))  # type: ignore[union-attr]
    with pytest.raises(LocalProtocolError, match="does not fit"):
        delivery.update(bare)
