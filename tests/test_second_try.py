"""A few failed tests get a second try, alone; what fails again fails the run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "second_try.py"

#: Fails in the first process that runs it.
BUSY = """
from pathlib import Path
def test_busy():
    mark = Path(__file__).with_suffix(".tried")
    tried = mark.exists()
    mark.touch()
    assert tried
def test_good():
    pass
"""


def tried(
    folder: Path, text: str, *options: str, paths: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the tests in *text*, and those of *paths*, with a second try."""
    (folder / "test_it.py").write_text(text)
    (folder / "empty.ini").write_text("[pytest]\n")
    command = [sys.executable, str(SCRIPT), "cache", f"--rootdir={folder}"]
    command += [f"--config-file={folder / 'empty.ini'}", *options, "--"]
    command += [str(path) for path in (folder, *paths)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [(), ("-n2",)], ids=["one process", "workers"])
def test_a_test_that_passes_alone_is_named(tmp_path: Path, options: tuple[str, ...]) -> None:
    run = tried(tmp_path, BUSY, *options)
    assert run.returncode == 0, run.stdout
    assert "1 failed, 1 passed" in run.stdout
    assert run.stdout.rstrip().endswith("look into it:\n  test_it.py::test_busy")


def test_a_test_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    run = tried(tmp_path, BUSY + "\ndef test_zero():\n    assert False\n")
    assert run.returncode == 1
    assert "look into it" not in run.stdout


def test_a_test_with_another_name_each_time_gets_no_second_try(tmp_path: Path) -> None:
    text = "import os, pytest\n@pytest.mark.parametrize('n', [os.getpid()])\ndef test_bad(n):\n    assert False\n"
    run = tried(tmp_path, text + "def test_good():\n    pass\n")
    assert run.returncode == 1
    assert "it is not found again" in run.stdout


def test_options_of_another_folder_are_known_in_the_second_try(tmp_path: Path) -> None:
    """As those of tests/conftest.py are, when a test of a plug-in has failed."""
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    (plugin / "test_plugin.py").write_text(BUSY)
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--conformance')\n"
    )
    run = tried(folder, "def test_other():\n    pass\n", "--conformance=a.json", paths=[plugin])
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout.partition("once more, alone")[2]


def test_many_failures_get_no_second_try(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_bad(n):\n    assert False\n"
    run = tried(tmp_path, text)
    assert run.returncode == 1
    assert "once more" not in run.stdout


def test_an_error_at_import_gets_no_second_try(tmp_path: Path) -> None:
    run = tried(tmp_path, "import nothing_like_it\n")
    assert run.returncode not in (0, 1)
    assert "once more" not in run.stdout


def test_the_second_try_has_a_record_of_its_own() -> None:
    from second_try import options_alone

    assert options_alone(["-n3", "-x", "--conformance=.conformance.json"], 2) == [
        "--last-failed",
        "-n0",
        "-x",
        "--conformance=.conformance.second2.json",
    ]


def test_what_is_called_without_paths_says_how(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "CACHE" in run.stderr
