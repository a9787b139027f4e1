"""The epoll set in which trio waits for I/O.

trio lets a task wait for a descriptor once: after each event the task has to run and to wait anew, which is half of the
work of a pass that carries one message. It has no public way of keeping a descriptor in its set, so that only this
module uses a private one, and what it returns may be None (decision 0129).
"""

from __future__ import annotations

import select
from collections import defaultdict
from typing import Any


def trio_epoll() -> select.epoll | None:
    """Return the epoll set of the running event loop; None if this version of trio keeps its waits in another way.

    A descriptor that is registered there by others ends the waits of the loop, and nothing else: trio finds no task that
    waits for it.
    """
    try:
        from trio._core._run import GLOBAL_RUN_CONTEXT
    except ImportError:
        return None
    manager: Any = getattr(getattr(GLOBAL_RUN_CONTEXT, "runner", None), "io_manager", None)
    found = getattr(manager, "_epoll", None)
    # Looking up a descriptor that no task waits for must not fail.
    if isinstance(found, select.epoll) and isinstance(
        getattr(manager, "_registered", None), defaultdict
    ):
        return found
    return None
