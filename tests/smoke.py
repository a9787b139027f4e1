"""First steps of a user, with only the wheel installed: run by ``make smoke``, not by pytest.

The argument names the installed wheel, ``compiled`` or ``pure``.

The interpreter's environment holds only the wheel and its own dependencies, and the current folder is
empty, so that files missing from the wheel are noticed here.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import amqp_rt

#: Modules that need an extra: module → extra. Their import says what to install.
EXTRAS: dict[str, str] = {
    "amqp_rt.outbox.sql": "sqlalchemy",
    "amqp_rt.telemetry.metrics": "metrics",
    "amqp_rt.telemetry.otel": "otel",
    "amqp_rt.telemetry.workers": "metrics",
}
#: A module that pytest alone imports.
PYTEST_PLUGIN = "amqp_rt.testing.plugin"


def check_imports() -> None:
    assert Path(amqp_rt.__file__).is_relative_to(sys.prefix), amqp_rt.__file__
    assert amqp_rt.__version__ == version("amqp-rt")
    assert amqp_rt.COMPILED is (sys.argv[1] == "compiled")
    for name in ("py.typed", "sync.pyi"):
        assert (Path(amqp_rt.__file__).parent / name).is_file()
    for name in amqp_rt.__all__:
        assert getattr(amqp_rt, name) is not None
    for module in pkgutil.walk_packages(amqp_rt.__path__, "amqp_rt."):
        if module.name == PYTEST_PLUGIN or module.name.endswith("__main__"):
            continue
        asked = ""
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            asked = str(error)
        if (extra := EXTRAS.get(module.name)) is None:
            assert not asked, (module.name, asked)
        else:
            assert f"pip install 'amqp-rt[{extra}]'" in asked, (module.name, asked)


def amqp_rt_command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("amqp-rt")), *arguments]


def check_command_line() -> None:
    told = subprocess.run(
        amqp_rt_command("--version"), check=True, capture_output=True, text=True, timeout=30
    )
    form = "compiled" if amqp_rt.COMPILED else "plain Python: AMQP_RT_COMPILE was 0"
    assert f"amqp-rt, version {amqp_rt.__version__} ({form}" in told.stdout, told.stdout
    missing = subprocess.run(
        amqp_rt_command("pipeline"), check=False, capture_output=True, text=True, timeout=30
    )
    assert missing.returncode == 1
    assert "pip install 'amqp-rt-spark" in missing.stderr, missing.stderr


def check_a_message() -> None:
    serve = amqp_rt_command(
        *("serve", "--listen", "amqp://127.0.0.1:0", "--anonymous", "--node", "queue:smoke")
    )
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            word, _, told = server.stdout.readline().partition(" ")
            assert word == "ready", word
            url = json.loads(told)["listeners"][0]
            send = amqp_rt_command("send", "--url", url, "smoke", "first light")
            subprocess.run(send, check=True, timeout=30)
            receive = amqp_rt_command("receive", "--url", url, "smoke", "--count", "1")
            got = subprocess.run(receive, check=True, timeout=30, capture_output=True, text=True)
            assert "first light" in got.stdout, got.stdout
        finally:
            server.terminate()
    if os.name == "posix":  # Windows has no signal that lets a process finish.
        assert server.returncode == 0, server.returncode


for check in (check_imports, check_command_line, check_a_message):
    check()
    print(f"{check.__name__}: passed")
