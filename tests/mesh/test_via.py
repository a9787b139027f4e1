"""The list of the meshes that a message has passed, in its octets."""

from __future__ import annotations

import pytest

from amqp_rt.mesh.via import VIA, ViaCheck, ViaWriter
from amqp_rt.message import Message
from amqp_rt.outcomes import Modified, Rejected

pytestmark = pytest.mark.req("P6")


def encoded(via: object = None) -> bytes:
    annotations = {} if via is None else {VIA: via}
    return Message("body", message_annotations=annotations).encode()


@pytest.mark.parametrize("before", [None, [], ["a"]])
def test_the_name_is_appended_wherever_the_octets_are_cut(before: list[str] | None) -> None:
    whole = encoded(before)
    write = ViaWriter("mesh")
    for cut in range(len(whole) + 1):
        revised = write(whole[:cut], False)
        if revised is None:
            continue
        assert isinstance(revised, bytes)
        found = Message.decode(revised + whole[cut:])
        assert found.message_annotations[VIA] == [*(before or []), "mesh"]
        assert found.body == "body"
    assert isinstance(write(whole, True), bytes)


@pytest.mark.parametrize(
    ("via", "kind"),
    [(["mesh"], Modified), (["a", "mesh"], Modified), (["a", "b"], Rejected), ("a", Rejected)],
)
def test_what_has_been_here_or_in_too_many_meshes_is_refused(via: object, kind: type) -> None:
    assert isinstance(ViaCheck("mesh", 1)(encoded(via), True), kind)


def test_other_messages_pass_unchanged() -> None:
    check = ViaCheck("mesh", 1)
    for via in (None, ["a"]):
        assert check(encoded(via), True) == encoded(via)
    assert check.refused == 0


def test_a_list_has_an_end() -> None:
    write = ViaWriter("mesh")
    assert isinstance(write(encoded(["a"] * 63), True), bytes)
    assert isinstance(write(encoded(["a"] * 64), True), Rejected)
