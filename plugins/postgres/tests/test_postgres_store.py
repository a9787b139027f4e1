"""The store keeps the contract of stores, on a real server."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count

import pytest
from amqp_rt_postgres import PostgreSQLStore
from postgresql import Cluster
from store_model import check_model

from amqp_rt.stores.base import OpenResult, Store
from amqp_rt.testing.checks import STORE_CHECKS

pytestmark = [pytest.mark.foreign, pytest.mark.slow, pytest.mark.req("B26", "U1")]

LONG = os.environ.get("AMQP_RT_LONG") == "1"

_numbers = count(1)


@pytest.fixture(scope="module")
def make(postgresql: Cluster) -> Callable[[], Store]:
    """Return a function that makes an empty store, in a schema of its own of one database."""
    url = postgresql.url(postgresql.create_database())
    return lambda: PostgreSQLStore(f"{url}?schema=s{next(_numbers)}")


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_store(make: Callable[[], Store], check: Callable[[Store], None]) -> None:
    store = make()
    assert store.open() == OpenResult(clean=True)
    check(store)
    store.close()


def test_random_batches(make: Callable[[], Store]) -> None:
    check_model(make, max_examples=100 if LONG else 2)
