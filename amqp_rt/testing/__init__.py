"""Test tools, public as ``trio.testing`` is.

The names are looked up on first use: pytest loads the plug-in in every run, whoever uses it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .loopback import LoopbackBroker
    from .script import Script, ScriptFailed
    from .virtual import VirtualAmqp

__all__ = ["LoopbackBroker", "Script", "ScriptFailed", "VirtualAmqp"]

#: Public name → the module that defines it.
_HOMES: dict[str, str] = {
    "LoopbackBroker": "loopback",
    "Script": "script",
    "ScriptFailed": "script",
    "VirtualAmqp": "virtual",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
