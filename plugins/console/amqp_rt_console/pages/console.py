"""The pages of one door: their routes, the data of sessions, and the answers to refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias
from urllib.parse import urlsplit

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from amqp_rt import Broker

from ..credentials import without
from ..guard import set_cookie
from ..places import StreamPlaces
from ..problems import Problem
from .dead_letters import show_dead_letters
from .entering import log_in, log_out, show_login
from .entities import act, create, entity_numbers, list_numbers, show_entity, show_list
from .history import Watches
from .ladder import Ladders, change_ladder, show_ladder
from .live import EventStream, frame_events, number_events, since_of
from .messages import publish, show_journal, show_messages
from .overview import overview_numbers, show_overview
from .rendering import Page, Redirect, html, respond
from .rights import show_rights
from .visits import PageStates, Visit, url

#: Makes the page for a visit.
Showing: TypeAlias = Callable[[Visit], Awaitable[Page | Redirect]]
#: Reads the numbers of a page that is open.
ReadingNumbers: TypeAlias = Callable[[Visit], Awaitable[Mapping[str, str]]]


class Console:
    """Pages of the door of *broker*.

    Args:
        broker: The broker.
        streams: Places for streams of events.
        read_only: Whether nothing may be changed: pages have no forms then.
    """

    def __init__(self, broker: Broker, streams: StreamPlaces, *, read_only: bool) -> None:
        self.watches = Watches(broker.container.limits)
        self.ladders = Ladders(broker)
        self._streams = streams
        self._read_only = read_only
        self._states = PageStates()

    async def run(self) -> None:
        """Keep the histories and watches of sessions, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.watches.run)
            nursery.start_soon(self.ladders.run)

    def routes(self) -> Sequence[BaseRoute]:
        """Return the routes of all pages."""
        watches, ladders = self.watches, self.ladders
        return [
            Route("/login", show_login, methods=["GET"]),
            Route("/login", log_in, methods=["POST"]),
            Route("/logout", log_out, methods=["POST"]),
            Mount("/static", StaticFiles(packages=[("amqp_rt_console", "static")])),
            self._page("/", lambda visit: show_overview(visit, watches)),
            self._page("/types/{type}", lambda visit: show_list(visit, _type(visit))),
            self._page(
                "/types/{type}/entity",
                lambda visit: show_entity(visit, watches, _type(visit), visit.query("name")),
            ),
            self._page(
                "/types/{type}/new", lambda visit: create(visit, _type(visit)), "GET", "POST"
            ),
            self._page(
                "/types/{type}/act", lambda visit: act(visit, watches, _type(visit)), "POST"
            ),
            self._page("/messages", lambda visit: show_messages(visit, visit.query("name"))),
            self._page("/publish", lambda visit: publish(visit, watches), "POST"),
            self._page("/watch", self._watch, "POST"),
            self._page("/dead-letters", show_dead_letters),
            self._page("/journal", show_journal),
            self._page("/rights", show_rights),
            self._page("/ladder", lambda visit: show_ladder(visit, ladders)),
            self._page("/ladder", lambda visit: change_ladder(visit, ladders), "POST"),
            self._numbers("/live/overview", overview_numbers),
            self._numbers("/live/list", list_numbers),
            self._numbers("/live/entity", entity_numbers),
            Route("/live/ladder", self._frames, methods=["GET"]),
        ]

    def _visit(self, request: Request) -> Visit:
        return Visit(
            request,
            request.state.session,
            self._states,
            request.state.form,
            read_only=self._read_only,
        )

    def _page(self, path: str, show: Showing, *methods: str) -> Route:
        async def answer(request: Request) -> Response:
            token = await _keep_session(request) if path == "/" else None
            visit = self._visit(request)
            response = await respond(visit, await show(visit))
            if token is not None:
                set_cookie(request, response, token)
            return response

        return Route(path, answer, methods=list(methods) or ["GET"])

    def _numbers(self, path: str, read: ReadingNumbers) -> Route:
        async def answer(request: Request) -> Response:
            visit = self._visit(request)
            events = number_events(visit.session, lambda: read(visit))
            return EventStream(self._streams, visit.session.owner, events)

        return Route(path, answer, methods=["GET"])

    async def _frames(self, request: Request) -> Response:
        visit = self._visit(request)
        await visit.check_manages()
        session = visit.session
        events = frame_events(session, self.ladders, since_of(request), visit.check_manages)
        return EventStream(self._streams, session.owner, events)

    async def _watch(self, visit: Visit) -> Redirect:
        name = visit.form.get("name", "")
        if visit.form.get("do") == "start":
            await self.watches.watch(visit.session, name)
        else:
            self.watches.stop(visit.session, name)
        return Redirect(url("/types/amqp_rt.node/entity", name=name))


async def _keep_session(request: Request) -> str | None:
    """Open a session of a browser for one that needs no login; return the token for its cookie.

    Without it the requests of the browser would have another session each minute, without the watches of the user. Pages
    of other sites, whose requests have no cookie, open none.
    """
    state = request.state
    door, arrival = state.door, state.arrival
    if state.session.has_cookie or "authorization" in request.headers:
        return None
    site = request.headers.get("sec-fetch-site", "none")
    if request.method == "HEAD" or site not in ("same-origin", "none"):
        return None
    login = without(door.broker.container.entry.mechanisms, arrival, "")
    if login is None:
        return None
    state.session, token = await door.sessions.log_in(login, arrival, state.uses)
    return str(token)


def problem_page(request: Request, problem: Problem) -> Response:
    """Return the page that shows why a request was refused."""
    page = Page(
        "problem.html",
        problem.title,
        {"condition": problem.condition or "", "back": _back(request)},
        failure=problem.detail,
        status=problem.status,
    )
    return html(page)


def _type(visit: Visit) -> str:
    return str(visit.request.path_params["type"])


def _back(request: Request) -> str:
    """Return the path of our page that led here, or that of the first page."""
    try:
        referrer = urlsplit(request.headers.get("referer", ""))
    except ValueError:
        return "/"
    own = referrer.netloc == request.headers.get("host") and referrer.path.startswith("/")
    if not own or referrer.path == request.url.path or referrer.path.startswith("//"):
        return "/"
    return f"{referrer.path}?{referrer.query}" if referrer.query else referrer.path
