"""Stores that earlier builds wrote open, with everything that is in them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import golden_store
import pytest
import trio


def known_part(found: Any, known: Any) -> Any:
    """Return *found* without options and counters that *known* does not have: later releases add some."""
    if isinstance(found, dict) and isinstance(known, dict):
        return {
            name: {key: value for key, value in each.items() if key in known[name]}
            if isinstance(each, dict) and isinstance(known.get(name), dict)
            else each
            for name, each in found.items()
        }
    return found


FILES = sorted(Path(__file__).parent.glob("golden-*.db.gz"))


@pytest.mark.parametrize("file", FILES, ids=[file.name.removesuffix(".db.gz") for file in FILES])
def test_a_store_of_an_earlier_build_has_all_its_facts(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_bytes(gzip.decompress(file.read_bytes()))
    facts = file.with_name(file.name.replace(".db.gz", ".json"))
    known = json.loads(facts.read_bytes())
    # Twice: what opening it writes is as good as what it found.
    for _ in range(2):
        assert known_part(trio.run(golden_store.facts, path), known) == known
