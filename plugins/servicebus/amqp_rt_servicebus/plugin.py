"""Plug-in of pytest: the fixture ``servicebus``, and the class behind it for other test runners.

pytest loads this module in every run. Hence modules that a run without the fixture does not need are
imported in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .testing import ServiceBus

__all__ = ["eventhubs", "servicebus"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    for name in ("servicebus", "eventhubs"):
        config.addinivalue_line(
            "markers",
            f"{name}(*declarations, **options): arguments of amqp_rt_servicebus.testing.ServiceBus for the fixture "
            f"{name}, such as config and realistic",
        )


@pytest.fixture
def servicebus(request: pytest.FixtureRequest) -> Iterator[ServiceBus]:
    """Run a namespace of Service Bus on a free port of 127.0.0.1, for this test; see ServiceBus."""
    yield from _served(request, "servicebus")


@pytest.fixture
def eventhubs(request: pytest.FixtureRequest) -> Iterator[ServiceBus]:
    """Run a namespace for event hubs, as the fixture ``servicebus`` does, in addition to that."""
    yield from _served(request, "eventhubs")


def _served(request: pytest.FixtureRequest, name: str) -> Iterator[ServiceBus]:
    from .testing import ServiceBus

    mark = request.node.get_closest_marker(name)
    arguments, options = ((), {}) if mark is None else (mark.args, mark.kwargs)
    with ServiceBus(*arguments, **options) as namespace:
        yield namespace
