"""Rules of the subscriptions of a topic: which copies of a message each subscription gets.

Rules without an action are joined by OR: a subscription gets one copy, however many of them match. Each rule with an
action that matches gives a copy of its own, with the property ``RuleName`` and the changes of the action. A change is
seen in that copy only (Service Bus facts, rules on a subscription).

A filter or an action that fails on a message does not affect other rules: results are both copies and
failures, and the subscription dead-letters the message once if it is declared so.

The correlation filters of a topic share one index; see :mod:`.correlations`. SQL filters are evaluated one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, TypeAlias

from msgspec import Struct

from .correlations import Conditions, CorrelationIndex, conditions_of
from .declarations import Correlation, Everything, Nothing, Rule, Sql
from .sql import (
    DEFAULT_BOUNDS,
    RULE_STEPS_MAX,
    STEPS_MAX,
    Evaluation,
    EvaluationError,
    MessageFields,
    SqlAction,
    SqlBounds,
    SqlFilter,
    parse_action,
    parse_filter,
)

#: Application property of copies that an action has changed: the name of the rule.
RULE_NAME: Final = "RuleName"
#: Dead-letter reasons for failures of filters and of actions: names of exceptions of the service.
FILTER_FAILED: Final = "FilterException"
ACTION_FAILED: Final = "RuleActionException"


class RuleExists(ValueError):
    """Rule whose name the subscription already has, apart from case."""


class RuleNotFound(LookupError):
    """Name that no rule of the subscription has."""


class InvalidRule(ValueError):
    """Rule whose filter or action is malformed."""


class TooManyRules(ValueError):
    """Rule that would exceed a bound of the subscription or the topic."""


class RuleBounds(Struct, frozen=True):
    """Bounds of the rules of a topic."""

    #: Bounds of the texts of filters and actions.
    sql: SqlBounds = DEFAULT_BOUNDS
    #: Rules of one subscription.
    rules_max: int = 20_000
    #: SQL filters of one topic, and correlation filters.
    sql_filters_max: int = 10_000
    correlation_filters_max: int = 100_000
    #: Steps of all rules of a topic for one message, and of a single filter or action, which nothing interrupts. A
    #: step takes about a fifth of a microsecond.
    steps_max: int = STEPS_MAX
    rule_steps_max: int = RULE_STEPS_MAX


DEFAULT_RULE_BOUNDS: Final = RuleBounds()


class Copy(Struct, frozen=True):
    """Copy of a message for a subscription."""

    #: Rule whose action made the copy; None for the copy that rules without an action select, which is the message
    #: as it is.
    rule: str | None = None
    #: All application properties of the copy, with values as they are on the wire; None for those of the message.
    properties: Mapping[str, object] | None = None
    #: System properties that differ from those of the message, by their names in
    #: :data:`.sql.SYSTEM_PROPERTIES`; None for removed ones. The service ignores a changed
    #: ``ScheduledEnqueueTimeUtc`` and ``MessageId`` on the subscription.
    system: Mapping[str, object] = {}


class Failure(Struct, frozen=True):
    """Failure of the filter or the action of a rule on a message."""

    rule: str
    #: Dead-letter reason: :data:`FILTER_FAILED` or :data:`ACTION_FAILED`.
    reason: str
    description: str


_UNCHANGED: Final = Copy()
#: Steps that a failure, and a copy that an action has changed, take beside those that they count themselves.
_STEPS_OF_A_RESULT: Final = 8
#: Rules found by the index that are looked at in one go.
_FOUND_IN_A_ROW: Final = 1_024


class ActiveRule:
    """Rule of a subscription, compiled.

    Args:
        declaration: The rule.
        owner: Rules of its subscription.
        created_ms: Time of its creation, in milliseconds since 1970.
        bounds: Bounds of its texts.

    Raises:
        InvalidRule: The filter or the action is malformed.
    """

    __slots__ = ("action", "conditions", "created_ms", "declaration", "filter", "owner", "serial")

    def __init__(
        self, declaration: Rule, owner: SubscriptionRules, created_ms: int, bounds: SqlBounds
    ) -> None:
        self.declaration = declaration
        self.owner = owner
        self.created_ms = created_ms
        #: Place in the order of rules of the topic; assigned when the rule is added.
        self.serial = 0
        #: Condition to evaluate, or whether all messages are selected; None with *conditions*.
        self.filter: SqlFilter | bool | None = None
        #: Conditions for the index.
        self.conditions: Conditions | None = None
        self.action: SqlAction | None = None
        try:
            self._compile(bounds)
        except ValueError as error:
            raise InvalidRule(f"rule {declaration.name!r}: {error}") from error

    def _compile(self, bounds: SqlBounds) -> None:
        declared = self.declaration
        wanted = declared.filter
        if isinstance(wanted, Correlation):
            self.conditions = conditions_of(wanted)
        elif isinstance(wanted, Sql):
            self.filter = parse_filter(wanted.expression, wanted.parameters, bounds=bounds)
        else:
            self.filter = isinstance(wanted, Everything)
            assert isinstance(wanted, Everything | Nothing)
        if declared.action is not None:
            self.action = parse_action(declared.action, declared.action_parameters, bounds=bounds)

    def matches(self, evaluation: Evaluation) -> bool:
        """Return whether a filter without *conditions* selects the message.

        Raises:
            EvaluationError: The filter failed.
        """
        wanted = self.filter
        return wanted.matches(evaluation) if type(wanted) is SqlFilter else wanted is True

    def copy(self, evaluation: Evaluation) -> Copy:
        """Return the copy that the rule gives of a message which it selects.

        Raises:
            EvaluationError: The action failed.
        """
        if self.action is None:
            return _UNCHANGED
        properties, system = self.action.apply(evaluation)
        folded = RULE_NAME.lower()
        for name in [name for name in properties if name.lower() == folded]:
            del properties[name]
        properties[RULE_NAME] = self.declaration.name
        return Copy(self.declaration.name, properties, system)


class SubscriptionRules:
    """Rules of one subscription; :meth:`TopicRules.add` makes them.

    Iterating gives the :class:`ActiveRule` in the order in which they were added.
    """

    def __init__(self, name: str, topic: TopicRules) -> None:
        self.name = name
        #: Rules of its topic.
        self.topic = topic
        #: Whether the subscription has been deleted.
        self.removed = False
        #: Lower-cased name → rule.
        self._rules: dict[str, ActiveRule] = {}
        #: Rules whose filters are evaluated one by one.
        self.evaluated: dict[ActiveRule, None] = {}

    def __len__(self) -> int:
        return len(self._rules)

    def __iter__(self) -> Iterator[ActiveRule]:
        return iter(self._rules.values())

    def __getitem__(self, name: str) -> ActiveRule:
        """Return the rule *name*, in any case.

        Raises:
            RuleNotFound: There is none.
        """
        try:
            return self._rules[name.lower()]
        except KeyError:
            raise RuleNotFound(f"subscription {self.name!r} has no rule {name!r:.60}") from None

    def page(self, skip: int, top: int) -> list[ActiveRule]:
        """Return at most *top* rules after the first *skip*, in the order in which they were added."""
        return list(islice(self, max(skip, 0), max(skip, 0) + max(top, 0)))

    def add(self, *rules: Rule, now_ms: int = 0) -> None:
        """Add *rules*, all or none; *now_ms* is the time of their creation.

        Raises:
            RuleExists: The subscription has a rule of that name.
            InvalidRule: A filter or an action is malformed.
            TooManyRules: A bound of the subscription or the topic would be exceeded.
        """
        bounds = self.topic.bounds
        names: set[str] = set()
        for rule in rules:
            if rule.name.lower() in self._rules or rule.name.lower() in names:
                raise RuleExists(f"subscription {self.name!r} already has a rule {rule.name!r:.60}")
            names.add(rule.name.lower())
        if len(self._rules) + len(names) > bounds.rules_max:
            raise TooManyRules(
                f"subscription {self.name!r} would have more than {bounds.rules_max} rules"
            )
        active = [ActiveRule(rule, self, now_ms, bounds.sql) for rule in rules]
        self.topic.admit(active)
        for each in active:
            self._rules[each.declaration.name.lower()] = each

    def remove(self, name: str) -> None:
        """Remove the rule *name*, in any case.

        Raises:
            RuleNotFound: There is none.
        """
        rule = self[name]
        del self._rules[name.lower()]
        self.topic.dismiss(rule)

    def replace(self, rule: Rule) -> None:
        """Put *rule* in the place of the one of its name, whose time of creation it keeps.

        Raises:
            RuleNotFound: There is none of that name.
            InvalidRule: The filter or the action is malformed; the rule stays as it was.
            TooManyRules: A bound of the topic would be exceeded; the rule stays as it was.
        """
        before = self[rule.name]
        place = before.serial
        after = ActiveRule(rule, self, before.created_ms, self.topic.bounds.sql)
        self.topic.dismiss(before)
        try:
            self.topic.admit([after])
        except TooManyRules:
            self.topic.admit([before])
            before.serial = place
            raise
        after.serial = place
        self._rules[rule.name.lower()] = after

    def examine(
        self, evaluation: Evaluation, matched: list[ActiveRule], newest: int
    ) -> Iterator[Found | None]:
        """Yield the copies that the subscription gets of a message, and the failures of its rules.

        Args:
            evaluation: The message.
            matched: Rules with correlation filters that the message meets.
            newest: Serial number of the last rule that counts.

        Yields:
            A result, or None for a pause.
        """
        failed = False
        for rule in list(self.evaluated):
            if rule.serial > newest:
                continue
            evaluation.steps += 1
            if failed and evaluation.exhausted and type(rule.filter) is SqlFilter:
                # It would fail as the one before it has.
                continue
            evaluation.begin_rule()
            try:
                if rule.matches(evaluation):
                    matched.append(rule)
            except EvaluationError as error:
                failed = True
                evaluation.steps += _STEPS_OF_A_RESULT
                yield self, Failure(rule.declaration.name, FILTER_FAILED, str(error))
            else:
                yield None
        matched.sort(key=lambda each: each.serial)
        unchanged = False
        for rule in matched:
            if rule.action is None:
                if not unchanged:
                    unchanged = True
                    yield self, _UNCHANGED
                continue
            if failed and evaluation.exhausted:
                continue
            evaluation.steps += _STEPS_OF_A_RESULT
            evaluation.begin_rule()
            try:
                copy = rule.copy(evaluation)
            except EvaluationError as error:
                failed = True
                yield self, Failure(rule.declaration.name, ACTION_FAILED, str(error))
            else:
                yield self, copy


#: Copy for a subscription, or failure of one of its rules.
Found: TypeAlias = tuple[SubscriptionRules, Copy | Failure]


class TopicRules:
    """Rules of all subscriptions of one topic."""

    def __init__(self, bounds: RuleBounds = DEFAULT_RULE_BOUNDS) -> None:
        self.bounds = bounds
        #: Index of all correlation filters.
        self.correlations: CorrelationIndex[ActiveRule] = CorrelationIndex()
        #: Subscriptions by their names in lower case.
        self._subscriptions: dict[str, SubscriptionRules] = {}
        #: Subscriptions with filters that are evaluated one by one.
        self._evaluated: dict[SubscriptionRules, None] = {}
        self._sql_filters = 0
        self._serial = 0

    def add(
        self, subscription: str, rules: Iterable[Rule] = (), *, now_ms: int = 0
    ) -> SubscriptionRules:
        """Add the rules of a new *subscription*; errors are those of :meth:`SubscriptionRules.add`."""
        if subscription.lower() in self._subscriptions:
            raise ValueError(f"the topic already has a subscription {subscription!r:.60}")
        found = SubscriptionRules(subscription, self)
        found.add(*rules, now_ms=now_ms)
        self._subscriptions[subscription.lower()] = found
        return found

    def remove(self, subscription: str) -> None:
        """Remove the rules of *subscription*, which has been deleted.

        Raises:
            KeyError: There is no such subscription.
        """
        found = self._subscriptions.pop(subscription.lower())
        found.removed = True
        for rule in found:
            self.dismiss(rule)

    def evaluation(self, fields: MessageFields) -> Evaluation:
        """Return the evaluation of the rules over a message, within the bounds of the topic."""
        return Evaluation(
            fields, steps_max=self.bounds.steps_max, rule_steps_max=self.bounds.rule_steps_max
        )

    def examine(self, evaluation: Evaluation) -> Iterator[Found | None]:
        """Yield the copies of a message for each subscription, and the failures of rules.

        All rules of a topic may take longer for a message than an event loop can wait. The caller may stop after each
        result, and continue in a later turn; the steps of *evaluation* tell how much was done since. Results of
        a subscription follow each other. The rules are those that there are at the start; of those that are changed
        or removed meanwhile, some may count as they were. A subscription that is removed gets nothing more.

        Args:
            evaluation: The message, with the steps that all rules of the topic share.

        Yields:
            A result, or None for a pause.
        """
        newest = self._serial
        evaluated = list(self._evaluated)
        matched: dict[SubscriptionRules, list[ActiveRule]] = {}
        for rules in self.correlations.search(evaluation):
            yield None
            for start in range(0, len(rules), _FOUND_IN_A_ROW):
                some = rules[start : start + _FOUND_IN_A_ROW]
                for rule in some:
                    if rule.serial <= newest:
                        matched.setdefault(rule.owner, []).append(rule)
                evaluation.steps += len(some)
                yield None
        for owner in evaluated:
            matched.setdefault(owner, [])
        for owner, rules in matched.items():
            for found in owner.examine(evaluation, rules, newest):
                if owner.removed:
                    break
                yield found

    def admit(self, rules: list[ActiveRule]) -> None:
        """Take *rules* of a subscription into service, all or none.

        Raises:
            TooManyRules: A bound would be exceeded.
        """
        correlations = sum(rule.conditions is not None for rule in rules)
        sql = sum(type(rule.filter) is SqlFilter for rule in rules)
        bounds = self.bounds
        if self._sql_filters + sql > bounds.sql_filters_max:
            raise TooManyRules(
                f"the topic would have more than {bounds.sql_filters_max} SQL filters"
            )
        if self.correlations.size + correlations > bounds.correlation_filters_max:
            raise TooManyRules(
                f"the topic would have more than {bounds.correlation_filters_max} correlation filters"
            )
        self._sql_filters += sql
        for rule in rules:
            self._serial += 1
            rule.serial = self._serial
            if rule.conditions is not None:
                self.correlations.add(rule.conditions, rule)
            elif rule.filter:
                rule.owner.evaluated[rule] = None
                self._evaluated[rule.owner] = None

    def dismiss(self, rule: ActiveRule) -> None:
        """Take a rule of a subscription out of service."""
        self._sql_filters -= type(rule.filter) is SqlFilter
        if rule.conditions is not None:
            self.correlations.remove(rule.conditions, rule)
            return
        rule.owner.evaluated.pop(rule, None)
        if not rule.owner.evaluated:
            self._evaluated.pop(rule.owner, None)
