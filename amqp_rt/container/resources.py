"""Objects of an application that handlers request by type."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from typing import Any, get_args, get_type_hints

from .scopes import PerMessage, is_block, parameters_of


class Resources:
    """Objects that handlers may request by type.

    A factory is an ``@asynccontextmanager`` function whose return annotation names the type that it
    yields; it is entered when the container starts and left when the container has stopped. Its parameters are
    other resources. A :class:`~amqp_rt.container.scopes.PerMessage` is made for each message.
    """

    def __init__(self, provided: Iterable[Any] = ()) -> None:
        self._values: dict[type, Any] = {}
        self._factories: dict[type, Callable[..., AbstractAsyncContextManager[Any]]] = {}
        self._per_message: dict[type, Callable[..., AbstractAsyncContextManager[Any]]] = {}
        #: Values in place of resources, and of functions of ``Depends``, for tests.
        self.overrides: dict[Any, Any] = {}
        for each in provided:
            self.provide(each)

    def provide(self, thing: Any, *, as_type: type | None = None) -> None:
        """Add an object, a factory of one, or a factory of one for each message.

        Raises:
            TypeError: The type of the factory's object is unknown, or there is a resource of that
                type.
        """
        if isinstance(thing, PerMessage):
            kind = _made_by(thing.factory, as_type or thing.as_type)
            self._free(kind)
            self._per_message[kind] = thing.factory
        elif is_block(thing):
            kind = _made_by(thing, as_type)
            self._free(kind)
            self._factories[kind] = thing
        else:
            kind = as_type or type(thing)
            self._free(kind)
            self._values[kind] = thing

    def _free(self, kind: type) -> None:
        if kind in self._values or kind in self._factories or kind in self._per_message:
            raise TypeError(f"there is a resource of type {kind.__name__} already")

    @property
    def unmade(self) -> bool:
        """Whether factories have not made their object."""
        return any(kind not in self._values for kind in self._factories)

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Make the objects of all factories, those that others need first, for the time of the block.

        Raises:
            TypeError: A factory needs what is not provided, or its own object.
        """
        async with AsyncExitStack() as stack:
            for kind in self._factories:
                await self._make(kind, stack, ())
            yield

    async def _make(self, kind: type, stack: AsyncExitStack, needed_by: tuple[type, ...]) -> None:
        if kind in self._values:
            return
        if kind in needed_by:
            circle = " needs ".join(each.__qualname__ for each in (*needed_by, kind))
            raise TypeError(f"resources need each other: {circle}")
        factory = self._factories[kind]
        arguments: dict[str, Any] = {}
        for parameter, wanted in parameters_of(factory):
            found = self.find(wanted)
            if found is not None and found not in self._per_message:
                if found not in self._values:
                    await self._make(found, stack, (*needed_by, kind))
                arguments[parameter.name] = self[found]
            elif parameter.default is parameter.empty:
                raise TypeError(
                    f"the resource {kind.__qualname__} needs {parameter.name}: "
                    f"{getattr(wanted, '__qualname__', wanted)}, and no resource of that type is provided"
                    " that lives as long"
                )
        value = await stack.enter_async_context(factory(**arguments))
        self._values[kind] = value

    def per_message(self, wanted: Any) -> Callable[..., AbstractAsyncContextManager[Any]] | None:
        """Return the factory for each message of a resource of the type *wanted*; None if there is none."""
        return self._per_message.get(wanted) if isinstance(wanted, type) else None

    @contextmanager
    def overridden(self, kind: Any, value: Any) -> Iterator[None]:
        """Use *value* in place of the resource *kind*, or of the function of a ``Depends``, within the block."""
        # As for handlers: a base class or a protocol stands for the resource that fits it.
        kind = self.find(kind) or kind
        if kind in self.overrides:
            raise ValueError(f"{kind!r} is overridden already")
        self.overrides[kind] = value
        try:
            yield
        finally:
            del self.overrides[kind]

    def find(self, wanted: Any) -> type | None:
        """Return the type of the resource that fits a parameter annotated *wanted*, or None.

        Raises:
            TypeError: Several resources fit.
        """
        if not isinstance(wanted, type) or wanted is object:
            return None
        known = list(dict.fromkeys((*self._values, *self._factories, *self._per_message)))
        if wanted in known:
            return wanted
        fitting = [kind for kind in known if _is_subclass(kind, wanted)]
        if len(fitting) > 1:
            names = " and ".join(sorted(kind.__name__ for kind in fitting))
            raise TypeError(f"{names} are both a {wanted.__name__}: ask for one of them")
        return fitting[0] if fitting else None

    def __getitem__(self, kind: type) -> Any:
        return self.overrides[kind] if kind in self.overrides else self._values[kind]


def _is_subclass(kind: type, wanted: type) -> bool:
    try:
        return issubclass(kind, wanted)
    except TypeError:  # A protocol with data members, or not a runtime one
        return False


def _made_by(factory: Any, as_type: type | None) -> type:
    """Return the type of the object that *factory* makes.

    Raises:
        TypeError: It is neither annotated nor given.
    """
    kind: Any = as_type
    if kind is None:
        made = get_args(get_type_hints(factory.__wrapped__).get("return"))
        kind = made[0] if made else None
    if not isinstance(kind, type):
        raise TypeError(
            f"{factory.__qualname__}() has no type of its items: annotate it as "
            "-> AsyncIterator[Thing], or pass as_type=Thing"
        )
    return kind
