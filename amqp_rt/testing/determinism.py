"""A single seed for all randomness in a process.

Trio shuffles the tasks of a pass, starting from the order of their memory addresses; link names,
tags of logs and pauses between attempts are random too. Trio's switch for this is private, so only
this module uses it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from trio._core import _run as scheduler

__all__ = ["deterministic"]

#: Sources of octets for ``secrets``, ``uuid`` and ``random.SystemRandom``.
_SOURCES: Final = ((os, "urandom"), (random, "_urandom"))
#: Flag that makes trio sort the tasks of a pass by age before shuffling, as for Hypothesis.
_SORTED: Final = "_ALLOW_DETERMINISTIC_SCHEDULING"


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Draw all random values from *seed* within the block; restore the sources afterwards.

    Covers trio's scheduler, :mod:`random`, :mod:`secrets` and :func:`uuid.uuid4`, for the whole
    process: no code that needs real secrets may run in it meanwhile. The order of a set of strings
    depends on the interpreter (``PYTHONHASHSEED``), so traces must not depend on it.
    """
    octets: Callable[[int], bytes] = random.Random(f"{seed}/octets").randbytes  # noqa: S311  # meant
    known: list[tuple[Any, str, Any]] = [
        (module, name, getattr(module, name)) for module, name in _SOURCES
    ]
    known.append((scheduler, _SORTED, getattr(scheduler, _SORTED)))
    drawn = random.getstate(), scheduler._r.getstate()
    for module, name in _SOURCES:
        setattr(module, name, octets)
    setattr(scheduler, _SORTED, True)
    random.seed(f"{seed}/random")
    scheduler._r.seed(f"{seed}/scheduler")
    try:
        yield
    finally:
        for module, name, value in known:
            setattr(module, name, value)
        random.setstate(drawn[0])
        scheduler._r.setstate(drawn[1])
