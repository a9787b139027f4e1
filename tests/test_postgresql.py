"""The server that tests of databases use: it keeps what it has acknowledged, and a replica takes over."""

from __future__ import annotations

import pytest
from postgresql import Cluster, running_cluster

pytestmark = [pytest.mark.foreign, pytest.mark.slow]


def test_databases_are_apart(postgresql: Cluster, database: str) -> None:
    name = database.rpartition("/")[2]
    postgresql.run("CREATE TABLE seen (n int)", name)
    other = postgresql.create_database()
    assert postgresql.run("SELECT to_regclass('seen') IS NULL", other) == "t"
    postgresql.drop_database(other)


def test_a_crashed_server_keeps_what_it_has_acknowledged() -> None:
    with running_cluster() as cluster:
        assert cluster.run("SHOW fsync") == "on"
        cluster.run("CREATE TABLE seen (n int)")
        cluster.run("INSERT INTO seen SELECT generate_series(1, 100)")
        cluster.crash()
        assert not cluster.is_ready()
        cluster.start()
        assert cluster.run("SELECT count(*) FROM seen") == "100"
