"""Streams of server-sent events: numbers that have changed, and frames, for pages that are open.

The form is that of https://html.spec.whatwg.org/multipage/server-sent-events.html. A stream ends by itself after some
minutes, so that a page which was left open does not keep its session in use.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

import trio
from msgspec import json
from starlette.requests import Request
from starlette.responses import Response

from amqp_rt.errors import AmqpError

from ..places import StreamPlaces
from ..server import Receive, Scope, Send
from ..sessions import Owner, WebSession
from .ladder import Ladders, shown_rung

#: Seconds between two looks at numbers, and at frames.
NUMBERS_S: Final = 2.0
FRAMES_S: Final = 0.5
#: Seconds after which it is checked again whether a user may see frames.
CHECK_S: Final = 10.0
#: Times that a look at numbers takes until the next one.
_REST: Final = 20
#: Seconds after which a stream ends.
STREAM_S: Final = 600.0
#: Frames in one event.
_FRAMES_MAX: Final = 200


class EventStream(Response):
    """Answer with the events that *events* yields, until it ends or the browser leaves.

    Args:
        places: Has a place for each stream.
        owner: Whose place it takes.
        events: Yields encoded events.

    Raises:
        Problem: There is no place.
    """

    media_type = "text/event-stream"

    def __init__(
        self, places: StreamPlaces, owner: Owner, events: AsyncGenerator[bytes, None]
    ) -> None:
        super().__init__(headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._places = places
        self._owner = owner
        self._events = events
        places.take(owner)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events (ASGI)."""
        try:
            start = {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
            await send(start)
            async with aclosing(self._events), trio.open_nursery() as nursery:

                async def leave() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    nursery.cancel_scope.cancel()

                nursery.start_soon(leave)
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                nursery.cancel_scope.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._places.give_back(self._owner)


def event(name: str, value: object) -> bytes:
    """Return the event *name* with *value* as JSON, which has no line breaks."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json.encode(value))


async def number_events(
    session: WebSession, read: Callable[[], Awaitable[Mapping[str, str]]]
) -> AsyncGenerator[bytes, None]:
    """Yield the changes of the numbers that *read* returns, until the session ends or may not see them."""
    sent: Mapping[str, str] = {}
    until = trio.current_time() + STREAM_S
    while session.alive and trio.current_time() < until:
        began = trio.current_time()
        try:
            values = await read()
        except AmqpError:
            return
        changed = {key: text for key, text in values.items() if sent.get(key) != text}
        sent = values
        # A comment, if nothing has changed: a browser that is gone is noticed.
        yield event("numbers", changed) if changed else b":\n\n"
        # Where a look takes long, as with thousands of nodes, it must not keep the broker busy.
        await trio.sleep(max(NUMBERS_S, _REST * (trio.current_time() - began)))


async def frame_events(
    session: WebSession, ladders: Ladders, since: int, check: Callable[[], Awaitable[None]]
) -> AsyncGenerator[bytes, None]:
    """Yield the frames of the ladder of *session* after the first *since* ones, until it stops.

    It stops when *check* raises AmqpError, since the user may not see frames any more.
    """
    checked = trio.current_time()
    until = checked + STREAM_S
    quiet = 0
    while session.alive and trio.current_time() < until:
        if trio.current_time() >= checked + CHECK_S:
            try:
                await check()
            except AmqpError:
                ladders.stop(session)
                return
            checked = trio.current_time()
        watch = ladders.of(session)
        if watch is None:
            return
        found = watch.since(since)[:_FRAMES_MAX]
        if found:
            # Rungs that are no longer kept are left out.
            since = max(since + len(found), watch.count - len(watch.since(since)) + len(found))
            rows: list[list[Any]] = [
                [each.connection, each.at, each.arrow, each.text, each.bad]
                for each in map(shown_rung, found)
            ]
            yield event("frames", {"rungs": rows, "count": since})
            yield event("numbers", {"connections": f"{watch.connections:,}"})
            quiet = 0
        elif (quiet := quiet + 1) % 20 == 0:
            yield b":\n\n"
        await trio.sleep(FRAMES_S)


def since_of(request: Request) -> int:
    """Return the number of frames that the page of *request* has."""
    text = request.query_params.get("since", "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0
