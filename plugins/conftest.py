"""What the tests of every plug-in may use; ``tests/conftest.py`` has the marks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from postgresql import database, postgresql  # noqa: F401 (fixtures)

# Whatever profile is in force: tests measure no time.
settings.register_profile("plugins", settings(), deadline=None)
settings.load_profile("plugins")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of specifications and vectors beside the checkout."""
    path = Path(__file__).parent.parent.parent / "shared"
    if not path.is_dir():
        pytest.skip("no folder shared/ beside the checkout")
    return path
