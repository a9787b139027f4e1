"""A far end that answers requests as a test decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from far_end import FarEnd

from amqp_rt.container.requests import STREAM_END
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED
from amqp_rt.values import Symbol


class Node:
    """A far end that answers requests by hand.

    Args:
        answer: Called with each request as it comes; None leaves it to the test.
    """

    def __init__(self, answer: Callable[[Node, Message], None] | None = None) -> None:
        self.answer = answer
        self.far = FarEnd(on_attach=self.attach)
        #: The links that replies leave on, by the address that was made for them.
        self.replies: dict[str, Any] = {}
        self.requests: list[Message] = []
        self.deliveries: list[Any] = []
        self.given_up: list[Any] = []

    def attach(self, link: Any) -> None:
        recorder = self.far.accept(link)
        if hasattr(link, "grant"):
            recorder.deliver = self.deliver  # type: ignore[method-assign]
            recorder.on_settled = self.on_settled  # type: ignore[method-assign]
            link.grant(1000)
        else:
            self.replies[link.source.address] = link

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        for each in deliveries:
            self.deliveries.append(each)
            request = Message.decode(each.payload)
            self.requests.append(request)
            if self.answer is not None:
                self.answer(self, request)

    def on_settled(self, link: Any, deliveries: list[Any]) -> None:
        self.given_up += deliveries

    def reply(self, request: Message, body: Any, *, settle: bool = True, **properties: Any) -> None:
        assert request.reply_to is not None
        properties.setdefault("correlation_id", request.message_id)
        message = Message(body, to=request.reply_to, **properties)
        self.replies[request.reply_to].send(message.encode(), settled=True)
        if settle:
            self.deliveries[self.requests.index(request)].settle(ACCEPTED)

    def part(self, request: Message, number: int, body: Any = None) -> None:
        """One part of a streamed reply; the number -1 ends it."""
        annotations = {Symbol(STREAM_END): True} if number < 0 else None
        self.reply(
            request,
            b"" if number < 0 else number if body is None else body,
            settle=number < 0,
            group_id=str(request.message_id),
            group_sequence=abs(number),
            message_annotations=annotations,
        )


def echoing(node: Node, request: Message) -> None:
    node.reply(request, request.body)
