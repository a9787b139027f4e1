"""Registry of connections by container and user.

It enforces the wish of a container for a single connection (``sole-connection-for-container``, JMS
mapping) and the limits of connections of a user and of a profile.

A container may have any number of connections, unless one of them asks to be the only one: then a
second is closed, no matter which of the two asked. A container is identified by virtual host, user
and container-id, so that a client cannot lock out others by using their container-id.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, TypeAlias

from ..events import Peer
from ..limits import Limits
from ..outcomes import Error
from ..values import Symbol

if TYPE_CHECKING:
    from .profiles import Profile

#: Open capability: this connection is to be the only one of its container.
SOLE_CONNECTION: Final = "sole-connection-for-container"

#: Virtual host, user and container-id.
_Key: TypeAlias = tuple[str, str | None, str]


class Namesakes:
    """Connections of a process, counted by container, by user and by profile."""

    def __init__(self, limits: Limits) -> None:
        self._users_max = limits.connections_per_user_max
        self._users: Counter[str] = Counter()
        self._profiles: Counter[Profile] = Counter()
        self._profile_of: dict[object, Profile] = {}
        self._counts: dict[_Key, int] = {}
        self._sole: dict[_Key, object] = {}
        self._keys: dict[object, _Key] = {}

    def enter(self, connection: object, peer: Peer) -> Error | None:
        """Register *connection*, which has opened; return None, or the error to close it with.

        A registered connection counts until :meth:`leave`.
        """
        key = (peer.virtual_host, peer.user, peer.container_id)
        sole = SOLE_CONNECTION in peer.desired_capabilities
        if key in self._sole or (sole and key in self._counts):
            return Error(
                "amqp:invalid-field",
                f"the container {peer.container_id!r:.100} has a connection already,"
                " and one of the two is to be its only one",
                {Symbol("invalid-field"): Symbol("container-id")},
            )
        profile: Profile | None = peer.profile
        most = None if profile is None else profile.connections_max
        if profile is not None and most is not None and self._profiles[profile] >= most:
            return Error(
                "amqp:resource-limit-exceeded",
                f"there are {most} connections to {profile.name} already",
            )
        if peer.user is not None:
            if self._users[peer.user] >= self._users_max:
                return Error(
                    "amqp:resource-limit-exceeded",
                    f"the user {peer.user!r:.100} has {self._users_max} connections already",
                )
            self._users[peer.user] += 1
        if profile is not None and most is not None:
            self._profiles[profile] += 1
            self._profile_of[connection] = profile
        self._counts[key] = self._counts.get(key, 0) + 1
        self._keys[connection] = key
        if sole:
            self._sole[key] = connection
        return None

    def leave(self, connection: object) -> None:
        """Remove *connection*, which has ended, whether or not it was registered."""
        key = self._keys.pop(connection, None)
        if key is None:
            return
        profile = self._profile_of.pop(connection, None)
        if profile is not None:
            self._profiles[profile] -= 1
            if not self._profiles[profile]:
                del self._profiles[profile]
        user = key[1]
        if user is not None:
            self._users[user] -= 1
            if not self._users[user]:
                del self._users[user]
        left = self._counts[key] - 1
        if left:
            self._counts[key] = left
        else:
            del self._counts[key]
        if self._sole.get(key) is connection:
            del self._sole[key]

    def __len__(self) -> int:
        return len(self._keys)
