"""``amqp-rt send``, ``receive`` and ``request``: send and receive messages."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
import msgspec
import trio

from ..container.container import Container
from ..errors import printable
from ..message import Message
from .running import Seconds, Where, client_options, run
from .tables import plain


def body_of(text: str | None, content_type: str | None) -> tuple[Any, str | None]:
    """Return payload and content-type for *text* or, without it, for standard input.

    JSON is sent as JSON; other text as a text value, unless *content_type* is given.
    """
    if text is None or text == "-":
        octets = sys.stdin.buffer.read()
    else:
        octets = text.encode()
    if content_type is not None:
        return octets, content_type
    try:
        json.loads(octets)
    except ValueError:
        try:
            return octets.decode(), None
        except UnicodeDecodeError:
            return octets, "application/octet-stream"
    return octets, "application/json"


def shown(message: Message, *, whole: bool) -> str:
    """Return a message as one line: its body as text, or with *whole* all of it as JSON."""
    body = message.body
    if not whole:
        if isinstance(body, bytes):
            return body.decode("utf-8", "backslashreplace")
        return body if isinstance(body, str) else json.dumps(plain(body))
    properties = msgspec.structs.asdict(message.properties)
    parts: dict[str, Any] = {
        "header": {
            "durable": message.durable,
            "priority": message.priority,
            "ttl_ms": message.ttl_ms,
            "delivery_count": message.delivery_count,
        },
        "message_annotations": message.message_annotations,
        "properties": {name: value for name, value in properties.items() if value is not None},
        "application_properties": message.application_properties,
        "body": body,
    }
    return json.dumps(plain({name: value for name, value in parts.items() if value}))


def octets_of(message: Message) -> bytes:
    """Return the body of *message* as octets: those of its data sections, else those of its text or JSON."""
    body = message.body
    return body if isinstance(body, bytes) else shown(message, whole=False).encode()


def for_stdout(text: str) -> str:
    """Return *text* of a peer for standard output, with escape sequences disarmed on a terminal."""
    return printable(text, keep="\n\t") if sys.stdout.isatty() else text


def check_form(*, whole: bool, raw: bool) -> None:
    """Refuse ``--json`` and ``--raw`` together.

    Raises:
        click.UsageError: Both are given.
    """
    if raw and whole:
        raise click.UsageError(
            "--raw writes bodies alone and --json whole messages: give one of them"
        )


def write(message: Message, *, whole: bool, raw: bool) -> None:
    """Write *message* to standard output: its body as text, all of it as JSON, or the octets of its body."""
    if raw:
        sys.stdout.buffer.write(octets_of(message))
        sys.stdout.buffer.flush()
    else:
        print(for_stdout(shown(message, whole=whole)), flush=True)


def _pairs(properties: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in properties:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--property")
        found[name] = value
    return found


@click.command()
@click.argument("address")
@click.argument("body", required=False)
@client_options
@click.option("--count", type=click.IntRange(1), default=1, help="Number of times to send it.")
@click.option(
    "--content-type", metavar="TYPE", help="Content type of the body; guessed by default."
)
@click.option("--subject", metavar="TEXT", help="Property subject of the message.")
@click.option("--message-id", metavar="TEXT", help="Property message-id of the message.")
@click.option("--correlation-id", metavar="TEXT", help="Property correlation-id of the message.")
@click.option("--reply-to", metavar="ADDRESS", help="Address for replies.")
@click.option(
    "--ttl", "ttl_s", type=Seconds(), metavar="TIME",
    help="Time to live of the message: seconds, or a time such as 500ms, 30s, 5m or 2h.",
)  # fmt: skip
@click.option(
    "--priority",
    type=click.IntRange(0, 255),
    default=4,
    show_default=True,
    help="Priority of the message.",
)
@click.option("--durable", is_flag=True, help="Ask the peer to store the message.")
@click.option(
    "--property", "properties", metavar="NAME=VALUE", multiple=True,
    help="An application-property. Repeatable.",
)  # fmt: skip
def send(
    address: str,
    body: str | None,
    where: Where,
    count: int,
    content_type: str | None,
    properties: tuple[str, ...],
    **fields: Any,
) -> None:
    """Send BODY, or standard input, to ADDRESS, and wait until it is accepted."""
    payload, kind = body_of(body, content_type)
    given = {name: value for name, value in fields.items() if value is not None}
    pairs = _pairs(properties)
    try:
        message = Message(payload, content_type=kind, application_properties=pairs or None, **given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None

    async def main() -> None:
        async with (
            Container("amqp-rt send") as container,
            where.connect(container) as peer,
            peer.sender(address) as sender,
        ):
            await sender.send_many(message for _ in range(count))

    run(main)


@click.command()
@click.argument("address")
@client_options
@click.option(
    "--count", type=click.IntRange(1), help="Stop after this number of messages; by default go on."
)
@click.option(
    "--timeout", type=Seconds(), metavar="TIME", help="Stop after this time without a message."
)
@click.option(
    "--browse", is_flag=True, help="Leave the messages in the queue (distribution-mode copy)."
)
@click.option(
    "--json", "whole", is_flag=True, help="Print whole messages, one JSON object per line."
)
@click.option(
    "--raw",
    is_flag=True,
    help="Write the octets of bodies unchanged, with nothing between messages and after them.",
)
def receive(
    address: str,
    where: Where,
    count: int | None,
    timeout: float | None,
    browse: bool,
    whole: bool,
    raw: bool,
) -> None:
    r"""Receive messages from ADDRESS, and accept them.

    Each body is written to standard output as text, with a line end after it: octets that are not UTF-8 as escapes such
    as \xff, values other than texts as JSON. Exits with 1 if --timeout passes before --count messages have arrived.
    """
    check_form(whole=whole, raw=raw)
    seen = 0

    async def main() -> None:
        nonlocal seen
        async with (
            Container("amqp-rt receive") as container,
            where.connect(container) as peer,
            peer.receiver(
                address, credit=min(count or 100, 100), mode="copy" if browse else None
            ) as receiver,
        ):
            while count is None or seen < count:
                with trio.move_on_after(timeout if timeout is not None else float("inf")) as scope:
                    delivery = await receiver.receive()
                if scope.cancelled_caught:
                    return
                with delivery:
                    write(delivery.message, whole=whole, raw=raw)
                seen += 1

    run(main)
    if count is not None and seen < count:
        raise click.ClickException(f"{seen} of {count} messages came within {timeout:g} s each")


@click.command()
@click.argument("address")
@click.argument("body", required=False)
@client_options
@click.option(
    "--timeout", type=Seconds(), default=10.0, show_default=True, metavar="TIME",
    help="Maximum time to wait for the reply.",
)  # fmt: skip
@click.option(
    "--content-type", metavar="TYPE", help="Content type of the body; guessed by default."
)
@click.option("--json", "whole", is_flag=True, help="Print the whole reply as a JSON object.")
@click.option(
    "--raw",
    is_flag=True,
    help="Write the octets of the reply's body unchanged, with nothing after them.",
)
def request(
    address: str,
    body: str | None,
    where: Where,
    timeout: float,
    content_type: str | None,
    whole: bool,
    raw: bool,
) -> None:
    """Send a request with BODY to ADDRESS and print the reply.

    BODY is left out for a request without one; - reads standard input. The reply is written as receive writes messages.
    """
    check_form(whole=whole, raw=raw)
    arguments: tuple[Message, ...] = ()
    if body is not None:
        payload, kind = body_of(body, content_type)
        arguments = (Message(payload, content_type=kind),)

    async def main() -> Message:
        async with (
            Container("amqp-rt request") as container,
            where.connect(container) as peer,
        ):
            return await peer.call(address, *arguments, reply=Message, within=timeout)

    write(run(main), whole=whole, raw=raw)
