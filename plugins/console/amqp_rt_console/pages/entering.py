"""Pages of the login, and its end."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from amqp_rt.errors import AmqpError, AuthenticationFailed

from ..credentials import by_password
from ..guard import set_cookie
from ..problems import problem_of
from .rendering import Page, html


async def show_login(request: Request) -> Response:
    """Show the form of the login."""
    return _login_page(_own_path(request.query_params.get("next", "/")))


async def log_in(request: Request) -> Response:
    """Open a session for the user of the form, in place of the one that the browser has."""
    form = request.state.form
    then = _own_path(form.get("next", "/"))
    try:
        login = by_password(
            form.get("user", ""), form.get("password", ""), form.get("virtual_host", "")
        )
        state = request.state
        _, token = await state.door.sessions.log_in(login, state.arrival, state.uses)
    except AuthenticationFailed:
        return _login_page(then, "the login failed", 401)
    except AmqpError as error:
        problem = problem_of(error)
        return _login_page(then, problem.detail, problem.status)
    if request.state.session is not None:
        request.state.session.end()
    answer = RedirectResponse(then, 303)
    set_cookie(request, answer, token)
    return answer


async def log_out(request: Request) -> Response:
    """End the session."""
    request.state.session.end()
    answer = RedirectResponse("/login", 303)
    set_cookie(request, answer, None)
    return answer


def _login_page(then: str, failure: str = "", status: int = 200) -> Response:
    return html(Page("login.html", "Log in", {"then": then}, failure=failure, status=status))


def _own_path(text: str) -> str:
    """Return *text* if it is a path of this door, else that of the first page: a login leads nowhere else."""
    plain = text.startswith("/") and not text.startswith(("//", "/\\")) and text.isprintable()
    return text if plain and "\\" not in text else "/"
