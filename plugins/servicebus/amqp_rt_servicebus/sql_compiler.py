"""Compiler of SQL filters and actions: from trees to nested functions over one message.

Each function returns the value of its part of the tree, ``None`` if that is *unknown*. A function calls those of its
operands at most once, so the number of functions bounds the steps; those that depend on the length of a text are
counted beside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from .sql_evaluation import SYSTEM_PROPERTIES, Draft, Evaluation, EvaluationError
from .sql_like import BadPattern, LikePattern
from .sql_syntax import (
    Assignment,
    Chain,
    Comparison,
    Constant,
    Exists,
    Expression,
    InvalidSql,
    IsNull,
    Junction,
    Likeness,
    Membership,
    Negation,
    NewId,
    Predicate,
    PropertyCall,
    PropertyName,
    Signed,
    position_of,
)
from .sql_values import Refused, Value, combine, comparison, signed, type_name

#: Compiled expression or predicate.
Evaluate: TypeAlias = Callable[[Evaluation], Any]
#: Compiled statement.
Statement: TypeAlias = Callable[[Draft], None]

#: Characters of a text that is compared or joined in the time of a step.
_CHARACTERS_OF_A_STEP: Final = 1_024


class Compiler:
    """Compiler of one text.

    Args:
        kind: ``"SQL filter"`` or ``"SQL action"``.
        text: The text, for the positions in errors.
    """

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        self.text = text
        #: Number of functions that an evaluation calls at most, each in the time of a step.
        self.nodes = 0

    def failure(self, at: int, problem: object) -> EvaluationError:
        """Return the error of an evaluation that fails at index *at* of the text."""
        return EvaluationError(f"the {self.kind} failed at {position_of(self.text, at)}: {problem}")

    def compile(self, node: Expression | Predicate) -> Evaluate:
        """Compile *node*.

        Raises:
            InvalidSql: A pattern of LIKE is invalid for all messages.
        """
        self.nodes += 1
        method: Callable[[Any], Evaluate] = getattr(self, f"_{type(node).__name__.lower()}")
        return method(node)

    # -- Values

    def _constant(self, node: Constant) -> Evaluate:
        value = node.value
        return lambda run: value

    def _propertyname(self, node: PropertyName) -> Evaluate:
        return self._named(node.scope, node.name, node.at)

    def _named(self, scope: str, name: str, at: int) -> Evaluate:
        folded = name.lower()
        if scope == "user":

            def evaluate(run: Evaluation) -> Any:
                try:
                    return run.application(folded)
                except Refused as refused:
                    raise self.failure(at, refused) from None

            return evaluate
        known = SYSTEM_PROPERTIES.get(folded)
        if known is None:
            return self._unknown_property(name, at)
        canonical = known.name
        return lambda run: run.system(canonical)

    def _unknown_property(self, name: str, at: int) -> Evaluate:
        # The service accepts the rule and fails on each message, so the error waits for one here too.
        def evaluate(run: Evaluation) -> Any:
            raise self.failure(at, f"there is no system property sys.{name:.60}")

        return evaluate

    def _propertycall(self, node: PropertyCall) -> Evaluate:
        name_of = self.compile(node.name)
        at = node.at

        def evaluate(run: Evaluation) -> Any:
            name = name_of(run)
            if name is None:
                return None
            if type(name) is not str:
                raise self.failure(
                    at, f"property() takes a string, not a value of type '{type_name(name)}'"
                )
            run.spend(1 + len(name) // _CHARACTERS_OF_A_STEP)
            scope, dot, rest = name.partition(".")
            if dot and scope.lower() in ("sys", "user"):
                return self._named(scope.lower(), rest, at)(run)
            return self._named("user", name, at)(run)

        return evaluate

    def _newid(self, node: NewId) -> Evaluate:
        return lambda run: run.new_id()

    def _signed(self, node: Signed) -> Evaluate:
        operand = self.compile(node.operand)
        symbol, at = node.symbol, node.at

        def evaluate(run: Evaluation) -> Any:
            value = operand(run)
            try:
                return None if value is None else signed(symbol, value)
            except Refused as refused:
                raise self.failure(at, refused) from None

        return evaluate

    def _chain(self, node: Chain) -> Evaluate:
        first = self.compile(node.first)
        rest = [(symbol, at, self.compile(operand)) for symbol, at, operand in node.rest]

        def evaluate(run: Evaluation) -> Any:
            result = first(run)
            for symbol, at, operand in rest:
                # An operand is evaluated also if the result is unknown: its errors are errors.
                value = operand(run)
                if result is None or value is None:
                    result = None
                    continue
                try:
                    result = combine(symbol, result, value)
                except Refused as refused:
                    raise self.failure(at, refused) from None
                if type(result) is str:
                    run.spend(1 + len(result) // _CHARACTERS_OF_A_STEP)
            return result

        return evaluate

    # -- Predicates

    def _comparison(self, node: Comparison) -> Evaluate:
        left, right = self.compile(node.left), self.compile(node.right)
        compare, at = comparison(node.symbol), node.at

        def evaluate(run: Evaluation) -> bool | None:
            first, second = left(run), right(run)
            if first is None or second is None:
                return None
            if type(first) is str:
                _spend_comparison(run, first)
            try:
                return compare(first, second)
            except Refused as refused:
                raise self.failure(at, refused) from None

        return evaluate

    def _isnull(self, node: IsNull) -> Evaluate:
        operand = self.compile(node.operand)
        negated = node.negated
        return lambda run: (operand(run) is None) is not negated

    def _exists(self, node: Exists) -> Evaluate:
        name = node.operand.name.lower()
        if node.operand.scope == "user":
            return lambda run: name in run.properties()
        operand = self.compile(node.operand)
        return lambda run: operand(run) is not None

    def _membership(self, node: Membership) -> Evaluate:
        left = self.compile(node.left)
        items = [self.compile(item) for item in node.items]
        found, missed, at = not node.negated, node.negated, node.at
        equals = comparison("=")
        constants = [item.value for item in node.items if type(item) is Constant]
        texts = frozenset(value for value in constants if type(value) is str)
        only_texts = len(constants) == len(node.items) and all(
            type(value) is str for value in constants
        )

        def evaluate(run: Evaluation) -> bool | None:
            value = left(run)
            if value is None:
                return None
            if only_texts and type(value) is str:
                _spend_comparison(run, value)
                return found if value in texts else missed
            result: bool | None = missed
            for item in items:
                other = item(run)
                if other is None:
                    result = None
                    continue
                if type(value) is str:
                    _spend_comparison(run, value)
                try:
                    if equals(value, other):
                        return found
                except Refused as refused:
                    raise self.failure(at, refused) from None
            return result

        return evaluate

    def _likeness(self, node: Likeness) -> Evaluate:
        left, pattern = self.compile(node.left), self.compile(node.pattern)
        escape = self.compile(Constant("", node.at) if node.escape is None else node.escape)
        escaped, negated, at = node.escape is not None, node.negated, node.at
        prepared = self._prepared(node)

        def evaluate(run: Evaluation) -> bool | None:
            text = left(run)
            wanted, mark = (None, None) if prepared else (pattern(run), escape(run))
            if text is None or (prepared is None and (wanted is None or mark is None)):
                return None
            like = prepared
            if like is None:
                like = self._pattern(at, wanted, mark, escaped)
                run.spend(1 + like.size)
            if type(text) is not str:
                raise self.failure(
                    at, f"LIKE takes a string, not a value of type '{type_name(text)}'"
                )
            return like.matches(text, run.spend) is not negated

        return evaluate

    def _pattern(self, at: int, pattern: Value, escape: Value, escaped: bool) -> LikePattern:
        if type(pattern) is not str:
            raise self.failure(
                at, f"a pattern of LIKE is a string, not a value of type '{type_name(pattern)}'"
            )
        if type(escape) is not str or len(escape) != escaped:
            raise self.failure(at, "an escape of LIKE is a string of one character")
        try:
            return LikePattern(pattern, escape)
        except BadPattern as error:
            raise self.failure(at, error) from None

    def _prepared(self, node: Likeness) -> LikePattern | None:
        """Prepare a pattern that is the same for all messages.

        Raises:
            InvalidSql: The pattern or its escape is invalid for all messages.
        """
        if type(node.pattern) is not Constant or type(node.pattern.value) is not str:
            return None
        mark: Value = ""
        if node.escape is not None:
            if type(node.escape) is not Constant or node.escape.value is None:
                return None
            mark = node.escape.value
            if type(mark) is not str or len(mark) != 1:
                problem = "an escape of LIKE is a string of one character"
                raise InvalidSql(self.kind, self.text, node.escape.at, problem)
        try:
            return LikePattern(node.pattern.value, mark)
        except BadPattern as error:
            raise InvalidSql(self.kind, self.text, node.pattern.at, str(error)) from None

    def _negation(self, node: Negation) -> Evaluate:
        operand = self.compile(node.operand)

        def evaluate(run: Evaluation) -> bool | None:
            found: bool | None = operand(run)
            return None if found is None else not found

        return evaluate

    def _junction(self, node: Junction) -> Evaluate:
        operands = [self.compile(operand) for operand in node.operands]
        decisive = node.word == "OR"

        def evaluate(run: Evaluation) -> bool | None:
            result: bool | None = not decisive
            for operand in operands:
                found: bool | None = operand(run)
                if found is decisive:
                    return found
                if found is None:
                    result = None
            return result

        return evaluate

    # -- Statements

    def statement(self, assignment: Assignment) -> Statement:
        """Compile a statement of an action; errors are those of :meth:`compile`."""
        self.nodes += 1
        name, at = assignment.target.name, assignment.target.at
        removes = assignment.value is None
        value_of = self.compile(assignment.value or Constant(None, at))
        if assignment.target.scope == "user":

            def change(draft: Draft) -> None:
                if removes:
                    draft.remove_application(name)
                else:
                    draft.set_application(name, value_of(draft))

        else:
            known = SYSTEM_PROPERTIES.get(name.lower())
            if known is None:
                return self._unknown_property(name, at)
            settable = known

            def change(draft: Draft) -> None:
                draft.set_system(settable, value_of(draft))

        def statement(draft: Draft) -> None:
            try:
                change(draft)
            except Refused as refused:
                raise self.failure(at, refused) from None

        return statement


def _spend_comparison(run: Evaluation, text: str) -> None:
    if len(text) > _CHARACTERS_OF_A_STEP:
        run.spend(len(text) // _CHARACTERS_OF_A_STEP)
