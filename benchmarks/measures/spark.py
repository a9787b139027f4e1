"""Spark: rows per second read and written through our format, and the duration of a micro-batch.

In the same run two others are measured. *direct* makes the same rows by the same code in one
process without Spark, which shows the limit set by decoding. Spark alone uses, for batches, a data
source in Python with prepared batches of the same columns and contents, and for streams its rate
source, which needs no Python; for small micro-batches a Python source with prepared rows too, since
each task and each plan of a Python source costs Spark some time, whatever the source does. Each form of amqp_rt has a broker, and a session whose workers run
that form.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from ..contestants import Contestant
from ..processes import Role, RoleFailed, cpu_s, tree_cpu_s
from ..rounds import Case, Sample
from . import Plan

#: Messages of 256 B for each second of a sample: the fixed cost of a query is half a second.
ROWS = 150_000
#: Divisor of that number where plain Python makes all columns, or where the messages are put into a
#: queue first.
FEWER = 3
#: Times that the compiled form reads the log in one query, whose fixed cost is that of about
#: 100,000 rows.
TIMES = 4
ALL: dict[str, str] = {}
#: Micro-batches in a sample.
BATCHES = 10
TRIMMED = {"columns": "offset,body"}
#: A session takes long to start, and so does the first query of each kind.
PATIENCE_S = 180.0

LOG = "logs-in"
#: Rows processed before the measurement.
WARM_ROWS = 2_000


class Sessions:
    """Sessions of Spark, started on first use."""

    def __init__(self, plan: Plan, spark: Contestant) -> None:
        self.rows = max(2_000, int(ROWS * plan.settings.seconds))
        self._plan = plan
        self._spark = spark
        self._started: dict[str, Role] = {}
        self._numbers = itertools.count()
        self._path = ""

    def ask(self, one: Contestant, job: str, **options: Any) -> dict[str, Any]:
        """Return the result of *job*, with the processor time of the session and of the broker."""
        if one.key not in self._started:
            self._started[one.key] = self._start(one)
        role = self._started[one.key]
        broker = () if one.broker is None else self._plan.broker(one).pids
        before = tree_cpu_s(role.pid), cpu_s(broker)
        done = role.ask({"job": job, **options}, PATIENCE_S)
        if "failed" in done:
            raise RoleFailed(done["failed"])
        done["all_cpu"] = tree_cpu_s(role.pid) - before[0]
        done["broker_cpu"] = cpu_s(broker) - before[1]
        return done

    def name(self, prefix: str) -> str:
        """Return a new node address."""
        return f"{prefix}-{next(self._numbers)}"

    def _start(self, one: Contestant) -> Role:
        # Workers are started in this folder, whose modules must not shadow installed ones.
        env, options = {"PYTHONSAFEPATH": "1"}, {}
        python = self._spark.command[0]
        if one.broker is not None:
            python = one.command[0]
            options["port"] = self._plan.broker(one).port
            if python != self._spark.command[0]:
                env["PYTHONPATH"] = self._packages()
        command = (python, "-P", *self._spark.command[1:])
        role = Role(command, "session", options, env=env, patience_s=PATIENCE_S)
        self._plan.stack.enter_context(role)
        codec, columns = role.ready["compiled"]
        if one.broker is not None and (codec, columns or not codec) != (
            one.key == "compiled",
            True,
        ):
            raise RoleFailed(
                f"the workers of {one.key} would run another form: {codec=}, {columns=} are compiled there"
            )
        # Until the first queries have ended, Java's compiler would be measured.
        warm: list[dict[str, Any]] = [
            {"job": "own_python", "rows": WARM_ROWS},
            {"job": "own_rate", "rows": WARM_ROWS},
        ]
        if one.broker is not None:
            warm = [
                {"job": "fill", "address": LOG, "rows": self.rows},
                {"job": "read", "address": LOG, "rows": 1, "options": _until(WARM_ROWS)},
                {"job": "stream", "address": LOG, "options": TRIMMED},
                {"job": "write", "address": "warm", "rows": WARM_ROWS, "staged": False},
                {"job": "write", "address": "warm", "rows": WARM_ROWS, "staged": True},
            ]
        for each in warm:
            done = role.ask(each, PATIENCE_S)
            if "failed" in done:
                raise RoleFailed(done["failed"])
        return role

    def _packages(self) -> str:
        """Return a folder with only Spark and Arrow, for a Python that has neither."""
        if not self._path:
            folder = Path(self._plan.stack.enter_context(tempfile.TemporaryDirectory()))
            for package in self._spark.packages:
                (folder / Path(package).name).symlink_to(package)
            self._path = str(folder)
        return self._path


def cases(plan: Plan) -> list[Case]:
    spark = plan.field.present.get("spark")
    if spark is None:
        plan.field.absent.setdefault("spark", "not among --peers")
        return []
    there = Sessions(plan, spark)
    ours = [one for key, one in plan.field.present.items() if key in ("compiled", "pure")]

    def case(name: str, take: Any, beside: Any = None) -> Case:
        runs = {one.key: partial(take, there, one) for one in ours}
        if beside is not None:
            runs[spark.key] = partial(beside, there, spark)
        return Case("spark", name, runs)

    return [
        case("a log, batch, all columns", partial(read, columns=ALL), partial(ready, columns="")),
        case(
            "a log, batch, offset and body",
            partial(read, columns=TRIMMED),
            partial(ready, columns=TRIMMED["columns"]),
        ),
        case(
            "a log, batch, body",
            partial(read, columns={"columns": "body"}),
            partial(ready, columns="body"),
        ),
        case("a log, stream, offset and body", stream, rate),
        case("a queue, leased, stream, body", lease),
        case("sink, at least once", partial(write, staged=False)),
        case("sink, exactly once", partial(write, staged=True)),
        case("a micro-batch of two rows", ticks, own_ticks),
        case("a micro-batch of two rows, beside Python", ticks, own_python_ticks),
    ]


def _rate(done: dict[str, Any]) -> float:
    return float(done["n"] / done["elapsed"])


def _rows(done: dict[str, Any]) -> dict[str, float]:
    found = {"rows": _rate(done), "row_cpu_us": done["all_cpu"] / done["n"] * 1e6}
    if done["broker_cpu"]:
        found["server_cpu_us"] = done["broker_cpu"] / done["n"] * 1e6
    return found


def _beside(done: dict[str, Any], direct: dict[str, Any]) -> Sample:
    return {
        **_rows(done),
        "direct_rows": _rate(direct),
        "of_direct": _rate(done) / _rate(direct),
        "over_direct": done["all_cpu"] / done["n"] / (direct["cpu"] / direct["n"]),
    }


def _until(rows: int) -> dict[str, str]:
    """Return the option for the first *rows* of the log, which has two partitions."""
    return {"endingOffsets": json.dumps({LOG: dict.fromkeys(("0", "1"), rows // 2)})}


def read(there: Sessions, one: Contestant, columns: dict[str, str]) -> Sample:
    slow = one.key == "pure" and columns is ALL
    options = {**columns, **(_until(there.rows // FEWER) if slow else {})}
    direct = there.ask(one, "direct_read", address=LOG, options=options)
    times = 1 if slow else TIMES
    done = there.ask(one, "read", address=LOG, rows=direct["n"], options=options, times=times)
    return _beside(done, direct)


def stream(there: Sessions, one: Contestant) -> Sample:
    direct = there.ask(one, "direct_read", address=LOG, options=TRIMMED)
    return _beside(there.ask(one, "stream", address=LOG, options=TRIMMED), direct)


def lease(there: Sessions, one: Contestant) -> Sample:
    queue = there.name("leased")
    rows = there.rows // FEWER
    there.ask(one, "fill", address=queue, rows=rows)
    options = {"columns": "body", "mode": "lease", "group": "bench"}
    done = there.ask(one, "stream", address=queue, options=options)
    if done["n"] != rows:
        raise RoleFailed(f"{done['n']} of {rows} messages were read")
    return _rows(done)


def write(there: Sessions, one: Contestant, staged: bool) -> Sample:
    rows = there.rows // FEWER
    direct = there.ask(one, "direct_write", address=there.name("out"), rows=rows)
    done = there.ask(one, "write", address=there.name("out"), rows=rows, staged=staged)
    return _beside(done, direct)


def ticks(there: Sessions, one: Contestant) -> Sample:
    return {"batch_ms": there.ask(one, "ticks", address=LOG, batches=BATCHES)["median_ms"]}


def ready(there: Sessions, spark: Contestant, columns: str) -> Sample:
    return _rows(there.ask(spark, "own_python", rows=TIMES * there.rows, columns=columns))


def rate(there: Sessions, spark: Contestant) -> Sample:
    return _rows(there.ask(spark, "own_rate", rows=50 * there.rows))


def own_ticks(there: Sessions, spark: Contestant) -> Sample:
    return {"batch_ms": there.ask(spark, "own_ticks", batches=BATCHES)["median_ms"]}


def own_python_ticks(there: Sessions, spark: Contestant) -> Sample:
    return {"batch_ms": there.ask(spark, "own_python_ticks", batches=BATCHES)["median_ms"]}
