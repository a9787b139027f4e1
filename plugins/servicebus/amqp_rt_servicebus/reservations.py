"""Room of an entity for messages that are on their way into it."""

from __future__ import annotations

from .entity import Entity


class Reservation:
    """Room that is reserved in an entity, so that what has been checked cannot fail for want of it later.

    Args:
        entity: The entity.
    """

    def __init__(self, entity: Entity) -> None:
        self._entity = entity
        self._held = 0

    def take(self, size: int) -> bool:
        """Reserve *size* octets more; return False if there is no room for them."""
        entity = self._entity
        if not entity.fits(size):
            return False
        self._change(size)
        return True

    def hold(self, size: int) -> None:
        """Reserve *size* octets, for which there was room already."""
        self._change(size)

    def release(self, size: int) -> None:
        """Release *size* octets for a message that is put now."""
        self._change(-min(size, self._held))

    def end(self) -> None:
        """Release what is left."""
        self._change(-self._held)

    def _change(self, size: int) -> None:
        self._held += size
        # A deleted entity has given all of its room back.
        if not self._entity.deleted:
            self._entity.shelf.reserve(size)
