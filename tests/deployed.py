"""Brokers started as the files of examples/deploy would: their variables and files, confined, under a service manager.

A machine with a container engine is not needed: an image or a unit is, for the process in it, an environment, a few
folders, a user, and a file system that it may not write to.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
DEPLOY: Final = ROOT / "examples" / "deploy"
COMMAND: Final = [sys.executable, "-m", "amqp_rt"]

#: Makes all but $FOLDER read-only for the command that follows, hides the home of root but for $NEEDED, and takes root
#: and its rights away. PR_SET_MDWE refuses memory that is written and executed, as MemoryDenyWriteExecute= of systemd does.
_CONFINE: Final = r"""
mount --make-rprivate /
mount --bind "$FOLDER" "$FOLDER"
mount -t tmpfs tmpfs /mnt
number=0
for at in $NEEDED; do
  number=$((number + 1)) && mkdir "/mnt/$number" && mount --rbind "$at" "/mnt/$number"
done
mount -t tmpfs -o mode=755 tmpfs /root
number=0
for at in $NEEDED; do
  number=$((number + 1)) && mkdir -p "$at" && mount --rbind "/mnt/$number" "$at"
done
cut -d' ' -f5 /proc/self/mountinfo | while read -r at; do
  case "$at" in "$FOLDER"|/proc*|/sys*|/dev*) ;; *) mount -o remount,bind,ro "$at" 2>/dev/null || true ;; esac
done
exec setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
  "$PYTHON" -c 'import ctypes, os, sys; ctypes.CDLL(None).prctl(65, 1, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])' "$@"
"""


class Folder:
    """Folder that a broker without rights may write to, in place of those that its files name."""

    def __init__(self) -> None:
        # Not the folder of the test, which only its own user can reach.
        self.path = Path(tempfile.mkdtemp(prefix="amqp-rt-deployed-"))
        self.path.chmod(0o755)

    def folder(self, name: str) -> Path:
        """Create the folder *name*."""
        path = self.path / name
        path.mkdir(parents=True)
        return path

    def own(self) -> None:
        """Give all of it to the user without rights, if this process may."""
        if os.geteuid() == 0:
            for path in (self.path, *self.path.rglob("*")):
                os.chown(path, 10001, 10001)


@contextmanager
def folder() -> Iterator[Folder]:
    """Yield a folder that is removed at the end."""
    made = Folder()
    try:
        yield made
    finally:
        shutil.rmtree(made.path)


def _confined(at: Folder, *command: str) -> list[str]:
    # Python may be installed in the home of root, as by pyenv.
    needed = {sys.base_prefix, sys.prefix, str(ROOT)}
    inside = " ".join(sorted(path for path in needed if Path(path).is_relative_to("/root")))
    variables = [f"FOLDER={at.path}", f"PYTHON={sys.executable}", f"NEEDED={inside}"]
    return [
        *("unshare", "--mount", "env", *variables, "sh", "-ec", _CONFINE, "confine"),
        *command,
    ]


@cache
def unconfined() -> str | None:
    """Return why programs cannot be confined here; None if they can be."""
    if os.geteuid() != 0:
        return "it takes root to confine programs"
    if not (shutil.which("unshare") and shutil.which("setpriv")):
        return "unshare and setpriv are not installed (util-linux)"
    with folder() as at:
        at.own()
        probe = f"import amqp_rt, pathlib; pathlib.Path({str(at.path)!r}, 'x').touch()"
        run = subprocess.run(
            _confined(at, sys.executable, "-c", probe), capture_output=True, text=True, check=False
        )
    return f"no confinement: {run.stderr.strip()[-200:]}" if run.returncode else None


def confined_run(at: Folder, *command: str) -> subprocess.CompletedProcess[str]:
    """Run *command* as a broker in *at* would run, to its end."""
    return subprocess.run(_confined(at, *command), capture_output=True, text=True, check=False)


class Manager:
    """Stand-in for the service manager: the socket to which a service reports its state."""

    def __init__(self, at: Folder) -> None:
        self.path = at.path / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.settimeout(30)
        self.path.chmod(0o777)

    def wait_for(self, field: str) -> None:
        """Wait for a report with *field*, such as ``READY=1``."""
        while field not in self._socket.recv(4096).decode().splitlines():
            pass

    def close(self) -> None:
        """Take no more reports."""
        self._socket.close()


class Deployed:
    """Broker that was started with *environ* alone, confined where that is possible.

    Without *wait* it need not serve yet: :meth:`wait_ready` waits for that.
    """

    def __init__(
        self, at: Folder, arguments: list[str], environ: Mapping[str, str], *, wait: bool = True
    ) -> None:
        at.own()
        command = [*COMMAND, *arguments]
        self.process = subprocess.Popen(
            command if unconfined() else _confined(at, *command),
            cwd=at.path,
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ready: dict[str, Any] = {}
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the broker serves."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("ready "):
            raise AssertionError(line + self.process.communicate(timeout=30)[1])
        self.ready = json.loads(line.removeprefix("ready "))

    def stop(self) -> tuple[int, str]:
        """Stop the broker as a platform does; return its exit status and log."""
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors

    def kill(self) -> None:
        """End the process, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def any_port(text: str) -> str:
    """Return *text* with free ports of this machine in place of those that it listens on."""
    return re.sub(r"(://)(0\.0\.0\.0|127\.0\.0\.1):\d+", r"\g<1>127.0.0.1:0", text)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Return the instructions of *dockerfile*, each with its arguments in one line."""
    lines = [
        line
        for line in dockerfile.read_text("utf-8").splitlines()
        if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(name, rest.strip()) for name, _, rest in found]


def image() -> dict[str, Any]:
    """Return variables, command and health check of the image, as its last stage has them."""
    environ: dict[str, str] = {}
    found: dict[str, Any] = {}
    for name, rest in instructions(DEPLOY / "Dockerfile"):
        if name == "FROM":
            environ, found = {}, {}
        elif name == "ENV":
            environ |= dict(each.split("=", 1) for each in shlex.split(rest))
        elif name in ("ENTRYPOINT", "CMD"):
            found[name] = json.loads(rest)
        elif name == "HEALTHCHECK":
            found[name] = json.loads(rest.partition("CMD ")[2])
        else:
            found[name] = rest
    del environ["PATH"]
    return {**found, "ENV": environ}


def unit() -> list[tuple[str, str]]:
    """Return the settings of the section [Service] of the unit."""
    text = (DEPLOY / "amqp-rt.service").read_text("utf-8")
    section = text.partition("[Service]\n")[2].partition("\n[")[0]
    lines = (line for line in section.splitlines() if line and not line.startswith("#"))
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]
