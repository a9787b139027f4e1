"""Conformance kit for AMQP 1.0: checks that pytest runs against the host at a URL.

::

    pytest -p amqp_rt_conformance --amqp-url amqp://localhost:5672

The kit adds its own test items, so it runs in any folder, even an empty one. A check either passes,
or finds that the host departs from the standard, or finds that the host does not offer an optional
feature. The summary lists the verdicts in the order of the requirements (docs/conformance.md); each
requirement is a mark, so that ``-m X13`` selects its checks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from . import deliveries, nodes, opening, sessions
from .checks import TITLES, Check
from .host import Host, Options, Unreachable
from .verdicts import Departs, NotOffered

if TYPE_CHECKING:
    from _pytest._code.code import TerminalRepr

_MODULES: Final = (opening, sessions, deliveries, nodes)
#: All checks, in the order in which they run.
_CHECKS: Final = tuple(
    found for module in _MODULES for found in vars(module).values() if isinstance(found, Check)
)
#: Outcome of a pytest item → verdict on its check.
_VERDICTS: Final = {"passed": "passed", "failed": "departs", "skipped": "not offered"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the kit."""
    group = parser.getgroup("amqp", "AMQP 1.0 conformance of a host")
    group.addoption("--amqp-url", metavar="URL", help="the host: amqp://[user:password@]host:port, or amqps://")  # fmt: skip
    group.addoption("--amqp-user", metavar="NAME", help="log in as this user, by SASL PLAIN")
    group.addoption("--amqp-password", metavar="TEXT", help="the user's password")
    group.addoption(
        "--amqp-address",
        metavar="ADDRESS",
        help="a queue that exists, for hosts that make none by themselves; it is emptied. {} in it "
        "stands for a name of its own for each check, for hosts that make queues of any name",
    )
    group.addoption(
        "--amqp-timeout",
        metavar="SECONDS",
        type=float,
        default=5.0,
        help="how long the host may take for an answer (default: 5)",
    )
    group.addoption("--amqp-report", metavar="FILE", help="write the findings as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Register the requirements as marks; collect other tests only if they are named."""
    for name, title in TITLES.items():
        config.addinivalue_line("markers", f"{name}: {title} (AMQP conformance)")
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []


def pytest_sessionstart(session: pytest.Session) -> None:
    """Connect to the host once; report any obstacle in one sentence.

    Raises:
        pytest.UsageError: No host is given or reachable, or it refuses the login.
    """
    config = session.config
    if config.option.collectonly:
        return
    url = config.getoption("--amqp-url")
    if url is None:
        raise pytest.UsageError("no host to check: pass --amqp-url amqp://HOST:PORT")
    options = Options(
        url,
        config.getoption("--amqp-user"),
        config.getoption("--amqp-password"),
        config.getoption("--amqp-address"),
        config.getoption("--amqp-timeout"),
    )
    try:
        host = Host(options)
        host.greet()
    except Unreachable as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(Report(host, config.getoption("--amqp-report")), "amqp-report")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Add the checks before other plug-ins deselect items."""
    kit = Kit.from_parent(session, name="amqp", nodeid="amqp")
    collected = session.ihook.pytest_make_collect_report(collector=kit)
    session.ihook.pytest_collectreport(report=collected)
    items.extend(collected.result)


class Kit(pytest.Collector):
    """Collector of the checks."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield an item for each check."""
        report = self.config.pluginmanager.get_plugin("amqp-report")
        host = report.host if isinstance(report, Report) else None
        for each in _CHECKS:
            yield Item.from_parent(self, name=each.name, check=each, host=host)


class Item(pytest.Item):
    """A check as a pytest item."""

    def __init__(self, *, check: Check, host: Host | None, **known: Any) -> None:
        super().__init__(**known)
        self.check = check
        self.host = host
        for name in check.ids:
            self.add_marker(name)

    def runtest(self) -> None:
        """Run the check, and close its connections."""
        assert self.host is not None
        try:
            self.check.run(self.host)
        except NotOffered as reason:
            pytest.skip(str(reason))
        except Unreachable as error:
            # The host could be reached when the run began.
            raise Departs(f"the host is gone, perhaps by this check: {error}") from None
        finally:
            self.host.hang_up()

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None
    ) -> str | TerminalRepr:
        """Return the observed departure; the summary has the details."""
        if isinstance(excinfo.value, Departs):
            return f"departs from §{self.check.section}: {excinfo.value.seen}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        """Return the location that pytest shows: requirement, section and name."""
        return "amqp", None, f"{self.check.ids[0]} §{self.check.section}: {self.check.name}"


class Report:
    """Verdicts on one host."""

    def __init__(self, host: Host, path: str | None) -> None:
        self.host = host
        self.path = path
        #: Check, verdict, observation.
        self.seen: list[tuple[Check, str, str]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        """Record the verdict on a check."""
        report: pytest.TestReport = yield  # type: ignore[assignment]
        if isinstance(item, Item) and call.when == "call":
            error = call.excinfo.value if call.excinfo is not None else None
            verdict = _VERDICTS[report.outcome]
            if error is not None and not isinstance(error, Departs | pytest.skip.Exception):
                verdict = "error"
            self.seen.append((item.check, verdict, "" if error is None else str(error)))
        return report  # type: ignore[return-value]

    def pytest_report_teststatus(
        self, report: pytest.CollectReport | pytest.TestReport
    ) -> tuple[str, str, str] | None:
        """Return the verdict in the terms of the kit."""
        if report.when != "call" or not report.nodeid.startswith("amqp::"):
            return None
        if report.failed:
            return "departs", "F", "DEPARTS"
        return ("not offered", "s", "NOT OFFERED") if report.skipped else None

    def pytest_report_collectionfinish(self) -> list[str]:
        """Name the host and the queue used."""
        queue = "dynamic nodes" if self.host.queues is None else f"the queue {self.host.queues!r}"
        return [f"AMQP host: {self.host.url}, {self._name()}; checked with {queue}"]

    def _name(self) -> str:
        greeting = self.host.greeting
        properties = greeting.get("properties") or {}
        product = " ".join(
            str(properties[key]) for key in ("product", "version") if key in properties
        )
        return product or f"container {greeting.get('container_id')!r}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the verdicts, requirement by requirement."""
        write = terminalreporter
        write.section(f"AMQP 1.0 conformance of {self.host.url} ({self._name()})", "=")
        counts: dict[str, Counter[str]] = {}
        for each, verdict, _ in self.seen:
            counts.setdefault(each.ids[0], Counter())[verdict] += 1
        write.write_line(f"{'':40}{'passed':>8}{'departs':>9}{'not offered':>13}")
        for name in filter(counts.__contains__, TITLES):
            found = counts[name]
            numbers = (found["passed"], found["departs"] + found["error"], found["not offered"])
            cells = "".join(
                f"{number or '·':>{width}}"
                for number, width in zip(numbers, (8, 9, 13), strict=True)
            )
            write.write_line(f"{name:5}{TITLES[name]:35}{cells}", red=bool(numbers[1]))
        self._list(write, "departs", "The host departs from the standard")
        self._list(write, "not offered", "Not offered by this host")
        self._list(write, "error", "The kit itself failed; please report it")
        total = Counter(verdict for _, verdict, _ in self.seen)
        write.write_sep("-")
        write.write_line(
            f"{total['passed']} passed, {total['departs']} depart from the standard, "
            f"{total['not offered']} not offered"
            + (f", {total['error']} failed to be checked" if total["error"] else "")
        )

    def _list(self, write: pytest.TerminalReporter, verdict: str, title: str) -> None:
        found = [(each, seen) for each, what, seen in self.seen if what == verdict]
        if not found:
            return
        write.write_sep("-", title)
        for name in TITLES:
            for each, seen in found:
                if each.ids[0] == name:
                    write.write_line(f"{' '.join(each.ids)}  §{each.section}  {each.promise}.")
                    write.write_line(f"      {each.name}: {seen}")

    def pytest_sessionfinish(self) -> None:
        """Write the JSON report, if ``--amqp-report`` names a file."""
        if self.path is None:
            return
        checks = [
            {
                "check": each.name,
                "requirements": list(each.ids),
                "section": each.section,
                "promise": each.promise,
                "verdict": verdict,
                "seen": seen,
            }
            for each, verdict, seen in self.seen
        ]
        told = {"host": self.host.url, "name": self._name(), "checks": checks}
        Path(self.path).write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", "utf-8")
