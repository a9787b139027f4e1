"""Shared by the tests of the plug-in: which SDKs are installed."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
from driven import PEERS, require


@pytest.fixture(scope="session")
def azure_python() -> None:
    """Require the SDKs for Python, with their transport for asyncio."""
    for package in ("azure.servicebus", "azure.eventhub", "aiohttp", "websocket", "celery"):
        try:
            found = importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            require(f"{package} is not installed (make peers)")


@pytest.fixture(scope="session")
def azure_javascript() -> str:
    """Require the SDK for JavaScript, and return the path of Node."""
    node = shutil.which("node")
    if node is None:
        require("node is not installed")
    elif not (PEERS / "node_modules" / "@azure" / "service-bus").is_dir():
        require("@azure/service-bus is not installed (make peers)")
    return str(node)
