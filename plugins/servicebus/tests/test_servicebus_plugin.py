"""The plug-in of pytest: the fixture and its mark in a project of others."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.req("Z1", "Z3")

pytest_plugins = ["pytester"]


@pytest.mark.slow
def test_the_fixture_has_the_entities_of_its_mark(pytester: pytest.Pytester) -> None:
    pytester.makeini(
        """
        [pytest]
        addopts = --strict-markers
        """
    )
    pytester.makepyfile(
        """
        import pytest
        from amqp_rt_servicebus.declarations import Queue

        def test_empty(servicebus):
            servicebus.declare(Queue("q")).send("a")
            assert [each.body for each in servicebus.queue("q").messages] == [b"a"]

        @pytest.mark.servicebus(Queue("q", lock_duration=7), realistic=True)
        def test_marked(servicebus):
            assert servicebus.queue("q").stats.active == 0
            with pytest.raises(ValueError):
                servicebus.declare(Queue("other", lock_duration=1))
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=100)
    result.assert_outcomes(passed=2)
