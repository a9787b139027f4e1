"""Debian's Prometheus reads the probe of a broker, and a published alert fires."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import pytest
import trio
from commands import Served

from amqp_rt import connect
from amqp_rt.telemetry.metrics import HELP

T = TypeVar("T")

pytestmark = [
    pytest.mark.req("O3"),
    pytest.mark.foreign,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is not installed (Debian has it)"
    ),
]

RULES = Path(__file__).parents[2] / "examples" / "deploy" / "prometheus" / "rules.yaml"
#: Families with samples only where single nodes are asked for, or there are logs, handlers or failures.
OCCASIONAL = {
    *("node_messages", "node_bytes", "log_lag_records", "handler_seconds", "handler_running"),
    *("handler_outcomes", "links_refused", "logins_failed", "connections", "connections_opened"),
    *("connections_closed", "links"),
}


class Prometheus:
    """A running Prometheus, by its HTTP API."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/api/v1"

    async def get(self, path: str, **query: str) -> Any:
        """Return ``data`` of the answer at *path*; None while there is none."""

        def fetch() -> Any:
            try:
                with urlopen(f"{self.url}/{path}?{urlencode(query)}", timeout=5) as answer:
                    return json.load(answer)["data"]
            except (URLError, ConnectionError):
                return None

        return await trio.to_thread.run_sync(fetch)

    async def until(self, good: Callable[[Any], T], path: str, **query: str) -> T:
        """Ask at *path* until *good* returns something of the answer, and return that."""
        found: Any = None
        try:
            with trio.fail_after(30):
                while True:
                    found = await self.get(path, **query)
                    if found is not None and (result := good(found)):
                        return result
                    await trio.sleep(0.1)
        except trio.TooSlowError:
            pytest.fail(f"{path} {query} of Prometheus stayed {found!r:.2000}")


@contextmanager
def prometheus(folder: Path, probe: str) -> Iterator[Prometheus]:
    """Run Prometheus, which reads *probe* every second, with the published rules."""
    scrape = {
        "job_name": "amqp_rt",
        "static_configs": [{"targets": [urlsplit(probe).netloc]}],
    }
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [scrape],
    }
    # JSON is YAML.
    (folder / "prometheus.yaml").write_text(json.dumps(config))
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    log = (folder / "prometheus.log").open("wb")
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=log,
        stderr=log,
    )
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(timeout=20)
        log.close()


async def test_prometheus_reads_a_broker_and_an_alert_fires(tmp_path: Path) -> None:
    served = Served(
        *("--probe", "http://127.0.0.1:0", "--node", "queue:orders?dead_letter=dead"),
        *("--node", "queue:dead", "--store", f"sqlite:{tmp_path / 'broker.db'}"),
    )
    try:
        with prometheus(tmp_path, served.ready["probe"]) as watching:
            await watching.until(
                lambda found: [each["value"][1] for each in found["result"]] == ["1"],
                "query",
                query="up",
            )
            # It has asked for OpenMetrics, in which names of counters come without their ending.
            known = {
                each["metric"].removeprefix("amqp_rt_"): each
                for each in await watching.until(
                    lambda found: found, "targets/metadata", metric="", match_target="{}"
                )
                if each["metric"].startswith("amqp_rt_")
            }
            assert {name: each["help"] for name, each in known.items()} == {
                name: text for name, text in HELP.items() if not name.startswith("node_")
            }
            assert known["messages"]["type"] == "gauge"
            assert known["messages_dead_lettered"]["type"] == "counter"
            assert known["store_commit_seconds"]["type"] == "histogram"
            sampled = await watching.until(
                lambda found: found, "label/__name__/values", **{"match[]": '{job="amqp_rt"}'}
            )
            names = {
                re.sub("_(total|bucket|count|sum)$", "", each.removeprefix("amqp_rt_"))
                for each in sampled
            }
            assert names >= HELP.keys() - OCCASIONAL

            assert await watching.get("alerts") == {"alerts": []}
            async with (
                connect(served.url) as peer,
                peer.sender("orders") as sender,
                peer.receiver("orders", credit=500) as receiver,
            ):
                assert await sender.send_many([b"bad"] * 1_000) == 1_000
                for _ in range(1_000):
                    (await receiver.receive()).reject("no such article")
            alert = await watching.until(
                lambda found: [each for each in found["alerts"] if each["state"] == "firing"],
                "alerts",
            )
            assert [each["labels"]["alertname"] for each in alert] == ["AmqpDeadLetters"]
            assert alert[0]["labels"]["reason"] == "rejected"
            (held,) = (await watching.get("query", query='amqp_rt_messages{state="available"}'))[
                "result"
            ]
            assert held["metric"]["kind"] == "queue"
            assert held["value"][1] == "1000"
    finally:
        code, errors = served.stop(signal.SIGTERM)
    assert code == 0
    assert "Traceback" not in errors
