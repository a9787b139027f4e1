"""Templates of the pages. Values are always escaped: names and bodies come from peers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from ..guard import CSRF_FIELD


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("amqp_rt_console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return the page that *template* makes of *values*, and of ``session``, ``door``, ``request`` and ``csrf_field``."""
    page = _environment().get_template(template)
    text = page.render(
        request=request,
        session=request.state.session,
        door=request.state.door,
        csrf_field=CSRF_FIELD,
        **values,
    )
    return HTMLResponse(text, status)
