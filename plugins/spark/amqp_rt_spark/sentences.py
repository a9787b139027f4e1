"""Errors that begin with their message.

Spark shows an error of a Python data source as the text of its traceback, whose last line holds the message:
a hundred lines below the place where people begin to read. Python prints the cause of an error before the
error itself, and a cause that was never raised has no traceback; so the message is made the cause. Spark removes
causes from errors whose traceback it shortens, so an error of another class is raised, which keeps its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Final, TypeVar

_Kind = TypeVar("_Kind", bound=type)

#: Methods that Spark calls, except ``pushFilters``, whose presence alone changes Spark's plan.
_CALLED: Final = (
    *("schema", "reader", "streamReader", "writer", "streamWriter"),
    *("initialOffset", "latestOffset", "reportLatestOffset", "prepareForTriggerAvailableNow"),
    *("partitions", "read", "write", "commit"),
)


def sentence_first(kind: _Kind) -> _Kind:
    """Make the methods of the class *kind* that Spark calls raise errors that begin with their message."""
    for name in _CALLED:
        method = getattr(kind, name, None)
        if method is not None and not method.__module__.startswith("pyspark"):
            setattr(kind, name, _wrapped(method))
    return kind


def _wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    if method.__name__ == "read":
        # A generator: rows are produced, and errors raised, during iteration.

        @wraps(method)
        def generated(*args: Any, **kwargs: Any) -> Iterator[Any]:
            try:
                yield from method(*args, **kwargs)
            except Exception as error:
                raise led(error)  # noqa: B904 - it has the cause that it is to have

        return generated

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            raise led(error)  # noqa: B904 - it has the cause that it is to have

    return called


def led(error: Exception) -> Exception:
    """Return *error* with its message ahead of its traceback, and ahead of those of its causes."""
    if isinstance(error, _Led):
        # Raised by a method that another such method called.
        return error
    # Python prints the name of the class before the text, so it must be that of the error.
    kind = type(error)
    first: BaseException = type(kind.__name__, (Exception,), {"__module__": "builtins"})(str(error))
    if (before := _before(error)) is not None:
        root, known = before, {id(error), id(before)}
        while (cause := _before(root)) is not None and id(cause) not in known:
            known.add(id(cause))
            root = cause
        root.__cause__ = first
        first = before
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "led_by": first}
    made = type(kind.__name__, (_Led, kind), names)
    try:
        copy: Exception = made.__new__(made, *error.args)
    except TypeError:
        # The constructor takes more than a text: return the error unchanged.
        return error
    copy.__dict__.update(error.__dict__)
    return copy.with_traceback(error.__traceback__)


def _before(error: BaseException) -> BaseException | None:
    """Return the error that Python prints before *error*."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


class _Led(Exception):
    """Error whose cause cannot be replaced."""

    led_by: BaseException

    @property
    def __cause__(self) -> BaseException:
        return self.led_by

    @__cause__.setter
    def __cause__(self, value: object) -> None:
        """Ignore *value*: Spark would remove the cause."""
