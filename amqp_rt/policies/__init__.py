"""Policies of calls: repeating, hedging, breaking the circuit, bounding and caching.

An application passes policies to ``peer.calling(...)``; the first is the outermost. This package has their
rules, and no I/O: the time is an argument, and :mod:`amqp_rt.container.calling` does the waiting.
Each policy keeps a state for each address. Create policies of their own for each peer, since
connections that share a policy share its state.
"""

from __future__ import annotations

from typing import TypeAlias

from .breaker import Breaker, is_failure
from .bulkhead import Bulkhead
from .cache import Cache, CacheKey
from .hedge import Hedge
from .retry import Retry

__all__ = ["Breaker", "Bulkhead", "Cache", "CacheKey", "Hedge", "Policy", "Retry", "is_failure"]

#: Policies that ``peer.calling`` takes.
Policy: TypeAlias = Retry | Hedge | Breaker | Bulkhead | Cache
