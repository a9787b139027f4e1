"""References that keep no object alive, to compiled objects too."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest


def reference(found: Any) -> Callable[[], Any]:
    """Return a function that returns *found* as long as it is alive, and None afterwards.

    It is a weak reference if the type has them. mypyc's classes do not: their objects are searched for
    among all objects, so no object of the same type may be made in the meantime.
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
    """Disable the collector of cycles during a test, so that objects kept alive by a cycle are noticed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
