"""The commands of docs/guides/security.md, copied one after the other, as a newcomer would."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "security.md"


def commands() -> list[str]:
    text = GUIDE.read_text("utf-8").partition("## Set up security on the command line")[2]
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return "".join(blocks).splitlines()


@pytest.mark.slow
@pytest.mark.req("U1")
@pytest.mark.skipif(os.name == "nt", reason="a shell of Unix")
def test_the_commands_work_one_after_the_other(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    if not GUIDE.exists():
        pytest.skip("the documentation is not here")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    serving: subprocess.Popen[str] | None = None
    heard = []
    try:
        for line in commands():
            command = line.replace("5671", port)
            if command.startswith("amqp-rt "):
                command = f"{sys.executable} -m amqp_rt.cli {command.removeprefix('amqp-rt ')}"
            if " serve " in command:
                if serving is not None:
                    serving.send_signal(signal.SIGINT)
                    serving.communicate(timeout=20)
                    assert serving.returncode == 0
                serving = subprocess.Popen(
                    ["/bin/sh", "-c", f"exec {command}"],
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                assert serving.stdout is not None
                assert serving.stdout.readline().startswith("ready")
                continue
            done = subprocess.run(
                command,
                shell=True,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            heard.append(done.stdout)
    finally:
        if serving is not None:
            serving.kill()
            serving.communicate()
    assert sum("hello" in each for each in heard) == 2
