"""Groups of messages, each of which goes to one consumer (Part 3 §3.2.4 ``group-id``). Pure."""

from __future__ import annotations

from .entries import Entry


class Groups:
    """Whose each group is: of the consumer that got one of its messages first, until that leaves.

    Groups are told apart by numbers, of which a queue has only so many; those that share one share
    their consumer as well, so that nothing grows with the names that senders invent.
    """

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}
        #: Failed messages whose pause is not over, by their group.
        self._held: dict[int, int] = {}

    def allows(self, entry: Entry, identity: int) -> bool:
        """Whether the consumer *identity* may have *entry*."""
        group = entry.marks.group
        if group < 0:
            return True
        if self._held and group in self._held:
            return False
        owner = self._owners.get(group, identity)
        # Nobody waits for an owner that must not get the message (§3.4.5).
        return owner == identity or (entry.avoid is not None and owner in entry.avoid)

    def give(self, entry: Entry, identity: int) -> bool:
        """The consumer *identity* gets *entry*; whether that takes its group from another."""
        group = entry.marks.group
        if group < 0:
            return False
        owner = self._owners.get(group, identity)
        self._owners[group] = identity
        return owner != identity

    def hold(self, entry: Entry) -> None:
        """Deliver nothing of the group of *entry* until :meth:`free`."""
        group = entry.marks.group
        if group >= 0:
            self._held[group] = self._held.get(group, 0) + 1

    def free(self, entry: Entry) -> bool:
        """End the hold of *entry*; true if its group may be delivered again."""
        group = entry.marks.group
        if group < 0:
            return False
        left = self._held.pop(group) - 1
        if left:
            self._held[group] = left
        return not left

    def leave(self, identity: int) -> None:
        """A consumer has left: the next ones get its groups."""
        self._owners = {group: owner for group, owner in self._owners.items() if owner != identity}
