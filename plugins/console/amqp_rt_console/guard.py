"""Gate of the HTTP door: each request is checked and gets its session here, and each answer its security headers.

Checked are, in this order: the host, which stops pages of other sites that point their name at us; that a change comes from our own
pages, or from a program; the login; the token of forms; and the size of the body.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import ExitStack
from hmac import compare_digest
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlsplit

from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from amqp_rt import Broker
from amqp_rt.container.doors import DoorArrival
from amqp_rt.errors import AmqpError, AuthenticationFailed

from . import credentials
from .problems import Problem, problem_of
from .server import PeerGone, Receive, Scope, Send
from .sessions import WebSession, WebSessions

log = logging.getLogger("amqp_rt.console")

#: Methods that change nothing (RFC 9110 §9.2.1).
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
#: Paths that take no login: the form for it, and files that are the same for everybody.
LOGIN_PATH: Final = "/login"
STATIC_PATH: Final = "/static/"
#: Paths of streams that pages open again by themselves, and the parameter of pages that reload themselves: neither puts
#: off the end of an idle session.
_LIVE_PATH: Final = "/live/"
REFRESH: Final = "refresh"
#: Requests with a form that change nothing but their session: its end, and what its pages observe.
_WITHOUT_CHANGES: Final = frozenset({"/logout", "/watch", "/ladder"})
#: Octets of the body of a login, whose sender is a stranger.
_LOGIN_MAX: Final = 16 * 1024
#: Fields of a form.
_FIELDS_MAX: Final = 200
#: Names of the token in headers and forms.
CSRF_HEADER: Final = "x-csrf-token"
CSRF_FIELD: Final = "csrf"
#: Header that names the virtual host of a request with credentials.
VIRTUAL_HOST_HEADER: Final = "amqp-virtual-host"
_FORM: Final = "application/x-www-form-urlencoded"

_HEADERS: Final = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not no-referrer, with which browsers hide the origin of our own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class Origins(Struct, frozen=True):
    """Origins of our own pages."""

    #: Where browsers reach the door behind a proxy; None without one that is known.
    public: str | None
    #: Whether the door is for this machine, where a proxy may provide TLS.
    local: bool

    def are_ours(self, origin: str, host: str, *, secure: bool, same: bool) -> bool:
        """Return whether *origin* is that of our pages.

        Args:
            origin: The origin, as a browser has told it.
            host: The header ``host`` of the request.
            secure: Whether the request has arrived over TLS.
            same: Whether the browser says that the request is of the same origin, whatever a proxy has made of it.
        """
        own = {f"{'https' if secure else 'http'}://{host}", self.public}
        if same or (self.local and not secure):
            own |= {f"http://{host}", f"https://{host}"}
        return origin in own


class Guard:
    """ASGI application that admits requests to *app*, and answers the others.

    Admitted requests have ``request.state.session`` (:class:`~.sessions.WebSession`; None at :data:`LOGIN_PATH` and below
    :data:`STATIC_PATH`), ``request.state.door``, ``request.state.form``, the fields of a form by name, and
    ``request.state.uses``, an :class:`~contextlib.ExitStack` until whose end the sessions of the request are in use.

    Args:
        app: The application. Problems and errors of AMQP that it raises are answered.
        broker: The broker.
        sessions: Sessions of the door.
        hosts: Names under which browsers reach the door; IP addresses need none.
        origins: Origins of our own pages.
        read_only: Refuse requests that change something.
        show: Answers a problem for browsers, with a page.
        door: Object that requests get as ``request.state.door``.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        *,
        broker: Broker,
        sessions: WebSessions,
        hosts: Collection[str],
        origins: Origins,
        read_only: bool,
        show: Callable[[Request, Problem], Response],
        door: object,
    ) -> None:
        self._app = app
        self._broker = broker
        self._sessions = sessions
        self._hosts = {"localhost", *(each.lower() for each in hosts)}
        self._origins = origins
        self._read_only = read_only
        self._show = show
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        with ExitStack() as uses:
            state = scope["state"]
            state.update(door=self._door, session=None, form={}, uses=uses)
            state["secure"] = state["arrival"].secure or (self._origins.public or "").startswith(
                "https:"
            )
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Routes raise their refusals instead of answering in plain text.
        scope["app"] = self._app
        if scope["path"].startswith(STATIC_PATH):
            # The files are small: they are sent whole (RFC 9110 §14.2), whatever the header has.
            scope["headers"] = [each for each in scope["headers"] if each[0] != b"range"]
        request = Request(scope, receive)
        sent = False

        async def secured(message: MutableMapping[str, Any]) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                sent = True
                message["headers"] = _secured([*message.get("headers", ())])
            await send(message)

        answer: Response
        try:
            read = await self._admit(request)
            if isinstance(read, Response):
                answer = read
            else:
                await self._app(scope, read, secured)
                return
        except PeerGone:
            raise
        except Exception as error:
            if sent or (problem := _as_problem(error)) is None:
                raise
            answer = self._show(request, problem) if _is_page(request) else problem.response()
            if problem.headers:
                answer.headers.update(problem.headers)
        await answer(scope, receive, secured)

    async def _admit(self, request: Request) -> Receive | Response:
        """Check *request*; return the function that has its body, or an answer that sends a browser elsewhere.

        Raises:
            Problem: The request is refused.
            AmqpError: The login failed.
        """
        host = self._check_host(request)
        changes = request.method not in SAFE
        if changes:
            self._check_site(request, host)
        path = request.url.path
        state = request.state
        if path == LOGIN_PATH or path.startswith(STATIC_PATH):
            state.session = self._by_cookie(request)
            if not changes:
                return request.receive
            body = await _read(request, _LOGIN_MAX)
            state.form = _form(request, body)
            return _replay(body, request.receive)
        session = state.session = await self._session(request)
        if session is None:
            if _is_page(request) and request.method in ("GET", "HEAD"):
                then = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                return RedirectResponse(f"{LOGIN_PATH}?next={quote(then, safe='')}", 303)
            raise _unauthorized(request)
        if not changes:
            return request.receive
        if self._read_only and path not in _WITHOUT_CHANGES:
            raise Problem(403, "this door is read-only", "amqp:not-allowed")
        body = await _read(request, self._broker.container.limits.http_body_max)
        state.form = _form(request, body)
        if session.has_cookie:
            given = request.headers.get(CSRF_HEADER) or state.form.get(CSRF_FIELD, "")
            if not compare_digest(given.encode(), session.csrf.encode()):
                raise Problem(
                    403,
                    f"a change needs the token of the session, as {CSRF_HEADER} or {CSRF_FIELD}",
                )
        return _replay(body, request.receive)

    def _check_host(self, request: Request) -> str:
        """Return the header ``host``, after checking that it names us."""
        given = request.headers.get("host", "")
        name = urlsplit(f"//{given}").hostname if _is_host(given) else None
        if name is None:
            raise Problem(400, "the request has no host")
        if name not in self._hosts and not _is_address(name):
            raise Problem(
                421,
                f"{name!r:.100} is not a name of this door: start it with --http-host {name:.100}",
            )
        return given

    def _check_site(self, request: Request, host: str) -> None:
        """Refuse a change that a page of another site has requested.

        Browsers tell the site (Fetch Metadata), or at least the origin; programs tell neither.
        """
        site = request.headers.get("sec-fetch-site")
        origin = request.headers.get("origin")
        secure = request.state.arrival.secure
        if site not in (None, "same-origin", "none") or (
            origin is not None
            and not self._origins.are_ours(origin, host, secure=secure, same=site == "same-origin")
        ):
            raise Problem(403, "a page of another site may change nothing here", "amqp:not-allowed")

    async def _session(self, request: Request) -> WebSession | None:
        """Return the session of *request*; None if it has no login and needs one."""
        arrival: DoorArrival = request.state.arrival
        virtual_host = request.headers.get(VIRTUAL_HOST_HEADER, "")
        if (given := request.headers.get("authorization")) is not None:
            login = await credentials.in_header(given, virtual_host)
            return await self._sessions.for_request(login, arrival, request.state.uses)
        if (session := self._by_cookie(request)) is not None:
            return session
        entry = self._broker.container.entry
        if entry.takes_tokens and arrival.certificate is None:
            # Without a token an anonymous peer has no rights.
            return None
        anonymous = credentials.without(entry.mechanisms, arrival, virtual_host)
        if anonymous is None:
            return None
        return await self._sessions.for_request(anonymous, arrival, request.state.uses)

    def _by_cookie(self, request: Request) -> WebSession | None:
        token = _cookie(request, cookie_name(request))
        if token is None:
            return None
        state = request.state
        by_itself = request.url.path.startswith(_LIVE_PATH) or REFRESH in request.query_params
        return self._sessions.find(token, state.arrival, state.uses, touch=not by_itself)


def _cookie(request: Request, name: str) -> str | None:
    """Return the value of the cookie *name*, whatever other applications of the host have in theirs."""
    for header in request.headers.getlist("cookie"):
        for pair in header.split(";"):
            found, equals, value = pair.strip().partition("=")
            if equals and found == name:
                return value
    return None


def cookie_name(request: Request) -> str:
    """Return the name of the cookie of our sessions: those of a host are shared by all of its ports."""
    port = urlsplit(f"//{request.headers.get('host', '')}").port
    prefix = "__Host-" if request.state.secure else ""
    return f"{prefix}amqp_rt{'' if port is None else f'_{port}'}"


def set_cookie(request: Request, answer: Response, token: str | None) -> None:
    """Set the cookie of a session in *answer*, or with None delete it."""
    answer.set_cookie(
        cookie_name(request),
        token or "",
        max_age=None if token else 0,
        path="/",
        secure=request.state.secure,
        httponly=True,
        samesite="strict",
    )


def _secured(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    given = {name.lower() for name, _ in headers}
    headers += [
        (name.encode(), value.encode())
        for name, value in _HEADERS.items()
        if name.encode() not in given
    ]
    if b"cache-control" not in given:
        headers.append((b"cache-control", b"no-store"))
    return headers


def _is_host(text: str) -> bool:
    """Return whether *text* is a host with or without a port, which urlsplit can read."""
    if any(each in text for each in "@/?#\\"):
        return False
    try:
        found = urlsplit(f"//{text}")
        return bool(found.hostname) and (found.port is None or found.port >= 0)
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_page(request: Request) -> bool:
    """Return whether *request* comes from a browser that shows the answer as a page."""
    return "text/html" in request.headers.get("accept", "") and not request.url.path.startswith(
        "/api/"
    )


def _unauthorized(request: Request, detail: str = "a login is needed") -> Problem:
    # Browsers would ask for a password themselves, and send it with requests from all sites from then on.
    by_script = "sec-fetch-mode" in request.headers
    headers = {} if by_script else {"www-authenticate": 'Basic realm="amqp-rt", charset="UTF-8"'}
    return Problem(401, detail, "amqp:unauthorized-access", headers)


def _as_problem(error: BaseException) -> Problem | None:
    """Return the refusal that *error* stands for; None if it is a fault of ours."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, Problem):
        return error
    if isinstance(error, AuthenticationFailed):
        return Problem(
            401,
            "the login failed",
            "amqp:unauthorized-access",
            {"www-authenticate": 'Basic realm="amqp-rt", charset="UTF-8"'},
        )
    if isinstance(error, AmqpError):
        return problem_of(error)
    if isinstance(error, HTTPException):
        return Problem(error.status_code, error.detail, headers=error.headers)
    if isinstance(error, Exception) and not isinstance(error, PeerGone):
        log.error("a request failed", exc_info=error)
        return Problem(
            500, "the request failed; the log of the broker has the reason", "amqp:internal-error"
        )
    return None


async def _read(request: Request, most: int) -> bytes:
    """Return the body of *request*, of at most *most* octets."""
    too_large = Problem(413, f"the body of a request has at most {most} octets")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > most:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise PeerGone("the connection ended within the body of a request")
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > most:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(pieces)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a function that has *body* as one piece, and what *receive* has after it."""
    given = False

    async def replayed() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _form(request: Request, body: bytes) -> dict[str, str]:
    """Return the fields of a form in *body*, the last of each name."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _FORM:
        return {}
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_FIELDS_MAX))
    except ValueError:
        raise Problem(400, "the form is malformed, or has too many fields") from None
