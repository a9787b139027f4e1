"""Grammar of SQL filters and actions: from a text to a tree.

The grammar is that of the service (Service Bus facts, SQL); its text is parsed in one pass, by the precedence of
operators. A tree is bounded by :class:`SqlBounds`, so that no text of a peer costs more than a known time and depth
of calls.

Rules for points that the documentation leaves open:

* Statements of an action are separated by ``;``, by ``,`` or by nothing; the documentation shows the first two.
* A predicate is no expression and the reverse, as in the grammar: ``flag`` alone is an error, ``flag = TRUE`` is not.
* ``sys.`` and ``user.`` are scopes only if they are not quoted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeAlias

from msgspec import Struct

from .sql_values import Refused, Value, Whole, value_of


class SqlBounds(Struct, frozen=True):
    """Bounds of the text of a filter or an action."""

    #: Characters of the text, and of the texts among its parameters.
    text_max: int = 3_072
    #: Constants and parameters in the text.
    literals_max: int = 2_048
    #: Depth of parentheses, functions, signs and ``NOT`` within each other.
    depth_max: int = 64
    #: Statements of an action.
    statements_max: int = 256


DEFAULT_BOUNDS: Final = SqlBounds()
#: Bounds of the service: 1,024 characters, and 32 expressions for an action.
SERVICE_BOUNDS: Final = SqlBounds(text_max=1_024, statements_max=32)


class InvalidSql(ValueError):
    """Text of a filter or an action that is malformed, or exceeds a bound.

    Args:
        kind: ``"SQL filter"`` or ``"SQL action"``.
        text: The text.
        at: Index of the character at which it becomes invalid.
        problem: The error, and what would be valid there.
    """

    def __init__(self, kind: str, text: str, at: int, problem: str) -> None:
        super().__init__(f"the {kind} is invalid at {position_of(text, at)}: {problem}")
        #: Line and column of that character, both counted from 1.
        self.line = text.count("\n", 0, at) + 1
        self.column = at - text.rfind("\n", 0, at)


def position_of(text: str, at: int) -> str:
    """Return the position of index *at* for an error, such as ``column 7`` or ``line 2, column 3``."""
    column = f"column {at - text.rfind(chr(10), 0, at)}"
    lines = text.count("\n", 0, at)
    return f"line {lines + 1}, {column}" if "\n" in text else column


# --- The tree --------------------------------------------------------------------------------------


class Constant(Struct, frozen=True):
    """Literal or parameter; None for ``NULL``."""

    value: Value
    at: int


class PropertyName(Struct, frozen=True):
    """Property of the message, of the system or of the application."""

    scope: Literal["sys", "user"]
    name: str
    at: int


class PropertyCall(Struct, frozen=True):
    """Property whose name is computed: ``property(expression)``."""

    name: Expression
    at: int


class NewId(Struct, frozen=True):
    """Call of ``newid()``."""

    at: int


class Signed(Struct, frozen=True):
    """Expression after a sign."""

    symbol: str
    operand: Expression
    at: int


class Chain(Struct, frozen=True):
    """Operations of one precedence, from left to right."""

    first: Expression
    #: Operator, its index in the text, and its right operand.
    rest: tuple[tuple[str, int, Expression], ...]
    at: int


class Comparison(Struct, frozen=True):
    """Comparison of two expressions."""

    symbol: str
    left: Expression
    right: Expression
    at: int


class IsNull(Struct, frozen=True):
    """Test of a property for null."""

    operand: PropertyName
    negated: bool
    at: int


class Exists(Struct, frozen=True):
    """Test for the presence of a property."""

    operand: PropertyName
    at: int


class Membership(Struct, frozen=True):
    """Test for one of several values."""

    left: Expression
    items: tuple[Expression, ...]
    negated: bool
    at: int


class Likeness(Struct, frozen=True):
    """Match with a pattern."""

    left: Expression
    pattern: Expression
    escape: Expression | None
    negated: bool
    at: int


class Negation(Struct, frozen=True):
    """Negation of a predicate."""

    operand: Predicate
    at: int


class Junction(Struct, frozen=True):
    """Predicates between ``AND``, or between ``OR``."""

    word: str
    operands: tuple[Predicate, ...]
    at: int


class Assignment(Struct, frozen=True):
    """Statement of an action: ``SET``, or ``REMOVE`` if there is no *value*."""

    target: PropertyName
    value: Expression | None


Expression: TypeAlias = "Constant | PropertyName | PropertyCall | NewId | Signed | Chain"
Predicate: TypeAlias = "Comparison | IsNull | Exists | Membership | Likeness | Negation | Junction"
Node: TypeAlias = "Expression | Predicate"

_PREDICATES: Final = (Comparison, IsNull, Exists, Membership, Likeness, Negation, Junction)


# --- Tokens ----------------------------------------------------------------------------------------


class _Token(NamedTuple):
    #: A keyword or symbol itself, or one of ``name quoted text number parameter end``.
    kind: str
    text: str
    at: int


_TOKEN: Final = re.compile(
    r"""\s*(?:
      (?P<text>'[^']*+(?:''[^']*+)*+')
    | (?P<quoted>\[[^\]]*+(?:\]\][^\]]*+)*+\] | "[^"]*+(?:""[^"]*+)*+")
    | (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    | (?P<parameter>@\w+)
    | (?P<name>\w+)
    | (?P<symbol><>|!=|<=|>=|[-=<>+*/%().,;])
    | (?P<end>\Z)
    )""",
    re.VERBOSE,
)
_KEYWORDS: Final = frozenset(
    {"AND", "OR", "NOT", "IS", "NULL", "IN", "LIKE", "ESCAPE", "EXISTS", "TRUE", "FALSE"}
    | {"SET", "REMOVE"}
)
_COMPARISONS: Final = frozenset({"=", "<>", "!=", "<", "<=", ">", ">="})
#: Operator → its precedence.
_LEVELS: Final[Mapping[str, int]] = {
    "OR": 1,
    "AND": 2,
    **dict.fromkeys(_COMPARISONS | {"IS", "IN", "LIKE", "NOT"}, 4),
    **dict.fromkeys("+-", 5),
    **dict.fromkeys("*/%", 6),
}
_NEGATION_LEVEL: Final = 3
_TEST_LEVEL: Final = 4
_SIGN_LEVEL: Final = 7
_LONG_MAX: Final = 2**63 - 1
#: Digits of the longest ``long``; longer literals are not converted to find out.
_LONG_DIGITS: Final = 19
#: Characters of the text that an error repeats.
_SHOWN: Final = 24


class _Parser:
    """Parser of one text."""

    def __init__(
        self, kind: str, text: str, parameters: Mapping[str, object], bounds: SqlBounds
    ) -> None:
        self.kind = kind
        self.text = text
        self.bounds = bounds
        self.literals = 0
        self.depth = 0
        size = len(text) + sum(len(each) for each in parameters.values() if isinstance(each, str))
        if size > bounds.text_max:
            self.fail(
                min(len(text), bounds.text_max),
                f"it has {size} characters, but at most {bounds.text_max} are allowed",
            )
        self.parameters = {
            name.removeprefix("@").lower(): value for name, value in parameters.items()
        }
        self.tokens = self._tokens()
        self.next = 0
        self.token = self.tokens[0]

    def fail(self, at: int, problem: str) -> NoReturn:
        raise InvalidSql(self.kind, self.text, at, problem)

    # -- Tokens

    def _tokens(self) -> list[_Token]:
        tokens = []
        at = 0
        while True:
            match = _TOKEN.match(self.text, at)
            if match is None:
                self._fail_at_character(at)
            kind = match.lastgroup or ""
            text = match[kind]
            begin, at = match.start(kind), match.end()
            if kind == "symbol":
                kind = text
            elif kind in ("name", "parameter"):
                self._check_name(text, begin)
                if text.upper() in _KEYWORDS:
                    kind = text.upper()
            elif kind == "number" and (
                self.text[at : at + 1].isalnum() or self.text[at : at + 1] == "_"
            ):
                self.fail(
                    begin, f"{self.text[begin : at + 1]!r:.40} is neither a number nor a name"
                )
            tokens.append(_Token(kind, text, begin))
            if kind == "end":
                return tokens

    def _fail_at_character(self, at: int) -> NoReturn:
        while self.text[at].isspace():
            at += 1
        character = self.text[at]
        if character in "'\"[":
            what = "string" if character == "'" else "name"
            self.fail(at, f"the {what} that begins here has no end")
        self.fail(at, f"unexpected character {character!r}")

    def _check_name(self, text: str, begin: int) -> None:
        # Letters and digits are those of Unicode's categories L and Nd, of which \w has more.
        for index, character in enumerate(text.removeprefix("@")):
            if character.isalpha() or (index and (character.isdecimal() or character == "_")):
                continue
            self.fail(
                begin + index + text.startswith("@"),
                f"a name has letters, digits and _ after a letter, not {character!r};"
                " write other names in brackets, as in [a-b]",
            )

    def take(self) -> _Token:
        """Return the current token and go to the next one."""
        token = self.token
        self.next += 1
        if token.kind != "end":
            self.token = self.tokens[self.next]
        return token

    def accept(self, *kinds: str) -> _Token | None:
        """Take the current token if it is one of *kinds*."""
        return self.take() if self.token.kind in kinds else None

    def expect(self, kind: str, wanted: str) -> _Token:
        """Take the current token, which must be *kind*; *wanted* is its name in the error."""
        if self.token.kind != kind:
            self.fail_expecting(wanted)
        return self.take()

    def fail_expecting(self, wanted: str) -> NoReturn:
        token = self.token
        shown = token.text if len(token.text) <= _SHOWN else token.text[:_SHOWN] + "…"
        found = "the end" if token.kind == "end" else f"{shown!r}"
        hint = ""
        if token.kind in _KEYWORDS and wanted.startswith(("a property", "a value")):
            hint = f"; write [{token.text}] if that is the name of a property"
        self.fail(token.at, f"expected {wanted}, found {found}{hint}")

    # -- Expressions and predicates

    def deepen(self, at: int) -> None:
        self.depth += 1
        if self.depth > self.bounds.depth_max:
            self.fail(at, f"more than {self.bounds.depth_max} levels are nested")

    def predicate(self, node: Node, at: int) -> Predicate:
        """Check that *node* is a predicate."""
        if not isinstance(node, _PREDICATES):
            self.fail(
                at, "expected a condition, found a value; compare it, as in flag = TRUE or size > 0"
            )
        return node

    def value(self, node: Node, at: int) -> Expression:
        """Check that *node* is an expression."""
        if isinstance(node, _PREDICATES):
            self.fail(at, "expected a value, found a condition")
        return node

    def parse(self, least: int) -> Node:
        """Parse operators of at least the precedence *least*, and their operands."""
        at = self.token.at
        node = self._operand()
        while True:
            level = _LEVELS.get(self.token.kind)
            if level is None or level < least:
                return node
            if level in (1, 2):
                node = self._junction(node, at, level)
            elif level == _TEST_LEVEL:
                node = self._test(self.value(node, at), at)
                # Tests are not chained: a = b = c has no meaning in the grammar.
                if _LEVELS.get(self.token.kind) == _TEST_LEVEL:
                    self.fail_expecting("AND, OR or the end of the condition")
            else:
                node = self._chain(self.value(node, at), at, level)

    def expression(self) -> Expression:
        """Parse an expression without comparisons."""
        at = self.token.at
        return self.value(self.parse(_TEST_LEVEL + 1), at)

    def _junction(self, first: Node, at: int, level: int) -> Predicate:
        word = self.token.kind
        operands = [self.predicate(first, at)]
        while self.accept(word):
            begin = self.token.at
            operands.append(self.predicate(self.parse(level + 1), begin))
        return Junction(word, tuple(operands), at)

    def _chain(self, first: Expression, at: int, level: int) -> Expression:
        rest = []
        while _LEVELS.get(self.token.kind) == level:
            token = self.take()
            begin = self.token.at
            rest.append((token.text, token.at, self.value(self.parse(level + 1), begin)))
        return Chain(first, tuple(rest), at)

    def _test(self, left: Expression, at: int) -> Predicate:
        token = self.take()
        if token.kind in _COMPARISONS:
            return Comparison(token.kind, left, self.expression(), token.at)
        if token.kind == "IS":
            negated = self.accept("NOT") is not None
            self.expect("NULL", "NULL" if negated else "NULL or NOT NULL")
            if not isinstance(left, PropertyName):
                self.fail(at, "expected a property before IS NULL, found another value")
            return IsNull(left, negated, token.at)
        negated = token.kind == "NOT"
        if negated:
            if self.token.kind not in ("IN", "LIKE"):
                self.fail_expecting("IN or LIKE after NOT")
            token = self.take()
        if token.kind == "IN":
            self.expect("(", "( after IN")
            items = [self.expression()]
            while self.accept(","):
                items.append(self.expression())
            self.expect(")", "a comma or )")
            return Membership(left, tuple(items), negated, token.at)
        pattern = self.expression()
        escape = self.expression() if self.accept("ESCAPE") else None
        return Likeness(left, pattern, escape, negated, token.at)

    def _operand(self) -> Node:
        token = self.token
        if token.kind in ("(", "NOT", "+", "-"):
            self.deepen(token.at)
            node = self._nested(self.take())
            self.depth -= 1
            return node
        if token.kind in ("name", "quoted"):
            return self._named()
        if token.kind == "EXISTS":
            self.take()
            self.expect("(", "( after EXISTS")
            operand = self.property()
            self.expect(")", ")")
            return Exists(operand, token.at)
        return self._constant()

    def _nested(self, token: _Token) -> Node:
        begin = self.token.at
        if token.kind == "(":
            node = self.parse(0)
            self.expect(")", "an operator or )")
            return node
        if token.kind == "NOT":
            return Negation(self.predicate(self.parse(_NEGATION_LEVEL), begin), token.at)
        # The least long has no positive counterpart, so its sign belongs to the literal.
        if token.kind == "-" and self.token.text == str(_LONG_MAX + 1):
            self.take()
            return self._literal(-_LONG_MAX - 1, token.at)
        return Signed(token.kind, self.value(self.parse(_SIGN_LEVEL), begin), token.at)

    def _named(self) -> Expression:
        token = self.token
        following = self.tokens[self.next + 1].kind
        if token.kind == "name" and following == "(":
            self.take()
            self.take()
            function = token.text.lower()
            if function == "newid":
                self.expect(")", ") after newid(")
                return NewId(token.at)
            if function not in ("property", "p"):
                self.fail(
                    token.at,
                    f"there is no function {token.text!r:.40}, only newid(), property(name) and p(name)",
                )
            self.deepen(token.at)
            name = self.expression()
            self.depth -= 1
            self.expect(")", "an operator or )")
            return PropertyCall(name, token.at)
        return self.property()

    def property(self) -> PropertyName:
        """Parse the name of a property, with or without its scope."""
        token = self.token
        if token.kind not in ("name", "quoted"):
            self.fail_expecting("a property")
        self.take()
        if self.token.kind != ".":
            return PropertyName("user", self._unquoted(token), token.at)
        scope = token.text.lower()
        if token.kind == "quoted" or scope not in ("sys", "user"):
            self.fail(
                token.at,
                f"there is no scope {token.text!r:.40}, only sys and user;"
                " write names with dots in brackets, as in [a.b]",
            )
        self.take()
        if self.token.kind not in ("name", "quoted"):
            self.fail_expecting(f"a property after {token.text}.")
        name = self._unquoted(self.take())
        return PropertyName("sys" if scope == "sys" else "user", name, token.at)

    def _unquoted(self, token: _Token) -> str:
        if token.kind == "name":
            return token.text
        closing = token.text[-1]
        name = token.text[1:-1].replace(closing * 2, closing)
        if not name:
            self.fail(token.at, "the name of a property is empty")
        return name

    def _constant(self) -> Constant:
        token = self.token
        if token.kind not in ("text", "number", "parameter", "TRUE", "FALSE", "NULL"):
            self.fail_expecting("a value")
        self.take()
        if token.kind == "text":
            return self._literal(token.text[1:-1].replace("''", "'"), token.at)
        if token.kind == "number":
            return self._literal(self._number(token), token.at)
        if token.kind == "parameter":
            return self._literal(self._parameter(token), token.at)
        return self._literal({"TRUE": True, "FALSE": False, "NULL": None}[token.kind], token.at)

    def _literal(self, value: Value, at: int) -> Constant:
        self.literals += 1
        if self.literals > self.bounds.literals_max:
            self.fail(at, f"there are more than {self.bounds.literals_max} constants")
        return Constant(value, at)

    def _number(self, token: _Token) -> Value:
        text = token.text
        if text.isdecimal():
            digits = text.lstrip("0") or "0"
            if len(digits) > _LONG_DIGITS or int(digits) > _LONG_MAX:
                self.fail(token.at, "an integer is outside the range of 64 bits")
            return Whole(digits)
        number = float(text)
        if number == float("inf"):
            self.fail(token.at, "a number is outside the range of a double")
        return number

    def _parameter(self, token: _Token) -> Value:
        name = token.text[1:].lower()
        if name not in self.parameters:
            self.fail(token.at, f"there is no parameter {token.text!r:.60}")
        try:
            return value_of(self.parameters[name])
        except Refused as refused:
            self.fail(token.at, f"the parameter {token.text!r:.60} cannot be used: {refused}")

    # -- Statements

    def statements(self) -> list[Assignment]:
        found: list[Assignment] = []
        while True:
            token = self.token
            if token.kind not in ("SET", "REMOVE"):
                self.fail_expecting("SET or REMOVE")
            if len(found) == self.bounds.statements_max:
                self.fail(token.at, f"there are more than {self.bounds.statements_max} statements")
            self.take()
            target = self.property()
            value = None
            if token.kind == "SET":
                self.expect("=", "=")
                value = self.expression()
            found.append(Assignment(target, value))
            semicolon = self.accept(";")
            comma = self.accept(",")
            if self.token.kind == "end" and comma is None:
                return found
            if self.token.kind not in ("SET", "REMOVE"):
                operator = "an operator, " if value is not None and not (semicolon or comma) else ""
                self.fail_expecting(f"{operator}SET or REMOVE")


def parse_predicate(
    text: str, parameters: Mapping[str, Any], bounds: SqlBounds = DEFAULT_BOUNDS
) -> Predicate:
    """Parse the text of a filter.

    Raises:
        InvalidSql: The text is malformed, or exceeds *bounds*.
    """
    parser = _Parser("SQL filter", text, parameters, bounds)
    at = parser.token.at
    node = parser.parse(0)
    if parser.token.kind != "end":
        parser.fail_expecting("an operator or the end")
    return parser.predicate(node, at)


def parse_statements(
    text: str, parameters: Mapping[str, Any], bounds: SqlBounds = DEFAULT_BOUNDS
) -> Sequence[Assignment]:
    """Parse the text of an action.

    Raises:
        InvalidSql: The text is malformed, or exceeds *bounds*.
    """
    return _Parser("SQL action", text, parameters, bounds).statements()
