"""Answers of pages: templates filled in, with the navigation, notices and the token of forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import trio
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from msgspec import Struct
from starlette.responses import HTMLResponse, RedirectResponse, Response

from amqp_rt.errors import AmqpError

from ..guard import CSRF_FIELD, REFRESH
from ..pieces import InPieces
from .kinds import listed
from .visits import Visit, url

#: Field of a form that tells it from those of other sites.
_TOKEN: Final = Markup('<input type="hidden" name="{}" value="{}">')
#: Characters of a page that are made in one step of the event loop.
_STEP: Final = 16 * 1024
#: Seconds after which a page may reload itself, if its user asks for that.
REFRESH_MIN: Final = 2
REFRESH_MAX: Final = 60


class Page(Struct, frozen=True):
    """A page: its template, and the values for it."""

    template: str
    title: str
    values: Mapping[str, Any] = {}
    #: Why the last act was refused, empty if it was not.
    failure: str = ""
    status: int = 200
    #: Address of the stream with the numbers of the page, empty without one.
    live: str = ""


class Redirect(Struct, frozen=True):
    """Another page, which the browser loads after an act."""

    path: str


class _FormTexts(dict[str, str]):
    """Texts of a form, empty where there is none."""

    def __missing__(self, key: str) -> str:
        return ""


@lru_cache(maxsize=1)
def _templates() -> Environment:
    found = Environment(
        loader=PackageLoader("amqp_rt_console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.globals.update(url=url)
    return found


async def respond(visit: Visit, page: Page | Redirect) -> Response:
    """Return the answer to *visit*."""
    if isinstance(page, Redirect):
        return RedirectResponse(page.path, 303)
    texts = _rendered(
        page,
        visit=visit,
        nav=await _navigation(visit),
        notices=visit.take_notices(),
        refresh=_refresh(visit),
    )
    pieces: list[bytes] = []
    step: list[str] = []
    size = 0
    for text in texts:
        step.append(text)
        size += len(text)
        if size >= _STEP:
            pieces.append("".join(step).encode())
            step, size = [], 0
            await trio.lowlevel.checkpoint()
    pieces.append("".join(step).encode())
    return InPieces(pieces, page.status, media_type="text/html")


def html(page: Page) -> HTMLResponse:
    """Return *page*, which is short, as HTML without navigation and without forms that need a session."""
    return HTMLResponse("".join(_rendered(page)), page.status)


def _rendered(page: Page, **more: Any) -> Iterator[str]:
    """Return the texts of *page*; with ``visit`` among *more* it has the navigation, and forms."""
    values: dict[str, Any] = {
        "visit": None,
        "nav": [],
        "notices": [],
        "refresh": None,
        **page.values,
        **more,
    }
    if isinstance(given := values.get("given"), Mapping):
        values["given"] = _FormTexts(given)
    visit: Visit | None = values["visit"]
    values["csrf"] = "" if visit is None else _TOKEN.format(CSRF_FIELD, visit.csrf)
    return (
        _templates()
        .get_template(page.template)
        .generate(title=page.title, failure=page.failure, live=page.live, **values)
    )


def _refresh(visit: Visit) -> int | None:
    text = visit.query(REFRESH)
    if not (text.isascii() and text.isdecimal() and len(text) < 4):
        return None
    return min(max(int(text), REFRESH_MIN), REFRESH_MAX)


async def _navigation(visit: Visit) -> list[tuple[str, str, bool]]:
    """Return label and address of each page, and whether it is the present one."""
    try:
        types = list(listed((await visit.types()).attributes))
    except AmqpError:
        # Without any right at $management there is nothing to list.
        types = []
    found = [("Overview", "/")]
    found += [(page.title, f"/types/{page.type_name}") for page in types]
    found += [
        ("Dead letters", "/dead-letters"),
        ("Journal", "/journal"),
        ("Rights", "/rights"),
        ("Frames", "/ladder"),
    ]
    here = visit.request.url.path
    return [(label, path, path == here or here.startswith(f"{path}/")) for label, path in found]
