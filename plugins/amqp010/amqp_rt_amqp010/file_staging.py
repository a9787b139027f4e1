"""Files from the client: ``file.open``, ``stage`` and ``publish`` (0-10 §file).

Neither ``open-ok`` nor ``stage`` name the file, so that they follow the opens of their session in order. A file
belongs to its user, and outlives the session: an open of the same identifier, in any session of the user,
continues it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

from amqp_rt.fronts import AmqpError, Error, TransactionalState

from .assembling import Assembly
from .codec import write_command
from .content_properties import read_properties, to_content
from .content_transfers import ContentTransfer
from .contexts import Context, Steps
from .faults import CommandFault
from .handlers import LATER, Answer, Method
from .layouts import (
    Command,
    ErrorCode,
    FileOpen,
    FileOpenOk,
    FileProperties,
    FilePublish,
    FileStage,
    RejectCode,
)
from .limits import OPENED_MAX, STAGED_STEP
from .order import fault_of
from .publishing import Publisher
from .staged_files import StagedFile, StagedFiles
from .transactions import CurrentTransaction

#: Cost in frames of :data:`~amqp_rt_amqp010.limits.STAGED_STEP` octets that are staged.
_STEP_WORK: Final = 20


class Slot(NamedTuple):
    """An open of the client that is to be followed by a stage."""

    file: StagedFile
    #: Octets that were staged then: the stage begins there.
    offset: int


class FileTransfer(ContentTransfer):
    """A published file, until every queue has returned an outcome."""

    __slots__ = ("file", "files")

    def __init__(
        self,
        files: StagedFiles,
        file: StagedFile,
        publisher: Publisher,
        number: int,
        command: FilePublish,
        body: bytes,
    ) -> None:
        super().__init__(publisher, number, command, file.header, (body,))
        self.files = files
        self.file = file

    def __call__(self, outcome: Any) -> None:
        """Count the outcome of one queue; forget the file after the last one, unless a queue has refused it."""
        super().__call__(outcome)
        if not self.awaited and not self.failed:
            self.files.drop(self.file)

    def on_refused(self, error: Error | None) -> None:
        """Keep the file, if its command fails: the client may publish it later."""
        super().on_refused(error)
        if self.failed:
            self.files.release(self.file)

    def on_dropped(self, code: RejectCode) -> None:
        """Return the file if that is wanted, and forget it."""
        super().on_dropped(code)
        self.files.drop(self.file)


class FileStaging:
    """Carries out the commands by which a client stages and publishes files.

    Args:
        context: Context of the session.
        publisher: Its publisher.
        current: Its current transaction.
    """

    def __init__(self, context: Context, publisher: Publisher, current: CurrentTransaction) -> None:
        self._context = context
        self._publisher = publisher
        self._current = current
        #: Stands for this session in files, which outlive it and must not refer to it.
        self._owner = object()
        self._opened: deque[Slot] = deque()
        #: Files of this session that are published once they are staged → the number and the command.
        self._waiting: dict[StagedFile, tuple[int, FilePublish]] = {}
        #: Those of the front, once there has been an open.
        self._files: StagedFiles | None = None

    def methods(self) -> dict[type[Command], Method]:
        """Return the method for each command."""
        return {FileOpen: self.open, FileStage: self.stage, FilePublish: self.publish}

    # --- commands ---------------------------------------------------------------------------------

    def open(self, number: int, command: FileOpen, assembly: Assembly) -> None:
        """Begin to stage a file, or continue it; ``open-ok`` says where.

        Raises:
            CommandFault: Identifier or size are missing (542), the file is open in this session or being
                published (409), or there is no room for it (506).
        """
        identifier, size = command.identifier or "", command.content_size
        if not identifier:
            raise _invalid("a file needs an identifier", 0)
        if size is None:
            raise _invalid("open needs the size of the content", 1)
        most = self._context.limits.message_size_max
        if size > most:
            text = f"a file of {size} octets; it has at most {most}"
            raise CommandFault(text, ErrorCode.RESOURCE_LIMIT_EXCEEDED, field_index=1)
        if len(self._opened) >= OPENED_MAX:
            text = f"{OPENED_MAX} files are open in this session: stage them first"
            raise CommandFault(text, ErrorCode.RESOURCE_LIMIT_EXCEEDED)
        files = self._store()
        known = files.find(self._principal, identifier)
        if known is not None and known.owner is self._owner and self._is_open(known):
            raise _wrong_state(f"file {identifier!r:.80} is open in this session: stage it")
        file = files.open(self._principal, identifier, size, self._owner)
        self._opened.append(Slot(file, file.octets))
        answer = FileOpenOk(staged_size=file.octets)
        self._context.session.send(write_command(answer), urgent=True)

    def stage(self, number: int, command: FileStage, assembly: Assembly) -> Answer:
        """Add content to the file that was opened first; publish it if that waits for this.

        Less than the rest is kept, and continued by another open.

        Raises:
            CommandFault: No file is open, or another session has opened it, or its time was up (409), the
                header is malformed (503), or the content is longer than was told (542), which drops the file.
        """
        if not self._opened:
            raise _wrong_state("no file is open: open it before it is staged")
        slot = self._opened.popleft()
        self._check_owned(slot.file)
        read_properties(assembly.header, FileProperties, FileStage.CODE)
        end = slot.offset + assembly.body_size
        if end > slot.file.size:
            self._store().drop(slot.file)
            text = f"{end} octets of a file whose size was told as {slot.file.size}"
            raise CommandFault(text, ErrorCode.INVALID_ARGUMENT)
        return self._context.run(number, command, self._staging(slot, assembly))

    def publish(self, number: int, command: FilePublish, assembly: Assembly) -> Answer:
        """Hand a staged file to the queues that it is routed to, now or when it has been staged.

        Raises:
            CommandFault: There is no such file (404), it is not staged as a whole and not open in this session, or
                is being published, or is not staged yet and belongs to a transaction (409), there is no such
                exchange (404), or the peer may not publish there (403).
        """
        identifier = command.identifier or ""
        file = self._store().find(self._principal, identifier)
        if file is None:
            text = f"no file {identifier!r:.80} is staged"
            raise CommandFault(text, ErrorCode.NOT_FOUND, field_index=4)
        if file.is_publishing or file.on_lost is not None:
            raise _wrong_state(f"file {identifier!r:.80} is being published")
        if file.is_complete and not (file.owner is self._owner and self._is_open(file)):
            return self._context.run(
                number, command, self._publishing(number, command, file, self._current.state)
            )
        if file.owner is not self._owner or not self._is_open(file):
            raise _wrong_state(
                f"file {identifier!r:.80} has {file.octets} octets of {file.size}: stage the rest"
            )
        if self._current.state is not None:
            # The transaction could end before the file has come.
            raise _wrong_state("in a transaction a file is published after it has been staged")
        self._waiting[file] = (number, command)
        file.on_lost = lambda: self._lose(file)
        return LATER

    def salvage(self, assembly: Assembly) -> None:
        """Keep the content of a stage whose connection was lost, as far as it has arrived.

        The open stays: if the session is resumed, the whole command comes again.
        """
        slot = self._opened[0] if self._opened else None
        if slot is None or slot.file.is_dropped or slot.file.owner is not self._owner:
            return
        file, files = slot.file, self._store()
        if slot.offset + assembly.body_size > file.size:
            return
        with suppress(CommandFault):
            read_properties(assembly.header, FileProperties, FileStage.CODE)
            files.describe(file, assembly.header or b"")
            for piece in _pieces_of(assembly.body or (), file.octets - slot.offset):
                files.append(file, piece)

    # --- steps ------------------------------------------------------------------------------------

    def _staging(self, slot: Slot, assembly: Assembly) -> Steps:
        file, files = slot.file, self._store()
        files.describe(file, assembly.header or b"")
        # A stage that comes once more, after its session was resumed, repeats octets that were staged.
        skipped = file.octets - slot.offset
        for piece in _pieces_of(assembly.body or (), skipped):
            files.append(file, piece)
            if len(piece) == STAGED_STEP:
                yield _STEP_WORK
                self._check_owned(file)
        waiting = self._waiting.pop(file, None)
        file.on_lost = None
        if waiting is None:
            return None
        number, command = waiting
        try:
            if not file.is_complete:
                raise _wrong_state(f"{file.octets} octets of {file.size} were staged")
            yield from self._publishing(number, command, file, None)
        except (CommandFault, AmqpError) as error:
            # The fault is that of publish, not of this command.
            self._context.session.fail(fault_of(error, command), number)
            return LATER
        return None

    def _publishing(
        self,
        number: int,
        command: FilePublish,
        file: StagedFile,
        state: TransactionalState | None,
    ) -> Steps:
        files = self._store()
        file.is_publishing = True
        is_posted = False
        try:
            body = self._read(file)
            content = to_content(
                file.header,
                (body,),
                FileProperties,
                FilePublish.CODE,
                exchange=command.exchange or "",
                routing_key=command.routing_key or "",
            )
            transfer = FileTransfer(files, file, self._publisher, number, command, body)
            yield from self._publisher.spread_content(command, transfer, content, state)
            is_posted = True
        finally:
            if not is_posted:
                files.release(file)
        return LATER

    def _read(self, file: StagedFile) -> bytes:
        try:
            return file.content()
        except OSError as error:
            text = f"the staged file cannot be read: {error.strerror}"
            raise CommandFault(text, ErrorCode.INTERNAL_ERROR) from error

    # --- private ----------------------------------------------------------------------------------

    @property
    def _principal(self) -> tuple[str, str | None]:
        key = self._context.session.key
        return key.host, key.user

    def _store(self) -> StagedFiles:
        if self._files is None:
            connection = self._context.connection
            assert connection is not None
            self._files = connection.staged
        return self._files

    def _is_open(self, file: StagedFile) -> bool:
        return any(slot.file is file for slot in self._opened)

    def _check_owned(self, file: StagedFile) -> None:
        if file.is_dropped:
            raise _wrong_state(f"file {file.identifier!r:.80} is gone: open it again")
        if file.owner is not self._owner:
            raise _wrong_state(f"another session has opened file {file.identifier!r:.80}")

    def _lose(self, file: StagedFile) -> None:
        """Fail the command that publishes *file*, which this session cannot stage any more."""
        number, command = self._waiting.pop(file)
        fault = _wrong_state(f"file {file.identifier!r:.80} was not staged here in its time")
        self._context.session.fail(fault_of(fault, command), number)

    def on_ended(self) -> None:
        """Leave the files to sessions that may continue them."""
        for file in self._waiting:
            file.on_lost = None
        self._waiting.clear()
        for slot in self._opened:
            if slot.file.owner is self._owner:
                slot.file.owner = None
        self._opened.clear()


def _pieces_of(body: Any, skipped: int) -> Iterator[bytes | memoryview]:
    """Return what follows the first *skipped* octets of *body*, in pieces of at most ``STAGED_STEP`` octets."""
    held = bytearray()
    for piece in body:
        view = memoryview(piece)
        if skipped:
            dropped = min(skipped, len(view))
            skipped -= dropped
            view = view[dropped:]
        while view:
            room = STAGED_STEP - len(held)
            held += view[:room]
            view = view[room:]
            if len(held) == STAGED_STEP:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)


def _invalid(text: str, index: int) -> CommandFault:
    return CommandFault(text, ErrorCode.INVALID_ARGUMENT, field_index=index)


def _wrong_state(text: str) -> CommandFault:
    return CommandFault(text, ErrorCode.ILLEGAL_STATE)
