"""Offsets that a log stores for others: cursors of groups, and holds."""

from __future__ import annotations


class Cursors(dict[str, dict[int, int]]):
    """Cursors of a log: group → partition → offset at which it continues."""

    def put(self, group: str, offsets: dict[int, int]) -> None:
        """Set the cursor of *group* to *offsets*; without any, delete it."""
        if offsets:
            self[group] = offsets
        else:
            self.pop(group, None)


class Holds(dict[str, tuple[dict[int, int], float]]):
    """Holds of a log: holder → partition → first offset that must not be dropped, and its expiry (wall
    clock)."""

    def put(self, holder: str, held: tuple[dict[int, int], float] | None) -> None:
        """Set the hold of *holder* to *held*, or delete it if that is empty."""
        if held is not None and held[0]:
            self[holder] = held
        else:
            self.pop(holder, None)

    def first(self, partition: int, end: int, now: float) -> int:
        """Return the first offset of *partition* covered by a hold at *now*; its *end* if there is none."""
        return min(
            (
                offsets[partition]
                for offsets, until in self.values()
                if partition in offsets and until > now
            ),
            default=end,
        )

    def expire(self, now: float) -> list[str]:
        """Drop the holds that have expired at *now*; return the names of their holders."""
        gone = [holder for holder, (_, until) in self.items() if until <= now]
        for holder in gone:
            del self[holder]
        return gone
