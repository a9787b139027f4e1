from __future__ import annotations

from pathlib import Path

import pytest
from transports import TRANSPORTS, Reach, reach_over


@pytest.fixture(params=TRANSPORTS)
def reach(request: pytest.FixtureRequest, tmp_path: Path) -> Reach:
    """Function that connects to a container, over each transport in turn."""
    return reach_over(request.param, tmp_path)
