"""Shared by the tests of the plug-in: which SDKs are installed."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

import pytest
from amqp_rt_servicebus.testing import ServiceBus
from driven import PEERS, Dialler, Driven, require


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


@pytest.fixture
def dialler() -> Iterator[Dialler]:
    """Clients with threads, which are closed in the end."""
    dialler = Dialler("threads")
    yield dialler
    dialler.close()


@pytest.fixture
def client(bus: ServiceBus, dialler: Dialler) -> Driven:
    """Client with threads of the fixture ``bus`` of the module."""
    return dialler.client(bus.connection_string)
