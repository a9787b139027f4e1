"""Run pytest, and run a few failed tests once more, each alone.

    python tests/second_try.py CACHE [OPTION ...] -- PATH ...

Many tests have real sockets, processes and clocks, and several run at a time, so that once in a great many runs
one fails for want of a processor. A test that fails again fails the run, and so do more than a few failures. What
passed alone is named at the end: it is to be looked into (decision 0080).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: More failures have a cause that a second try would only delay.
FEW = 3

#: Exit code of pytest when tests ran and some failed.
FAILED = 1


def record_of_failures(cache: Path) -> Path:
    """Return where pytest keeps the names of the tests that failed in the run with *cache*."""
    return cache / "v" / "cache" / "lastfailed"


def failed_tests(cache: Path) -> list[str]:
    """Return the names of the tests that failed in the run with *cache*."""
    path = record_of_failures(cache)
    return sorted(json.loads(path.read_text("utf-8"))) if path.exists() else []


def command(cache: Path, options: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return the command that runs the tests of *paths*."""
    return [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *options, *paths]


def run(cache: Path, options: Sequence[str], paths: Sequence[str]) -> int:
    """Run the tests of *paths*; return pytest's exit code."""
    return subprocess.run(command(cache, options, paths), check=False).returncode


def options_alone(options: Sequence[str], test: int) -> list[str]:
    """Return *options* for a run of the one test that the cache names, in this process, with a record of its own."""
    alone = ["--last-failed"]
    for option in options:
        if option.startswith("-n"):
            alone.append("-n0")
        elif option.startswith("--conformance="):
            alone.append(f"{option.removesuffix('.json')}.second{test}.json")
        else:
            alone.append(option)
    return alone


def selects_one(cache: Path, options: Sequence[str], paths: Sequence[str]) -> bool:
    """Return whether *options* select the one test that the cache names. Of a test that is not found, they select all."""
    collecting = command(cache, ["--collect-only", "-q", *options], paths)
    found = subprocess.run(collecting, check=False, capture_output=True, text=True)
    return sum("::" in line for line in found.stdout.splitlines()) == 1


def main(arguments: Sequence[str]) -> int:
    if "--" not in arguments or len(arguments) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    cut = arguments.index("--")
    cache, options, paths = Path(arguments[0]).resolve(), arguments[1:cut], arguments[cut + 1 :]
    status = run(cache, ["--cache-clear", *options], paths)
    failed = failed_tests(cache)
    # Long runs draw other inputs each time: a second try would not meet the one that failed.
    drawn = os.environ.get("AMQP_RT_LONG") == "1"
    if drawn or status != FAILED or not 0 < len(failed) <= FEW:
        return status
    for number, test in enumerate(failed):
        print(f"\nonce more, alone: {test}", flush=True)
        # The paths stay the same: they decide which conftest.py pytest asks for its options.
        record_of_failures(cache).write_text(json.dumps({test: True}), "utf-8")
        alone = options_alone(options, number)
        if not selects_one(cache, alone, paths):
            print("it is not found again")
            return status
        if again := run(cache, alone, paths):
            return again
    print("\nfailed beside other tests and passed alone; look into it:", *failed, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
