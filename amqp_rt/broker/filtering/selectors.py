r"""Selector languages: parsing, and compiling into functions over messages.

Two families are in use: JMS selectors (``apache.org:selector-filter:string``) and the SQL filter of
the OASIS filter expressions (``amqp:sql-filter``). They share one grammar; keywords, literals and
names differ, and so do a few rules, which are the fields of :class:`Dialect`.

A selector is compiled once into nested functions, which only read the fields that it names. The
logic has three values: ``True``, ``False`` and ``None``, which is *unknown*, the result of every
operation on an absent field. A message passes if the result is ``True``.

A selector has no loops: each term is evaluated at most once for a message, so the bounds of text,
terms and depth bound the work. LIKE is matched without backtracking. Steps are counted where the
work depends on the message, and for selectors of many terms.

Rules for points that the specifications leave open:

* Numbers are compared by their exact values, not by type. Integers outside 64 bits,
  infinities, NaN, and a division by zero are *unknown*.
* Strings are ordered too, by code points, and ``+`` concatenates them.
* The patterns of LIKE must be literals, so that they are checked when the link attaches. An escape
  character before anything but a wildcard or itself stands for itself.
* ``UTC()`` is the time at which the link attached, since a filter must give the same result for the
  same message each time (Part 3 §3.5.1).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, cast
from uuid import UUID

from msgspec import Struct

from ...errors import AmqpError
from ...limits import DEFAULT_LIMITS, Limits
from ...message import Properties
from ...values import (
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Float32,
    Int,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)
from .views import MessageView

if TYPE_CHECKING:
    from lark import Lark, Token, Tree

__all__ = [
    "FILTEX",
    "JMS",
    "KINDS",
    "QPID",
    "Dialect",
    "Evaluate",
    "InvalidFilter",
    "compile_selector",
]

#: Compiled expression: returns its value for a message, ``None`` if unknown.
Evaluate: TypeAlias = Callable[[MessageView], Any]


class InvalidFilter(AmqpError):
    """Filter that is malformed for its type; its link is refused.

    Args:
        description: The error, with its position in the text and the expected terms.
        position: Index of the character at which the text becomes invalid, counted from 0.
        expected: Terms that would be valid there.
    """

    default_condition = "amqp:invalid-field"

    def __init__(
        self, description: str, *, position: int | None = None, expected: Sequence[str] = ()
    ) -> None:
        super().__init__(description, info={Symbol("invalid-field"): Symbol("filter")})
        self.position = position
        self.expected = tuple(expected)


class Dialect(Struct, frozen=True):
    """Rules in which the selector languages differ."""

    name: str
    #: Family of keywords, literals and names.
    words: Literal["jms", "filtex"]
    #: Result of comparing values of different kinds.
    unlike: bool | None
    #: Whether a blank selector selects everything; otherwise it is an error.
    blank_passes: bool
    #: Whether a number or string in place of a condition is an error; otherwise it is unknown.
    conditions_only: bool
    #: Whether the quotient of two integers is an integer, truncated.
    whole_quotients: bool
    #: Whether a wildcard can be its own escape character, and '' is an error.
    wildcard_escapes: bool


#: JMS selectors as ActiveMQ, Artemis and Qpid Broker-J interpret them.
JMS: Final = Dialect(
    name="JMS",
    words="jms",
    unlike=False,
    blank_passes=True,
    conditions_only=True,
    whole_quotients=False,
    wildcard_escapes=True,
)
#: JMS selectors as the C++ broker of Qpid interprets them.
QPID: Final = Dialect(
    name="Qpid C++",
    words="jms",
    unlike=False,
    blank_passes=True,
    conditions_only=False,
    whole_quotients=True,
    wildcard_escapes=False,
)
#: The language of ``amqp:sql-filter``, as far as RabbitMQ 4 implements it.
FILTEX: Final = Dialect(
    name="AMQP SQL",
    words="filtex",
    unlike=None,
    blank_passes=False,
    conditions_only=False,
    whole_quotients=False,
    wildcard_escapes=True,
)


def compile_selector(
    text: str,
    dialect: Dialect = JMS,
    *,
    now_ms: int = 0,
    limits: Limits = DEFAULT_LIMITS,
) -> Evaluate:
    """Compile *text* into a function that returns whether it selects a message.

    Args:
        text: The selector.
        dialect: Rules of its language.
        now_ms: Value of ``UTC()``, in milliseconds since 1970.
        limits: Bounds of the text and of its work.

    Raises:
        InvalidFilter: The text is malformed, or exceeds a limit of length, depth or terms.
    """
    if len(text.encode("utf-8", "surrogatepass")) > limits.filter_text_max:
        raise InvalidFilter(f"the selector has more than {limits.filter_text_max} bytes")
    if not text.strip():
        if dialect.blank_passes:
            return _always
        raise _unexpected(text, 0, ("a condition",))
    tree = _parse(text, dialect, limits)
    compiler = _Compiler(text, dialect, now_ms, limits)
    selector = compiler.condition(tree, 1).evaluate
    steps = compiler.nodes // _NODES_OF_A_STEP
    return selector if steps < _FEW_STEPS else _counted(selector, steps)


#: Nodes of a selector that are evaluated in the time of a step, and the number of steps from which
#: they are counted.
_NODES_OF_A_STEP: Final = 2
_FEW_STEPS: Final = 8


def _counted(selector: Evaluate, steps: int) -> Evaluate:
    """Count *steps* for each evaluation of *selector*, which has many terms."""

    def evaluate(view: MessageView) -> Any:
        view.spend(steps)
        return selector(view)

    return evaluate


# --- Parsing -----------------------------------------------------------------------------------

_RULES: Final = r"""
?start: disjunction
?disjunction: conjunction (_OR conjunction)*
?conjunction: negation (_AND negation)*
?negation: predicate | NOT negation
?predicate: sum
    | sum COMPARE sum -> comparison
    | sum _IS [NOT] _NULL -> is_null
    | sum [NOT] _LIKE TEXT [_ESCAPE TEXT] -> like
    | sum [NOT] _IN "(" sum ("," sum)* ")" -> membership
    | sum [NOT] _BETWEEN sum _AND sum -> between
?sum: product ((PLUS | MINUS) product)*
?product: sign ((STAR | SLASH | PERCENT) sign)*
?sign: operand | (PLUS | MINUS) sign
?operand: TEXT -> text
    | NUMBER -> number
    | BINARY -> binary
    | (TRUE | FALSE) -> boolean
    | NAME -> name
    | _UTC "(" ")" -> utc
    | "(" disjunction ")" -> group

COMPARE: "<>" | "!=" | "<=" | ">=" | "=" | "<" | ">"
PLUS: "+"
MINUS: "-"
STAR: "*"
SLASH: "/"
%ignore /[ \t\r\n\f\v]+/
%declare _OR _AND NOT _IS _NULL _LIKE _ESCAPE _IN _BETWEEN TRUE FALSE _UTC
"""

#: Literals are those of Java (JMS 1.1 §3.8.1.1), names may contain dots, and a quoted name may
#: contain any character. Keys of annotations contain hyphens, so a name with their prefix extends
#: over these.
_JMS_TERMINALS: Final = r"""
TEXT: /'(?:[^']|'')*'/
NUMBER: /0[xX][0-9a-fA-F_]+(?:\.[0-9a-fA-F_]*)?[pP][+-]?[0-9]+[fFdD]?|0[xX][0-9a-fA-F_]+[lL]?|0[bB][01_]+[lL]?|(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9]+)?[fFdDlL]?/
NAME: /amqp\.annotation\.[\w$.:-]+|(?:[^\W0-9]|\$)[\w$]*(?:\.[\w$]+)*|"(?:[^"]|"")*"/
%declare BINARY PERCENT
"""

#: Terminals of AMQP Filter Expressions v1.0 §6.4.4.2 and §6.4.4.6.
_FILTEX_TERMINALS: Final = r"""
TEXT: /'(?:[^'\x00-\x1f\x7f]|'')*'|"(?:[^"\x00-\x1f\x7f]|"")*"/
BINARY.1: /0x(?:[0-9A-F]{2})+(?![0-9A-Za-z_])/
NUMBER: /[0-9]+(?:\.[0-9]+(?:E[+-]?[0-9]+)?)?/
NAME: /(?:[^\W\d_]\w*\.)?(?:[^\W\d_]\w*|\[(?:[^\[\]\x00-\x1f\x7f]|\[\[|\]\])+\])/
PERCENT: "%"
"""

_KEYWORDS: Final[Mapping[str, str]] = {
    "AND": "_AND",
    "OR": "_OR",
    "NOT": "NOT",
    "IS": "_IS",
    "NULL": "_NULL",
    "LIKE": "_LIKE",
    "ESCAPE": "_ESCAPE",
    "IN": "_IN",
    "BETWEEN": "_BETWEEN",
    "TRUE": "TRUE",
    "FALSE": "FALSE",
}
_FILTEX_KEYWORDS: Final[Mapping[str, str]] = {
    **{word: token for word, token in _KEYWORDS.items() if word != "BETWEEN"},
    "UTC": "_UTC",
}
#: Words that cannot be names in ``amqp:sql-filter``, in upper or lower case.
_FILTEX_RESERVED: Final = frozenset(_FILTEX_KEYWORDS) | {
    *("BETWEEN", "DATE", "EXISTS", "INF", "LEFT", "LOWER", "NAN", "RIGHT", "SUBSTRING", "UPPER"),
}

#: Terminals that begin a value, and those between values.
_OPERANDS: Final = frozenset(
    {"TEXT", "NUMBER", "BINARY", "TRUE", "FALSE", "NAME", "_UTC", "PLUS", "MINUS", "LPAR", "NOT"}
)
_OPERATORS: Final = frozenset(
    {"COMPARE", "PLUS", "MINUS", "STAR", "SLASH", "PERCENT", "_AND", "_OR", "NOT"}
    | {"_BETWEEN", "_IN", "_IS", "_LIKE"}
)
#: Names of the other terminals in errors.
_EXPECTED: Final[Mapping[str, str]] = {
    "LPAR": "(",
    "RPAR": ")",
    "COMMA": ",",
    "TEXT": "a string",
    "$END": "the end",
}


def _jms_word(token: Token) -> Token:
    """Turn *token* into a keyword if it is one, in upper or lower case."""
    kind = _KEYWORDS.get(token.upper())
    return token if kind is None else token.update(type=kind)


def _filtex_word(token: Token) -> Token:
    kind = _FILTEX_KEYWORDS.get(token)
    if kind is not None:
        return token.update(type=kind)
    if token.upper() in _FILTEX_RESERVED:
        raise InvalidFilter(
            f"the selector: at character {token.start_pos}: {str(token)!r} is a reserved word: "
            f"write [{token}] for the name",
            position=token.start_pos,
            expected=("a name",),
        )
    return token


@lru_cache(maxsize=2)
def _parser(words: Literal["jms", "filtex"]) -> Lark:
    """Return the parser of a family, built on first use."""
    from lark import Lark

    jms = words == "jms"
    return Lark(
        _RULES + (_JMS_TERMINALS if jms else _FILTEX_TERMINALS),
        parser="lalr",
        lexer="basic",
        maybe_placeholders=True,
        lexer_callbacks={"NAME": _jms_word if jms else _filtex_word},
    )


def prepare() -> None:
    """Build the parsers now, since that would block the event loop at the first selector.

    ``amqp-rt serve`` does so in a thread. A broker within an application does not: most of them have
    no selectors, for which an import and two parsers would take time and memory of every process. There
    the first selector costs one step of some 50 ms, once in the life of a process.
    """
    _parser("jms")
    _parser("filtex")


def _parse(text: str, dialect: Dialect, limits: Limits) -> Tree[Token]:
    from lark.exceptions import UnexpectedCharacters, UnexpectedToken

    parser: Any = _parser(dialect.words).parse_interactive(text)  # partly untyped
    terms = 0
    try:
        for _token in parser.iter_parse():
            terms += 1
            if terms > limits.selector_terms_max:
                raise InvalidFilter(f"the selector has more than {limits.selector_terms_max} terms")
        return cast("Tree[Token]", parser.feed_eof())
    except UnexpectedToken as error:
        at = len(text) if error.token.type == "$END" else error.token.start_pos or 0
    except UnexpectedCharacters as error:
        at = error.pos_in_stream
    raise _unexpected(text, at, _expectations(parser.accepts()))


def _expectations(terminals: Iterable[str]) -> list[str]:
    """Return the names of *terminals* for an error; values and operators are not listed singly."""
    wanted = set(terminals)
    found = []
    if "NAME" in wanted:
        found.append("a value")
        wanted -= _OPERANDS
    if "STAR" in wanted:
        found.append("an operator")
        wanted -= _OPERATORS
    return found + [_EXPECTED.get(name, name.removeprefix("_")) for name in sorted(wanted)]


def _unexpected(text: str, at: int, expected: Sequence[str]) -> InvalidFilter:
    there = f"not {text[at : at + 16]!r}" if at < len(text) else "but it ends there"
    return InvalidFilter(
        f"the selector: at character {at}: {' or '.join(expected)} expected, {there}",
        position=at,
        expected=expected,
    )


# --- Values ------------------------------------------------------------------------------------

# Values of one kind are comparable.
_NUMBER: Final = 1
_TEXT: Final = 2
_OCTETS: Final = 3
_BOOLEAN: Final = 4
_UUID: Final = 5

_ORDERED: Final[dict[type, int]] = {
    **dict.fromkeys((int, UByte, UShort, UInt, ULong, Byte, Short, Int, Timestamp), _NUMBER),
    **dict.fromkeys((float, Float32), _NUMBER),
    **dict.fromkeys((str, Symbol, Char), _TEXT),
    bytes: _OCTETS,
}
#: Kind of each type that a selector can compare.
KINDS: Final[dict[type, int]] = {**_ORDERED, bool: _BOOLEAN, UUID: _UUID}

_LEAST: Final = -0x8000_0000_0000_0000
_MOST: Final = 0xFFFF_FFFF_FFFF_FFFF

#: Exponent bits, coefficient bits after them, and bias of the decimals (IEEE 754-2008 §3.5.2).
_DECIMALS: Final[dict[type, tuple[int, int, int]]] = {
    Decimal32: (8, 23, 101),
    Decimal64: (10, 53, 398),
    Decimal128: (14, 113, 6176),
}


def _of_decimal(value: Any) -> float | None:
    """Return the float nearest to a decimal in AMQP's binary encoding (Part 1 §1.6.13).

    None for an infinity and for NaN.
    """
    exponent_bits, coefficient_bits, bias = _DECIMALS[type(value)]
    bits = int.from_bytes(value.octets, "big")
    size = 8 * value.WIDTH
    coefficient_high = 0
    if bits >> (size - 3) & 3 == 3:
        if bits >> (size - 5) & 15 == 15:
            return None  # an infinity or NaN
        coefficient_bits -= 2
        coefficient_high = 4 << coefficient_bits
    exponent = bits >> coefficient_bits & ((1 << exponent_bits) - 1)
    coefficient = coefficient_high | bits & ((1 << coefficient_bits) - 1)
    found = float(f"{coefficient}e{exponent - bias}")
    return (-found if bits >> (size - 1) else found) if isfinite(found) else None


def _always(view: MessageView) -> bool:
    return True


def _in_range(result: float) -> float | None:
    """Return the result of arithmetic, or None if it is outside the range of AMQP's numbers."""
    if type(result) is int:
        return result if _LEAST <= result <= _MOST else None
    return result if isfinite(result) else None


def _plus(longest: int, left: Any, right: Any) -> Any:
    kind = _ORDERED.get(type(left), 0)
    if kind != _ORDERED.get(type(right), -1):
        return None
    if kind == _NUMBER:
        return _in_range(left + right)
    if kind == _TEXT and len(left) + len(right) <= longest:
        return left + right
    return None


def _minus(left: Any, right: Any) -> Any:
    if _ORDERED.get(type(left), 0) == _ORDERED.get(type(right), -1) == _NUMBER:
        return _in_range(left - right)
    return None


def _times(left: Any, right: Any) -> Any:
    if _ORDERED.get(type(left), 0) == _ORDERED.get(type(right), -1) == _NUMBER:
        return _in_range(left * right)
    return None


def _divided(whole: bool, left: Any, right: Any) -> Any:
    if not (_ORDERED.get(type(left), 0) == _ORDERED.get(type(right), -1) == _NUMBER) or not right:
        return None
    if whole and isinstance(left, int) and isinstance(right, int):
        quotient = abs(left) // abs(right)
        return quotient if (left < 0) == (right < 0) else -quotient
    return _in_range(left / right)


def _remainder(left: Any, right: Any) -> Any:
    """Return the remainder, with the sign of the dividend as in SQL."""
    if not (_ORDERED.get(type(left), 0) == _ORDERED.get(type(right), -1) == _NUMBER) or not right:
        return None
    if isinstance(left, float) or isinstance(right, float):
        return None
    found = abs(left) % abs(right)
    return -found if left < 0 else found


def _minus_sign(value: Any) -> Any:
    return _in_range(-value) if _ORDERED.get(type(value), 0) == _NUMBER else None


def _plus_sign(value: Any) -> Any:
    return value if _ORDERED.get(type(value), 0) == _NUMBER else None


#: Characters or octets that are compared in one step.
_COMPARED_AT_ONCE: Final = 4096

_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_MIRRORED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


# --- LIKE --------------------------------------------------------------------------------------


#: Comparisons of characters in the time of a step: when a literal is searched, and when ``_`` are
#: among its characters. Longer literals than this are searched in linear time.
_COMPARED_IN_LITERALS: Final = 1024
_COMPARED: Final = 64
_LONG_LITERAL: Final = 100


class _Segment:
    """Part of a pattern between two ``%``.

    Args:
        pieces: Its literal strings; between two of them there is a ``_``.
    """

    __slots__ = ("_literal", "_pattern", "length")

    def __init__(self, pieces: Sequence[str]) -> None:
        #: Number of characters that it matches.
        self.length = sum(map(len, pieces)) + len(pieces) - 1
        self._literal = pieces[0]
        self._pattern = (
            None if len(pieces) == 1 else re.compile(".".join(map(re.escape, pieces)), re.DOTALL)
        )

    def stands_at(self, text: str, at: int) -> bool:
        """Return whether it matches *text* at *at*."""
        if self._pattern is None:
            return text.startswith(self._literal, at)
        return self._pattern.match(text, at) is not None

    def find(self, view: MessageView, text: str, at: int, end: int) -> int:
        """Return the first index from *at* on where it matches before *end*; -1 if there is none."""
        if self._pattern is None:
            compared = (end - at) * min(self.length, _LONG_LITERAL)
            view.spend(1 + compared // _COMPARED_IN_LITERALS)
            return text.find(self._literal, at, end)
        view.spend(1 + (end - at) * self.length // _COMPARED)
        found = self._pattern.search(text, at, end)
        return -1 if found is None else found.start()


def _like_segments(
    pattern: str, escape: str | None, wildcards_max: int
) -> tuple[list[_Segment], int]:
    """Split *pattern* into segments; return them and the number of wildcards.

    Raises:
        InvalidFilter: There are more wildcards than *wildcards_max*.
    """
    segments: list[_Segment] = []
    pieces: list[str] = []
    literal: list[str] = []
    wildcards = 0
    at = 0

    def end_of_literal() -> None:
        pieces.append("".join(literal))
        literal.clear()

    while at < len(pattern):
        character = pattern[at]
        at += 1
        if character == escape and at < len(pattern) and pattern[at] in ("%", "_", escape):
            literal.append(pattern[at])
            at += 1
        elif character in ("%", "_"):
            wildcards += 1
            if wildcards > wildcards_max:
                raise InvalidFilter("the selector has too many LIKE wildcards")
            end_of_literal()
            if character == "%":
                segments.append(_Segment(pieces))
                pieces.clear()
        else:
            literal.append(character)
    end_of_literal()
    segments.append(_Segment(pieces))
    return segments, wildcards


def _is_like(segments: Sequence[_Segment], view: MessageView, text: str) -> bool:
    """Return whether *text* consists of *segments* with any characters between them.

    The first and the last segment have fixed positions. The others are searched from the left
    without backtracking: a later match would only leave less room for the rest.
    """
    view.spend(1)
    first = segments[0]
    size = len(text)
    if len(segments) == 1:
        return size == first.length and first.stands_at(text, 0)
    last = segments[-1]
    end = size - last.length
    at = first.length
    if at > end or not first.stands_at(text, 0) or not last.stands_at(text, end):
        return False
    for segment in segments[1:-1]:
        found = segment.find(view, text, at, end)
        if found < 0:
            return False
        at = found + segment.length
    return True


# --- Names -------------------------------------------------------------------------------------

#: Steps for converting a decimal or an id, and octets that are converted to text in one step.
_STEPS_OF_A_CONVERSION: Final = 4
_CONVERTED: Final = 256


def _property(field: str, view: MessageView) -> Any:
    return getattr(view.properties(), field)


def _id_text(field: str, view: MessageView) -> Any:
    """Return an id as a string, as JMS represents ids of all types."""
    found = getattr(view.properties(), field)
    if found is None or isinstance(found, str):
        return found
    view.spend(_STEPS_OF_A_CONVERSION)
    if isinstance(found, UUID):
        return f"ID:AMQP_UUID:{found}"
    if isinstance(found, bytes):
        view.spend(len(found) // _CONVERTED)
        return f"ID:AMQP_BINARY:{found.hex().upper()}"
    return f"ID:AMQP_ULONG:{int(found)}"


def _annotation(key: str, view: MessageView) -> Any:
    found = view.message_annotations().get(key)
    if type(found) in _DECIMALS:
        view.spend(_STEPS_OF_A_CONVERSION)
        return _of_decimal(found)
    return found


def _application_property(name: str) -> Evaluate:
    def evaluate(view: MessageView) -> Any:
        found = view.application_properties().get(name)
        if type(found) in _DECIMALS:
            view.spend(_STEPS_OF_A_CONVERSION)
            return _of_decimal(found)
        return found

    return evaluate


def _user_text(view: MessageView) -> str | None:
    found = view.properties().user_id
    if found is None:
        return None
    view.spend(1 + len(found) // _CONVERTED)
    return found.decode("utf-8", "replace")


_HEADER_FIELDS: Final[Mapping[str, Evaluate]] = {
    "durable": lambda view: view.entry.durable,
    "priority": lambda view: view.entry.priority,
    "ttl": lambda view: view.ttl(),
    "first_acquirer": lambda view: view.entry.first_acquirer and not view.entry.attempts,
    "delivery_count": lambda view: view.entry.delivery_count,
}
_PROPERTY_FIELDS: Final[Mapping[str, Evaluate]] = {
    field: partial(_property, field) for field in Properties.__struct_fields__
}
_ID_TEXTS: Final[Mapping[str, Evaluate]] = {
    field: partial(_id_text, field) for field in ("message_id", "correlation_id")
}
#: Names of JMS (JMS 1.1 §3.8.1.1), and those into which clients translate them
#: (``apache-filters``).
_JMS_NAMES: Final[Mapping[str, Evaluate]] = {
    "JMSMessageID": _ID_TEXTS["message_id"],
    "JMSCorrelationID": _ID_TEXTS["correlation_id"],
    "JMSPriority": _HEADER_FIELDS["priority"],
    "JMSTimestamp": _PROPERTY_FIELDS["creation_time"],
    "JMSExpiration": _PROPERTY_FIELDS["absolute_expiry_time"],
    "JMSType": _PROPERTY_FIELDS["subject"],
    "JMSDestination": _PROPERTY_FIELDS["to"],
    "JMSReplyTo": _PROPERTY_FIELDS["reply_to"],
    "JMSDeliveryMode": lambda view: "PERSISTENT" if view.entry.durable else "NON_PERSISTENT",
    "JMSRedelivered": lambda view: view.entry.delivery_count > 0,
    "JMSXDeliveryCount": lambda view: view.entry.delivery_count + 1,
    "JMSXGroupID": _PROPERTY_FIELDS["group_id"],
    "JMSXGroupSeq": _PROPERTY_FIELDS["group_sequence"],
    "JMSXUserID": _user_text,
    **{
        f"amqp.{field}": read
        for field, read in {**_HEADER_FIELDS, **_PROPERTY_FIELDS, **_ID_TEXTS}.items()
    },
}
#: Sections by their names in ``amqp:sql-filter`` (§6.4.4.4).
_FILTEX_SECTIONS: Final[Mapping[str, Mapping[str, Evaluate] | None]] = {
    **dict.fromkeys(("header", "h"), _HEADER_FIELDS),
    **dict.fromkeys(("properties", "p"), _PROPERTY_FIELDS),
    **dict.fromkeys(("application_properties", "a"), None),
}


# --- Compiling ---------------------------------------------------------------------------------

_VARIES: Final[Any] = object()


class _Node(NamedTuple):
    evaluate: Evaluate
    #: Whether the value may be a boolean, which those of numbers and strings are not.
    condition: bool = True
    #: Value of a literal.
    constant: Any = _VARIES


def _constant(value: Any) -> _Node:
    return _Node(lambda view: value, type(value) is bool, value)


class _Compiler:
    """Compiler of the functions of one selector from its tree."""

    def __init__(self, text: str, dialect: Dialect, now_ms: int, limits: Limits) -> None:
        self.text = text
        self.dialect = dialect
        self.now_ms = now_ms
        self.limits = limits
        self.wildcards = 0
        #: Number of nodes that an evaluation visits at most.
        self.nodes = 0
        self.operators: Mapping[str, Callable[[Any, Any], Any]] = {
            "+": partial(_plus, limits.filter_subject_max),
            "-": _minus,
            "*": _times,
            "/": partial(_divided, dialect.whole_quotients),
            "%": _remainder,
        }

    def node(self, tree: Tree[Token], depth: int) -> _Node:
        """Compile *tree*, which is *depth* levels deep in the selector.

        Raises:
            InvalidFilter: The selector is nested too deeply, or a term is invalid.
        """
        if depth > self.limits.selector_depth_max:
            raise InvalidFilter(
                f"the selector is more than {self.limits.selector_depth_max} levels deep"
            )
        self.nodes += 1
        make = cast("Callable[[list[Any], int], _Node]", getattr(self, f"_{tree.data}"))
        return make(tree.children, depth + 1)

    def condition(self, tree: Tree[Token], depth: int) -> _Node:
        """Compile *tree* in place of a condition.

        Raises:
            InvalidFilter: As for :meth:`node`, or the dialect requires a condition and it is none.
        """
        found = self.node(tree, depth)
        if self.dialect.conditions_only and not found.condition:
            at = next(tree.scan_values(lambda token: token is not None)).start_pos or 0
            raise _unexpected(self.text, at, ("a condition",))
        return found

    def value(self, tree: Tree[Token], depth: int) -> Evaluate:
        return self.node(tree, depth).evaluate

    # Three-valued logic: the result is unknown unless the known operands determine it.

    def _disjunction(self, children: list[Tree[Token]], depth: int) -> _Node:
        terms = tuple(self.condition(child, depth).evaluate for child in children)

        def evaluate(view: MessageView) -> bool | None:
            result: bool | None = False
            for term in terms:
                found = term(view)
                if found is True:
                    return True
                if found is not False:
                    result = None
            return result

        return _Node(evaluate)

    def _conjunction(self, children: list[Tree[Token]], depth: int) -> _Node:
        terms = tuple(self.condition(child, depth).evaluate for child in children)

        def evaluate(view: MessageView) -> bool | None:
            result: bool | None = True
            for term in terms:
                found = term(view)
                if found is False:
                    return False
                if found is not True:
                    result = None
            return result

        return _Node(evaluate)

    def _negation(self, children: list[Any], depth: int) -> _Node:
        return _negated(self.condition(children[1], depth).evaluate)

    def _group(self, children: list[Tree[Token]], depth: int) -> _Node:
        return self.node(children[0], depth)

    # Predicates

    def _comparison(self, children: list[Any], depth: int) -> _Node:
        left = self.node(children[0], depth)
        right = self.node(children[2], depth)
        sign = str(children[1])
        if left.constant is not _VARIES:
            left, right = right, left
            sign = _MIRRORED.get(sign, sign)
        kinds = (KINDS if sign in ("=", "<>", "!=") else _ORDERED).get
        compare = _COMPARISONS[sign]
        unlike = self.dialect.unlike
        first = left.evaluate
        second = right.evaluate
        if right.constant is not _VARIES:
            constant = right.constant
            kind = kinds(type(constant), -1)

            def with_a_constant(view: MessageView) -> bool | None:
                value = first(view)
                if kinds(type(value), 0) == kind:
                    return compare(value, constant)
                return None if value is None else unlike

            return _Node(with_a_constant)

        def evaluate(view: MessageView) -> bool | None:
            one = first(view)
            other = second(view)
            if one is None or other is None:
                return None
            if kinds(type(one), 0) == kinds(type(other), -1):
                _count_comparison(view, one)
                return compare(one, other)
            return unlike

        return _Node(evaluate)

    def _is_null(self, children: list[Any], depth: int) -> _Node:
        operand = self.value(children[0], depth)
        if children[1] is None:
            return _Node(lambda view: operand(view) is None)
        return _Node(lambda view: operand(view) is not None)

    def _like(self, children: list[Any], depth: int) -> _Node:
        operand = self.value(children[0], depth)
        escape = self._escape(children[3])
        pattern = _unquoted(children[2])
        wildcards_max = self.limits.like_wildcards_max - self.wildcards
        segments, wildcards = _like_segments(pattern, escape, wildcards_max)
        self.wildcards += wildcards
        longest = self.limits.filter_subject_max
        unlike = self.dialect.unlike

        def evaluate(view: MessageView) -> bool | None:
            value = operand(view)
            if _ORDERED.get(type(value), 0) != _TEXT:
                return None if value is None else unlike
            return _is_like(segments, view, value) if len(value) <= longest else None

        return _Node(evaluate) if children[1] is None else _negated(evaluate)

    def _escape(self, token: Token | None) -> str | None:
        if token is None:
            return None
        escape = _unquoted(token)
        if self.dialect.wildcard_escapes:
            if len(escape) == 1:
                return escape
        elif len(escape) <= 1 and escape not in ("%", "_"):
            return escape or None
        raise _unexpected(self.text, token.start_pos or 0, ("one escape character",))

    def _membership(self, children: list[Any], depth: int) -> _Node:
        operand = self.value(children[0], depth)
        absent = children[1] is not None
        present = not absent
        items = [self.node(child, depth) for child in children[2:]]
        unlike = self.dialect.unlike
        kinds = KINDS.get
        if all(item.constant is not _VARIES for item in items):
            self.nodes -= len(items)
            # Grouped by kind, since True equals 1 in Python.
            by_kind: dict[int, set[object]] = {}
            for item in items:
                by_kind.setdefault(KINDS[type(item.constant)], set()).add(item.constant)
            other_kinds = len(by_kind) > 1

            def among_constants(view: MessageView) -> bool | None:
                value = operand(view)
                if value is None:
                    return None
                alike = by_kind.get(kinds(type(value), 0))
                if alike is None:
                    return unlike
                if value in alike:
                    return present
                return unlike if other_kinds else absent

            return _Node(among_constants)
        readers = tuple(item.evaluate for item in items)

        def evaluate(view: MessageView) -> bool | None:
            value = operand(view)
            if value is None:
                return None
            kind = kinds(type(value), 0)
            result: bool | None = absent
            unknown = False
            for read in readers:
                item = read(view)
                if item is None:
                    unknown = True
                elif kinds(type(item), -1) != kind:
                    result = unlike
                else:
                    _count_comparison(view, item)
                    if value == item:
                        return present
            return None if unknown else result

        return _Node(evaluate)

    def _between(self, children: list[Any], depth: int) -> _Node:
        operand = self.value(children[0], depth)
        low = self.value(children[2], depth)
        high = self.value(children[3], depth)
        unlike = self.dialect.unlike

        def at_most(one: Any, other: Any) -> bool | None:
            if one is None or other is None:
                return None
            if _ORDERED.get(type(one), 0) == _ORDERED.get(type(other), -1):
                return cast("bool", one <= other)
            return unlike

        def evaluate(view: MessageView) -> bool | None:
            value = operand(view)
            _count_comparison(view, value)
            above = at_most(low(view), value)
            below = at_most(value, high(view))
            if above is False or below is False:
                return False
            return None if above is None or below is None else True

        return _Node(evaluate) if children[1] is None else _negated(evaluate)

    # Values

    def _sum(self, children: list[Any], depth: int) -> _Node:
        first = self.value(children[0], depth)
        rest = tuple(
            (self.operators[str(sign)], self.value(child, depth))
            for sign, child in zip(children[1::2], children[2::2], strict=True)
        )

        def evaluate(view: MessageView) -> Any:
            result = first(view)
            for combine, operand in rest:
                if result is None:
                    return None
                result = combine(result, operand(view))
            return result

        return _Node(evaluate, condition=False)

    _product = _sum

    def _sign(self, children: list[Any], depth: int) -> _Node:
        operand, _, constant = self.node(children[1], depth)
        apply = _minus_sign if str(children[0]) == "-" else _plus_sign
        if constant is not _VARIES:
            signed = apply(constant)
            if signed is not None:
                return _constant(signed)
        return _Node(lambda view: apply(operand(view)), condition=False)

    def _text(self, children: list[Token], depth: int) -> _Node:
        return _constant(_unquoted(children[0]))

    def _number(self, children: list[Token], depth: int) -> _Node:
        token = children[0]
        found = _jms_number(token) if self.dialect.words == "jms" else _filtex_number(token)
        if found is None:
            raise _unexpected(self.text, token.start_pos or 0, ("a number within its range",))
        return _constant(found)

    def _binary(self, children: list[Token], depth: int) -> _Node:
        return _constant(bytes.fromhex(children[0][2:]))

    def _boolean(self, children: list[Token], depth: int) -> _Node:
        return _constant(children[0].type == "TRUE")

    def _utc(self, children: list[Token], depth: int) -> _Node:
        return _constant(self.now_ms)

    def _name(self, children: list[Token], depth: int) -> _Node:
        token = children[0]
        if self.dialect.words == "jms":
            return _Node(self._jms_name(token))
        return _Node(self._filtex_name(token))

    def _jms_name(self, token: Token) -> Evaluate:
        if token.startswith('"'):
            return _application_property(_unquoted(token))
        name = str(token)
        known = _JMS_NAMES.get(name)
        if known is not None:
            return known
        if name.startswith("amqp.annotation."):
            return partial(_annotation, name.removeprefix("amqp.annotation."))
        if name.startswith("amqp."):
            raise _unexpected(
                self.text, token.start_pos or 0, ("the name of a field of AMQP 1.0 after amqp.",)
            )
        return _application_property(name)

    def _filtex_name(self, token: Token) -> Evaluate:
        # Only the first dot outside brackets separates the section from the name.
        section, dot, name = token.partition("." if not token.startswith("[") else "\0")
        if not dot:
            section, name = "a", str(token)
        if name.startswith("["):
            name = name[1:-1].replace("[[", "[").replace("]]", "]")
        if section not in _FILTEX_SECTIONS:
            raise _unexpected(
                self.text,
                token.start_pos or 0,
                ("header. or properties. or application_properties.",),
            )
        fields = _FILTEX_SECTIONS[section]
        if fields is None:
            return _application_property(name)
        if name not in fields:
            raise _unexpected(
                self.text,
                (token.start_pos or 0) + len(section) + 1,
                (f"a field of the section {section}",),
            )
        return fields[name]


def _count_comparison(view: MessageView, value: Any) -> None:
    """Count the steps of comparing *value* with another one of a message."""
    if isinstance(value, str | bytes):
        view.spend(len(value) // _COMPARED_AT_ONCE)


def _negated(operand: Evaluate) -> _Node:
    def evaluate(view: MessageView) -> bool | None:
        found = operand(view)
        return False if found is True else True if found is False else None

    return _Node(evaluate)


def _unquoted(token: Token) -> str:
    quote = token[0]
    return token[1:-1].replace(quote + quote, quote)


# --- Numbers -----------------------------------------------------------------------------------

_PLAIN_DIGITS: Final = re.compile("[0-9]{1,20}")


def _jms_number(literal: str) -> float | None:
    """Parse a literal of Java; hexadecimal, octal and binary ones are the bits of a long."""
    text = literal.replace("_", "").lower()
    try:
        if text.startswith("0x"):
            if "p" in text:
                return _in_range(float.fromhex(text.rstrip("fd")))
            return _as_long(int(text.rstrip("l"), 16))
        if text.startswith("0b"):
            return _as_long(int(text.rstrip("l"), 2))
        digits = text.rstrip("l")
        if _PLAIN_DIGITS.fullmatch(digits):
            if digits.startswith("0"):
                return _as_long(int(digits, 8))
            return _in_range(int(digits))
        if digits.isdigit():
            return None
        value = float(text.rstrip("fd"))
        return _in_range(float(Float32(value)) if text.endswith("f") else value)
    except (ValueError, OverflowError):
        return None


def _as_long(bits: int) -> int | None:
    if bits > _MOST:
        return None
    return bits - (1 << 64) if bits >> 63 else bits


def _filtex_number(literal: str) -> float | None:
    if "." in literal:
        return _in_range(float(literal))
    return _in_range(int(literal)) if _PLAIN_DIGITS.fullmatch(literal) else None
