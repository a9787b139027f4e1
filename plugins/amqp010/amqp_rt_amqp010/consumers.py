"""Consumers of classes file and stream, as far as they are alike (0-10 §file, §stream)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final, TypeVar

from amqp_rt.fronts import Error, Source, Symbol
from amqp_rt.fronts.links import REQUEUED
from amqp_rt.fronts.splicing import CONTENT_CLASS

from .codec import write_command
from .contexts import WAIT, Context, Steps
from .faults import CommandFault
from .handlers import Answer
from .layouts import Command, ErrorCode, FileConsume, StreamConsume
from .limits import CONSUMERS_MAX
from .links import SendingLink

_EXCLUSIVE: Final = Symbol("exclusive")
_NO_LOCAL: Final = Symbol("no-local")
_CLASS_FILTER: Final = Symbol("amqp:message-annotations-filter")
_DELETED: Final = Error("amqp:resource-deleted", "the queue of a consumer has been deleted")


class ConsumerLink(SendingLink):
    """Link of a consumer of class file or stream."""

    #: Whether ``consume-ok`` has been sent, which comes before all content.
    started = False


Link = TypeVar("Link", bound=ConsumerLink)


def start_consumer(
    context: Context,
    number: int,
    command: FileConsume | StreamConsume,
    link: Link,
    consumers: dict[str, Link],
    answer: Command,
) -> Answer:
    """Attach *link*, add it to *consumers*, and send *answer* unless it is not wanted; later commands wait for that.

    The link leaves *consumers* when it ends, which ends the session.
    """
    if command.exclusive:
        link.properties = {_EXCLUSIVE: True}
    link.on_answer = partial(_note_answer, link, context)
    link.on_end = partial(_end_session, link, context, consumers)
    steps = _attach(context, link, consumers, None if command.nowait else answer)
    return context.run(number, command, steps)


def _attach(
    context: Context, link: Link, consumers: dict[str, Link], answer: Command | None
) -> Steps:
    context.report(context.anchor.request(link))
    while not link.answered:
        yield WAIT
    if link.refusal is not None:
        context.anchor.drop(link)
        raise CommandFault.of(link.refusal)
    if not link.over:
        consumers[link.destination] = link
        if answer is not None:
            context.session.send(write_command(answer), urgent=True)
        link.started = True
        link.offer_credit()
    return None


def _note_answer(link: SendingLink, context: Context, refused: Error | None) -> None:
    """Note the container's answer to the attach request of *link*."""
    link.answered = True
    link.refusal = refused
    context.wake()


def _end_session(
    link: SendingLink, context: Context, consumers: dict[str, Link], error: Error | None
) -> None:
    """End the session: a queue of it was deleted, or the right to receive was revoked."""
    context.anchor.links.pop(link, None)
    if consumers.get(link.destination) is link:
        del consumers[link.destination]
    context.session.fail(CommandFault.of(error or _DELETED))


def take_consumer(consumers: dict[str, Link], tag: str | None) -> Link:
    """Remove the consumer with *tag* from *consumers*, and return it.

    Raises:
        CommandFault: There is none (404).
    """
    link = consumers.pop(tag or "", None)
    if link is None:
        text = f"there is no consumer {tag or ''!r} in this session"
        raise CommandFault(text, ErrorCode.NOT_FOUND, field_index=0)
    return link


def check_consume(
    queue: str | None,
    tag: str,
    consumers: Mapping[str, object],
    arguments: Mapping[str, object] | None,
    arguments_index: int,
) -> None:
    """Check the fields of ``consume``.

    Raises:
        CommandFault: Queue or tag are empty, or the tag is in use (530), there are too many consumers (506), or
            an argument is unknown (540).
    """
    if not queue:
        raise _not_allowed("a consumer needs the name of a queue", 0)
    if not tag.strip():
        raise _not_allowed("a consumer needs a tag that is not blank", 1)
    if tag in consumers:
        raise _not_allowed(f"consumer-tag {tag!r} is in use in this session", 1)
    if arguments:
        text = f"consumers have no argument {next(iter(arguments))!r:.100}"
        raise CommandFault(text, ErrorCode.NOT_IMPLEMENTED, field_index=arguments_index)
    if len(consumers) >= CONSUMERS_MAX:
        text = f"a session has at most {CONSUMERS_MAX} consumers of a class"
        raise CommandFault(text, ErrorCode.RESOURCE_LIMIT_EXCEEDED)


def source_of(queue: str, content_class: str, *, no_local: bool) -> Source:
    """Return the source of a consumer, which gets messages of *content_class* only."""
    filters: dict[object, object] = {_CLASS_FILTER: {CONTENT_CLASS: content_class}}
    if no_local:
        filters[_NO_LOCAL] = "true"
    # Streams have no unsettled content; files that a client had, and did not settle, are marked as redelivered.
    source = Source(address=queue, default_outcome=REQUEUED)
    source.filter = filters
    return source


def no_global(index: int) -> CommandFault:
    """Return the fault of a quality of service for a whole connection."""
    text = "quality of service applies to sessions here: leave out global"
    return CommandFault(text, ErrorCode.NOT_IMPLEMENTED, field_index=index)


def _not_allowed(text: str, index: int) -> CommandFault:
    return CommandFault(text, ErrorCode.NOT_ALLOWED, field_index=index)
