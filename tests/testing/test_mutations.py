"""Whatever promise is broken on purpose, the simulation notices, and the page says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation, hunt

import amqp_rt

PAGE = Path(__file__).parent.parent.parent / "docs" / "mutations.md"


@pytest.mark.slow
@pytest.mark.req("A22", "A23")
@pytest.mark.skipif(amqp_rt.COMPILED, reason="methods of compiled classes cannot be changed")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_promise_is_noticed(mutation: Mutation) -> None:
    assert hunt(mutation) is not None, f"no simulation notices that {mutation.name}"


def test_the_page_lists_them_all() -> None:
    page, _, _ = PAGE.read_text("utf-8").partition("<!-- scores")
    listed = re.findall(r"^\| ([a-z][^|]+?) \|", page, re.MULTILINE)
    assert listed[1:] == [mutation.name for mutation in MUTATIONS], (
        "`make mutations` brings it up to date"
    )
