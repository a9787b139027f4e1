"""Pages of the console: HTML that works without scripts, made of the templates in ``templates/``."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from .entering import home, log_in, log_out, problem_page, show_login

__all__ = ["problem_page", "routes"]


def routes() -> Sequence[BaseRoute]:
    """Return the routes of all pages."""
    return [
        Route("/login", show_login, methods=["GET"]),
        Route("/login", log_in, methods=["POST"]),
        Route("/logout", log_out, methods=["POST"]),
        Route("/", home, methods=["GET"]),
        Mount("/static", StaticFiles(packages=[("amqp_rt_console", "static")])),
    ]
