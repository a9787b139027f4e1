"""Plug-in of pytest: fixtures ``amqp``, ``amqp_broker`` and ``amqp_script``, without configuration.

pytest loads this module in every run, also for tests without AMQP. Hence modules that such a run
does not need are imported in the fixtures.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .loopback import LoopbackBroker
    from .script import Script
    from .virtual import VirtualAmqp

__all__ = ["amqp", "amqp_broker", "amqp_script"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks."""
    config.addinivalue_line(
        "markers",
        "amqp_broker(**options): arguments of amqp_rt.Broker for the fixture "
        "amqp_broker, such as users, auto_create and nodes",
    )


@pytest.fixture
def amqp(request: pytest.FixtureRequest) -> VirtualAmqp:
    """Containers and brokers in memory and in virtual time; see amqp_rt.testing.VirtualAmqp."""
    from .virtual import VirtualAmqp, run_in_virtual_time

    node = request.node
    if inspect.iscoroutinefunction(getattr(node, "obj", None)):
        if node.get_closest_marker("trio") is None:
            pytest.fail(
                "the fixture amqp keeps virtual time, which trio has: mark the test with "
                "pytest.mark.trio, or write a plain one that uses amqp.run; for asyncio there is "
                "amqp_broker",
                pytrace=False,
            )
        # pytest-trio takes the function that runs the test from the first of these marks.
        node.add_marker(pytest.mark.trio(run=run_in_virtual_time), append=False)
    return VirtualAmqp()


@pytest.fixture
def amqp_broker(request: pytest.FixtureRequest) -> Iterator[LoopbackBroker]:
    """A broker on a free port of 127.0.0.1, for this test; see amqp_rt.testing.LoopbackBroker."""
    from .loopback import LoopbackBroker

    mark = request.node.get_closest_marker("amqp_broker")
    with LoopbackBroker(**({} if mark is None else mark.kwargs)) as broker:
        yield broker


@pytest.fixture
def amqp_script() -> Script:
    """A peer that follows a script and may break every rule; see amqp_rt.testing.Script."""
    from .script import Script

    return Script()
