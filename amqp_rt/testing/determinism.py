"""One seed for everything in a process that is left to chance.

Trio runs the tasks of a pass in random order, and in the order of memory addresses before that;
link names, tags of logs and pauses between attempts are drawn too. Trio's switch for this is private,
which is why it is touched here and nowhere else.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from trio._core import _run as scheduler

__all__ = ["deterministic"]

#: Where ``secrets``, ``uuid`` and ``random.SystemRandom`` get their octets from.
_SOURCES: Final = ((os, "urandom"), (random, "_urandom"))
#: Trio sorts the tasks of a pass by age before it shuffles them, as it does for Hypothesis.
_SORTED: Final = "_ALLOW_DETERMINISTIC_SCHEDULING"


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Draw from *seed* within the block, and then from what there was before.

    Covers trio's scheduler, :mod:`random`, :mod:`secrets` and :func:`uuid.uuid4`, for the whole
    process: nothing that needs real secrets may run beside it. The order of a set of strings is the
    interpreter's (``PYTHONHASHSEED``), so no trace may depend on it.
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
