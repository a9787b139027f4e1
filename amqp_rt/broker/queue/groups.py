"""Message groups, each of which is delivered to one consumer (Part 3 §3.2.4 ``group-id``). Pure."""

from __future__ import annotations

from ..entries import Entry


class Groups:
    """Owners of message groups: the consumer that got a group's first message, until it leaves.

    Group-ids are mapped to a fixed count of numbers. Groups with the same number share their
    consumer, so that memory does not grow with the names that senders invent.
    """

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}
        #: Number of failed messages in a pause before redelivery, by their group.
        self._held: dict[int, int] = {}

    def allows(self, entry: Entry, identity: int) -> bool:
        """Return whether the consumer *identity* may receive *entry*."""
        group = entry.marks.group
        if group < 0:
            return True
        if self._held and group in self._held:
            return False
        owner = self._owners.get(group, identity)
        # A group does not wait for an owner that must not receive the message (§3.4.5).
        return owner == identity or (entry.avoid is not None and owner in entry.avoid)

    def give(self, entry: Entry, identity: int) -> bool:
        """Make consumer *identity* the owner of the group; return whether another one owned it."""
        group = entry.marks.group
        if group < 0:
            return False
        owner = self._owners.get(group, identity)
        self._owners[group] = identity
        return owner != identity

    def hold(self, entry: Entry) -> None:
        """Deliver no message of the group of *entry* until :meth:`free`."""
        group = entry.marks.group
        if group >= 0:
            self._held[group] = self._held.get(group, 0) + 1

    def free(self, entry: Entry) -> bool:
        """End the hold of *entry*; return whether its group may be delivered again."""
        group = entry.marks.group
        if group < 0:
            return False
        left = self._held.pop(group) - 1
        if left:
            self._held[group] = left
        return not left

    def leave(self, identity: int) -> None:
        """Give up the groups of a consumer that has left; others become owners on delivery."""
        self._owners = {group: owner for group, owner in self._owners.items() if owner != identity}
