"""Arguments of queues, exchanges and bindings, by the names of Apache Qpid.

An argument that is unknown must be refused (0-10 §queue.declare, rule ``unknown-argument``), since its sender
relies on it. Those that describe how Qpid's broker works inside, such as the pages that it loads, are
accepted without effect. Texts come as ``str16`` or, from clients in Python 2 and C++, as ``vbin16``.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias
from uuid import UUID

from amqp_rt.broker import Queue
from amqp_rt.broker.bindings import KEEPS_LAST
from amqp_rt.fronts import Timestamp
from amqp_rt.limits import SECONDS_MAX

from .faults import CommandFault
from .layouts import ErrorCode
from .limits import GROUPS
from .values import Array, Datetime, as_text

#: Options of a queue, by the names of :class:`amqp_rt.Queue`.
Options: TypeAlias = dict[str, object]

#: Largest number of an argument.
_NUMBER_MAX: Final = 2**63 - 1
_TRUE: Final = frozenset(("true", "1", "yes", "t"))
_FALSE: Final = frozenset(("false", "0", "no", "f", ""))

#: Arguments of queues whose effect is not an option of the queue.
AUTO_DELETE_TIMEOUT: Final = "qpid.auto_delete_timeout"
#: Also an argument of subscriptions: none gets messages that its own connection has published.
NO_LOCAL: Final = "no-local"
_LIFETIME: Final = "qpid.lifetime-policy"
#: Header with the key of a last-value queue for which none is named.
_LAST_VALUE_KEY: Final = "qpid.LVQ_key"
_LAST_VALUE_KEYS: Final = ("qpid.last_value_queue_key", _LAST_VALUE_KEY)
_LAST_VALUE_FLAGS: Final = ("qpid.last_value_queue", "qpid.last_value_queue_no_browse")

#: Arguments of queues without effect: thresholds of alerts, journal files, flow control of publishers, which
#: all have their own bounds here, pages, fairness, traces of federation, and hints to Qpid's broker.
_IDLE: Final = frozenset(
    (
        *("qpid.alert_count", "qpid.alert_size", "qpid.alert_repeat_gap"),
        *("qpid.alert_count_up", "qpid.alert_count_down"),
        *("qpid.alert_size_up", "qpid.alert_size_down"),
        *("x-qpid-maximum-message-count", "x-qpid-maximum-message-size"),
        "x-qpid-minimum-alert-repeat-gap",
        *("qpid.file_count", "qpid.file_size"),
        *("qpid.flow_stop_count", "qpid.flow_resume_count"),
        *("qpid.flow_stop_size", "qpid.flow_resume_size"),
        *("qpid.paging", "qpid.max_pages_loaded", "qpid.page_factor"),
        *("qpid.fairshare", "x-qpid-fairshare"),
        *("qpid.trace.id", "qpid.trace.exclude"),
        *("qpid.optimistic_consume", "qpid.persist_last_node", "qpid.queue_event_generation"),
        "qpid.shared_msg_group",
        "x-qpid-description",
    )
)
_POLICIES: Final = {
    "reject": "reject",
    "ring": "drop-head",
    "ring_strict": "drop-head",
    # Every queue in the store pages by itself, so that this one has no limits.
    "flow_to_disk": None,
}
_UNUSED_AND_EMPTY: Final = "delete-if-unused-and-empty"
#: Lifetimes: whether the queue is deleted without consumers.
_LIFETIMES: Final = {
    "delete-if-unused": True,
    "delete-on-close": True,
    _UNUSED_AND_EMPTY: True,
    "manual": False,
}
#: One that does not depend on consumers, which is not offered.
_OTHER_LIFETIMES: Final = ("delete-if-empty",)

#: Argument of an exchange, and the header in which its messages are numbered.
MESSAGE_SEQUENCE: Final = "qpid.msg_sequence"

#: Arguments of a binding that are none of its exchange.
EXCLUSIVE_BINDING: Final = "qpid.exclusive-binding"
SCOPE: Final = "x-scope"
#: Argument of a binding to a headers exchange. RabbitMQ's also consider headers whose names begin with ``x-``.
MATCH: Final = "x-match"
_MATCHES: Final = ("all", "any", "all-with-x", "any-with-x")


# --- queues -------------------------------------------------------------------------------------------


class QueueArguments:
    """Effect of the arguments of ``queue.declare``.

    Args:
        given: The arguments; None if there are none.

    Raises:
        CommandFault: One is unknown (540), or has a wrong value (542).
    """

    def __init__(self, given: Mapping[str, object] | None) -> None:
        #: The arguments as they are shown by ``queue.query``, and stored.
        self.known: dict[str, object] = {}
        #: Options of the queue.
        self.options: Options = {}
        #: Seconds without consumers after which an auto-delete queue is deleted.
        self.auto_delete_s = 0.0
        #: Whether the queue is deleted without consumers; None if not said.
        self.auto_delete: bool | None = None
        #: Whether that waits until the queue is empty.
        self.keeps_messages = False
        for name, value in (given or {}).items():
            read = _READERS.get(name)
            if read is not None:
                self.options.update(read(name, value))
            elif name == AUTO_DELETE_TIMEOUT:
                self.auto_delete_s = float(number(name, value, most=int(SECONDS_MAX)))
            elif name == _LIFETIME:
                if as_text(value) in _OTHER_LIFETIMES:
                    raise unknown(f"{name} {as_text(value)}", "queue")
                lifetime = _one_of(name, value, _LIFETIMES)
                self.auto_delete = _LIFETIMES[lifetime]
                self.keeps_messages = lifetime == _UNUSED_AND_EMPTY
            elif name in _LAST_VALUE_FLAGS:
                if flag(name, value) and "last_value_key" not in self.options:
                    self.options["last_value_key"] = _field(_LAST_VALUE_KEY)
            elif name == NO_LOCAL:
                value = flag(name, value)
            elif name not in _IDLE:
                raise unknown(name, "queue")
            self.known[name] = plain(value)
        if self.auto_delete is None and self.auto_delete_s:
            # Without the bit too, as for Qpid's broker.
            self.auto_delete = True
        if self.known.get("qpid.policy_type") == "flow_to_disk":
            self.options.pop("length_max", None)
            self.options.pop("bytes_max", None)


def _number_option(option: str) -> Callable[[str, object], Options]:
    def read(name: str, value: object) -> Options:
        # Zero is no limit, as for Qpid's broker.
        return {option: number(name, value) or None}

    return read


def _policy(name: str, value: object) -> Options:
    overflow = _POLICIES[_one_of(name, value, _POLICIES)]
    return {} if overflow is None else {"overflow": overflow}


def _priorities(name: str, value: object) -> Options:
    return {"priorities": max(1, number(name, value, most=256))}


def _last_value_key(name: str, value: object) -> Options:
    return {"last_value_key": _field(text(name, value))}


def _browse_only(name: str, value: object) -> Options:
    return {"browse_only": flag(name, value)}


def _groups(name: str, value: object) -> Options:
    return {"groups": GROUPS, "group_key": _field(text(name, value))}


def _selector(name: str, value: object) -> Options:
    found = text(name, value)
    try:
        Queue("q", selector=found)
    except ValueError as error:
        raise _wrong(f"{name}: {error}") from error
    return {"selector": found}


def _number_header(name: str, value: object) -> Options:
    if as_text(value) == "":
        # No header, as for Qpid's broker.
        return {}
    found = text(name, value)
    try:
        Queue("q", number_header=found)
    except ValueError as error:
        raise _wrong(f"{name}: {error}") from error
    return {"number_header": found}


def _field(key: str) -> str:
    """Return the field of a message in which the header *key* is found (see the guide's table)."""
    if key == "qpid.subject":
        return "properties.subject"
    if key == "JMSXGroupID":
        return "properties.group-id"
    return f"application-properties.{key}"


#: Argument → its effect on the options of a queue.
_READERS: Final[Mapping[str, Callable[[str, object], Options]]] = {
    "qpid.max_count": _number_option("length_max"),
    "qpid.max_size": _number_option("bytes_max"),
    "qpid.policy_type": _policy,
    "qpid.priorities": _priorities,
    "x-qpid-priorities": _priorities,
    **dict.fromkeys(_LAST_VALUE_KEYS, _last_value_key),
    "qpid.browse-only": _browse_only,
    "qpid.group_header_key": _groups,
    "qpid.filter": _selector,
    "qpid.queue_msg_sequence": _number_header,
}


# --- exchanges and bindings ---------------------------------------------------------------------------


def exchange_arguments(given: Mapping[str, object] | None, type_name: str) -> dict[str, object]:
    """Return the arguments of ``exchange.declare`` as they are kept.

    A type of the application, whose name begins with ``x-``, has arguments of its own.

    Raises:
        CommandFault: One is unknown (540), or has a wrong value (542).
    """
    known = {name: plain(value) for name, value in (given or {}).items()}
    if MESSAGE_SEQUENCE in known:
        known[MESSAGE_SEQUENCE] = flag(MESSAGE_SEQUENCE, known[MESSAGE_SEQUENCE])
    if KEEPS_LAST in known:
        known[KEEPS_LAST] = flag(KEEPS_LAST, known[KEEPS_LAST])
    if not type_name.startswith("x-"):
        for name in known.keys() - {MESSAGE_SEQUENCE, KEEPS_LAST}:
            raise unknown(name, "exchange")
    return known


class BindingArguments:
    """Arguments of ``exchange.bind`` and ``exchange.bound``.

    Args:
        given: The arguments; None if there are none.

    Raises:
        CommandFault: One has a wrong value (542).
    """

    def __init__(self, given: Mapping[str, object] | None) -> None:
        #: Those that the exchange interprets.
        self.known = {name: plain(value) for name, value in (given or {}).items()}
        #: Whether other queues lose their bindings of the same key.
        self.is_alone = flag(EXCLUSIVE_BINDING, self.known.pop(EXCLUSIVE_BINDING, False))
        #: Whether the binding ends with the session.
        self.is_scoped = False
        scope = self.known.pop(SCOPE, None)
        if scope is not None:
            self.is_scoped = _one_of(SCOPE, scope, ("session",)) == "session"

    def check(self, type_name: str) -> None:
        """Check that an exchange of type *type_name* understands the arguments.

        A headers exchange compares them with headers of messages, and a type of the application has
        its own. Names that begin with ``x-``, such as the selector that JMS adds, are about the
        subscription.

        Raises:
            CommandFault: One is unknown (540), or has a wrong value (542).
        """
        if type_name == "headers":
            _one_of(MATCH, self.known.get(MATCH, "all"), _MATCHES)
        if type_name == "headers" or type_name.startswith("x-"):
            return
        for name in self.known:
            if not name.startswith("x-"):
                raise unknown(name, f"binding of a {type_name} exchange")


# --- values -------------------------------------------------------------------------------------------


def plain(value: object) -> object:
    """Return *value* in types that every protocol has, to be stored, compared and shown.

    Octets that are UTF-8 become text: clients in Python 2 and C++ send texts as binary.

    Raises:
        CommandFault: It has a type that is unknown outside of AMQP 0-10 (542).
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Datetime):
        return Timestamp(int(value) * 1000)
    if isinstance(value, int):
        if not -(2**63) <= value <= _NUMBER_MAX:
            raise _wrong(f"numbers have at most 63 bits, not {value}")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        found = as_text(value)
        return bytes(value) if found is None else found
    if isinstance(value, (UUID, dt.datetime)):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, Array):
        return [plain(each) for each in value.items]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    raise _wrong(f"an argument has a value of the type {type(value).__name__}")


def shown(value: object) -> object:
    """Return *value* of an argument as ``queue.query`` shows it, whatever protocol declared it."""
    if isinstance(value, Timestamp):
        return Datetime(int(value) // 1000)
    if isinstance(value, dt.datetime):
        return Datetime(int(value.timestamp()))
    if value is None or isinstance(value, bool | int | float | str | bytes | UUID):
        return value if not isinstance(value, int) or abs(value) <= _NUMBER_MAX else str(value)
    if isinstance(value, Mapping):
        return {str(name): shown(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [shown(each) for each in value]
    return str(value)


def number(name: str, value: object, most: int = _NUMBER_MAX) -> int:
    """Return *value* of the argument *name* as a whole number from 0 to *most*.

    Raises:
        CommandFault: It is none (542).
    """
    found = as_text(value)
    if found is not None and found.isascii() and found.isdigit() and len(found) < 20:
        value = int(found)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most:
        return int(value)
    raise _wrong(f"{name} is a whole number from 0 to {most}, not {value!r:.50}")


def flag(name: str, value: object) -> bool:
    """Return *value* of the argument *name* as true or false.

    Raises:
        CommandFault: It is neither (542).
    """
    found = as_text(value)
    if found is not None:
        lower = found.lower()
        if lower in _TRUE or lower in _FALSE:
            return lower in _TRUE
    elif isinstance(value, int):
        return value != 0
    raise _wrong(f"{name} is true or false, not {value!r:.50}")


def text(name: str, value: object) -> str:
    """Return *value* of the argument *name* as a text that is not empty.

    Raises:
        CommandFault: It is none (542).
    """
    found = as_text(value)
    if not found:
        raise _wrong(f"{name} is a text, not {value!r:.50}")
    return found


def unknown(name: str, what: str) -> CommandFault:
    """Return the fault for the argument *name* that *what* does not have."""
    return CommandFault(
        f"there is no argument {name!r:.80} of a {what} here",
        ErrorCode.NOT_IMPLEMENTED,
        field="arguments",
    )


def _one_of(name: str, value: object, values: Mapping[str, object] | tuple[str, ...]) -> str:
    found = as_text(value)
    if found is None or found not in values:
        raise _wrong(f"{name} is one of {', '.join(values)}, not {value!r:.50}")
    return found


def _wrong(why: str) -> CommandFault:
    return CommandFault(why, ErrorCode.INVALID_ARGUMENT, field="arguments")
