"""Twelve members of a mesh, two edges, their clients, and faults of all kinds, in virtual time.

``mesh_worlds`` has the clients, and what is checked: at every moment the credit and the counts of hops and fans, with each
delivery and outcome that both are true, and in the end that all nodes know the same, serve everything and keep nothing.
"""

from __future__ import annotations

import pytest
from mesh_worlds import Drain, chaos, draw_mesh_faults

from amqp_rt.testing.simulation import check_seeds, simulate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

#: Seeds of CI, and of a long run.
SEEDS, SEEDS_LONG = 2, 1_000


@pytest.mark.req("P1", "P2", "P3", "P5", "A22", "A23")
def test_seeds_of_a_mesh(brief_run: bool, long_run: bool) -> None:
    seeds = SEEDS_LONG if long_run else 1 if brief_run else SEEDS
    check_seeds(chaos, range(seeds), draw=draw_mesh_faults)


@pytest.mark.req("P1", "P3")
def test_nothing_is_lost_refused_or_doubled_while_nodes_leave() -> None:
    """Every node that serves something leaves at some time; clients notice nothing of it."""
    simulate(
        chaos, seed=1, faults=[Drain(host=f"n{at:02}", at=0.6 * at) for at in (1, 2, 6, 7, 10, 11)]
    )
