"""Filters that a broker applies to messages on their way to a consumer (Part 3 §3.5.8).

A source has a set of filters, and a message has to pass all of them. :func:`compile_filter_set`
turns the filter-set that a receiver requested into a :class:`FilterSet`, once for each link: the
filters in place, the unknown ones, and a function that tests messages.

The name of a filter in the set is free; its descriptor determines its type. A value without a
descriptor is accepted too, if its name in the set is the descriptor's symbol or the name that JMS
clients use.

A message with a malformed section fails a filter that reads this section, and a message of an
unknown format fails every filter that reads the message. No error is raised, since the consumer is
not responsible for the message. The body is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import msgspec

from ...codec.sections import is_simple
from ...errors import DecodeError
from ...limits import DEFAULT_LIMITS, Limits
from ...message import MESSAGE_FORMAT, Properties
from ...values import Described, Map, Symbol
from ..entries import Entry
from .plugin_filters import FilterType, FilterTypes
from .positions import Position, event_hubs_position, stream_position
from .selectors import FILTEX, JMS, KINDS, Dialect, Evaluate, InvalidFilter, compile_selector
from .views import Exhausted, MessageView

__all__ = [
    "CAPABILITIES",
    "FilterSet",
    "compile_filter_set",
    "filter_types",
    "log_position",
]

#: Capabilities that a source with these filters offers, and a connection on which it is available.
CAPABILITIES: Final = (
    "APACHE.ORG:SELECTOR",
    "APACHE.ORG:NO_LOCAL",
    "APACHE.ORG:LEGACY_AMQP_EXCHANGE_FILTERS",
    "AMQP_FILTEX_PROP_V1_0",
    "AMQP_FILTEX_SQL_V1_0",
)

_DIRECT: Final = "apache.org:legacy-amqp-direct-binding:string"
_TOPIC: Final = "apache.org:legacy-amqp-topic-binding:string"
_HEADERS: Final = "apache.org:legacy-amqp-headers-binding:map"
_NO_LOCAL: Final = "apache.org:no-local-filter:list"
_SELECTOR: Final = "apache.org:selector-filter:string"
_SQL: Final = "amqp:sql-filter"
_HEADER: Final = "amqp:header-filter"
_ANNOTATIONS: Final = "amqp:message-annotations-filter"
_PROPERTIES: Final = "amqp:properties-filter"
_APPLICATION: Final = "amqp:application-properties-filter"
_TRUE: Final = "amqp:true-filter"
_FALSE: Final = "amqp:false-filter"
_STREAM_OFFSET: Final = "rabbitmq:stream-offset-spec"
_STREAM_FILTER: Final = "rabbitmq:stream-filter"
_STREAM_UNFILTERED: Final = "rabbitmq:stream-match-unfiltered"

#: Filter types by the code of their descriptor.
_BY_CODE: Final[Mapping[int, str]] = {
    0x0000_468C_0000_0000: _DIRECT,
    0x0000_468C_0000_0001: _TOPIC,
    0x0000_468C_0000_0002: _HEADERS,
    0x0000_468C_0000_0003: _NO_LOCAL,
    0x0000_468C_0000_0004: _SELECTOR,
    0x110: _TRUE,
    0x111: _FALSE,
    0x120: _SQL,
    0x170: _HEADER,
    0x172: _ANNOTATIONS,
    0x173: _PROPERTIES,
    0x174: _APPLICATION,
}
#: Filter types whose descriptor is a symbol only.
_STREAM: Final = (_STREAM_OFFSET, _STREAM_FILTER, _STREAM_UNFILTERED)
#: Type of a filter without a descriptor, by its name in the set.
_BY_NAME: Final[Mapping[str, str]] = {
    **{symbol: symbol for symbol in (*_BY_CODE.values(), *_STREAM)},
    "jms-selector": _SELECTOR,
    "no-local": _NO_LOCAL,
}


#: Steps of filters that take as long as the node's concluding a delivery.
_STEPS_OF_WORK: Final = 8


class FilterSet:
    """Filters of one link, compiled for its messages."""

    __slots__ = (
        "_filters",
        "_limits",
        "_not_from",
        "_steps_max",
        "in_place",
        "position",
        "unsupported",
        "work",
    )

    def __init__(
        self,
        in_place: Mapping[object, object],
        unsupported: tuple[str, ...],
        position: Position | None,
        filters: Sequence[Evaluate],
        not_from: str | None,
        limits: Limits,
    ) -> None:
        #: Filter-set to answer as the filter of the source: the requested filters that are applied.
        self.in_place = in_place
        #: Names of the requested filters that are unknown or unsupported here.
        self.unsupported = unsupported
        #: Start position in a log, if one was requested.
        self.position = position
        #: Work of the last :meth:`matches`, in deliveries concluded in the same time.
        self.work: int = 1
        self._filters = tuple(filters)
        self._not_from = not_from
        self._steps_max = limits.filter_steps_max
        # Decoding an element takes about two steps, and cannot be interrupted.
        self._limits = msgspec.structs.replace(
            limits, elements_max=min(limits.elements_max, max(1, limits.filter_steps_max // 2))
        )

    @property
    def selective(self) -> bool:
        """Whether some messages may not match."""
        return bool(self._filters) or self._not_from is not None

    def matches(self, entry: Entry, publisher: str | None = None) -> bool:
        """Return whether the message passes all filters, and set :attr:`work`.

        The result is the same for the same message until its state or its annotations change
        (§3.5.1).

        Args:
            entry: The message.
            publisher: Its sender, in the terms of *receiver* of :func:`compile_filter_set`; None if
                unknown, in which case no-local lets the message pass.
        """
        self.work = 1
        if publisher is not None and publisher == self._not_from:
            return False
        if not self._filters:
            return True
        if entry.message_format != MESSAGE_FORMAT:
            return False
        view = MessageView(entry, self._limits, self._steps_max)
        try:
            for passes in self._filters:
                if passes(view) is not True:
                    return False
        except (DecodeError, Exhausted):
            return False
        finally:
            self.work += view.steps // _STEPS_OF_WORK
        return True


def compile_filter_set(
    filter_map: Mapping[Any, object] | None,
    *,
    receiver: str | None = None,
    log: bool = False,
    selectors: Dialect = JMS,
    now_ms: int = 0,
    limits: Limits = DEFAULT_LIMITS,
    types: FilterTypes | None = None,
) -> FilterSet:
    """Compile the filters of a source that a receiver requested.

    Args:
        filter_map: ``Source.filter``, or None.
        receiver: Identity of the receiver for no-local: the container-id, which JMS clients set to
            their client id and use for one connection. None if it is unknown; no-local is then
            unsupported.
        log: Whether the node is a log, which supports filters for a start position.
        selectors: Dialect of ``apache.org:selector-filter:string``.
        now_ms: Current time for ``UTC()``, in milliseconds since 1970.
        limits: Bounds of the filters and of their work for a message.
        types: Filter types beside those of the broker.

    Raises:
        InvalidFilter: There are too many filters, or a known filter has an invalid value.
    """
    asked = filter_map or {}
    if len(asked) > limits.filters_max:
        raise InvalidFilter(f"the source has more than {limits.filters_max} filters")
    compiler = _SetCompiler(receiver, log, selectors, now_ms, limits, types)
    in_place: dict[object, object] = {}
    unsupported: list[str] = []
    for name, kind, value in _kinds(asked, types):
        if kind == _ALWAYS or (kind is not None and compiler.add(name[:_SHOWN_MAX], kind, value)):
            in_place[Symbol(name)] = asked[name]
        else:
            unsupported.append(name)
    compiler.add_stream_filter()
    return FilterSet(
        in_place,
        tuple(unsupported),
        log_position(asked) if log else None,
        compiler.filters,
        compiler.not_from,
        limits,
    )


def log_position(filter_map: Mapping[Any, object] | None) -> Position | None:
    """Return the start position in a log that a reader requested; None if it requested none.

    Raises:
        InvalidFilter: There are two positions, or one is malformed.
    """
    found: Position | None = None
    for name, kind, value in _kinds(filter_map or {}):
        position: Position | None = None
        if kind == _STREAM_OFFSET:
            position = stream_position(value)
        elif kind == _SELECTOR and isinstance(value, str):
            position = event_hubs_position(value)
        if position is not None:
            if found is not None:
                raise InvalidFilter(f"{name[:_SHOWN_MAX]}: there is another start position")
            found = position
    return found


#: Longest part of a name that an error repeats, in characters.
_SHOWN_MAX: Final = 60

#: Type of a null filter, which every message passes (§3.5.8).
_ALWAYS: Final = "null"


def _kinds(
    filter_map: Mapping[Any, object], types: FilterTypes | None = None
) -> Iterator[tuple[str, str | None, object]]:
    """Yield the name of each filter, its type if that is known here, and its value."""
    for name, value in filter_map.items():
        kind: str | None = None
        if value is None:
            kind = _ALWAYS
        elif isinstance(value, Described):
            descriptor = value.descriptor
            if isinstance(descriptor, str):
                kind = descriptor if descriptor in _SYMBOLS or _is_in(types, descriptor) else None
            elif isinstance(descriptor, int):
                kind = _BY_CODE.get(descriptor)
            value = value.value
        else:
            kind = _BY_NAME.get(name) or (name if _is_in(types, name) else None)
        yield name, kind, value


def _is_in(types: FilterTypes | None, symbol: str) -> bool:
    return types is not None and symbol in types


_SYMBOLS: Final = frozenset((*_BY_CODE.values(), *_STREAM))


def filter_types(given: Mapping[str, FilterType] | None) -> FilterTypes:
    """Return the filter types *given* by an application, together with those of installed plug-ins.

    Raises:
        ValueError: One has the symbol or the name of a filter type of the broker.
    """
    for symbol in given or ():
        if symbol in _BY_NAME:
            raise ValueError(
                f"the filter type {symbol!r} is one of the broker: give yours another symbol"
            )
    return FilterTypes(given)


class _SetCompiler:
    """Compiler that collects the functions of one filter-set."""

    def __init__(
        self,
        receiver: str | None,
        log: bool,
        selectors: Dialect,
        now_ms: int,
        limits: Limits,
        types: FilterTypes | None,
    ) -> None:
        self._types = types
        self.receiver = receiver
        self.log = log
        self.selectors = selectors
        self.now_ms = now_ms
        self.limits = limits
        self.filters: list[Evaluate] = []
        self.not_from: str | None = None
        self._entries = 0
        self._text_bytes = 0
        self._stream_values: frozenset[str] | None = None
        self._unfiltered = False

    def add(self, name: str, kind: str, value: object) -> bool:
        """Add the filter *name* to the set; return False if it is not supported here.

        Raises:
            InvalidFilter: Its value is malformed or exceeds a limit.
        """
        if kind in _STREAM:
            return self.log and self._add_stream(name, kind, value)
        if kind == _NO_LOCAL:
            # Qpid JMS sends a string instead of the empty list that the definition requires; the
            # value carries no information.
            self.not_from = self.receiver
            return self.receiver is not None
        if kind == _TRUE:
            return True
        if kind == _FALSE:
            self.filters.append(_never)
        elif kind in (_SELECTOR, _SQL, _DIRECT, _TOPIC):
            self._add_text(name, kind, self._text(name, value))
        elif self._types is not None and kind not in _SYMBOLS:
            test = self._types.compile(name, kind, value)
            if test is None:
                return False
            self.filters.append(test)
        else:
            self._add_map(name, kind, value)
        return True

    def _text(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise InvalidFilter(f"{name}: a string expected", expected=("a string",))
        self._text_bytes += len(value.encode("utf-8", "surrogatepass"))
        if self._text_bytes > self.limits.filter_text_max:
            raise InvalidFilter(
                f"{name}: more than {self.limits.filter_text_max} bytes in texts of filters"
            )
        return value

    def _add_text(self, name: str, kind: str, text: str) -> None:
        if kind == _DIRECT:
            self.filters.append(lambda view: view.properties().subject == text)
        elif kind == _TOPIC:
            self.filters.append(_topic_binding(text, self.limits.filter_subject_max))
        elif kind == _SQL or not self.log or event_hubs_position(text) is None:
            dialect = FILTEX if kind == _SQL else self.selectors
            try:
                selector = compile_selector(text, dialect, now_ms=self.now_ms, limits=self.limits)
            except InvalidFilter as error:
                raise InvalidFilter(
                    f"{name}: {error.description}",
                    position=error.position,
                    expected=error.expected,
                ) from None
            self.filters.append(selector)

    # Property filters (AMQP Filter Expressions §4), and the headers binding

    def _add_map(self, name: str, kind: str, value: object) -> None:
        if not isinstance(value, Mapping | Map):
            raise InvalidFilter(f"{name}: a map expected", expected=("a map",))
        self._entries += len(value)
        if self._entries > self.limits.filter_entries_max:
            raise InvalidFilter(
                f"{name}: more than {self.limits.filter_entries_max} entries in property filters"
            )
        entries: list[tuple[str, object]] = []
        for key, reference in value.items():
            if not isinstance(key, str):
                raise InvalidFilter(f"{name}: the keys are symbols or strings")
            if not is_simple(reference):
                raise InvalidFilter(
                    f"{name}: the value of {key[:_SHOWN_MAX]} is not of a simple type"
                )
            entries.append((str(key), reference))
        if kind == _HEADERS:
            self.filters.append(_headers_binding(name, entries))
        else:
            self.filters.append(
                _all_of([_property_filter(name, kind, key, wanted) for key, wanted in entries])
            )

    # Streams

    def _add_stream(self, name: str, kind: str, value: object) -> bool:
        if kind == _STREAM_FILTER:
            values = [value] if isinstance(value, str) else value
            if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
                raise InvalidFilter(f"{name}: a string or a list of strings expected")
            self._entries += len(values)
            if self._entries > self.limits.filter_entries_max:
                raise InvalidFilter(f"{name}: more than {self.limits.filter_entries_max} values")
            others = self._stream_values
            self._stream_values = frozenset(values if others is None else others & set(values))
        elif kind == _STREAM_UNFILTERED:
            if not isinstance(value, bool):
                raise InvalidFilter(f"{name}: a boolean expected", expected=("a boolean",))
            self._unfiltered = value
        return True

    def add_stream_filter(self) -> None:
        """Add the test of ``rabbitmq:stream-filter`` with the flag for records without a value."""
        values = self._stream_values
        if values is None:
            return
        unfiltered = self._unfiltered

        def passes(view: MessageView) -> bool:
            found = view.message_annotations().get("x-stream-filter-value")
            return unfiltered if found is None else isinstance(found, str) and found in values

        self.filters.append(passes)


def _never(view: MessageView) -> bool:
    return False


def _all_of(tests: Sequence[Evaluate]) -> Evaluate:
    def passes(view: MessageView) -> bool:
        return all(test(view) for test in tests)

    return passes


# --- Subjects ----------------------------------------------------------------------------------


def _topic_binding(pattern: str, subject_max: int) -> Evaluate:
    """Match messages whose subject fits *pattern*: ``*`` is one word, ``#`` any number of them.

    All ways to match are followed at once: bit *n* of a number means that the words so far match
    the first *n* words of the pattern, so that a word costs the same however many ``#`` there are.
    """
    places: list[str] = []
    for part in pattern.split("."):
        if part != "#" or places[-1:] != ["#"]:
            places.append(part)
    by_word: dict[str, int] = {}
    any_word = 0
    any_words = 0
    for place, part in enumerate(places):
        if part == "#":
            any_words |= 1 << place
        elif part == "*":
            any_word |= 1 << place
        else:
            by_word[part] = by_word.get(part, 0) | 1 << place
    whole = 1 << len(places)

    def passes(view: MessageView) -> bool:
        subject = view.properties().subject
        if subject is None:
            return places == ["#"]
        if len(subject) > subject_max:
            return False
        fits = 1 | (any_words & 1) << 1
        words = subject.split(".")
        view.spend(len(words))
        for word in words:
            fits = (fits & (by_word.get(word, 0) | any_word)) << 1 | fits & any_words
            fits |= (fits & any_words) << 1
            if not fits:
                return False
        return bool(fits & whole)

    return passes


# --- Maps --------------------------------------------------------------------------------------

_TEXTS: Final = (str,)
_IDS: Final = (str, int, bytes, UUID)
#: Types that may be compared with each property, by its name in the standard (§3.2.4).
_PROPERTY_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    **{field.replace("_", "-"): _TEXTS for field in Properties.__struct_fields__},
    "message-id": _IDS,
    "correlation-id": _IDS,
    "user-id": (bytes,),
    "absolute-expiry-time": (int,),
    "creation-time": (int,),
    "group-sequence": (int,),
}
#: The type of each header field (§3.2.1), and a function that reads it from the entry.
_HEADER_FIELDS: Final[Mapping[str, tuple[type, Callable[[MessageView], object]]]] = {
    "durable": (bool, lambda view: view.entry.durable),
    "priority": (int, lambda view: view.entry.priority),
    "ttl": (int, lambda view: view.ttl()),
    "first-acquirer": (bool, lambda view: view.entry.first_acquirer and not view.entry.attempts),
    "delivery-count": (int, lambda view: view.entry.delivery_count),
}


def _property_filter(name: str, kind: str, key: str, wanted: object) -> Evaluate:
    """Return a test whether a field of a section equals *wanted* (AMQP Filter Expressions §4.1.1).

    Raises:
        InvalidFilter: The section has no such field, or the field has another type.
    """
    if kind in (_HEADER, _PROPERTIES):
        key = key.replace("_", "-")
        types: tuple[type, ...]
        if kind == _HEADER:
            if key not in _HEADER_FIELDS:
                raise InvalidFilter(f"{name}: the header has no field {key[:_SHOWN_MAX]}")
            types = (_HEADER_FIELDS[key][0],)
        else:
            if key not in _PROPERTY_TYPES:
                raise InvalidFilter(f"{name}: the properties have no field {key[:_SHOWN_MAX]}")
            types = _PROPERTY_TYPES[key]
        if wanted is not None and (
            not isinstance(wanted, types) or isinstance(wanted, bool) != (bool in types)
        ):
            raise InvalidFilter(f"{name}: the value of {key} is not of its type")
    test = _like_reference(name, wanted)
    if test is None:
        return lambda view: True
    if kind == _HEADER:
        read = _HEADER_FIELDS[key][1]
        return lambda view: test(read(view))
    if kind == _PROPERTIES:
        field = key.replace("-", "_")
        return lambda view: test(getattr(view.properties(), field))
    if kind == _ANNOTATIONS:
        return lambda view: test(view.message_annotations().get(key))
    return lambda view: test(view.application_properties().get(key))


def _like_reference(name: str, wanted: object) -> Callable[[object], bool] | None:
    """Return a test whether a value fits *wanted*; None if every value fits, and an absent one.

    Raises:
        InvalidFilter: *wanted* begins with an unknown modifier.
    """
    if wanted is None:
        return None
    if isinstance(wanted, str):
        if wanted.startswith("&s:"):
            suffix = wanted[3:]
            return lambda value: isinstance(value, str) and value.endswith(suffix)
        if wanted.startswith("&p:"):
            prefix = wanted[3:]
            return lambda value: isinstance(value, str) and value.startswith(prefix)
        if wanted.startswith("&&"):
            wanted = wanted[1:]
        elif wanted.startswith("&"):
            raise InvalidFilter(
                f"{name}: at character 1: p: or s: or & expected after &, not {wanted[1:17]!r}",
                position=1,
                expected=("p:", "s:", "&"),
            )
    kind = KINDS.get(type(wanted), 0)
    if not kind:
        # Types that are not compared by value, such as decimals: equal in type and octets, or not.
        return lambda value: type(value) is type(wanted) and value == wanted
    return lambda value: KINDS.get(type(value), 0) == kind and value == wanted


def _headers_binding(name: str, entries: Sequence[tuple[str, object]]) -> Evaluate:
    """Match application properties like the headers exchange of earlier AMQP (``apache-filters``).

    A null value only requires that the key exists.

    Raises:
        InvalidFilter: ``x-match`` is neither ``all`` nor ``any``.
    """
    match = dict(entries).get("x-match", "all")
    if match not in ("all", "any"):
        raise InvalidFilter(f"{name}: x-match is all or any", expected=("all", "any"))
    decide = all if match == "all" else any
    wanted = [
        (key, None if value is None else _equals(value))
        for key, value in entries
        if not key.startswith("x-")
    ]

    def passes(view: MessageView) -> bool:
        found = view.application_properties()
        return decide(
            key in found and (equals is None or equals(found[key])) for key, equals in wanted
        )

    return passes


def _equals(wanted: object) -> Callable[[object], bool]:
    kind = KINDS.get(type(wanted), 0)
    return lambda value: KINDS.get(type(value), 0) == kind and value == wanted
