"""Files that clients stage before they publish them, in all sessions of a front and without one (0-10 §file.open)."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from tempfile import TemporaryFile
from typing import IO

from msgspec import Struct

from .faults import CommandFault
from .layouts import ErrorCode
from .limits import STAGED_COST
from .partial_messages import Principal


class StagingLimits(Struct, frozen=True, kw_only=True):
    """Bounds on files that clients stage and have not published.

    Args:
        directory: Folder for the contents, in files without a name, which end with the process; None to hold
            them in memory.
        memory_max: Octets of one file that are in memory all the same, if there is a folder.
        files_user_max: Files of one user.
        files_max: Files of all users.
        octets_user_max: Octets of the files of one user.
        octets_max: Octets of the files of all users.
        lifetime_s: Seconds for which a file is kept after its last open or stage.
    """

    directory: str | None = None
    memory_max: int = 64 * 1024
    files_user_max: int = 100
    files_max: int = 1_000
    octets_user_max: int = 64 * 1024 * 1024
    octets_max: int = 256 * 1024 * 1024
    lifetime_s: float = 3_600.0


class StagedFile:
    """A file that is being staged, or is staged as a whole.

    Args:
        principal: Its sender.
        identifier: The sender's name for it.
        size: Octets that it has as a whole.
    """

    __slots__ = (
        *("cost", "expires_at", "header", "identifier", "is_dropped", "is_publishing", "octets"),
        *("on_lost", "owner", "principal", "size", "store", "tail"),
    )

    def __init__(self, principal: Principal, identifier: str, size: int) -> None:
        self.principal = principal
        self.identifier = identifier
        self.size = size
        #: Header segment of the latest stage.
        self.header = b""
        #: Octets that have been staged.
        self.octets = 0
        #: The last of them, which are not in ``store``.
        self.tail = bytearray()
        self.store: IO[bytes] | None = None
        self.cost = STAGED_COST + len(identifier.encode())
        #: Session that stages it; another one may take it over.
        self.owner: object = None
        #: Called when its owner cannot go on: another session has opened it, or its time is up.
        self.on_lost: Callable[[], None] | None = None
        self.is_publishing = False
        self.is_dropped = False
        #: When it is dropped; None if that is not known yet.
        self.expires_at: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all of it is staged."""
        return self.octets == self.size

    def content(self) -> bytes:
        """Return what has been staged.

        Raises:
            OSError: The disk cannot be read.
        """
        if self.store is None:
            return bytes(self.tail)
        self.store.seek(0)
        return b"".join((self.store.read(), self.tail))


class StagedFiles:
    """Staged files of all sessions of a front.

    None is dropped to make room for another: users cannot drop files of others.

    Args:
        limits: Their bounds.
    """

    def __init__(self, limits: StagingLimits) -> None:
        self.limits = limits
        self._files: dict[tuple[Principal, str], StagedFile] = {}
        #: Number and octets of the files of each user that has any.
        self._by_user: dict[Principal, tuple[int, int]] = {}
        self._octets = 0
        #: Called when ``deadline`` may have become earlier.
        self.on_deadline: Callable[[], None] = _nothing

    def __len__(self) -> int:
        return len(self._files)

    @property
    def octets(self) -> int:
        """Octets for which the files count together."""
        return self._octets

    def open(self, principal: Principal, identifier: str, size: int, owner: object) -> StagedFile:
        """Return file *identifier* of *principal*, which *owner* stages from now on.

        An earlier one is continued if it has the same size; it is taken from its owner, whose connection may be
        lost. One of another size is another file, and is dropped.

        Raises:
            CommandFault: There are too many, or there is no room for it (506); it is being published (409).
        """
        file = self._files.get((principal, identifier))
        if file is not None and file.is_publishing:
            raise CommandFault(
                f"file {identifier!r:.80} is being published", ErrorCode.ILLEGAL_STATE
            )
        if file is not None and file.size != size:
            self._lose(file)
            file = None
        if file is None:
            file = self._begin(principal, identifier, size)
        elif file.owner is not owner:
            self._notify_lost(file)
        file.owner = owner
        self._renew(file)
        return file

    def _begin(self, principal: Principal, identifier: str, size: int) -> StagedFile:
        limits = self.limits
        count, octets = self._by_user.get(principal, (0, 0))
        if count >= limits.files_user_max or len(self._files) >= limits.files_max:
            raise _too_much(
                f"{len(self._files)} files are staged, {count} by this user: publish some, or wait until"
                " those without a session expire, before you open more"
            )
        file = StagedFile(principal, identifier, size)
        total = file.cost + size
        if octets + total > limits.octets_user_max or self._octets + total > limits.octets_max:
            raise _too_much(
                f"no room for a file of {size} octets: {self._octets} are staged, {octets} by this user"
            )
        self._files[principal, identifier] = file
        self._account(principal, 1, file.cost)
        return file

    def describe(self, file: StagedFile, header: bytes) -> None:
        """Set the header segment of *file*.

        Raises:
            CommandFault: There is no room (506).
        """
        self._charge(file, len(header) - len(file.header))
        file.header = header
        self._renew(file)

    def append(self, file: StagedFile, piece: bytes | memoryview) -> None:
        """Append *piece* to the content of *file*.

        Raises:
            CommandFault: There is no room for it, or the disk does not take it (506); the file is dropped.
        """
        self._charge(file, len(piece))
        file.tail += piece
        file.octets += len(piece)
        limits = self.limits
        if limits.directory is not None and len(file.tail) > limits.memory_max:
            try:
                self._spool(file, limits.directory)
            except OSError as error:
                self.drop(file)
                raise _too_much(f"the file cannot be stored: {error.strerror}") from error

    def _spool(self, file: StagedFile, directory: str) -> None:
        if file.store is None:
            # Unbuffered: what was written has left this process's memory.
            file.store = TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        file.store.seek(0, 2)
        written = 0
        # Views of the tail, since a copy costs as much as the write; they end before the tail is cleared.
        while written < len(file.tail):
            with memoryview(file.tail) as whole, whole[written:] as rest:
                written += file.store.write(rest)
        file.tail.clear()

    def _charge(self, file: StagedFile, octets: int) -> None:
        limits = self.limits
        _, held = self._by_user[file.principal]
        if octets > 0 and (
            held + octets > limits.octets_user_max or self._octets + octets > limits.octets_max
        ):
            self.drop(file)
            raise _too_much(f"{self._octets} octets are staged, {held} by this user")
        self._account(file.principal, 0, octets)
        file.cost += octets

    def find(self, principal: Principal, identifier: str) -> StagedFile | None:
        """Return file *identifier* of *principal*, None if there is none."""
        return self._files.get((principal, identifier))

    def release(self, file: StagedFile) -> None:
        """Keep *file*, which could not be published, for its time."""
        if not file.is_dropped:
            file.is_publishing = False
            self._renew(file)

    def drop(self, file: StagedFile) -> None:
        """Forget *file*, which is published or is not wanted."""
        if file.is_dropped:
            return
        file.is_dropped = True
        file.owner = file.on_lost = None
        del self._files[file.principal, file.identifier]
        self._account(file.principal, -1, -file.cost)
        file.tail = bytearray()
        if file.store is not None:
            file.store.close()
            file.store = None

    def _lose(self, file: StagedFile) -> None:
        self._notify_lost(file)
        self.drop(file)

    def _notify_lost(self, file: StagedFile) -> None:
        on_lost, file.on_lost = file.on_lost, None
        if on_lost is not None:
            on_lost()

    def _renew(self, file: StagedFile) -> None:
        # Sessions have no clock: the time of a file begins with the next tick.
        file.expires_at = None
        self.on_deadline()

    def _account(self, principal: Principal, count: int, octets: int) -> None:
        self._octets += octets
        before = self._by_user.get(principal, (0, 0))
        after = before[0] + count, before[1] + octets
        if after[0]:
            self._by_user[principal] = after
        else:
            self._by_user.pop(principal, None)

    @property
    def deadline(self) -> float:
        """Time at which ``tick`` is due; ``inf`` for never."""
        return min(
            (-inf if each.expires_at is None else each.expires_at for each in self._files.values()),
            default=inf,
        )

    def tick(self, now: float) -> None:
        """Drop the files whose time is up."""
        for file in list(self._files.values()):
            if file.expires_at is None:
                file.expires_at = now + self.limits.lifetime_s
            elif file.expires_at <= now:
                self._lose(file)

    def close(self) -> None:
        """Drop all files."""
        for file in list(self._files.values()):
            self.drop(file)


def _nothing() -> None:
    """Do nothing."""


def _too_much(text: str) -> CommandFault:
    return CommandFault(text, ErrorCode.RESOURCE_LIMIT_EXCEEDED)
