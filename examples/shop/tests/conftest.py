"""Fixtures of the shop's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shop import main
from sqlalchemy import create_engine


@pytest.fixture(autouse=True)
def database(tmp_path: Path) -> Iterator[None]:
    """Provide an empty database."""
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}?timeout=30")
    main.Base.metadata.create_all(engine)
    main.sessions.configure(bind=engine)
    yield
    engine.dispose()
