"""Which runs these are, for tests that choose their number of cases when they are imported.

Tests that choose it when they run take the fixtures ``brief_run`` and ``long_run``.
"""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

#: ``brief`` in ``make test`` and on the compiled wheel, ``long`` in ``make test-long``, otherwise ``quick``. The
#: quick loop (``-m "not slow"``) is brief as well.
RUNS: Final = (
    "long"
    if os.environ.get("AMQP_RT_LONG") == "1"
    else "brief"
    if os.environ.get("AMQP_RT_BRIEF") == "1"
    else "quick"
)


def of_this_run(*, brief: int, quick: int, long: int) -> int:
    """Return the number for this run."""
    return {"brief": brief, "quick": quick, "long": long}[RUNS]


def machine_settings() -> settings:
    """Return the settings of state machines, with half of the usual number of examples in quick runs.

    An example of a machine is a program of up to 50 steps. Quick runs take the same examples every time; long runs
    look for new ones.
    """
    examples: int = settings().max_examples
    return settings(
        deadline=None,
        max_examples=min(examples, of_this_run(brief=examples, quick=50, long=examples)),
        suppress_health_check=list(HealthCheck),
    )
