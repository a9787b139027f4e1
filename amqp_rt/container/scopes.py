"""Resources that live as long as the handling of one message: a database session, the user of a token."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

from msgspec import Struct

if TYPE_CHECKING:
    from .resources import Resources
    from .routes import Context

#: Key of a value with the lifetime of a message: its type, or the function of ``Depends``.
Key: TypeAlias = Any
#: Function that makes one argument for a message.
Maker: TypeAlias = "Callable[[Context], Any]"


class PerMessage:
    """Resource of a container that is made anew for each message.

    Args:
        factory: An ``@asynccontextmanager`` function, entered before the handler is called and left before the
            message gets its outcome, with the handler's exception if there is one. Its parameters are passed by
            type: other resources, and what a handler can request.
        as_type: Type of the resource, by default the annotated one of the factory's items.
    """

    def __init__(self, factory: Callable[..., Any], *, as_type: type | None = None) -> None:
        if not is_block(factory):
            raise TypeError(f"PerMessage takes an @asynccontextmanager function, not {factory!r}")
        self.factory = factory
        self.as_type = as_type

    def __repr__(self) -> str:
        return f"PerMessage({self.factory.__qualname__})"


class Depends(Struct, frozen=True):
    """Mark of a parameter, ``Annotated[User, Depends(current_user)]``, whose value a function makes for each message.

    Args:
        make: A function, ``def`` or ``async def``, or an ``@asynccontextmanager`` function, with parameters as for
            :class:`PerMessage`. It is called once for a message, however many parameters depend on it.
    """

    make: Callable[..., Any]

    def __post_init__(self) -> None:
        make = self.make
        if not callable(make):
            raise TypeError(f"Depends takes a function, not {make!r}")
        # The result of its call would be passed as it is: a generator, or a block that is not entered.
        if (
            inspect.isgeneratorfunction(make)
            or inspect.isasyncgenfunction(make)
            or _is_sync_block(make)
        ):
            raise TypeError(
                f"Depends({_shown(make)}): a function that yields is an `async def` with @asynccontextmanager"
            )


class _Reader:
    """Maker of an argument that reads what was made for the message."""

    __slots__ = ("key",)

    def __init__(self, key: Key) -> None:
        self.key = key

    def __call__(self, context: Context) -> Any:
        return context.made[self.key]


class _Making(Struct):
    """One value to make for a message, after those that it needs."""

    key: Key
    make: Callable[..., Any]
    arguments: dict[str, Maker]

    @property
    def needs(self) -> set[Key]:
        """Keys of the values that it needs."""
        return {each.key for each in self.arguments.values() if isinstance(each, _Reader)}


class Scope:
    """Values that a handler needs for each message, in the order in which they are made.

    Args:
        name: Name of the handler, for errors.
        resources: Resources of the container.
        by_type: Makers of what a handler can request by type.
    """

    def __init__(self, name: str, resources: Resources, by_type: Mapping[type, Maker]) -> None:
        self._name = name
        self._resources = resources
        self._by_type = by_type
        self._steps: dict[Key, _Making] = {}
        #: Keys of the values that the handler itself needs.
        self._wanted: set[Key] = set()
        #: Factories of this handler alone, used where the container has none of their type.
        self._own: dict[type, Callable[..., Any]] = {}

    def __bool__(self) -> bool:
        """Whether anything has to be made."""
        return bool(self._steps)

    def provide(self, kind: type, factory: Callable[..., Any]) -> Maker:
        """Make a value of *kind* for each message, and return its maker.

        The container's own resource of that type, if it is made for each message, goes before *factory*.
        """
        self._own[kind] = factory
        self._add(kind, self._factory(kind) or factory, ())
        return _Reader(kind)

    def _factory(self, wanted: Any) -> Callable[..., Any] | None:
        """Return the factory of a value of the type *wanted* that has the lifetime of a message."""
        found = self._resources.per_message(wanted)
        return found or (self._own.get(wanted) if isinstance(wanted, type) else None)

    def maker(self, wanted: Any) -> Maker | None:
        """Return the maker of a parameter annotated *wanted*; None if its value has not this lifetime.

        Raises:
            TypeError: A factory has a parameter that cannot be provided, or needs its own value.
        """
        made = depends_on(wanted)
        if made is not None:
            self._add(made, made, ())
            return _Reader(made)
        factory = self._factory(wanted)
        if factory is None:
            return None
        self._add(wanted, factory, ())
        return _Reader(wanted)

    def argument(self, wanted: Any) -> Maker | None:
        """Return the maker of a parameter annotated *wanted*, of any lifetime; None if nothing provides it.

        Raises:
            TypeError: As for :meth:`maker`.
        """
        return self._argument(wanted, ())

    def _add(self, key: Key, make: Callable[..., Any], needed_by: tuple[Key, ...]) -> None:
        if not needed_by:
            self._wanted.add(key)
        if key in self._steps:
            return
        if key in needed_by:
            circle = " needs ".join(_shown(each) for each in (*needed_by, key))
            raise TypeError(f"{self._name}: resources need each other: {circle}")
        arguments: dict[str, Maker] = {}
        for parameter, wanted in parameters_of(make):
            maker = self._argument(wanted, (*needed_by, key))
            if maker is not None:
                arguments[parameter.name] = maker
            elif parameter.default is parameter.empty:
                raise TypeError(
                    f"{self._name}: {_shown(key)} needs {parameter.name}: {_shown(wanted)}, and no resource of"
                    " that type is provided"
                )
        self._steps[key] = _Making(key, make, arguments)

    def _argument(self, wanted: Any, needed_by: tuple[Key, ...]) -> Maker | None:
        made = depends_on(wanted)
        if made is not None:
            self._add(made, made, needed_by)
            return _Reader(made)
        if isinstance(wanted, type) and wanted in self._by_type:
            return self._by_type[wanted]
        factory = self._factory(wanted)
        if factory is not None:
            self._add(wanted, factory, needed_by)
            return _Reader(wanted)
        found = self._resources.find(wanted)
        if found is None:
            return None
        resources = self._resources
        return lambda context: resources[found]

    @asynccontextmanager
    async def entered(self, context: Context) -> AsyncIterator[None]:
        """Make the values for *context*, and end them in the opposite order when the block ends."""
        async with AsyncExitStack() as stack:
            for step in self._to_make():
                context.made[step.key] = await self._made(step, context, stack)
            yield

    def _to_make(self) -> Iterable[_Making]:
        """Return what to make, without that which only values replaced by tests need."""
        replaced = self._resources.overrides
        if not replaced:
            return self._steps.values()
        needed = set(self._wanted)
        # A value comes after those that it needs.
        for step in reversed(self._steps.values()):
            if step.key in needed and step.key not in replaced:
                needed |= step.needs
        return [step for step in self._steps.values() if step.key in needed]

    async def _made(self, step: _Making, context: Context, stack: AsyncExitStack) -> Any:
        if step.key in self._resources.overrides:
            return self._resources.overrides[step.key]
        value = step.make(**{name: make(context) for name, make in step.arguments.items()})
        if is_block(step.make):
            return await stack.enter_async_context(value)
        return await value if inspect.isawaitable(value) else value


def depends_on(wanted: Any) -> Callable[..., Any] | None:
    """Return the function of a :class:`Depends` in the annotation *wanted*; None without one.

    Raises:
        TypeError: The mark has no function.
    """
    if get_origin(wanted) is Annotated:
        for mark in get_args(wanted)[1:]:
            if isinstance(mark, Depends):
                return mark.make
            if mark is Depends:
                raise TypeError(
                    f"Depends takes a function: Annotated[{_shown(get_args(wanted)[0])}, Depends(f)]"
                )
    return None


def check_default(owner: str, parameter: inspect.Parameter) -> None:
    """Refuse *parameter* of *owner* if its default is a :class:`Depends`, which would be passed as it is.

    Raises:
        TypeError: It is one.
    """
    if isinstance(parameter.default, Depends):
        name = parameter.name
        raise TypeError(
            f"{owner}: Depends is no default of {name}: write {name}: Annotated[T, Depends({_shown(parameter.default.make)})]"
        )


def is_block(factory: Any) -> bool:
    """Return whether *factory* is an ``@asynccontextmanager`` function."""
    return inspect.isasyncgenfunction(getattr(factory, "__wrapped__", None))


def _is_sync_block(factory: Any) -> bool:
    """Return whether *factory* is a ``@contextmanager`` function."""
    made_in = getattr(factory, "__globals__", {}).get("__name__")
    return made_in == "contextlib" and not is_block(factory)


def parameters_of(factory: Callable[..., Any]) -> list[tuple[inspect.Parameter, Any]]:
    """Return the parameters of *factory*, each with its annotation.

    Raises:
        TypeError: An annotation cannot be read.
    """
    function = getattr(factory, "__wrapped__", factory)
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"{_shown(factory)}: an annotation names {error.name!r}, which is unknown"
        ) from None
    found = inspect.signature(factory).parameters.values()
    for each in found:
        check_default(_shown(factory), each)
    return [
        (each, hints.get(each.name, Any))
        for each in found
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]


def _shown(thing: Any) -> str:
    return getattr(thing, "__qualname__", None) or str(thing)
