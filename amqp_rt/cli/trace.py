"""``amqp-rt trace``: what a connection heard and said, as a ladder of frames."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from ..errors import AmqpError
from ..net.traces import read_trace
from ..testing.ladder import draw_html, draw_svg, draw_text, rungs


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--html", "page", metavar="PATH", help="Draw it as a page in this file instead.")
@click.option("--svg", "picture", metavar="PATH", help="Draw it as a picture in this file instead.")
@click.option(
    "--frames",
    type=click.IntRange(1),
    default=2_000,
    show_default=True,
    help="How many frames to draw, from the first one on.",
)
@click.option("--width", type=click.IntRange(40), help="Characters of a line; by default all.")
def trace(
    file: Path, page: str | None, picture: str | None, frames: int, width: int | None
) -> None:
    """Draw the ladder of frames in FILE, as serve --trace has recorded it.

    Of a file that is damaged what comes before the damage is drawn, and the exit code is 1.
    """
    try:
        found = read_trace(file)
    except AmqpError as error:
        raise click.ClickException(error.description) from None
    every = rungs(found)
    shown = every[:frames]
    try:
        if page is not None:
            Path(page).write_text(draw_html(found, shown), "utf-8")
        if picture is not None:
            Path(picture).write_text(draw_svg(found, shown), "utf-8")
    except OSError as error:
        raise click.ClickException(f"{error.filename}: {error.strerror}") from None
    if page is None and picture is None:
        encoding = str(sys.stdout.encoding)
        plain = not encoding.lower().replace("-", "").startswith("utf")
        columns = width or shutil.get_terminal_size((100, 24)).columns
        click.echo(draw_text(found, shown, width=columns, plain=plain))
    if len(every) > frames:
        click.echo(f"{len(every) - frames} more: --frames {len(every)} draws them all", err=True)
    if found.damage:
        raise click.ClickException(f"{file} is damaged: {found.damage}")
