"""What the doors for asyncio and for threads share: stand-ins for objects that live under trio.

There is one implementation, and it runs under trio. A :class:`StandIn` is held by an application that
does not: reading an attribute reads the attribute, a plain call is the plain call, and what would be
awaited is run under trio while the caller waits in its own way. What comes back is stood in for as
well if it has anything to wait for.

:mod:`amqp_rt.aio` and :mod:`amqp_rt.sync` say how one waits.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import AsyncGeneratorType
from typing import Any, Final

import msgspec

from .container.routes import (
    Declaration,
    NodeDecorator,
    Router,
    RpcDecorator,
    SourceDecorator,
    declared,
)

_DECORATORS: Final = (NodeDecorator, RpcDecorator, SourceDecorator)
#: Methods to which nodes of the application are given.
_OF_NODES: Final = ("add", "remove", "serve")
#: Methods that make something worth standing in for.
_WAITING: Final = ("__aenter__", "__anext__", "__aiter__", "__await__")


class StandIn:
    """Behaves like *target*, for somebody on the other side of *door*."""

    __slots__ = ("_door", "_target")

    def __init__(self, door: Door, target: Any) -> None:
        self._door = door
        self._target = target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self._target).__name__!r} shows no {name!r} here")
        return self._door.attribute(self._target, name)

    @property  # type: ignore[misc]  # of object it can be assigned to
    def __class__(self) -> type:
        return type(self._target)

    def __repr__(self) -> str:
        return repr(self._target)

    def __eq__(self, other: object) -> bool:
        return bool(self._target == inward(other))

    def __hash__(self) -> int:
        return hash(self._target)


def inward(value: Any) -> Any:
    """What *value* stands in for; itself if it is nobody's stand-in."""
    return value._target if issubclass(type(value), StandIn) else value


def _lives(value: object) -> bool:
    """Whether *value* has something to wait for."""
    kind: Any = type(value)
    return _is_alive(kind)


@functools.lru_cache(maxsize=1_000)
def _is_alive(kind: Any) -> bool:
    if issubclass(kind, AsyncGeneratorType):
        return True
    if not kind.__module__.startswith("amqp_rt.") and not hasattr(kind, "__aenter__"):
        return False
    return any(hasattr(kind, name) for name in _WAITING) or any(
        inspect.iscoroutinefunction(member) for _, member in inspect.getmembers_static(kind)
    )


class Door(ABC):
    """A way between trio and the code of an application."""

    @abstractmethod
    def stand_in(self, target: Any) -> StandIn:
        """Something for the application to hold in place of *target*."""

    @abstractmethod
    def wait(self, call: Callable[[], Any]) -> Any:
        """Run what *call* returns to its end under trio, and let the application wait for it."""

    @abstractmethod
    def plain(self, call: Callable[[], Any]) -> Any:
        """Make a call that waits for nothing, where it may be made."""

    @abstractmethod
    def handler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """*function* of the application, for trio to call; it has its name and its signature."""

    def outward(self, value: Any) -> Any:
        """*value* as the application gets it."""
        if isinstance(value, list | tuple) and any(map(_lives, value)):
            return type(value)(map(self.outward, value))
        if _lives(value):
            return self.stand_in(value)
        if inspect.iscoroutinefunction(value):
            return self._calling(value)
        return value

    def given(self, value: Any) -> Any:
        """*value* as an object under trio gets it."""
        if isinstance(value, list | tuple):
            return type(value)(map(self.given, value))
        if inspect.isfunction(value) or inspect.ismethod(value):
            return self.handler(value)
        return inward(value)

    def attribute(self, target: Any, name: str) -> Any:
        """What the application sees as *name* of *target*."""
        value = getattr(target, name)
        if isinstance(value, _DECORATORS):
            return type(value)(functools.partial(self._declare, value.register))
        if inspect.isroutine(value):
            return self._calling(value, self.nodes if name in _OF_NODES else self.given)
        return self.outward(value)

    def _calling(
        self, function: Callable[..., Any], given: Callable[[Any], Any] | None = None
    ) -> Callable[..., Any]:
        """*function* of an object under trio, for the application to call."""
        waits = inspect.iscoroutinefunction(function)
        take = given or self.given

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = functools.partial(
                function,
                *map(take, args),
                **{name: self.given(value) for name, value in kwargs.items()},
            )
            return self.wait(bound) if waits else self.outward(self.plain(bound))

        return call

    def _declare(
        self, register: Callable[[Any, Declaration], None], function: Any, declaration: Declaration
    ) -> None:
        register(self.handler(function), self._declaration(declaration))

    def _declaration(self, declaration: Declaration) -> Declaration:
        middleware = tuple(map(self.handler, declaration.middleware))
        return msgspec.structs.replace(declaration, middleware=middleware)

    def nodes(self, node: Any) -> Any:
        """*node* of the application as trio calls it; the address of one is itself."""
        if isinstance(node, str):
            return node
        router = Router()
        for function, declaration in declared(node):
            router.declare(self.handler(function), self._declaration(declaration))
        return router
