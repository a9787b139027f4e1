"""Consumers of an entity in the order in which their credit arrived."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from amqp_rt.broker.building import Subscription

#: Grants of one consumer that are remembered in order; more credit is added to its last grant.
GRANTS_MAX: Final = 100


#: Grants without credit that may be in the line beyond one for each other one.
_SPARE: Final = 64


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
        #: Credit in the line, and the grants, by the identity of the subscription.
        self._credit: dict[int, int] = {}
        self._own: dict[int, deque[_Grant]] = {}
        #: Grants in the line whose consumers have left. Each has no credit.
        self._left = 0

    def __len__(self) -> int:
        return len(self._grants) - self._left

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
        own = self._own.setdefault(identity, deque())
        if own and (len(own) >= GRANTS_MAX or own[-1] is self._grants[-1]):
            own[-1].credit += more
        else:
            grant = _Grant(subscription, more)
            own.append(grant)
            self._grants.append(grant)
        self._credit[identity] = known + more

    def first(self) -> Subscription | None:
        """Return the consumer that gets the next message; None if none has credit.

        Grants of consumers that cannot send now are taken out: they join again when they can.
        """
        grants = self._grants
        while grants:
            if grants[0].credit <= 0:
                grants.popleft()
                self._left -= 1
                continue
            subscription = grants[0].subscription
            link: Any = subscription.link
            if link is not None and link.attached and link.credit > 0 and link.writable:
                return subscription
            self._retire()
        return None

    def use(self) -> None:
        """Take the unit of credit that the last message has used from the line."""
        grant = self._grants[0]
        grant.credit -= 1
        self._credit[grant.subscription.identity] -= 1
        if grant.credit <= 0:
            self._retire()

    def _retire(self) -> None:
        grant = self._grants.popleft()
        identity = grant.subscription.identity
        own = self._own[identity]
        # The grants of a consumer are in the order of the line.
        own.popleft()
        self._credit[identity] -= grant.credit
        if not own:
            del self._credit[identity], self._own[identity]

    def leave(self, subscription: Subscription) -> None:
        """Remove the credit of *subscription*, which has ended."""
        own = self._own.pop(subscription.identity, None)
        if own is None:
            return
        del self._credit[subscription.identity]
        for grant in own:
            grant.credit = 0
        self._left += len(own)
        # Thousands of consumers may end with one connection: the line is not gone through for each.
        if self._left > len(self) + _SPARE:
            self._grants = deque([each for each in self._grants if each.credit > 0])
            self._left = 0
