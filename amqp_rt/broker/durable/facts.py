"""Facts: records in a broker's store besides messages and logs. This module is their format.

A fact has a kind, a key and a value (:meth:`~amqp_rt.stores.base.Store.facts`). Most keys begin with the
number in the store of the object that the fact belongs to. A store that an earlier build wrote has to open,
so kinds and keys never change, and fields are only added: at the end of a record, with a default.

The heads of messages are in :mod:`~amqp_rt.broker.entries`, the records of logs in
:mod:`~amqp_rt.broker.log.records`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import Struct

from ...codec.composites import decode_composite, encode_composite
from ...codec.primitives import Reader, write_value
from ...errors import DecodeError
from ...termini import Source, Target
from ..nodes import KINDS, Declaration
from .journal import Journal
from .units import Unit

T = TypeVar("T")

_AT: Final = struct.Struct(">d")
#: Bytes of the digest of a message-id.
ID_BYTES: Final = 16

_encode: Final = msgspec.msgpack.Encoder().encode


class FactKind(Generic[T]):
    """Kind of facts.

    Args:
        name: Its name in the store.
        encode: Encodes a value.
        decode: Decodes a value; raises ValueError, such as ``msgspec.DecodeError``, or
            :class:`~amqp_rt.errors.DecodeError` if it is none of this kind.
    """

    def __init__(
        self, name: str, encode: Callable[[T], bytes], decode: Callable[[bytes], T]
    ) -> None:
        self.name = name
        self._encode = encode
        self.decode = decode

    def put(self, unit: Unit, key: bytes, value: T) -> None:
        """Add the fact to *unit*; it replaces an earlier one of that key."""
        unit.put_fact(self.name, key, self._encode(value))

    def remove(self, unit: Unit, key: bytes) -> None:
        """Delete the fact in *unit*, if there is one."""
        unit.remove_fact(self.name, key)

    async def read(self, journal: Journal) -> list[tuple[bytes, bytes]]:
        """Return the keys and encoded values of all facts in the store, in the order of the keys."""
        found: list[tuple[bytes, bytes]] = await journal.call(journal.store.facts, self.name)
        return found


def _packed(name: str, type_: type[T]) -> FactKind[T]:
    """Return a kind with values of *type_* in MessagePack."""
    return FactKind(name, _encode, msgspec.msgpack.Decoder(type_).decode)


# --- Keys ---


def key_of(number: int, part: bytes = b"") -> bytes:
    """Return the key of a fact of the object with this *number*; *part* tells its facts apart."""
    return number.to_bytes(4, "big") + part


def name_key(number: int, name: str) -> bytes:
    """Return the key of a fact that has a name."""
    return key_of(number, name.encode())


def place_key(number: int, place: int) -> bytes:
    """Return the key of the fact at *place* of an endless count."""
    return key_of(number, place.to_bytes(8, "big"))


def slot_key(number: int, slot: int) -> bytes:
    """Return the key of the fact in *slot* of a bounded number, which are used again."""
    return key_of(number, slot.to_bytes(4, "big"))


def digest_key(*parts: object) -> bytes:
    """Return the key of a fact without a number: a digest, since names may be longer than a key."""
    return blake2b(repr(parts).encode("utf-8", "surrogateescape"), digest_size=16).digest()


def number_of(key: bytes) -> int:
    """Return the number at the beginning of *key*."""
    return int.from_bytes(key[:4], "big")


def part_of(key: bytes) -> bytes:
    """Return the rest of *key*."""
    return key[4:]


def name_of(key: bytes) -> str:
    """Return the name in a key made by :func:`name_key`."""
    return key[4:].decode()


def place_of(key: bytes) -> int:
    """Return the place in a key made by :func:`place_key`."""
    return int.from_bytes(key[4:], "big")


# --- Values ---


class NodeFact(Struct, array_like=True):
    """Declared node."""

    virtual_host: str
    kind: str
    declared: dict[str, Any]
    implicit: bool = False


class TerminusFact(Struct, array_like=True):
    """Durable terminus."""

    #: Number of its node.
    node: int
    virtual_host: str
    user: str
    container_id: str
    sending: bool
    name: str
    #: The answered source or target, encoded.
    terminus: bytes
    snd_settle_mode: int
    priority: int = 0
    exclusive: bool = False


class LeaseFact(Struct, array_like=True):
    """Lease of a group of messages."""

    #: Number of its queue.
    node: int
    name: str
    generation: int
    #: Numbers within the group: of its first message, and of the one after its last.
    first: int
    next: int
    ttl_s: float | None
    id: str = ""


class Claim(Struct, frozen=True):
    """Producer, epoch, part and attempt that a link stages messages for."""

    producer: str
    run: str
    epoch: int
    part: int
    attempt: int
    write: str = ""


class Identity(Struct, array_like=True, frozen=True):
    """Identity of one write to an epoch, besides the number of the epoch.

    Attributes:
        write: Name of the write, different in each run; empty if an epoch has only one.
        query: The computation that has made the messages, the same in all of its runs.
        plan: Input of the computation as it was planned; empty if unknown.
        content: Fingerprint of the messages, independent of their order and parts; computed from the
            parts if it is empty.
    """

    write: str = ""
    query: str = ""
    plan: str = ""
    content: str = ""

    def repeats(self, earlier: Identity) -> bool:
        """Return whether this write repeats *earlier*.

        A plan of a query is read once. Without plans the messages have to be the same.
        """
        return self.query == earlier.query and (
            bool(self.plan and self.plan == earlier.plan) or self.content == earlier.content
        )

    def __str__(self) -> str:
        by = f" of the query {self.query!r}" if self.query else ""
        return f"{self.content}{by}"


class Write(Struct, array_like=True, frozen=True):
    """Write to the epoch that a producer committed last."""

    #: Run that committed it, or was the last to repeat it.
    run: str
    #: None if it was committed before identities were stored: then any write repeats it.
    identity: Identity | None


class BranchFact(Struct, array_like=True):
    """Branch of a distributed transaction that is prepared, or was completed by an operator."""

    virtual_host: str
    user: str | None
    #: Format, global id and branch id.
    xid: tuple[int, bytes, bytes]
    #: Addresses of the nodes that messages were posted to, and of each message at the place of the same
    #: index under the branch's number: the index of its address. -1 for one that is not stored.
    targets: list[str]
    posts: list[int]
    #: Retired messages: number of the queue, sequence number, and the encoded outcome.
    retired: list[tuple[int, int, bytes]]
    #: Result of the operator's decision (:class:`~amqp_rt.transactions.XaStatus`); 0 while prepared.
    result: int = 0
    #: Wall-clock time of the preparation.
    prepared_at: float = 0.0


class ProducerFact(Struct, array_like=True):
    """Producer that publishes by epochs."""

    runs: list[str]
    epoch: int
    #: Numbers of the stages that are being published.
    publishing: list[int]
    #: Wall-clock time of its last attach, request or run.
    used: float = 0.0
    #: None if it was stored before identities were.
    writes: tuple[Write, ...] | None = None


class StageFact(Struct, array_like=True):
    """Stage of one attempt."""

    #: Number of its node.
    node: int
    claim: Claim
    began: float


class ScheduleFact(Struct, array_like=True):
    """Progress of a schedule."""

    #: Wall-clock times: when the next message is due, and when the last one was; 0 before the first.
    due: float
    last: float = 0.0


class Era(Struct, frozen=True, array_like=True):
    """A start of the broker, and the offsets of a log at that time.

    A store restored from a backup continues from older offsets, so that new records get offsets that
    other records had before. They belong to another era: a reader whose position is of an era that the
    log no longer has can detect this.
    """

    id: str
    #: For each partition, the offset of the first record of this era or a later one.
    starts: list[int]


def node_fact(declared: Declaration, virtual_host: str, *, implicit: bool) -> NodeFact:
    """Return the fact of a node with this declaration."""
    return NodeFact(virtual_host, declared.kind, msgspec.structs.asdict(declared), implicit)


def declaration_of(fact: NodeFact, kinds: Mapping[str, type[Declaration]] = KINDS) -> Declaration:
    """Return the declaration of a node in the store, of one of *kinds*.

    Raises:
        msgspec.ValidationError: A field has another type in this release.
        KeyError: This release has no such kind of node.
    """
    if fact.declared.pop("check_properties", False):
        # Earlier builds had one option in place of these two.
        fact.declared.update(check_user_id=True, absolute_expiry=True)
    return msgspec.convert(fact.declared, kinds[fact.kind])


def encode_terminus(terminus: Source | Target) -> bytes:
    """Encode the source or target of a :class:`TerminusFact`."""
    return encode_composite(terminus)


def terminus_of(fact: TerminusFact) -> Source | Target:
    """Decode the source or target of a terminus in the store.

    Raises:
        DecodeError: The fact holds something else.
    """
    if fact.sending:
        return decode_composite(fact.terminus, Source)
    return decode_composite(fact.terminus, Target)


def _write_sequence(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def _read_sequence(value: bytes) -> int:
    return int.from_bytes(value, "big")


def _write_seen(value: tuple[int, bytes]) -> bytes:
    order, tag = value
    return order.to_bytes(8, "big") + tag


def _read_seen(value: bytes) -> tuple[int, bytes]:
    return int.from_bytes(value[:8], "big"), value[8:]


def _write_ids(value: tuple[float, list[bytes]]) -> bytes:
    at, ids = value
    return _AT.pack(at) + b"".join(ids)


def _read_ids(value: bytes) -> tuple[float, list[bytes]]:
    (at,) = _AT.unpack_from(value)
    starts = range(_AT.size, len(value), ID_BYTES)
    return at, [value[start : start + ID_BYTES] for start in starts]


def _write_fields(fields: list[object]) -> bytes:
    out = bytearray()
    write_value(out, fields)
    return bytes(out)


def _read_fields(value: bytes) -> list[Any]:
    found = Reader(value).read_value()
    if not isinstance(found, list):
        raise DecodeError("a fact of the topology is a list")
    return found


# --- Kinds ---

#: Declared nodes, by number.
NODES: Final = _packed("node", NodeFact)
#: Incarnations and eras of logs, by number.
INCARNATIONS: Final = FactKind[str]("log", str.encode, bytes.decode)
ERAS: Final = _packed("log-eras", list[Era])
#: Cursors of groups, and holds of holders with the time of their end, by log and name: partition → offset.
CURSORS: Final = _packed("log-cursor", dict[int, int])
HOLDS: Final = _packed("log-hold", tuple[dict[int, int], float])
#: Message-ids in the window of a queue, by queue and place: the time of arrival, and the digests.
DUPLICATES: Final = FactKind("duplicates", _write_ids, _read_ids)
#: Durable termini, by number.
TERMINI: Final = _packed("terminus", TerminusFact)
#: Unsettled deliveries of a durable source, by terminus and tag: the sequence number of the message.
DELIVERIES: Final = FactKind("terminus-delivery", _write_sequence, _read_sequence)
#: Deliveries that a durable target has accepted, by terminus and slot: their order, and the tag.
SEEN: Final = FactKind("terminus-seen", _write_seen, _read_seen)
#: Producers of epochs, by node and name; and their stages, by number.
PRODUCERS: Final = _packed("epoch-producer", ProducerFact)
STAGES: Final = _packed("epoch-stage", StageFact)
#: Branches of distributed transactions, by the number under which their posts are stored.
BRANCHES: Final = _packed("dtx-branch", BranchFact)
#: Leases, by number; and their messages, by lease and number in the group: the sequence number.
LEASES: Final = _packed("lease", LeaseFact)
LEASED: Final = FactKind("leased", _write_sequence, _read_sequence)
#: Progress of schedules, by number.
SCHEDULES: Final = _packed("schedule", ScheduleFact)
#: Number of a queue that numbers its messages → its next sequence number.
NUMBERS: Final = FactKind("queue-numbers", _write_sequence, _read_sequence)
#: Durable queues, exchanges and bindings that peers have declared, by digest. Arguments keep their AMQP
#: types. Fields of a queue: virtual host, name, auto-delete, arguments; of an exchange: virtual host, name,
#: type, auto-delete, internal, arguments; of a binding: virtual host, exchange, destination, whether that
#: is an exchange, key, arguments.
QUEUES: Final = FactKind("topology-queue", _write_fields, _read_fields)
EXCHANGES: Final = FactKind("topology-exchange", _write_fields, _read_fields)
BINDINGS: Final = FactKind("topology-binding", _write_fields, _read_fields)
