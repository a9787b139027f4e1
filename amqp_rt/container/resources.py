"""Objects of an application that handlers request by type."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, get_args, get_type_hints


class Resources:
    """Objects that handlers may request by type.

    A factory is an ``@asynccontextmanager`` function whose return annotation names the type that it
    yields; it is entered when the container starts and left when the container has stopped.
    """

    def __init__(self, provided: Iterable[Any] = ()) -> None:
        self._values: dict[type, Any] = {}
        self._factories: dict[type, Callable[[], AbstractAsyncContextManager[Any]]] = {}
        for each in provided:
            self.provide(each)

    def provide(self, thing: Any, *, as_type: type | None = None) -> None:
        """Add an object, or a factory of one.

        Raises:
            TypeError: The type of the factory's object is unknown, or there is a resource of that
                type.
        """
        wrapped = getattr(thing, "__wrapped__", None)
        kind: Any
        if wrapped is not None and inspect.isasyncgenfunction(wrapped):
            kind = as_type
            if kind is None:
                made = get_args(get_type_hints(wrapped).get("return"))
                kind = made[0] if made else None
            if not isinstance(kind, type):
                raise TypeError(
                    f"{thing.__qualname__}() has no type of its items: annotate it as "
                    "-> AsyncIterator[Thing], or pass as_type=Thing"
                )
            self._free(kind)
            self._factories[kind] = thing
        else:
            kind = as_type or type(thing)
            self._free(kind)
            self._values[kind] = thing

    def _free(self, kind: type) -> None:
        if kind in self._values or kind in self._factories:
            raise TypeError(f"there is a resource of type {kind.__name__} already")

    @property
    def unmade(self) -> Mapping[type, Callable[[], AbstractAsyncContextManager[Any]]]:
        """Factories whose object has not been made."""
        return {kind: make for kind, make in self._factories.items() if kind not in self._values}

    def made(self, kind: type, value: Any) -> None:
        """Store the object made by the factory of *kind*."""
        self._values[kind] = value

    def find(self, wanted: Any) -> type | None:
        """Return the type of the resource that fits a parameter annotated *wanted*, or None.

        Raises:
            TypeError: Several resources fit.
        """
        if not isinstance(wanted, type) or wanted is object:
            return None
        known = [*self._values, *(set(self._factories) - set(self._values))]
        if wanted in known:
            return wanted
        fitting = [kind for kind in known if _is_subclass(kind, wanted)]
        if len(fitting) > 1:
            names = " and ".join(sorted(kind.__name__ for kind in fitting))
            raise TypeError(f"{names} are both a {wanted.__name__}: ask for one of them")
        return fitting[0] if fitting else None

    def __getitem__(self, kind: type) -> Any:
        return self._values[kind]


def _is_subclass(kind: type, wanted: type) -> bool:
    try:
        return issubclass(kind, wanted)
    except TypeError:  # A protocol with data members, or not a runtime one
        return False
