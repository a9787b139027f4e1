"""Profiles of listeners: how a container appears to the clients of another product."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from msgspec import Struct

from ..addresses import address_of
from ..annotations import AnnotationPolicy
from ..events import Peer
from ..fronts.base import Host
from ..security.mechanisms import ServerMechanism
from ..security.tokens import Cbs

__all__ = ["Profile", "address_for"]


class Profile(Struct, frozen=True, kw_only=True, eq=False):
    """Dialect of a listener: what clients of another product expect of the connections that it accepts.

    A profile changes connections only; the broker behind them is the same for all listeners. Hosts and
    handlers find it as ``link.peer.profile``.

    Args:
        name: Name for logs.
        properties: Properties of our open (Part 2 §2.7.1), such as ``product`` and ``version``.
        address: Returns the address of the node that a peer's address stands for. Applied to its own
            result, it returns the same. It is called with what peers write, and must not raise.
        dynamic_address: Returns the address to answer for a dynamic node, by the node's name, to which *address* maps it
            back; None for the name.
        activity: Key of the properties of flows that tell a consumer of a queue whether it is served, after its first
            credit and whenever that changes; None for no such flows.
        echo_addresses: Answer a link with the address that its peer asked for.
        whole_errors: Write errors with all their fields, an absent ``info`` as an empty map.
        whole_frames: Write performatives with all their fields, absent ones as nulls.
        settle_second: Whether senders get ``rcv-settle-mode`` second; None as the container decides.
        cbs: Tokens that are accepted at ``$cbs``; None as the container decides. Peers of this
            listener have no rights without a token, or a rule of access.
        sasl: Mechanisms to offer; None as the container decides, or with *cbs* those for tokens.
        management_open: Whether links to the management node take any right at all, and not one to manage; each
            operation takes its own.
        token_passwords: Whether PLAIN takes a token as password, where tokens are accepted; the user is its subject.
        frame_size_max: Largest frame, in octets; None as the container's limits say.
        channel_max: Highest channel number, so that 0 allows one session; None as the container's limits say.
        connections_max: Open connections of all listeners with this profile together; None for no bound but those of the
            container's limits.
        annotations: Policy for unknown annotation keys in messages that links of this listener send to
            nodes of the broker; None as the broker decides.
        hosts: Hosts that are asked first, for links of this listener only, and for the messages that they
            send to an anonymous terminus. Names of nodes, virtual hosts and kept termini are those of the
            container's hosts.
    """

    name: str
    properties: Mapping[object, object] = {}
    address: Callable[[str], str] = address_of
    dynamic_address: Callable[[str], str] | None = None
    activity: str | None = None
    echo_addresses: bool = False
    whole_errors: bool = False
    whole_frames: bool = False
    settle_second: bool | None = None
    cbs: Cbs | None = None
    sasl: Collection[str | ServerMechanism] | None = None
    management_open: bool = False
    token_passwords: bool = False
    frame_size_max: int | None = None
    channel_max: int | None = None
    connections_max: int | None = None
    annotations: AnnotationPolicy | None = None
    hosts: tuple[Host, ...] = ()


def address_for(peer: Peer, text: str) -> str:
    """Return the address of the node that *text*, written by *peer*, stands for."""
    profile: Profile | None = peer.profile
    return address_of(text) if profile is None else profile.address(text)
