"""Pages of the login, of problems, and the first page."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from amqp_rt.errors import AmqpError, AuthenticationFailed

from ..credentials import by_password
from ..guard import set_cookie
from ..problems import Problem, problem_of
from .rendering import render


async def home(request: Request) -> Response:
    """Show the first page."""
    return render(request, "home.html")


async def show_login(request: Request) -> Response:
    """Show the form of the login."""
    return render(
        request, "login.html", then=_own_path(request.query_params.get("next", "/")), problem=None
    )


async def log_in(request: Request) -> Response:
    """Open a session for the user of the form, in place of the one that the browser has."""
    form = request.state.form
    then = _own_path(form.get("next", "/"))
    try:
        login = by_password(
            form.get("user", ""), form.get("password", ""), form.get("virtual_host", "")
        )
        _, token = await request.state.door.sessions.log_in(login, request.state.arrival)
    except AuthenticationFailed:
        return render(
            request, "login.html", 401, then=then, problem=Problem(401, "The login failed.")
        )
    except AmqpError as error:
        problem = problem_of(error)
        return render(request, "login.html", problem.status, then=then, problem=problem)
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


def problem_page(request: Request, problem: Problem) -> Response:
    """Return the page that shows why a request was refused."""
    return render(request, "problem.html", problem.status, problem=problem)


def _own_path(text: str) -> str:
    """Return *text* if it is a path of this door, else that of the first page: a login leads nowhere else."""
    plain = text.startswith("/") and not text.startswith(("//", "/\\")) and text.isprintable()
    return text if plain and "\\" not in text else "/"
