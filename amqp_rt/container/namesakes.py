"""Who has the only connection of its container (``sole-connection-for-container``, JMS mapping), and
how many a user has.

A container may have as many connections as it likes, unless it wishes for one that is its only one:
then a second is closed, whichever of the two had the wish. A container is known by its virtual host,
its user and its container-id, so that nobody keeps others out by using their name.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, TypeAlias

from ..events import Peer
from ..limits import Limits
from ..outcomes import Error
from ..values import Symbol

#: Open capability: this connection is the container's only one.
SOLE_CONNECTION: Final = "sole-connection-for-container"

#: Virtual host, user and container-id.
_Key: TypeAlias = tuple[str, str | None, str]


class Namesakes:
    """The connections of a process by the containers that they come from, and by their users."""

    def __init__(self, limits: Limits) -> None:
        self._users_max = limits.connections_per_user_max
        self._users: Counter[str] = Counter()
        self._counts: Counter[_Key] = Counter()
        self._sole: dict[_Key, Any] = {}
        self._keys: dict[Any, _Key] = {}

    def enter(self, connection: Any, peer: Peer) -> Error | None:
        """*connection* is open; why it has to go, None if it may stay until :meth:`leave`."""
        key = (peer.virtual_host, peer.user, peer.container_id)
        sole = SOLE_CONNECTION in peer.desired_capabilities
        if key in self._sole or (sole and self._counts[key]):
            return Error(
                "amqp:invalid-field",
                f"the container {peer.container_id!r:.100} has a connection already,"
                " and one of the two is to be its only one",
                {Symbol("invalid-field"): Symbol("container-id")},
            )
        if peer.user is not None:
            if self._users[peer.user] >= self._users_max:
                return Error(
                    "amqp:resource-limit-exceeded",
                    f"the user {peer.user!r:.100} has {self._users_max} connections already",
                )
            self._users[peer.user] += 1
        self._counts[key] += 1
        self._keys[connection] = key
        if sole:
            self._sole[key] = connection
        return None

    def leave(self, connection: Any) -> None:
        """*connection* is over, whether it stayed or not."""
        key = self._keys.pop(connection, None)
        if key is None:
            return
        _, user, _ = key
        if user is not None:
            self._users[user] -= 1
            if not self._users[user]:
                del self._users[user]
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
        if self._sole.get(key) is connection:
            del self._sole[key]

    def __len__(self) -> int:
        return len(self._keys)
