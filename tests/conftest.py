"""Shared by all tests: requirement marks, quick and long runs, workers, peers, the shared material.

Tests run against the installed package. ``make test`` runs the suite on the editable tree, ``make test-all``
some of it again on the compiled wheel; ``AMQP_RT_EXPECT`` names the one that a run is meant for.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from postgresql import (  # noqa: F401 (fixtures)
    _cleared_database,
    cleared_database,
    database,
    postgresql,
)
from references import no_collector  # noqa: F401 (a fixture)
from root_logging import restored_logging
from runs import RUNS

import amqp_rt
from amqp_rt.net import carrier, preamble

ROOT = Path(__file__).parent.parent
IN_CI = os.environ.get("CI") == "true"
LONG = RUNS == "long"

# Images of Python set PYTHONDONTWRITEBYTECODE. Each worker, and each program that a test starts, would rewrite
# and compile all of its modules anew: a sixth of the quick loop.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No deadlines, since tests measure no time. Brief and quick runs are always the same, so that a submission is
# not judged by chance; long runs look for new failures, and print how to reproduce them.
for name, examples in (("brief", 25), ("quick", 100)):
    settings.register_profile(
        name,
        deadline=None,
        derandomize=True,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.register_profile(
    "long",
    deadline=None,
    max_examples=5_000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(RUNS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--conformance", metavar="FILE", help="write which test proved which requirement, as JSON"
    )


@pytest.fixture
def sqlite_database() -> Iterator[sqlite3.Connection]:
    """Yield a database in memory that commits each statement. Python complains of those that are not closed since 3.13."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        yield connection


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    with restored_logging():
        yield


def is_brief(config: pytest.Config) -> bool:
    """Return whether this run takes a quarter of the seeds and generated inputs of CI."""
    return RUNS == "brief" or (RUNS == "quick" and "not slow" in config.option.markexpr)


def pytest_configure(config: pytest.Config) -> None:
    if is_brief(config):
        settings.load_profile("brief")
    # Shells let background processes ignore SIGINT, which processes started by tests would inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Requirements(config), "requirements")
    expected = os.environ.get("AMQP_RT_EXPECT")
    source = Path(amqp_rt.__file__).is_relative_to(ROOT / "amqp_rt")
    if expected == "compiled" and (source or not amqp_rt.COMPILED):
        raise pytest.UsageError(f"not a compiled wheel: {amqp_rt.__file__}")
    if expected == "pure" and amqp_rt.COMPILED:
        raise pytest.UsageError(f"compiled modules found: {amqp_rt.__file__}")


@pytest.fixture
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait briefly for a peer to leave after the last octets, where time is real."""
    monkeypatch.setattr(carrier, "_LINGER_S", 0.05)
    monkeypatch.setattr(preamble, "_LINGER_S", 0.05)


def pytest_report_header() -> list[str]:
    mode = "compiled" if amqp_rt.COMPILED else "pure"
    return [f"amqp_rt {amqp_rt.__version__}, {mode}, {RUNS}"]


#: Marks and fixtures of tests that start programs of others.
_FOREIGN = {
    "foreign",
    "peer",
    "proton",
    "rhea",
    "azure",
    "chromium",
    "rabbitmq",
    "postgresql",
    "spark",
    "spark_python",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _FOREIGN & {
            *getattr(item, "fixturenames", ()),
            *(mark.name for mark in item.iter_markers()),
        }:
            # Programs of others take seconds to start.
            item.add_marker("foreign")
            item.add_marker("slow")
    if in_worker(config):
        # Workers take the next file when they are free. The longest come first, so that all end at about the same time.
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: -slow[item.path])
    if LONG:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in set(long)]


def pytest_collection_finish(session: pytest.Session) -> None:
    # Many tests run the garbage collector, and all test modules are loaded by now: freeze them, or each
    # collection would traverse them.
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("peer"):
        require_peer(mark.args[0])


#: Tests that take longer belong out of the quick loop, ``pytest -m "not slow"``.
_SLOW_S = 1.0


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Tell whether machines in network namespaces were used, and list the tests that make the quick loop slow.

    No test fails for being slow: the machine may have been busy.
    """
    outcomes = Counter(
        outcome
        for outcome in ("passed", "failed", "skipped")
        for each in terminalreporter.getreports(outcome)
        if "namespaces" in getattr(each, "keywords", ())
        and (each.when == "call" or outcome == "skipped")
    )
    if outcomes:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        terminalreporter.write_line(f"tests with network namespaces: {counts}")
    if "not slow" not in config.option.markexpr:
        return
    passed = sorted(terminalreporter.getreports("passed"), key=lambda each: -each.duration)
    if slow := [each for each in passed[:20] if each.duration > _SLOW_S]:
        terminalreporter.section('slow without the mark "slow"')
        for each in slow:
            terminalreporter.write_line(f"{each.duration:6.1f} s  {each.nodeid}")


class Requirements:
    """Checks the ``req`` marks, and records the outcomes of the tests that have them."""

    def __init__(self, config: pytest.Config) -> None:
        with (ROOT / "tests" / "requirements.toml").open("rb") as file:
            self.known = {name for section in tomllib.load(file).values() for name in section}
        self.config = config
        #: requirement → test without its parameters → outcome → how often
        self.proofs: defaultdict[str, defaultdict[str, Counter[str]]]
        self.proofs = defaultdict(lambda: defaultdict(Counter))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            ids = {name for mark in item.iter_markers("req") for name in mark.args}
            if unknown := ids - self.known:
                raise pytest.UsageError(f"{item.nodeid}: no such requirement: {sorted(unknown)}")
            # Reports carry these from the workers of pytest-xdist to the process that writes the record.
            item.user_properties.append(("req", sorted(ids)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            test = report.nodeid.partition("[")[0]
            for name in dict(report.user_properties).get("req", ()):
                self.proofs[name][test][report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        if (path := self.config.getoption("--conformance")) and not in_worker(self.config):
            Path(path).write_text(json.dumps(self.proofs, indent=1, sort_keys=True) + "\n")


def in_worker(config: pytest.Config) -> bool:
    """Return whether this process is a worker of pytest-xdist, which reports to another one."""
    return hasattr(config, "workerinput")


#: Files whose tests share no fixture and take long: each test goes to the next free worker.
_SPREAD = (
    "tests/abuse/test_threats.py",
    "tests/mesh/test_mesh_chaos.py",
    "tests/testing/test_mutations.py",
)
#: Files whose tests use one session of Spark, and the processes that it has started. A session in each worker would take
#: its half a minute of the processor each time, and warm processes answer in half of the time.
_ONE_SESSION = tuple(
    f"plugins/spark/tests/test_{name}.py"
    for name in (
        "checkpoints",
        "event_hubs",
        "job_deadletters",
        "job_ingest",
        "job_metrics",
        "job_replay",
        "json_bodies",
        "pitfalls",
        "reconnecting",
        "several_brokers",
        "spark",
    )
)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give free workers whole files, since the tests of a file share fixtures, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file in _ONE_SESSION:
                return "a session of Spark"
            return nodeid if file in _SPREAD else file

    if config.getoption("dist") not in {"load", "loadfile"}:
        return None
    config.option.loadscopereorder = False
    return ByFile(config, log)


#: Peer → module to import, and package to install.
_PYTHON_PEERS = {
    "proton": ("proton", "python-qpid-proton"),
    "azure": ("azure.servicebus", "azure-servicebus"),
}


@cache
def _peer_command(name: str) -> list[str] | str:
    """Return the command that runs programs written on peer *name*, or why there is none."""
    if name in _PYTHON_PEERS:
        module, package = _PYTHON_PEERS[name]
        # A compiled run uses those that `make peers` installed in the tree: peers are processes of their own.
        for python in (sys.executable, str(ROOT / ".venv" / "bin" / "python")):
            probe = [python, "-c", f"import {module}"]
            if not shutil.which(python):
                continue
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                return [python]
        return f"{package} is not installed (make peers)"
    if name == "spark":
        probe = "import pyspark, pyarrow; from amqp_rt_spark.java import java_home; java_home()"
        run = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, check=False
        )
        if run.returncode:
            return f"Spark cannot be started (make peers): {run.stderr.strip().splitlines()[-1]}"
        return [sys.executable]
    if name == "rhea":
        if not (node := shutil.which("node")):
            return "node is not installed"
        if not (ROOT / "tests" / "peers" / "node_modules" / "rhea").is_dir():
            return "rhea is not installed (make peers)"
        return [node]
    if name == "chromium":
        if not (browser := shutil.which("chromium")):
            return "chromium is not installed"
        if not (ROOT / "tests" / "peers" / "node_modules" / "rhea").is_dir():
            return "rhea is not installed (make peers)"
        return [browser]
    raise pytest.UsageError(f"no such peer: {name}")


def require_peer(name: str) -> list[str]:
    """Return the command for programs written on peer *name*: "proton", "azure", "rhea", "chromium" or "spark".

    Without that peer the test is skipped, with the reason; on CI it fails.
    """
    command = _peer_command(name)
    if isinstance(command, list):
        return command
    if IN_CI:
        pytest.fail(command, pytrace=False)
    pytest.skip(command)


@pytest.fixture(scope="session")
def proton() -> list[str]:
    """Command of the Python that has proton."""
    return require_peer("proton")


@pytest.fixture(scope="session")
def azure() -> list[str]:
    """Command of the Python that has azure-servicebus."""
    return require_peer("azure")


@pytest.fixture(scope="session")
def rhea() -> list[str]:
    """Command of Node, for programs in tests/peers, where rhea is installed."""
    return require_peer("rhea")


@pytest.fixture(scope="session")
def chromium() -> list[str]:
    """Command of a browser, for pages with rhea in them."""
    return require_peer("chromium")


@pytest.fixture(scope="session")
def spark_python() -> list[str]:
    """Command of the Python that has pyspark and finds a Java."""
    return require_peer("spark")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of specifications and vectors beside the checkout."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("no folder shared/ beside the checkout")
    return path


@pytest.fixture(scope="session")
def brief_run(pytestconfig: pytest.Config) -> bool:
    """Whether this is ``make test`` or the quick loop: fewer seeds than in CI."""
    return is_brief(pytestconfig)


@pytest.fixture(scope="session")
def long_run() -> bool:
    """Whether this is ``make test-long``: more seeds, more kills, deeper queues."""
    return LONG
