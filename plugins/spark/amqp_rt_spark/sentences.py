"""Errors that begin with their sentence.

Spark shows an error of a Python data source as the text of its traceback, whose last line says what is
wrong: a hundred lines below the place where people begin to read. Python prints the cause of an error before the
error itself, and a cause that was never raised has no traceback; so the sentence is made the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Final, TypeVar

_Kind = TypeVar("_Kind", bound=type)

#: What Spark calls, but for the conditions of a reader: whether that method is there says something.
_CALLED: Final = (
    *("schema", "reader", "streamReader", "writer", "streamWriter"),
    *("initialOffset", "latestOffset", "reportLatestOffset", "prepareForTriggerAvailableNow"),
    *("partitions", "read", "write", "commit"),
)


def sentence_first(kind: _Kind) -> _Kind:
    """Have what Spark calls of the class *kind* raise errors that begin with their sentence."""
    for name in _CALLED:
        method = getattr(kind, name, None)
        if method is not None and not method.__module__.startswith("pyspark"):
            setattr(kind, name, _wrapped(method))
    return kind


def _wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    if method.__name__ == "read":
        # Rows come, and fail, while what it returns is walked.

        @wraps(method)
        def generated(*args: Any, **kwargs: Any) -> Iterator[Any]:
            try:
                yield from method(*args, **kwargs)
            except Exception as error:
                lead(error)
                raise

        return generated

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            lead(error)
            raise

    return called


def lead(error: BaseException) -> None:
    """Put the sentence of *error* in front of its traceback, and of those of its causes."""
    root, known = error, {id(error)}
    while True:
        hidden = root.__suppress_context__
        before = root.__cause__ or (None if hidden else root.__context__)
        if isinstance(before, _Sentence):
            # A method calls another one that Spark calls, too.
            return
        if before is None or id(before) in known:
            break
        known.add(id(before))
        root = before
    # The name of the class, which Python prints before the text, is that of the error.
    kind = type(type(error).__name__, (_Sentence,), {"__module__": "builtins"})
    root.__cause__ = kind(str(error))


class _Sentence(Exception):
    """What is wrong, without how it came to that."""
