"""Twelve members of a mesh, two edges, their clients, and faults of all kinds, in virtual time.

``mesh_worlds`` has the clients, and what is checked: at every moment the credit and the counts of hops and fans, with each
delivery and outcome that both are true, and in the end that all nodes know the same, serve everything and keep nothing.
"""

from __future__ import annotations

import pytest
from mesh_worlds import Drain, chaos, draw_mesh_faults
from runs import of_this_run

from amqp_rt.testing.simulation import check_seeds, simulate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

SEEDS = of_this_run(brief=1, quick=2, long=1_000)
#: Seeds of one test, since the tests of a long run are shared by the processes of pytest.
SEEDS_TOGETHER = 50


@pytest.mark.req("P1", "P2", "P3", "P5", "A22", "A23")
@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_TOGETHER))
def test_seeds_of_a_mesh(first: int) -> None:
    seeds = range(first, min(first + SEEDS_TOGETHER, SEEDS))
    check_seeds(chaos, seeds, draw=draw_mesh_faults)


@pytest.mark.req("P1", "P3")
def test_nothing_is_lost_refused_or_doubled_while_nodes_leave() -> None:
    """Every node that serves something leaves at some time; clients notice nothing of it."""
    simulate(
        chaos, seed=1, faults=[Drain(host=f"n{at:02}", at=0.6 * at) for at in (1, 2, 6, 7, 10, 11)]
    )
