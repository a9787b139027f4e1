"""The browser that all tests of pages share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from chromium import Browser, running

ROOT = Path(__file__).parent.parent.parent.parent


def _missing(why: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="session")
def chromium() -> list[str]:
    """Command of a browser."""
    found = shutil.which("chromium")
    if found is None:
        _missing("chromium is not installed")
    return [found]


@pytest.fixture(scope="session")
def browser(chromium: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A running Chromium."""
    with running(chromium, tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="session")
def axe() -> str:
    """axe-core, a script that examines pages by the rules of WCAG."""
    file = ROOT / "tests" / "peers" / "node_modules" / "axe-core" / "axe.min.js"
    if not file.exists():
        _missing("axe-core is not installed (make peers)")
    return file.read_text("utf-8")
