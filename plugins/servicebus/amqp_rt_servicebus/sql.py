"""SQL filters and actions of rules: compiling, and evaluating over one message.

A text is compiled once into nested functions, which read only the properties that it names. Logic has three
values: ``True``, ``False`` and ``None``, which is *unknown*: a property that is missing or null, and each
operation on one. Only ``True`` selects a message (Service Bus facts, SQL). The grammar is in :mod:`.sql_syntax`, the
operators in :mod:`.sql_values`.

Work is bounded: the text by :class:`SqlBounds`, an evaluation by steps, which all filters over one message share.
A step takes about a fifth of a microsecond. LIKE takes time linear in its text.

Rules for points that the documentation leaves open:

* A null property is *unknown* in operators, as in SQL. ``EXISTS`` is true for a null property of the application, and
  false for a property of the system that is not set.
* ``AND``, ``OR`` and ``IN`` stop at the operand that decides; operands are evaluated from left to right. So
  ``EXISTS(size) AND size > 3`` never fails on a message without the property.
* Of application properties whose names differ only by case, the first one counts.
* ``SET`` to an unknown value makes the property null. Properties that only the service sets, such as
  ``sys.SequenceNumber``, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .sql_compiler import Compiler, Evaluate, Statement
from .sql_evaluation import (
    RULE_STEPS_MAX,
    STEPS_MAX,
    SYSTEM_PROPERTIES,
    Changes,
    Draft,
    Evaluation,
    EvaluationError,
    MessageFields,
    SystemProperty,
)
from .sql_like import PATTERN_MAX
from .sql_syntax import (
    DEFAULT_BOUNDS,
    SERVICE_BOUNDS,
    InvalidSql,
    SqlBounds,
    parse_predicate,
    parse_statements,
)
from .sql_values import COMPUTED_TEXT_MAX

__all__ = [
    "COMPUTED_TEXT_MAX",
    "DEFAULT_BOUNDS",
    "PATTERN_MAX",
    "RULE_STEPS_MAX",
    "SERVICE_BOUNDS",
    "STEPS_MAX",
    "SYSTEM_PROPERTIES",
    "Changes",
    "Evaluation",
    "EvaluationError",
    "InvalidSql",
    "MessageFields",
    "SqlAction",
    "SqlBounds",
    "SqlFilter",
    "SystemProperty",
    "parse_action",
    "parse_filter",
]


class SqlFilter:
    """Compiled condition; :func:`parse_filter` returns it."""

    __slots__ = ("_evaluate", "_steps", "text")

    def __init__(self, text: str, evaluate: Evaluate, steps: int) -> None:
        self.text = text
        self._evaluate = evaluate
        self._steps = steps

    def evaluate(self, evaluation: Evaluation) -> bool | None:
        """Return whether the condition holds for the message; None if that is unknown.

        Raises:
            EvaluationError: The condition cannot be evaluated on this message.
        """
        evaluation.spend(self._steps)
        found: bool | None = self._evaluate(evaluation)
        return found

    def matches(self, evaluation: Evaluation) -> bool:
        """Return whether the message is selected: the condition is true.

        Raises:
            EvaluationError: The condition cannot be evaluated on this message.
        """
        return self.evaluate(evaluation) is True


class SqlAction:
    """Compiled action; :func:`parse_action` returns it."""

    __slots__ = ("_statements", "_steps", "text")

    def __init__(self, text: str, statements: list[Statement], steps: int) -> None:
        self.text = text
        self._statements = statements
        self._steps = steps

    def apply(self, evaluation: Evaluation) -> Changes:
        """Return the properties of a copy of the message after the statements, in their order.

        The message and *evaluation* are not changed. A statement sees the changes of those before it.

        Raises:
            EvaluationError: A statement cannot be carried out on this message.
        """
        evaluation.spend(self._steps + len(evaluation.properties()))
        draft = Draft(evaluation)
        for statement in self._statements:
            statement(draft)
        return draft.changes()


def parse_filter(
    text: str, parameters: Mapping[str, Any] | None = None, *, bounds: SqlBounds = DEFAULT_BOUNDS
) -> SqlFilter:
    """Compile the text of a filter.

    Args:
        text: The condition.
        parameters: Values of the names that begin with ``@``; the keys have the ``@`` or not.
        bounds: Bounds of the text.

    Raises:
        InvalidSql: The text is malformed, or exceeds a bound; the error has the line and the column.
    """
    compiler = Compiler("SQL filter", text)
    predicate = parse_predicate(text, parameters or {}, bounds)
    evaluate = compiler.compile(predicate)
    return SqlFilter(text, evaluate, 1 + compiler.nodes)


def parse_action(
    text: str, parameters: Mapping[str, Any] | None = None, *, bounds: SqlBounds = DEFAULT_BOUNDS
) -> SqlAction:
    """Compile the text of an action; arguments and errors are those of :func:`parse_filter`."""
    compiler = Compiler("SQL action", text)
    assignments = parse_statements(text, parameters or {}, bounds)
    statements = [compiler.statement(each) for each in assignments]
    return SqlAction(text, statements, 1 + compiler.nodes)
