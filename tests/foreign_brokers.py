"""Brokers of other projects, started as the benchmarks start them."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


def benchmarks() -> ModuleType:
    """Import the package of the benchmarks, which is not part of the installation."""
    if (known := sys.modules.get("benchmarks")) is not None:
        return known
    spec = importlib.util.spec_from_file_location(
        "benchmarks", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = module
    spec.loader.exec_module(module)
    return module


def foreign_broker(name: str) -> AbstractContextManager[Any]:
    """Run ``proton-c`` or ``rabbitmq``; the context's value has a ``port`` and makes an ``address``.

    Without it the test is skipped, with the reason; on CI it fails.
    """
    benchmarks()
    from benchmarks.contestants import PEERS

    found = PEERS[name]()
    if isinstance(found, str):
        absent(found)
    assert found.broker is not None
    running: AbstractContextManager[Any] = found.broker()
    return running


def absent(reason: str) -> NoReturn:
    """Skip the test because a broker is not installed; on CI, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
