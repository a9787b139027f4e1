"""Messages between neighbours of a mesh, version 1 (pure).

Each message is one AMQP list: its kind, then its fields in the order of the class. Receivers ignore messages of kinds that
they do not know and fields beyond those that they know, so that later versions can add some. Each count and size
is checked before anything is built from it; malformed messages raise ``DecodeError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Final

from msgspec import Struct
from msgspec.structs import astuple

from ..addresses import AddressError, Pattern
from ..codec.primitives import Reader, encode
from ..errors import DecodeError
from ..limits import DEFAULT_LIMITS, Limits

#: Epochs, sequence numbers and incarnations are below this bound, so that one more fits a long.
NUMBER_MAX: Final = 2**62
COST_MAX: Final = 65_535
#: Longest interval and lateness in a hello, in milliseconds.
MILLISECONDS_MAX: Final = 60_000
_WEIGHT_MAX: Final = 65_535

#: Flags of an offer: messages can be sent to the address, received from it; links to it are routed, not messages;
#: the address is a pattern; the offer is that of an edge, made through its uplink.
TAKES, GIVES, LINK_ROUTED, PATTERN, EDGE = 1, 2, 4, 8, 16
DISTRIBUTIONS: Final = ("closest", "balanced", "multicast")


class Hello(Struct, frozen=True):
    """Sign of life, sent after an interval of silence."""

    node: str
    incarnation: int
    #: Incarnation of the receiver as its sender last heard it, 0 if it does not hear the receiver.
    heard: int
    #: Milliseconds of silence after which the sender says hello again.
    interval_ms: int
    #: Digest of the sender's database.
    digest: int
    #: Milliseconds by which the sender is late at present: the receiver is as much more patient.
    lateness_ms: int = 0
    #: The sender leaves: its edges, which get no records of links, use another uplink.
    draining: bool = False


class Version(Struct, frozen=True, order=True):
    """Version of what is known of one origin. Sequence number 0: nothing is known in this epoch."""

    epoch: int
    links: int
    addresses: int


class Digest(Struct, frozen=True):
    """Versions of origins that the sender knows. A large table is sent in several messages."""

    versions: dict[str, Version]


class Ask(Struct, frozen=True):
    """Request for all records that are newer than these versions."""

    versions: dict[str, Version]


class Links(Struct, frozen=True):
    """Adjacencies of one origin, and what else concerns the node as a whole."""

    origin: str
    epoch: int
    incarnation: int
    seq: int
    zone: str
    draining: bool
    urls: tuple[str, ...]
    #: Cost of the link to each neighbour.
    costs: dict[str, int]


class Offer(Struct, frozen=True):
    """How one node serves an address.

    Args:
        flags: ``TAKES`` if messages can be sent there, ``GIVES`` if they can be received, or both added; with ``PATTERN`` if the
            address is a pattern, and with ``LINK_ROUTED`` if each link goes to one destination.
        distribution: ``balanced``, ``closest`` or ``multicast``. If nodes differ, that of the lowest id holds.
        weight: Share of balanced messages, relative to those of other nodes, up to 65,535; nothing new comes with 0.
    """

    flags: int = TAKES
    distribution: str = "balanced"
    weight: int = 1


class Addresses(Struct, frozen=True):
    """Addresses that one origin offers: all of them in *parts*, or the changes since *base*."""

    origin: str
    epoch: int
    #: Sequence number that the changes apply to; 0 if all addresses are listed.
    base: int
    seq: int
    part: int
    parts: int
    offers: dict[str, Offer]
    withdrawn: tuple[str, ...] = ()
    #: The same in all parts of one list, and different for lists that other nodes have divided otherwise or know otherwise,
    #: of which parts do not belong together.
    mark: int = 0


Record = Hello | Digest | Ask | Links | Addresses


def check_offer(address: str, offer: Offer, limits: Limits) -> None:
    """Check an offer that other nodes would refuse otherwise.

    Raises:
        ValueError: The address is too long or no pattern, or a value of the offer is out of bounds.
    """
    wrong = ""
    if not 0 < len(address.encode()) <= limits.mesh_name_max:
        wrong = f"an address has 1 to mesh_name_max ({limits.mesh_name_max}) octets"
    elif not offer.flags & (TAKES | GIVES) or offer.flags & ~(
        TAKES | GIVES | LINK_ROUTED | PATTERN
    ):
        wrong = f"flags are TAKES or GIVES, with LINK_ROUTED and PATTERN at most, not {offer.flags}"
    elif offer.distribution not in DISTRIBUTIONS:
        wrong = f"distribution is one of {', '.join(DISTRIBUTIONS)}, not {offer.distribution!r}"
    elif not 0 <= offer.weight <= _WEIGHT_MAX:
        wrong = f"weight is from 0 to {_WEIGHT_MAX}, not {offer.weight}"
    elif offer.flags & PATTERN:
        try:
            Pattern(address)
        except AddressError as fault:
            wrong = str(fault)
    if wrong:
        raise ValueError(f"offer of {address!r:.100}: {wrong}")


def encode_record(record: Record) -> bytes:
    """Encode *record* as one list. It must have been checked, or built from checked values."""
    return encode(_WRITERS[type(record)](record))


def decode_record(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Record | None:
    """Decode one message; None if its kind is unknown.

    Raises:
        DecodeError: The message is malformed or exceeds a limit; nothing of it may be used.
    """
    if len(data) > limits.mesh_message_max:
        raise DecodeError(f"{len(data)} octets exceed mesh_message_max")
    reader = Reader(data, limits=limits)
    values = reader.read_value()
    if reader.at != reader.end:
        raise DecodeError(f"{reader.end - reader.at} octets are left over after the message")
    if not isinstance(values, list) or not values:
        raise DecodeError("a message of the mesh is a list that begins with its kind")
    read = _READERS.get(_number(values[0], "kind"))
    return None if read is None else read(_Fields(values, limits))


class _Fields:
    """Fields of a message, taken in order, each with a check."""

    def __init__(self, values: list[object], limits: Limits) -> None:
        self._values = values
        self._at = 1
        self.limits = limits

    def next(self, name: str) -> object:
        if self._at >= len(self._values):
            raise DecodeError(f"the field {name} is missing")
        self._at += 1
        return self._values[self._at - 1]

    def number(self, name: str, most: int = NUMBER_MAX - 1, least: int = 0) -> int:
        return _number(self.next(name), name, most, least)

    def node(self, name: str) -> str:
        return _node(self.next(name), name, self.limits)

    def flag(self, name: str) -> bool:
        value = self.next(name)
        if not isinstance(value, bool):
            raise DecodeError(f"{name} must be a boolean, got {value!r:.50}")
        return value

    def text(self, name: str) -> str:
        return _text(self.next(name), name, self.limits)

    def map(self, name: str, most: int) -> Mapping[object, object]:
        value = self.next(name)
        if not isinstance(value, dict):
            raise DecodeError(f"{name} must be a map, got {value!r:.50}")
        if len(value) > most:
            raise DecodeError(f"{name} has {len(value)} entries, at most {most}")
        return value

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        value = self.next(name)
        if not isinstance(value, list):
            raise DecodeError(f"{name} must be a list, got {value!r:.50}")
        if len(value) > most:
            raise DecodeError(f"{name} has {len(value)} elements, at most {most}")
        return tuple(_text(each, name, self.limits) for each in value)


def _number(value: object, name: str, most: int = NUMBER_MAX - 1, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise DecodeError(
            f"{name} must be a whole number from {least} to {most}, got {value!r:.50}"
        )
    return int(value)


def _text(value: object, name: str, limits: Limits) -> str:
    if not isinstance(value, str):
        raise DecodeError(f"{name} must be a string, got {value!r:.50}")
    if len(value) > limits.mesh_name_max or len(value.encode()) > limits.mesh_name_max:
        raise DecodeError(f"{name} exceeds mesh_name_max: {value[:50]!r}")
    return str(value)


def _node(value: object, name: str, limits: Limits) -> str:
    """Check the id of a node, which is one segment of the addresses ``$mesh/NODE/…``."""
    node = _text(value, name, limits)
    if not node or "/" in node:
        raise DecodeError(f"{name} must be the id of a node, got {node!r:.50}")
    return node


def _row(value: object, name: str, width: int) -> list[object]:
    if not isinstance(value, list) or len(value) < width:
        raise DecodeError(f"{name} must be a list of {width} elements, got {value!r:.50}")
    return value


def _read_hello(fields: _Fields) -> Record:
    return Hello(
        fields.node("node"),
        fields.number("incarnation", least=1),
        fields.number("heard"),
        fields.number("interval", MILLISECONDS_MAX, 1),
        fields.number("digest", 2**63 - 1),
        fields.number("lateness", MILLISECONDS_MAX),
        fields.flag("draining"),
    )


def _version(epoch: object, links: object, addresses: object) -> Version:
    return Version(
        _number(epoch, "epoch"), _number(links, "links seq"), _number(addresses, "addresses seq")
    )


def _read_digest(fields: _Fields) -> Record:
    versions = {}
    for origin, value in fields.map("versions", fields.limits.mesh_nodes_max).items():
        row = _row(value, "version", 3)
        versions[_node(origin, "origin", fields.limits)] = _version(row[0], row[1], row[2])
    return Digest(versions)


def _read_ask(fields: _Fields) -> Record:
    rows = fields.next("versions")
    if not isinstance(rows, list) or len(rows) > fields.limits.mesh_nodes_max:
        raise DecodeError("versions must be a list of at most mesh_nodes_max elements")
    versions = {}
    for value in rows:
        row = _row(value, "version", 4)
        versions[_node(row[0], "origin", fields.limits)] = _version(row[1], row[2], row[3])
    return Ask(versions)


def _read_links(fields: _Fields) -> Record:
    limits = fields.limits
    origin = fields.node("origin")
    record = Links(
        origin,
        fields.number("epoch"),
        fields.number("incarnation", least=1),
        fields.number("seq", least=1),
        fields.text("zone"),
        fields.flag("draining"),
        fields.texts("urls", limits.mesh_urls_max),
        {
            _node(node, "neighbour", limits): _number(cost, "cost", COST_MAX, 1)
            for node, cost in fields.map("neighbours", limits.mesh_neighbours_max).items()
        },
    )
    if origin in record.costs:
        raise DecodeError(f"{origin!r:.50} names itself as a neighbour")
    return record


def _read_addresses(fields: _Fields) -> Record:
    limits = fields.limits
    # As many parts as one node may need if each of them holds few long addresses.
    parts_max = limits.mesh_node_addresses_max or 1
    record = Addresses(
        fields.node("origin"),
        fields.number("epoch"),
        fields.number("base"),
        fields.number("seq", least=1),
        fields.number("part", parts_max - 1),
        fields.number("parts", parts_max, 1),
        {
            _text(address, "address", limits): _offer(address, offer)
            for address, offer in fields.map("addresses", limits.mesh_part_max).items()
        },
        fields.texts("withdrawn", limits.mesh_part_max),
        fields.number("mark", 2**63 - 1),
    )
    if record.part >= record.parts or record.base >= record.seq:
        raise DecodeError("part must be below parts, and base below seq")
    if record.base and record.parts > 1:
        raise DecodeError("changes are sent in one part")
    return record


def _offer(address: object, value: object) -> Offer:
    row = _row(value, "offer", 3)
    flags = _number(row[0], "flags", 2**31 - 1)
    distribution = row[1]
    if not isinstance(distribution, str) or distribution not in DISTRIBUTIONS:
        raise DecodeError(f"{distribution!r:.50} is no distribution")
    if flags & PATTERN:
        try:
            Pattern(str(address))
        except AddressError as error:
            raise DecodeError(error.description) from None
    return Offer(flags, str(distribution), _number(row[2], "weight", _WEIGHT_MAX))


_READERS: Final[Mapping[int, Callable[[_Fields], Record]]] = {
    1: _read_hello,
    2: _read_digest,
    3: _read_ask,
    4: _read_links,
    5: _read_addresses,
}


def _write_hello(r: Hello) -> list[object]:
    return [
        *(1, r.node, r.incarnation, r.heard, r.interval_ms),
        *(r.digest, r.lateness_ms, r.draining),
    ]


def _write_digest(r: Digest) -> list[object]:
    return [2, {origin: [v.epoch, v.links, v.addresses] for origin, v in r.versions.items()}]


def _write_ask(r: Ask) -> list[object]:
    return [3, [[origin, v.epoch, v.links, v.addresses] for origin, v in r.versions.items()]]


def _write_links(r: Links) -> list[object]:
    return [
        *(4, r.origin, r.epoch, r.incarnation, r.seq),
        *(r.zone, r.draining, list(r.urls), r.costs),
    ]


def _write_addresses(r: Addresses) -> list[object]:
    return [
        *(5, r.origin, r.epoch, r.base, r.seq, r.part, r.parts),
        {a: [o.flags, o.distribution, o.weight] for a, o in r.offers.items()},
        list(r.withdrawn),
        r.mark,
    ]


_WRITERS: Final[Mapping[type, Callable[..., list[object]]]] = {
    Hello: _write_hello,
    Digest: _write_digest,
    Ask: _write_ask,
    Links: _write_links,
    Addresses: _write_addresses,
}

#: Octets of a message beside its entries, and of an entry beside its name, at most.
_MESSAGE_ROOM: Final = 600
_ENTRY_ROOM: Final = 48


def portions(names: Mapping[str, object], limits: Limits) -> Iterator[list[str]]:
    """Divide *names* into lists whose entries fit one message; at least one list, perhaps empty."""
    chosen: list[str] = []
    room = limits.mesh_message_max - _MESSAGE_ROOM
    for name in names:
        size = len(name.encode()) + _ENTRY_ROOM
        if chosen and (size > room or len(chosen) >= limits.mesh_part_max):
            yield chosen
            chosen = []
            room = limits.mesh_message_max - _MESSAGE_ROOM
        chosen.append(name)
        room -= size
    yield chosen


def all_addresses(
    origin: str, epoch: int, seq: int, offers: Mapping[str, Offer], limits: Limits
) -> list[Addresses]:
    """Return the messages that list all *offers* of *origin*.

    The addresses are sorted, so that nodes which know the same and have the same limits divide a list alike: parts that have
    the same mark may come from several of them.
    """
    lists = list(portions(dict.fromkeys(sorted(offers)), limits))
    mark = 0
    if len(lists) > 1:
        known = [[(name, astuple(offers[name])) for name in names] for names in lists]
        mark = int.from_bytes(blake2b(repr(known).encode(), digest_size=8).digest()) >> 1
    return [
        Addresses(
            *(origin, epoch, 0, seq, part, len(lists)),
            {name: offers[name] for name in names},
            mark=mark,
        )
        for part, names in enumerate(lists)
    ]
