"""Fixtures for tests with programs of peers; tests with ``peer`` run with every installed one."""

from __future__ import annotations

import pytest
from peer_programs import PeerPrograms

PEERS = ("proton", "rhea")


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.peer(name)) for name in PEERS])
def peer(request: pytest.FixtureRequest) -> PeerPrograms:
    """Programs of each peer in turn."""
    name = str(request.param)
    command: list[str] = request.getfixturevalue(name)
    return PeerPrograms(name, command)


@pytest.fixture
def proton_programs(proton: list[str]) -> PeerPrograms:
    return PeerPrograms("proton", proton)


@pytest.fixture
def rhea_programs(rhea: list[str]) -> PeerPrograms:
    return PeerPrograms("rhea", rhea)


@pytest.fixture
def azure_programs(azure: list[str]) -> PeerPrograms:
    return PeerPrograms("azure", azure)
