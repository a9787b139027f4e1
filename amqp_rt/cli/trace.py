"""``amqp-rt trace``: draw the frames of connections as a ladder."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Final

import click

from ..addresses import Url, parse_url
from ..broker.broker import installed_fronts
from ..errors import AmqpError
from ..net.endpoints import check_scheme
from ..net.tls import ClientTls
from ..net.traces.drawing import draw_html, draw_svg, draw_text, rungs
from ..net.traces.recording import read_trace
from .live import Drawing, trace_live
from .running import run, tls_options

#: Maximum number of frames of a file that are drawn without ``--frames``.
_FRAMES: Final = 2_000


@click.command()
@click.argument("target", metavar="FILE|URL")
@click.option("--html", "page", metavar="PATH", help="Write the drawing of FILE to this HTML page.")
@click.option(
    "--svg", "picture", metavar="PATH", help="Write the drawing of FILE to this SVG picture."
)
@click.option(
    "--listen",
    metavar="[HOST]:PORT",
    help="With a URL: address for clients; without a host, on this machine only. Also "
    "amqp+unix:///PATH.  [default: :5673]",
)
@click.option(
    "--write",
    "kept",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With a URL: write the trace of the first connection to FILE, and of others beside it, "
    "messages included.",
)
@click.option(
    "--frames",
    type=click.IntRange(1),
    help="Number of frames to draw, from the first; by default 2000 of a FILE.",
)
@click.option(
    "--width",
    type=click.IntRange(40),
    help="Maximum width of a line, in characters; unlimited by default.",
)
@tls_options
def trace(
    target: str,
    page: str | None,
    picture: str | None,
    listen: str | None,
    kept: Path | None,
    frames: int | None,
    width: int | None,
    tls: ClientTls | None,
) -> None:
    """Draw the ladder of frames in FILE, recorded by serve --trace, or of connections to URL, relayed
    by this command.

    With a URL, connect the client to --listen instead of its server. Frames are drawn until
    Ctrl-C, and then summed up. They are relayed unchanged, and unencrypted on the client's side even if
    the URL uses TLS. Neither passwords nor messages are shown.

    A damaged file is drawn up to the damage, and the exit code is 1.
    """
    # Loads the plug-ins, which register how their protocols are drawn.
    installed_fronts()
    encoding = str(sys.stdout.encoding)
    drawing = Drawing(
        width=width or shutil.get_terminal_size((100, 24)).columns,
        plain=not encoding.lower().replace("-", "").startswith("utf"),
        frames=frames,
    )
    if "://" not in target:
        if listen is not None or kept is not None:
            raise click.UsageError(
                "--listen and --write go with a URL, such as amqp://127.0.0.1:5672"
            )
        _draw(Path(target), page, picture, drawing)
        return
    if page is not None or picture is not None:
        raise click.UsageError("--html and --svg draw a FILE: keep the trace with --write first")
    try:
        url = parse_url(target)
        check_scheme(url)
        if url.scheme == "memory":
            raise AmqpError("memory:// is within one process: nothing can stand between")
        where = _place(listen or ":5673")
    except AmqpError as error:
        raise click.UsageError(error.description) from None
    if url.user is not None:
        raise click.UsageError("the client logs in by itself: leave the user out of the URL")
    run(partial(trace_live, url, where, tls=tls, drawing=drawing, kept=kept))


def _place(text: str) -> Url:
    """Return the address to listen on; a port alone means this machine only."""
    if text.isdigit():
        text = f":{text}"
    url = parse_url(f"127.0.0.1{text}" if text.startswith(":") else text, listening=True)
    if url.scheme not in ("amqp", "amqp+unix"):
        raise AmqpError(f"it listens on amqp or amqp+unix, not on {url.scheme}")
    return url


def _draw(file: Path, page: str | None, picture: str | None, drawing: Drawing) -> None:
    """Draw the ladder of a trace file."""
    try:
        found = read_trace(file)
    except AmqpError as error:
        raise click.ClickException(error.description) from None
    every = rungs(found)
    shown = every[: drawing.frames or _FRAMES]
    try:
        if page is not None:
            Path(page).write_text(draw_html(found, shown), "utf-8")
        if picture is not None:
            Path(picture).write_text(draw_svg(found, shown), "utf-8")
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from None
    if page is None and picture is None:
        click.echo(draw_text(found, shown, width=drawing.width, plain=drawing.plain))
    if len(every) > len(shown):
        left = len(every) - len(shown)
        click.echo(f"{left} more: --frames {len(every)} draws them all", err=True)
    if found.damage:
        raise click.ClickException(f"{file} is damaged: {found.damage}")
