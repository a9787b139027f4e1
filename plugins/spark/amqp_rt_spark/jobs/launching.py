"""Spark sessions for commands: a quiet start, an end by signals, and errors of one sentence."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import as_file, files
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Final

import click

from amqp_rt.errors import AmqpError

from ..cluster import NotReady
from ..java import INSTALL, NoSpark, find_spark, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NO_SPARK: Final = f"Spark is not installed: {INSTALL}"

#: Warnings of Java's start, which users can do nothing about.
_NOISE: Final = re.compile(
    rb"WARNING: (Using incubator modules|A terminally deprecated|A restricted method|"
    rb"sun\.misc\.Unsafe|java\.lang\.(System|foreign)|Use --enable-native|Restricted methods|"
    rb"Please consider reporting)|Setting Spark log level"
)
#: The last line of a Python traceback that Java has put into an error of its own.
_RAISED: Final = re.compile(r"^(?:[a-z_]\w*\.)*([A-Z]\w*): (.+?)(?: SQLSTATE: .*)?$", re.MULTILINE)
_PREFIX: Final = re.compile(
    r"\[[A-Z_.0-9]+\] |Query \[id = [^]]*\] terminated with exception: |SQLSTATE: \w+"
)
#: Text of py4j for an error that pyspark does not know: the Java class, and its message.
_JAVA: Final = re.compile(r"^An error occurred while calling .*\n: (?:[\w.$]+: )?(.*)")
_SENTENCE_MAX: Final = 1_000

#: A command shows none of these unless asked to.
_QUIET: Final = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
#: Variable with options of Java for the launcher of Spark (``SparkSubmitCommandBuilder``).
_SUBMIT_OPTIONS: Final = "SPARK_SUBMIT_OPTS"
#: On one machine, starting 200 tasks, Spark's default after each grouping, takes longer than running them.
_LOCAL: Final = {"spark.sql.shuffle.partitions": "4"}


def start(master: str, conf: Mapping[str, str], *, name: str, debug: bool = False) -> SparkSession:
    """Create a session at *master*, without output of its own unless *debug*.

    Raises:
        click.ClickException: Spark is missing, or too old for jobs.
    """
    try:
        find_spark()
    except NoSpark as error:
        raise click.ClickException(str(error)) from None
    if find_spec("pyspark.sql.streaming.datasource") is None:
        # Earlier versions run availableNow as one micro-batch, so --once would leave the rest.
        raise click.ClickException(f"jobs take pyspark 4.2 or later: {INSTALL} --upgrade")
    if debug or not master or master.startswith("sc://"):
        return session(master, name=f"amqp-rt {name}", conf=conf)
    quiet = {**_QUIET, **(_LOCAL if master.startswith("local") else {})}
    with (
        as_file(files(__package__).joinpath("log4j2.properties")) as logs,
        _java_option(f"-Dlog4j2.configurationFile={logs.as_uri()}"),
        _filtered(),
    ):
        return session(master, name=f"amqp-rt {name}", conf={**quiet, **conf})


@contextmanager
def _java_option(option: str) -> Iterator[None]:
    """Pass *option* to the Java of a session that is started meanwhile.

    A setting of Spark would replace the user's own value of it, given as ``--conf`` or in
    ``spark-defaults.conf``. Options given there come after this one, and so override it.
    """
    before = os.environ.get(_SUBMIT_OPTIONS)
    os.environ[_SUBMIT_OPTIONS] = option if not before else f"{before} {option}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SUBMIT_OPTIONS]
        else:
            os.environ[_SUBMIT_OPTIONS] = before


@contextmanager
def _filtered() -> Iterator[None]:
    """Filter Java's noise from the standard error of processes that are started meanwhile."""
    reading, writing = os.pipe()
    ours = os.dup(2)
    sys.stderr.flush()
    os.dup2(writing, 2)
    os.close(writing)
    threading.Thread(target=_pass_on, args=(reading, os.dup(ours)), daemon=True).start()
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


def _pass_on(reading: int, writing: int) -> None:
    with open(reading, "rb") as lines, open(writing, "wb", buffering=0) as out:
        for line in lines:
            if not _NOISE.match(line):
                out.write(line)


@contextmanager
def signals(stopping: threading.Event | None) -> Iterator[None]:
    """Handle SIGINT and SIGTERM: the first sets *stopping*; the second, or the first without it, ends the process.

    The process ends at once, without an exception: one raised in the middle of a call to Java would leave
    its answer to be read as that of the next call. Java ends when its standard input does.
    """

    def heard(number: int, _: FrameType | None) -> None:
        if stopping is None or stopping.is_set():
            os._exit(128 + number)
        stopping.set()
        os.write(2, b"stopping after this batch; again to stop now\n")

    wanted = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, heard) for each in wanted]
    try:
        yield
    finally:
        for each, handler in zip(wanted, before, strict=True):
            signal.signal(each, handler)


def sentence_of(error: BaseException) -> str:
    """Return the message of *error* without the tracebacks that Java and Python have put around it."""
    said = str(error)
    if isinstance(error, AmqpError | NotReady | ValueError | OSError) or not said:
        return said or type(error).__name__
    found = _RAISED.findall(said.partition("=== Streaming Query ===")[0])
    if found:
        kind, text = found[-1]
        # Errors of the runtime and the plug-in are sentences; others need the name of their class.
        ours = kind in ("ValueError", "DataLost", "MissingExtra") or "[amqp:" in text
        said = text if ours else f"{kind}: {text}"
    else:
        first = _JAVA.search(said)
        said = _PREFIX.sub("", first[1] if first else said.strip().partition("\n")[0]).strip()
    return said[:_SENTENCE_MAX]
