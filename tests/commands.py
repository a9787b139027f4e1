"""``amqp-rt`` as a process: brokers that it serves, and the output of its commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "amqp_rt.cli"]


class Served:
    """A running ``amqp-rt serve``."""

    def __init__(
        self,
        *arguments: str,
        listen: str = "amqp://127.0.0.1:0",
        cwd: Path | None = None,
        **environ: str,
    ) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--listen", listen, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, **environ},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), line + self.stop()[1]
        self.ready = json.loads(line.removeprefix("ready "))
        self.url: str = self.ready["listeners"][0]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Stop the process; return its exit code and standard error."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


def amqp_rt(*arguments: str, stdin: str = "", url: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "AMQP_URL": url} if url else dict(os.environ)
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env=environ,
        check=False,
    )


def ok(*arguments: str, stdin: str = "", url: str = "") -> str:
    done = amqp_rt(*arguments, stdin=stdin, url=url)
    assert done.returncode == 0, done.stderr
    return done.stdout
