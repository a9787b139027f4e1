"""Check before a query starts whether the machines of a cluster can run its tasks.

A task on a machine that lacks something fails with a traceback, four times over, on machines that users are
not logged in to. So a job of a few tasks runs first: each reports its version of Python, the versions of our
packages, and whether it reaches the broker. The first problem is raised as one sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from .endpoints import Endpoint
from .options import SOURCE, read_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Modules that tasks import, and the names of their packages.
_NEEDED: Final = {
    "msgspec": "msgspec",
    "pyarrow": "pyarrow",
    "amqp_rt": "amqp-rt",
    "amqp_rt_spark": "amqp-rt-spark",
}
#: Modules of these whose versions must be the same as on the driver.
_SAME: Final = ("amqp_rt", "amqp_rt_spark")

#: Seconds that a task waits at its end, so that the others run on other executors.
_SPREAD_S: Final = 0.3
#: Most tasks: on a cluster of thousands of cores, not every one is tested.
TASKS_MAX: Final = 256

#: Spark's errors when a worker could not even start.
_NO_MODULE: Final = re.compile(r"No module named '([\w.]+)'")
_VERSIONS: Final = re.compile(r"different version: ([\d.]+) than that in driver: ([\d.]+),")
#: Most characters of any other error that are shown.
_SHOWN_MAX: Final = 500
_NO_PYTHON: Final = re.compile(r'Cannot run program "([^"]+)"')


class NotReady(RuntimeError):
    """Tasks cannot do their work; the text names the machine, the problem and the remedy."""


class Machine(Struct, frozen=True):
    """Findings of a task on its machine."""

    host: str
    python: str
    #: Module → version, without missing modules.
    versions: dict[str, str]
    #: Error of the connection or of an import; empty if all is well.
    trouble: str = ""


def check(
    spark: SparkSession,
    endpoint: Endpoint | Mapping[str, str] | None = None,
    *,
    tasks: int | None = None,
) -> tuple[Machine, ...]:
    """Check whether the executors of *spark* can read and write AMQP.

    A Spark job runs meanwhile, for about a second if all is well; a broker that does not answer takes its
    ``connectTimeout`` (30 seconds by default). The job changes nothing, so it may be cancelled like any other one, which
    raises ``NotReady`` here.

    Args:
        spark: A session, also of Spark Connect.
        endpoint: The broker that they must reach: the options of the format (``url`` and those of the
            login), or an :class:`Endpoint`; with several URLs, all of them. Without it only the
            installation is checked.
        tasks: Number of tasks, which Spark spreads over the executors; by default one for each core
            that it has, ``TASKS_MAX`` at most.

    Returns:
        The findings of each task.

    Raises:
        NotReady: An executor is not ready: one sentence names the machine, the problem and the remedy.
        ValueError: The options are invalid.
    """
    if isinstance(endpoint, Mapping):
        # A placeholder for the required address, which is not used here.
        options = read_options({"address": "-", **endpoint}, SOURCE)
        endpoints = [options.place(node)[0] for node in options.nodes]
    else:
        endpoints = [] if endpoint is None else [endpoint]
    ours = {name: str(import_module(name).__version__) for name in _SAME}
    found = _ask(spark, endpoints, tasks)
    for machine in found:
        if why := _wrong(machine, ours):
            count = sum(1 for each in found if _wrong(each, ours))
            raise NotReady(f"{machine.host}, where {count} of {len(found)} tasks ran{why}")
    return found


def _ask(
    spark: SparkSession, endpoints: Iterable[Endpoint], tasks: int | None
) -> tuple[Machine, ...]:
    from pyspark.sql.functions import udf

    count = tasks or _cores(spark)
    given = [msgspec.structs.asdict(endpoint) for endpoint in endpoints]
    # Without Arrow, which may be missing on the executors.
    probe = udf(_probe(tuple(_NEEDED), given, _SPREAD_S), "string", useArrow=False)
    try:
        rows = spark.range(0, count, 1, count).select(probe("id")).collect()
    except Exception as error:
        # Raised by Spark, Java or the Spark Connect server: the check has failed in any case.
        raise NotReady(_sentence(str(error))) from error
    return tuple(msgspec.json.decode(row[0], type=Machine) for row in rows)


def _cores(spark: SparkSession) -> int:
    """Return Spark's current number of cores, into which it partitions a range by default."""
    rows = spark.range(TASKS_MAX).selectExpr("spark_partition_id()").collect()
    return len({row[0] for row in rows})


def _probe(
    modules: tuple[str, ...], endpoints: list[dict[str, Any]], seconds: float
) -> Callable[[int], str]:
    """Return the function that tasks run. A nested function is pickled by value, and needs none of our modules."""

    def probe(number: int) -> str:
        import importlib
        import json
        import platform
        import socket
        import time

        versions = {}
        trouble = ""
        for name in modules:
            try:
                versions[name] = str(getattr(importlib.import_module(name), "__version__", ""))
            except Exception as error:
                if not (isinstance(error, ModuleNotFoundError) and error.name == name):
                    trouble = trouble or f"cannot import {name}: {error}"
        if endpoints and not trouble and len(versions) == len(modules):
            connections = importlib.import_module("amqp_rt_spark.connections")
            kind = importlib.import_module("amqp_rt_spark.endpoints").Endpoint
            try:
                for endpoint in endpoints:
                    connections.wire(kind(**endpoint))
            except Exception as error:
                trouble = str(getattr(error, "description", "") or error)
        time.sleep(seconds)
        return json.dumps(
            {
                "host": socket.gethostname(),
                "python": platform.python_version(),
                "versions": versions,
                "trouble": trouble,
            }
        )

    return probe


def _wrong(machine: Machine, ours: Mapping[str, str]) -> str:
    """Return the problem of *machine*, as a continuation of its name; empty if there is none."""
    missing = [_NEEDED[name] for name in _NEEDED if name not in machine.versions]
    if missing and not machine.trouble:
        return (
            f" has no {_listed(missing)} for its Python {machine.python}: install it there, or send it "
            "along (see the guide on clusters)"
        )
    for name, version in ours.items():
        there = machine.versions.get(name, version)
        if there != version:
            return f" has {_NEEDED[name]} {there}, and the driver has {version}: make them the same"
    return machine.trouble and f": {machine.trouble}"


def _listed(names: Iterable[str]) -> str:
    *some, last = names
    return f"{', '.join(some)} and {last}" if some else last


def _sentence(said: str) -> str:
    """Return the meaning of Spark's error about workers that could not start."""
    if found := _NO_PYTHON.search(said):
        return (
            f"the executors have no Python {found[1]!r}: set PYSPARK_PYTHON to one that they have"
        )
    if found := _VERSIONS.search(said):
        return (
            f"the executors run Python {found[1]}, and the driver {found[2]}: set PYSPARK_PYTHON "
            "to the same version"
        )
    if found := _NO_MODULE.search(said):
        return f"the executors' Python has no module {found[1]!r}: install it there"
    first = next(filter(None, map(str.strip, said.splitlines())), "")
    why = f": {json.dumps(first)[1:-1][:_SHOWN_MAX]}" if first else ""
    return f"the executors cannot run Python{why}"
