"""References that keep no object alive, to compiled objects too."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest


def reference(found: Any) -> Callable[[], Any]:
    """Return what gives *found* as long as it is alive, and None afterwards.

    A weak reference where there can be one. mypyc's classes have none: those are looked for among all
    objects, so nothing of the same type may be made in the meantime.
    """
    try:
        return weakref.ref(found)
    except TypeError:
        kind, key = type(found), id(found)
    assert gc.is_tracked(found)
    return lambda: next(
        (each for each in gc.get_objects() if type(each) is kind and id(each) == key), None
    )


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Leave cycles alone for the time of a test, so that what is kept by one is seen."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
