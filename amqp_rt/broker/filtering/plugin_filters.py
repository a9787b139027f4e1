"""Types of filters that applications and plug-ins add to those of the broker.

A filter type is a function that is called with the value of a filter when a link attaches. It returns the test of messages, or
raises :class:`~amqp_rt.broker.filtering.selectors.InvalidFilter`. Plug-ins register it in the entry point group ``amqp_rt.filters``, under
the symbol that describes the filter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final, TypeAlias

from ...errors import DecodeError
from .selectors import Evaluate, InvalidFilter
from .views import Exhausted, MessageView

__all__ = ["FilterType", "FilterTypes"]

#: Makes the test of messages from the value of a filter. The test has to return the same for the same message until its
#: state or its annotations change (§3.5.1), and to ``spend`` steps of the view for loops over what peers choose.
FilterType: TypeAlias = Callable[[object], Callable[[MessageView], bool]]

_log: Final = logging.getLogger("amqp_rt.broker")


class FilterTypes:
    """Filter types that are known beside those of the broker.

    Args:
        given: Those of the application, by symbol. The ones of installed plug-ins are loaded when a receiver first
            asks for one.
    """

    def __init__(self, given: Mapping[str, FilterType] | None = None) -> None:
        self._given = dict(given or {})

    def __contains__(self, symbol: object) -> bool:
        return symbol in self._given or symbol in _installed()

    def compile(self, name: str, symbol: str, value: object) -> Evaluate | None:
        """Return the test of the filter *name* of type *symbol*; None if its type fails, which is logged.

        Messages for which the test raises do not pass.

        Raises:
            InvalidFilter: *value* is not one of this type.
        """
        try:
            make = self._given.get(symbol) or _loaded(symbol)
            test = make(value)
        except InvalidFilter as error:
            raise InvalidFilter(
                f"{name}: {error.description}", position=error.position, expected=error.expected
            ) from None
        except Exception:
            # A fault of the plug-in: the receiver learns that its filter is not in place.
            _log.exception("filter not in place: %s: its type %s failed", name, symbol)
            return None
        return _guarded(test, name, symbol)


def _guarded(test: Callable[[MessageView], bool], name: str, symbol: str) -> Evaluate:
    """Return *test* as one that does not raise for faults of its own; the first one is logged."""
    failed = False

    def passes(view: MessageView) -> bool:
        nonlocal failed
        try:
            return bool(test(view))
        except (DecodeError, Exhausted):
            raise
        except Exception:
            if not failed:
                failed = True
                _log.exception("message does not pass: filter %s: its type %s failed", name, symbol)
            return False

    return passes


@lru_cache(maxsize=1)
def _installed() -> Mapping[str, EntryPoint]:
    """Return the filter types of plug-ins by symbol, which are not loaded."""
    return {each.name: each for each in entry_points(group="amqp_rt.filters")}


@lru_cache(maxsize=64)
def _loaded(symbol: str) -> FilterType:
    """Load the filter type of a plug-in."""
    make: FilterType = _installed()[symbol].load()
    return make
