"""Counts of calls of a package's Python functions, which do not depend on the speed of the machine."""

from __future__ import annotations

import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import pytest

import amqp_rt

#: Compiled functions call each other without the interpreter.
plain_only = pytest.mark.skipif(
    amqp_rt.COMPILED, reason="counts or replaces plain Python functions"
)


class Calls:
    """Calls of functions of *packages* in this thread while the context is entered.

    A coroutine or generator that is resumed counts as a call each time. Comprehensions do not count: from
    Python 3.12 on they are no functions.
    """

    def __init__(self, *packages: str) -> None:
        self.counts: Counter[str] = Counter()
        self._folders = tuple(_folder(name) for name in packages or ("amqp_rt",))
        self._names: dict[Any, str] = {}

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            name = ""
            if code.co_filename.startswith(self._folders) and not code.co_name.endswith("comp>"):
                name = f"{Path(code.co_filename).stem}.{code.co_qualname}"
            self._names[code] = name
        if name:
            self.counts[name] += 1

    def check(self, messages: int, at_most: int) -> None:
        """Fail if more than *at_most* calls were counted for each of *messages*."""
        found = self.counts.total() / messages
        if found > at_most:
            lines = [
                f"{count / messages:8.2f}  {name}" for name, count in self.counts.most_common()
            ]
            pytest.fail(
                f"{found:.2f} calls for a message, and at most {at_most} are allowed. Look in the list "
                "for the call that is new, and do without it on this path. If it has to be, raise the "
                "number in the commit that says why.\n" + "\n".join(lines),
                pytrace=False,
            )


def _folder(package: str) -> str:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent) + "/"
