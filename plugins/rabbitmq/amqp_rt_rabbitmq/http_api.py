"""Requests of RabbitMQ's HTTP API that monitors and autoscalers send, at the HTTP door: queues and totals, read only.

They read ``$management`` over the connection of their user, whose rights decide what there is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec
import trio
from amqp_rt_console import credentials
from amqp_rt_console.problems import Problem
from amqp_rt_console.sessions import WebSession
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from amqp_rt import Broker
from amqp_rt.errors import AmqpError

from .name_patterns import NamePattern
from .profile import VERSION

#: Kinds of nodes that are queues, with the types of their queues.
_TYPES: Final = {"queue": "classic", "log": "stream"}
#: Attributes of nodes that answers are made of.
_ATTRIBUTES: Final = (
    *("name", "kind", "available", "acquired", "delayed", "bytes", "consumers"),
    *("enqueued", "delivered", "accepted"),
)
#: Rows of a page by default, as in RabbitMQ.
_PAGE: Final = 100
#: Pages of rows that one request reads.
_PAGES_MAX: Final = 20
#: Queues whose rates are known at a time, and seconds for which an earlier count is compared.
_RATES_MAX: Final = 1_000
_SAMPLE_S: Final = 300.0
#: Steps that the pattern of one request may take.
_STEPS_MAX: Final = 5_000_000
#: Counts of a node, by the names of RabbitMQ.
_COUNTS: Final = {"publish": "enqueued", "deliver_get": "delivered", "ack": "accepted"}


def routes(broker: Broker) -> list[BaseRoute]:
    """Return the routes of *broker* (entry point ``amqp_rt.door_routes``)."""
    api = RabbitApi(broker)
    return [
        Route("/api/overview", api.overview, methods=["GET"]),
        Route("/api/queues", api.queues, methods=["GET"]),
        Route("/api/queues/{rest:path}", api.queues, methods=["GET"]),
    ]


class Rates:
    """Rates of counts, each since an earlier request for the same queue."""

    def __init__(self) -> None:
        #: Times and counts of the last two requests that were a second apart.
        self._known: OrderedDict[tuple[str, str], list[tuple[float, dict[str, int]]]] = (
            OrderedDict()
        )

    def of(self, place: tuple[str, str], counts: dict[str, int], now: float) -> dict[str, float]:
        """Return the rates of *counts* at *now*, in units per second; 0 if there is nothing to compare with."""
        samples = self._known.setdefault(place, [])
        self._known.move_to_end(place)
        if len(self._known) > _RATES_MAX:
            self._known.popitem(last=False)
        if not samples or now - samples[-1][0] >= 1:
            samples.append((now, counts))
            del samples[:-2]
        since, before = samples[0]
        passed = now - since
        if not 1 <= passed <= _SAMPLE_S:
            return dict.fromkeys(counts, 0.0)
        # A queue that was deleted and declared again counts anew.
        return {name: max(0.0, (count - before[name]) / passed) for name, count in counts.items()}


class RabbitApi:
    """Answers to requests of the HTTP API.

    Args:
        broker: The broker.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._rates = Rates()
        self._rows_max = broker.container.limits.http_rows_max

    async def overview(self, request: Request) -> Response:
        """Answer ``GET /api/overview``: versions, and totals of the queues that the user manages."""
        session: WebSession = request.state.session
        ready = unacknowledged = count = consumers = 0
        async for row in self._rows(session):
            count += 1
            ready += row["available"]
            unacknowledged += row["acquired"]
            consumers += row["consumers"]
        totals = {"queues": count, "consumers": consumers}
        try:
            page = await session.management.page("amqp_rt.connection", count=1, attributes=["name"])
            totals["connections"] = page.total
        except AmqpError as error:
            # Who manages some nodes only does not see the connections.
            if error.condition != "amqp:unauthorized-access":
                raise
        name = self._broker.container.name
        return _json(
            {
                "product_name": "amqp-rt",
                "rabbitmq_version": VERSION,
                "management_version": VERSION,
                "cluster_name": name,
                "node": name,
                "object_totals": totals,
                "queue_totals": {
                    "messages": ready + unacknowledged,
                    "messages_ready": ready,
                    "messages_unacknowledged": unacknowledged,
                },
            }
        )

    async def queues(self, request: Request) -> Response:
        """Answer ``GET /api/queues``, ``/api/queues/VHOST`` and ``/api/queues/VHOST/NAME``.

        Raises:
            Problem: The request is malformed, or asks for too much.
            AmqpError: The user has no right, or there is no such queue or virtual host.
        """
        segments = _segments(request)
        session = await _session(request, segments[0] if segments else None)
        if len(segments) == 2 and segments[1]:
            reply = await session.management.request("READ", type="amqp_rt.node", name=segments[1])
            row: Mapping[str, Any] = reply.body
            if row.get("kind") not in _TYPES:
                raise Problem(404, f"{segments[1]!r:.100} is no queue", "amqp:not-found")
            return _json(self._queue(session, row))
        if len(segments) > 2:
            raise Problem(404, "there is no such resource", "amqp:not-found")
        found = [self._queue(session, row) async for row in self._named(request, session)]
        if "page" not in request.query_params:
            return _json(found)
        number = _number(request, "page", 1, 1_000_000)
        size = _number(request, "page_size", _PAGE, self._rows_max)
        items = found[(number - 1) * size : number * size]
        return _json(
            {
                "page": number,
                "page_count": max(1, -(-len(found) // size)),
                "page_size": size,
                "filtered_count": len(found),
                "item_count": len(items),
                "items": items,
            }
        )

    async def _named(
        self, request: Request, session: WebSession
    ) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the queues of *session* whose names are those that *request* asks for."""
        wanted = request.query_params.get("name", "")
        if request.query_params.get("use_regex") != "true":
            async for row in self._rows(session):
                if wanted.lower() in row["name"].lower():
                    yield row
            return
        pattern, steps = NamePattern(wanted), 0
        async for row in self._rows(session):
            steps += pattern.work(row["name"])
            if steps > _STEPS_MAX:
                raise Problem(400, f"the pattern takes more than {_STEPS_MAX} steps: anchor it")
            await trio.lowlevel.checkpoint()
            if pattern.matches(row["name"]):
                yield row

    async def _rows(self, session: WebSession) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the nodes of *session* that are queues, without those for replies.

        Raises:
            Problem: There are too many.
        """
        after: str | None = None
        for _ in range(_PAGES_MAX):
            page = await session.management.page(
                "amqp_rt.node",
                after=after,
                count=self._rows_max,
                attributes=[*_ATTRIBUTES, "dynamic"],
            )
            for row in page.rows:
                if row.get("kind") in _TYPES and not row.get("dynamic"):
                    yield row
            after = page.next
            if after is None:
                return
        most = _PAGES_MAX * self._rows_max
        raise Problem(
            413, f"there are more than {most} nodes: ask for one queue", "amqp:not-allowed"
        )

    def _queue(self, session: WebSession, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return *row* in the words of RabbitMQ."""
        name = str(row["name"])
        counts = {ours: int(row[theirs]) for ours, theirs in _COUNTS.items()}
        place = (session.virtual_host, name)
        stats: dict[str, Any] = dict(counts)
        for each, rate in self._rates.of(place, counts, trio.current_time()).items():
            stats[f"{each}_details"] = {"rate": rate}
        ready, unacknowledged = int(row["available"]), int(row["acquired"])
        return {
            "name": name,
            "vhost": session.virtual_host.removeprefix("vhost:") or "/",
            "type": _TYPES[row["kind"]],
            "node": self._broker.container.name,
            "state": "running",
            "messages": ready + unacknowledged,
            "messages_ready": ready,
            "messages_unacknowledged": unacknowledged,
            "message_bytes": int(row["bytes"]),
            "consumers": int(row["consumers"]),
            "message_stats": stats,
        }


async def _session(request: Request, virtual_host: str | None) -> WebSession:
    """Return the session of *request* in *virtual_host*; None for the one that it has.

    Raises:
        Problem: A session of a browser is in one virtual host.
        AmqpError: There is no such virtual host, or the user may not log in there.
    """
    session: WebSession = request.state.session
    if virtual_host is None:
        return session
    name = "" if virtual_host == "/" else virtual_host
    if name == session.virtual_host.removeprefix("vhost:"):
        return session
    given = request.headers.get("authorization")
    if given is None:
        raise Problem(404, f"the session is not in the virtual host {virtual_host!r:.100}")
    login = await credentials.in_header(given, f"vhost:{name}" if name else "")
    state = request.state
    found: WebSession = await state.door.sessions.for_request(login, state.arrival, state.uses)
    return found


def _segments(request: Request) -> list[str]:
    """Return the segments of the path below ``/api/queues``, decoded: a slash within one is encoded.

    Flower writes the default virtual host as a slash of its own.
    """
    raw: bytes = request.scope["raw_path"]
    rest = raw.split(b"/")[3:]
    if rest and rest[-1] == b"" and len(rest) > 1:
        rest.pop()
    try:
        found = [unquote_to_bytes(each).decode() for each in rest]
    except UnicodeDecodeError:
        raise Problem(400, "the percent-encoded characters of the path are not UTF-8") from None
    return [found[0] or "/", *found[1:]] if found else []


def _number(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
        raise Problem(400, f"{name} is a whole number from 1 to {most}, not {text!r:.50}")
    return int(text)


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
