"""Exchanges and bindings of one virtual host, which route messages to queues (0-9-1 §3.1.3). Pure.

The model that AMQP 0-9-1 and 0-10 share. An exchange has a *table* that maps a routing key and
headers to destinations: queues or other exchanges. Queues are known by name only, and messages are
not part of this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from ..errors import AmqpError
from ..fronts.base import Exchange
from ..limits import DEFAULT_LIMITS, Limits
from .binding_arguments import Frozen, frozen_arguments, frozen_value
from .queue.accounts import Memory

#: Prefix of names that only the broker may declare.
RESERVED: Final = "amq."
#: Characters of an exchange's name in 0-9-1, and in 0-10, which has no limit but that of its type ``str8``.
NAME_MAX: Final = 127
LONG_NAME_MAX: Final = 255

#: Argument of an exchange that remembers its last message, see :mod:`amqp_rt.broker.topology.last_messages`.
KEEPS_LAST: Final = "qpid.ive"

_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]+")
#: Names as RabbitMQ has them, which does not keep to the characters of 0-9-1.
_FREE_NAME: Final = re.compile(r"[^\x00-\x1f\x7f]+")
#: Lookups (trie nodes and bindings examined) between two yields of :meth:`Exchanges.routing`: about
#: a tenth of a millisecond. One lookup costs a tenth of the work for a frame of a message.
_LOOKS: Final = 100
LOOKS_OF_A_FRAME: Final = 10
_X_MATCH: Final = frozenset(("all", "any", "all-with-x", "any-with-x"))
_NO_HEADERS: Final[Mapping[str, object]] = {}


def is_exchange_name(name: str, name_max: int = NAME_MAX, *, free: bool = False) -> bool:
    """Return whether an exchange may have that name, of at most *name_max* octets.

    A *free* one has any characters but control characters.
    """
    pattern = _FREE_NAME if free else _NAME
    # Peers of 0-9-1 get the name as a short string, which has up to 255 octets.
    return len(name.encode("utf-8", "surrogatepass")) <= name_max and bool(pattern.fullmatch(name))


class Destination(NamedTuple):
    """Destination of a binding: a queue or another exchange."""

    name: str
    is_exchange: bool = False


class Binding(NamedTuple):
    """Binding of an exchange. Equal bindings are the same binding."""

    destination: Destination
    key: str
    #: Headers that a headers exchange matches. For other types they only make bindings differ.
    arguments: Frozen = ()


class RoutingTable(Protocol):
    """Interface of an exchange type, and the plug-in point for ``x-`` types."""

    def check(self, key: str, arguments: Mapping[str, object]) -> None:
        """Raise ``AmqpError`` if this type of exchange cannot have such a binding."""

    def add(self, binding: Binding) -> None:
        """Add a binding that the table does not have."""

    def remove(self, binding: Binding) -> None:
        """Remove a binding that the table has."""

    def match(self, key: str, headers: Mapping[str, object]) -> Iterable[Destination | int]:
        """Yield the destinations of a message; a destination may occur several times.

        Tables that search also yield integers in between: the number of bindings examined since
        the last integer. The caller counts both to let others run, and bindings may be added or
        removed while it does.
        """


class _Unchecked:
    def check(self, key: str, arguments: Mapping[str, object]) -> None:
        """Accept every binding."""


class DirectTable(_Unchecked):
    """Bindings whose key equals the routing key (§3.1.3.1)."""

    def __init__(self) -> None:
        self._keys: dict[str, dict[Binding, None]] = {}

    def add(self, binding: Binding) -> None:
        self._keys.setdefault(binding.key, {})[binding] = None

    def remove(self, binding: Binding) -> None:
        bindings = self._keys[binding.key]
        del bindings[binding]
        if not bindings:
            del self._keys[binding.key]

    def match(self, key: str, headers: Mapping[str, object]) -> Iterable[Destination | int]:
        return (binding.destination for binding in list(self._keys.get(key, ())))


class FanoutTable(_Unchecked):
    """Bindings that match every message (§3.1.3.2)."""

    def __init__(self) -> None:
        self._bindings: dict[Binding, None] = {}

    def add(self, binding: Binding) -> None:
        self._bindings[binding] = None

    def remove(self, binding: Binding) -> None:
        del self._bindings[binding]

    def match(self, key: str, headers: Mapping[str, object]) -> Iterable[Destination | int]:
        return (binding.destination for binding in list(self._bindings))


class _Word:
    """Node in the trie of patterns, with the words that may follow it."""

    __slots__ = ("bindings", "many", "words")

    def __init__(self, *, many: bool = False) -> None:
        #: Whether the node stands for ``#``, which stays active for any number of words.
        self.many = many
        self.words: dict[str, _Word] = {}
        self.bindings: dict[Binding, None] = {}


class TopicTable(_Unchecked):
    """Patterns of words with ``*`` for one and ``#`` for any number (§3.1.3.3).

    The patterns form a trie. A key is matched word by word, at all nodes at once that a pattern may
    have reached: the cost grows with the words and with the wildcards that match so far, not with
    the bindings, and a pattern of many ``#`` costs no more than its length.
    """

    def __init__(self) -> None:
        self._root = _Word()

    def add(self, binding: Binding) -> None:
        place = self._root
        for word in _words(binding.key):
            following = place.words.get(word)
            if following is None:
                following = place.words[word] = _Word(many=word == "#")
            place = following
        place.bindings[binding] = None

    def remove(self, binding: Binding) -> None:
        path = [self._root]
        words = _words(binding.key)
        for word in words:
            path.append(path[-1].words[word])
        del path[-1].bindings[binding]
        for word in reversed(words):
            place = path.pop()
            if place.bindings or place.words:
                break
            del path[-1].words[word]

    def match(self, key: str, headers: Mapping[str, object]) -> Iterator[Destination | int]:
        places: dict[_Word, None] = {}
        _enter(places, self._root)
        looked = 0
        for word in _words(key):
            wanted = (word, "*") if word not in ("*", "#") else ("*",)
            following: dict[_Word, None] = {}
            for place in places:
                looked += 1
                if place.many:
                    looked += _enter(following, place)
                for each in wanted:
                    found = place.words.get(each)
                    if found is not None:
                        looked += _enter(following, found)
                if looked >= _LOOKS:
                    yield looked
                    looked = 0
            places = following
        for place in places:
            for binding in list(place.bindings):
                yield binding.destination
            looked += 1
            if looked >= _LOOKS:
                yield looked
                looked = 0
        yield looked


def _words(key: str) -> list[str]:
    return key.split(".") if key else []


def _enter(places: dict[_Word, None], place: _Word | None) -> int:
    """Add *place* to *places*, and each ``#`` that follows it, since ``#`` matches zero words too.

    Returns:
        The number of nodes added.
    """
    count = 0
    while place is not None and place not in places:
        places[place] = None
        count += 1
        place = place.words.get("#")
    return count


class _HeadersBinding:
    """Binding of a headers exchange, with the headers of which all or any have to match."""

    __slots__ = ("destination", "every", "wanted")

    def __init__(self, destination: Destination, every: bool, wanted: dict[str, object]) -> None:
        self.destination = destination
        self.every = every
        self.wanted = wanted


class HeadersTable:
    """Bindings whose headers, all or any by ``x-match``, equal those of the message (§3.1.3.4).

    A void value only requires that the header exists. Names that begin with ``x-`` count only for
    ``all-with-x`` and ``any-with-x``.
    """

    def __init__(self) -> None:
        self._bindings: dict[Binding, _HeadersBinding] = {}

    def check(self, key: str, arguments: Mapping[str, object]) -> None:
        how = arguments.get("x-match", "all")
        if not isinstance(how, str) or how not in _X_MATCH:
            raise AmqpError(
                f"x-match is all, any, all-with-x or any-with-x, not {how!r:.80}",
                condition="amqp:precondition-failed",
            )

    def add(self, binding: Binding) -> None:
        arguments = dict(binding.arguments)
        how = str(arguments.pop("x-match", "all"))
        if not how.endswith("-with-x"):
            arguments = {
                name: value for name, value in arguments.items() if not name.startswith("x-")
            }
        self._bindings[binding] = _HeadersBinding(
            binding.destination, how.startswith("all"), arguments
        )

    def remove(self, binding: Binding) -> None:
        del self._bindings[binding]

    def match(self, key: str, headers: Mapping[str, object]) -> Iterator[Destination | int]:
        # A header is read once for each message, however many bindings refer to it.
        frozen: dict[str, object] = {}
        looked = 0
        for binding in list(self._bindings.values()):
            looked += 1
            found = binding.every
            for name, value in binding.wanted.items():
                looked += 1
                fits = name in headers
                if fits and value is not None:
                    if name not in frozen:
                        frozen[name] = frozen_value(headers[name])
                    fits = frozen[name] == value
                if fits is not binding.every:
                    found = fits
                    break
            if found:
                yield binding.destination
            if looked >= _LOOKS:
                yield looked
                looked = 0
        yield looked


class SystemTable:
    """Routing to the queue named by the key, as for a service (§3.1.3.5), without bindings.

    Names that begin with ``amq.`` are reserved for services of the standard, none of which exist
    here.
    """

    def check(self, key: str, arguments: Mapping[str, object]) -> None:
        raise AmqpError(
            "a system exchange leads to services by their names: nothing is bound to it",
            condition="amqp:precondition-failed",
        )

    def add(self, binding: Binding) -> None:
        """Do nothing: the table has no bindings."""

    def remove(self, binding: Binding) -> None:
        """Do nothing: the table has no bindings."""

    def match(self, key: str, headers: Mapping[str, object]) -> Iterable[Destination | int]:
        return [Destination(key)] if key and not key.startswith(RESERVED) else []


#: Exchange type whose sender chooses the queue, which takes the right to send to that queue.
SYSTEM: Final = "system"
#: Exchange types available without a plug-in.
TYPES: Final[Mapping[str, Callable[[], RoutingTable]]] = {
    "direct": DirectTable,
    "fanout": FanoutTable,
    "topic": TopicTable,
    "headers": HeadersTable,
    SYSTEM: SystemTable,
}
#: Exchanges of every virtual host, besides the default exchange, whose name is empty.
STANDARD: Final[Mapping[str, str]] = {
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.topic": "topic",
    "amq.headers": "headers",
    "amq.match": "headers",
}


class _ExchangeState:
    """Exchange: its declaration, its routing table, and the bindings of which it is the source."""

    def __init__(self, declared: Exchange, table: RoutingTable) -> None:
        self.declared = declared
        self.table = table
        self.bindings: dict[Binding, None] = {}
        #: Messages that have been numbered, see :meth:`Exchanges.count_message`.
        self.numbered = 0
        #: Maps each key to the bindings that have it.
        self.keyed: dict[str, dict[Binding, None]] = {}
        #: Maps each trait of bindings to the number of those that have it.
        self._counts: dict[_Trait, int] = {}

    def add(self, binding: Binding) -> None:
        """Add *binding*, which is new."""
        self.bindings[binding] = None
        self.keyed.setdefault(binding.key, {})[binding] = None
        for trait in _traits(binding):
            self._counts[trait] = self._counts.get(trait, 0) + 1
        self.table.add(binding)

    def remove(self, binding: Binding) -> None:
        """Remove *binding*, which exists."""
        del self.bindings[binding]
        keyed = self.keyed[binding.key]
        del keyed[binding]
        if not keyed:
            del self.keyed[binding.key]
        for trait in _traits(binding):
            left = self._counts[trait] - 1
            if left:
                self._counts[trait] = left
            else:
                del self._counts[trait]
        self.table.remove(binding)

    def has_trait(self, trait: _Trait) -> bool:
        """Return whether some binding has *trait*."""
        return trait in self._counts


#: Two parts of a binding, of which None means any: its destination or key, and its arguments. A peer may ask for
#: each such pair, and an exchange may have very many bindings, so that they are counted and not searched.
_Trait: TypeAlias = tuple[Destination | str | None, Frozen | None]


def _traits(binding: Binding) -> tuple[_Trait, ...]:
    destination, key, arguments = binding
    return (destination, None), (destination, arguments), (key, arguments), (None, arguments)


#: A binding with the name of its source exchange.
_Bound: TypeAlias = tuple[str, Binding]
#: Source exchange and key → bindings of one destination, which differ in their arguments. Peers of 0-10 name
#: a binding by its key, and a queue may have very many.
_Leading: TypeAlias = dict[tuple[str, str], dict[Binding, None]]


class Exchanges:
    """The exchanges of one virtual host and their bindings.

    Operations that fail raise :class:`~amqp_rt.errors.AmqpError` with a condition of AMQP 1.0,
    which a front translates: ``amqp:not-found`` to 404, ``amqp:precondition-failed`` to 406,
    ``amqp:unauthorized-access`` to 403, ``amqp:not-implemented`` (an unknown type) to 503.

    Args:
        has_queue: Whether a queue of this name exists: the default exchange routes by queue
            name.
        types: Exchange types by name; add ``x-`` types to those of :data:`TYPES`.
        limits: ``exchanges_max``, ``bindings_max`` and the bounds of routing are used here.
        on_unbound: Called with the exchange and the binding for each binding removed, for any
            cause.
        memory: Where the memory of exchanges and bindings is counted.
    """

    def __init__(
        self,
        has_queue: Callable[[str], bool],
        *,
        types: Mapping[str, Callable[[], RoutingTable]] = TYPES,
        limits: Limits = DEFAULT_LIMITS,
        on_unbound: Callable[[str, Binding], None] | None = None,
        memory: Memory | None = None,
    ) -> None:
        self._has_queue = has_queue
        self._on_unbound = on_unbound
        self._memory = Memory(limits.broker_bytes_max) if memory is None else memory
        self._types = types
        self._limits = limits
        self._exchanges: dict[str, _ExchangeState] = {}
        #: Maps each destination to the bindings that lead to it.
        self._leading: dict[Destination, _Leading] = {}
        self._count = 0
        for name, kind in STANDARD.items():
            if kind in types:
                declared = Exchange(name=name, type=kind, durable=True)
                self._exchanges[name] = _ExchangeState(declared, types[kind]())

    def __len__(self) -> int:
        return len(self._exchanges)

    def __contains__(self, name: str) -> bool:
        return name in self._exchanges

    def find(self, name: str) -> Exchange:
        """Return the declaration of exchange *name*.

        Raises:
            AmqpError: No such exchange exists (``amqp:not-found``).
        """
        if not name:
            return _DEFAULT
        return self._exchange(name).declared

    def is_alternate(self, name: str) -> bool:
        """Return whether *name* is the alternate of another exchange."""
        return any(
            each.declared.alternate == name and each.declared.name != name
            for each in self._exchanges.values()
        )

    def bindings(self, name: str) -> list[Binding]:
        """Return the bindings of an exchange, in the order of their creation.

        Raises:
            AmqpError: No such exchange exists.
        """
        return list(self._exchange(name).bindings)

    def count_message(self, name: str, argument: str) -> int:
        """Return the number of one more message of exchange *name*, counted from 1.

        Zero if its *argument* is not true, or if there is no such exchange. The count ends with the
        process, as that of Qpid's broker does.
        """
        exchange = self._exchanges.get(name)
        if exchange is None or not exchange.declared.arguments.get(argument):
            return 0
        exchange.numbered += 1
        return exchange.numbered

    def declare(
        self,
        wanted: Exchange,
        *,
        name_max: int = NAME_MAX,
        free_name: bool = False,
        restored: bool = False,
    ) -> bool:
        """Create an exchange, or return False if an equal one exists (§1.7.2.1 ``declare``).

        An exchange *restored* from a store is created even if the memory limit is reached.

        Raises:
            AmqpError: A different one of this name exists, the name is reserved or invalid, the
                type is unknown, or there are too many exchanges.
        """
        name = wanted.name
        if not name:
            raise _refused("the default exchange cannot be declared")
        exchange = self._exchanges.get(name)
        if exchange is not None:
            for field in ("type", "durable", "auto_delete", "internal", "alternate"):
                before, now = getattr(exchange.declared, field), getattr(wanted, field)
                if before != now:
                    raise AmqpError(
                        f"exchange {name!r} has {field} {before!r}, not {now!r:.80}: "
                        f"delete it first, or declare it equally",
                        condition="amqp:precondition-failed",
                    )
            return False
        if name.startswith(RESERVED):
            raise _refused(f"names that begin with {RESERVED!r} are the broker's, such as {name!r}")
        if restored:
            # It had the name that its protocol allows.
            name_max, free_name = LONG_NAME_MAX, True
        if not is_exchange_name(name, name_max, free=free_name):
            allowed = (
                "octets without control characters"
                if free_name
                else "letters, digits, '-', '_', '.' or ':'"
            )
            raise AmqpError(
                f"an exchange is named by 1 to {name_max} {allowed}, not {name!r:.80}",
                condition="amqp:precondition-failed",
            )
        make = self._types.get(wanted.type)
        if make is None:
            raise AmqpError(
                f"there is no exchange type {wanted.type!r:.80}; there are {', '.join(self._types)}",
                condition="amqp:not-implemented",
            )
        if len(self._exchanges) >= self._limits.exchanges_max:
            raise AmqpError(
                f"there are {len(self._exchanges)} exchanges, and no more are allowed",
                condition="amqp:resource-limit-exceeded",
            )
        self._take_room(size_of(wanted.arguments), f"exchange {name!r}", restored)
        self._exchanges[name] = _ExchangeState(wanted, make())
        return True

    def _take_room(self, size: int, what: str, restored: bool) -> None:
        """Count *size* bytes of memory; *what* names their purpose in the error.

        The limit does not apply to objects *restored* from the store.

        Raises:
            AmqpError: The broker has no memory left for them.
        """
        memory = self._memory
        if memory.held + size > memory.limit and not restored:
            raise AmqpError(
                f"{what} takes {size} bytes, and the broker has no room for them",
                condition="amqp:resource-limit-exceeded",
            )
        memory.held += size

    def _give_room(self, size: int) -> None:
        memory = self._memory
        memory.held -= size
        if memory.waiting:
            memory.notify_waiting()

    def delete(self, name: str, *, if_unused: bool = False) -> list[str]:
        """Delete an exchange and its bindings; return the names of all exchanges thereby deleted.

        Raises:
            AmqpError: No such exchange exists, it is reserved, or it has bindings and *if_unused*
                is set.
        """
        if not name or name.startswith(RESERVED):
            raise _refused(f"exchange {name!r} is the broker's")
        exchange = self._exchange(name)
        if if_unused and exchange.bindings:
            raise AmqpError(f"exchange {name!r} has bindings", condition="amqp:precondition-failed")
        gone: list[str] = []
        self._drop([name], gone)
        return gone

    def bind(
        self,
        source: str,
        destination: Destination,
        key: str,
        arguments: Mapping[str, object],
        *,
        restored: bool = False,
    ) -> Binding | None:
        """Bind *destination* to *source*; return the new binding, or None if it exists already.

        The caller has checked that a destination queue exists. A *restored* binding takes its
        memory even if the limit is reached.

        Raises:
            AmqpError: An exchange does not exist, cannot be bound or not with these arguments, or
                there are too many bindings.
        """
        if not restored:
            self._check_key(key)
        exchange, binding = self._binding(source, destination, key, arguments)
        exchange.table.check(key, arguments)
        if binding in exchange.bindings:
            return None
        if self._count >= self._limits.bindings_max:
            raise AmqpError(
                f"there are {self._count} bindings, and no more are allowed",
                condition="amqp:resource-limit-exceeded",
            )
        self._take_room(_size_of(binding), f"a binding of exchange {source!r}", restored)
        exchange.add(binding)
        self._leading.setdefault(destination, {}).setdefault((source, key), {})[binding] = None
        self._count += 1
        return binding

    def unbind(
        self, source: str, destination: Destination, key: str, arguments: Mapping[str, object]
    ) -> list[str]:
        """Remove a binding if it exists; return the auto-delete exchanges deleted with it.

        Raises:
            AmqpError: An exchange does not exist, or it is the default one.
        """
        _, binding = self._binding(source, destination, key, arguments)
        return self.remove(source, binding)

    def find_binding(
        self, source: str, destination: Destination, key: str, arguments: Mapping[str, object]
    ) -> Binding | None:
        """Return this binding; None if it does not exist.

        Raises:
            AmqpError: An exchange does not exist, or it is the default one.
        """
        exchange, binding = self._binding(source, destination, key, arguments)
        return binding if binding in exchange.bindings else None

    def is_bound(
        self,
        source: str,
        destination: Destination | None = None,
        key: str | None = None,
        arguments: Mapping[str, object] | None = None,
    ) -> bool:
        """Return whether *source* has a binding of these parts, of which None means any.

        The work does not depend on the number of bindings. Without such an exchange there are none.
        """
        exchange = self._exchanges.get(source)
        if exchange is None:
            return False
        frozen = None if arguments is None else frozen_arguments(arguments)
        if destination is not None and key is not None:
            if frozen is None:
                return (source, key) in self._leading.get(destination, ())
            return Binding(destination, key, frozen) in exchange.bindings
        if destination is not None:
            return exchange.has_trait((destination, frozen))
        if frozen is not None:
            return exchange.has_trait((key, frozen))
        return bool(exchange.bindings) if key is None else key in exchange.keyed

    def leading_to(self, source: str, destination: Destination, key: str) -> list[Binding]:
        """Return the bindings of *destination* to *source* that have *key*."""
        return list(self._leading.get(destination, {}).get((source, key), ()))

    def with_key(self, source: str, key: str) -> list[Binding]:
        """Return the bindings of exchange *source* that have *key*, in the order of their creation.

        Raises:
            AmqpError: No such exchange exists.
        """
        return list(self._exchange(source).keyed.get(key, ()))

    def remove(self, source: str, binding: Binding) -> list[str]:
        """Remove *binding* if it exists; return the auto-delete exchanges deleted with it."""
        gone: list[str] = []
        self._drop(self._undo((source, binding)), gone)
        return gone

    def forget(self, queue: str) -> list[str]:
        """Remove the bindings of a deleted queue; return the exchanges deleted with them."""
        gone: list[str] = []
        self._drop(self._unbind_destination(Destination(queue)), gone)
        return gone

    def route(self, name: str, key: str, headers: Mapping[str, object] = _NO_HEADERS) -> list[str]:
        """Return the queues that a message for exchange *name* is routed to, without yielding.

        Raises:
            AmqpError: As for :meth:`routing`.
        """
        found: dict[str, None] = {}
        for _ in self.routing(name, (key,), headers, found):
            pass
        return list(found)

    def routing(
        self,
        name: str,
        keys: Sequence[str],
        headers: Mapping[str, object],
        found: dict[str, None],
        *,
        alternate: bool = True,
        chained: bool = True,
        diverted: bool = False,
    ) -> Generator[int, None, None]:
        """Add to *found* the queues that a message for exchange *name* is routed to, each once.

        Bindings between exchanges are followed, and each exchange is visited once per key. A
        message without a destination goes to the alternate exchange, unless that is a system
        exchange: its sender chooses the queue, and needs the right to send to it.

        A message may have to be compared with very many bindings. The generator yields from time to
        time the work done since, counted in frames, so that its caller can let others run; changes
        of the bindings made in between may or may not take effect.

        Args:
            name: Name of the exchange.
            keys: Routing keys of the message.
            headers: Headers of the message.
            found: Receives the names of the queues, as keys.
            alternate: Whether the alternate exchange of exchange *name* itself is followed.
            chained: Whether an alternate exchange that cannot route the message passes it to its own
                alternate. In 0-10 it drops the message (rule double-failure of exchange.declare).
            diverted: Whether exchange *name* is itself an alternate, that of a queue, in 0-10: none is
                followed from there.

        Raises:
            AmqpError: The exchange does not exist, there are too many keys or one is too long,
                or routing takes more than ``routing_looks_max`` lookups.
        """
        limits = self._limits
        if len(keys) > limits.routing_keys_max:
            raise _too_much(
                f"a message has at most {limits.routing_keys_max} routing keys, got {len(keys)}"
            )
        for key in keys:
            self._check_key(key)
        if not name:
            for key in keys:
                if self._has_queue(key):
                    found[key] = None
            return
        self._exchange(name)
        looked = total = 0
        for key in keys:
            seen = {name}
            waiting = [name]
            # Exchanges that the message has reached through an alternate, of which there is to be only one.
            passed: set[str] = {name} if diverted else set()
            while waiting:
                looked += 1
                exchange = self._exchanges.get(current := waiting.pop())
                if exchange is None or (exchange.declared.type == SYSTEM and current != name):
                    continue
                nowhere = True
                for destination in exchange.table.match(key, headers):
                    if isinstance(destination, int):
                        looked += destination
                    else:
                        looked += 1
                        nowhere = False
                        if not destination.is_exchange:
                            found[destination.name] = None
                        elif destination.name not in seen:
                            seen.add(destination.name)
                            waiting.append(destination.name)
                            if current in passed:
                                passed.add(destination.name)
                    if looked >= _LOOKS:
                        total += looked
                        if total > limits.routing_looks_max:
                            raise _too_much(
                                f"a message for exchange {name!r:.80} would have to be held against"
                                f" more than {limits.routing_looks_max} bindings"
                            )
                        yield looked // LOOKS_OF_A_FRAME
                        looked = 0
                other = exchange.declared.alternate
                if not alternate and current == name:
                    continue
                if not nowhere or other is None or other in seen or current in passed:
                    continue
                seen.add(other)
                waiting.append(other)
                if not chained:
                    passed.add(other)
        if looked >= LOOKS_OF_A_FRAME:
            yield looked // LOOKS_OF_A_FRAME

    def empty_table(self, name: str) -> RoutingTable:
        """Return a table without bindings of the type of exchange *name*.

        Raises:
            AmqpError: No such exchange exists.
        """
        return self._types[self._exchange(name).declared.type]()

    def _check_key(self, key: str) -> None:
        """Refuse a routing key or a pattern that is too long.

        Raises:
            AmqpError: The key has too many characters or words.
        """
        limits = self._limits
        if len(key) > limits.routing_key_max or key.count(".") >= limits.routing_words_max:
            raise AmqpError(
                f"a routing key has at most {limits.routing_key_max} characters and"
                f" {limits.routing_words_max} words, and {key!r:.50} has more",
                condition="amqp:precondition-failed",
            )

    def _exchange(self, name: str) -> _ExchangeState:
        exchange = self._exchanges.get(name)
        if exchange is None:
            raise AmqpError(f"there is no exchange {name!r:.80}", condition="amqp:not-found")
        return exchange

    def _binding(
        self, source: str, destination: Destination, key: str, arguments: Mapping[str, object]
    ) -> tuple[_ExchangeState, Binding]:
        if not source or (destination.is_exchange and not destination.name):
            raise _refused("every queue is bound to the default exchange by its name, for good")
        exchange = self._exchange(source)
        if destination.is_exchange and self._exchange(destination.name).declared.type == SYSTEM:
            raise AmqpError(
                f"exchange {destination.name!r} is of type system, and bound to none",
                condition="amqp:precondition-failed",
            )
        return exchange, Binding(destination, key, frozen_arguments(arguments))

    def _undo(self, bound: _Bound) -> list[str]:
        """Remove a binding; return its exchange if that is to be deleted with its last binding."""
        source, binding = bound
        exchange = self._exchanges[source]
        if binding not in exchange.bindings:
            return []
        exchange.remove(binding)
        leading = self._leading[binding.destination]
        keyed = leading[source, binding.key]
        del keyed[binding]
        if not keyed:
            del leading[source, binding.key]
        if not leading:
            del self._leading[binding.destination]
        self._count -= 1
        self._give_room(_size_of(binding))
        if self._on_unbound is not None:
            self._on_unbound(source, binding)
        return [source] if exchange.declared.auto_delete and not exchange.bindings else []

    def _unbind_destination(self, destination: Destination) -> list[str]:
        """Remove the bindings to *destination*; return the exchanges to be deleted with them."""
        leading = self._leading.get(destination, {})
        bounds = [(source, each) for (source, _), found in leading.items() for each in found]
        return [name for bound in bounds for name in self._undo(bound)]

    def _drop(self, names: list[str], gone: list[str]) -> None:
        """Delete exchanges, and auto-delete exchanges that thereby lose their last binding."""
        while names:
            name = names.pop()
            exchange = self._exchanges.get(name)
            if exchange is None:
                continue
            for binding in list(exchange.bindings):
                self._undo((name, binding))
            names += self._unbind_destination(Destination(name, is_exchange=True))
            del self._exchanges[name]
            self._give_room(size_of(exchange.declared.arguments))
            gone.append(name)


#: Approximate memory in bytes of a value beside its octets, of a binding, and of each word of its
#: pattern in the tables.
_VALUE: Final = 64
_BINDING: Final = 1_100
_WORD: Final = 400


def size_of(value: object) -> int:
    """Return the approximate memory in bytes of *value*, such as the arguments of a declaration."""
    if isinstance(value, str | bytes):
        return _VALUE + len(value)
    if isinstance(value, Mapping):
        return _VALUE + sum(size_of(name) + size_of(each) for name, each in value.items())
    if isinstance(value, list | tuple):
        return _VALUE + sum(map(size_of, value))
    return _VALUE


def _size_of(binding: Binding) -> int:
    words = binding.key.count(".") + 1
    return _BINDING + _WORD * words + len(binding.key) + size_of(binding.arguments)


_DEFAULT: Final = Exchange(name="", durable=True)


def _too_much(why: str) -> AmqpError:
    return AmqpError(why, condition="amqp:precondition-failed")


def _refused(why: str) -> AmqpError:
    return AmqpError(why, condition="amqp:unauthorized-access")
