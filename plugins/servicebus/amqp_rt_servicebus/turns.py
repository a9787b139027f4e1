"""Consumers of an entity in the order in which their credit arrived."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from amqp_rt.broker.building import Subscription

#: Grants of one consumer that are remembered in order; more credit is added to its last grant.
GRANTS_MAX: Final = 100


class _Grant:
    def __init__(self, subscription: Subscription, credit: int) -> None:
        self.subscription = subscription
        self.credit = credit


class Turns:
    """Credit of all consumers, in the order in which it arrived: each unit is for one message.

    The service keeps credit so over competing receivers: who asked first gets the next message, and a
    prefetch is credit.
    """

    def __init__(self) -> None:
        self._grants: deque[_Grant] = deque()
        #: Credit in the line and number of grants, by the identity of the subscription.
        self._credit: dict[int, int] = {}
        self._count: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._grants)

    def credit(self, subscription: Subscription) -> int:
        """Return the credit of *subscription* that is in the line."""
        return self._credit.get(subscription.identity, 0)

    def update(self, subscription: Subscription) -> None:
        """Put credit of *subscription* that has arrived at the end of the line."""
        link: Any = subscription.link
        identity = subscription.identity
        known = self._credit.get(identity, 0)
        more = link.credit - known
        if more <= 0 or not link.writable:
            return
        count = self._count.get(identity, 0)
        last = self._grants[-1] if self._grants else None
        if last is None or last.subscription is not subscription:
            last = None
            if count >= GRANTS_MAX:
                last = next(
                    each for each in reversed(self._grants) if each.subscription is subscription
                )
        if last is None:
            self._grants.append(_Grant(subscription, more))
            self._count[identity] = count + 1
        else:
            last.credit += more
        self._credit[identity] = known + more

    def first(self) -> Subscription | None:
        """Return the consumer that gets the next message; None if none has credit.

        Grants of consumers that cannot send now are taken out: they join again when they can.
        """
        grants = self._grants
        while grants:
            subscription = grants[0].subscription
            link: Any = subscription.link
            if link is not None and link.attached and link.credit > 0 and link.writable:
                return subscription
            self._retire()
        return None

    def use(self) -> None:
        """Take the unit of credit that the last message has used from the line."""
        grant = self._grants[0]
        identity = grant.subscription.identity
        grant.credit -= 1
        self._credit[identity] -= 1
        if grant.credit <= 0:
            self._retire()

    def _retire(self) -> None:
        grant = self._grants.popleft()
        identity = grant.subscription.identity
        self._credit[identity] -= grant.credit
        self._count[identity] -= 1
        if not self._count[identity]:
            del self._credit[identity], self._count[identity]

    def leave(self, subscription: Subscription) -> None:
        """Remove the credit of *subscription*, which has ended."""
        identity = subscription.identity
        if self._count.pop(identity, 0):
            del self._credit[identity]
            self._grants = deque(
                each for each in self._grants if each.subscription is not subscription
            )
