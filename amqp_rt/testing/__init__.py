"""Test tools, public as ``trio.testing`` is.

Names are imported on first use: pytest loads the plug-in in every run, whether or not it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..net.traces.recording import Trace, read_trace
    from .checks import check_store
    from .fronts import FrontClient, check_front
    from .honesty import assert_honest
    from .loopback import LoopbackBroker
    from .replaying import Replayed, record, replay
    from .script import Script, ScriptFailed
    from .virtual import VirtualAmqp

__all__ = [
    "FrontClient",
    "LoopbackBroker",
    "Replayed",
    "Script",
    "ScriptFailed",
    "Trace",
    "VirtualAmqp",
    "assert_honest",
    "check_front",
    "check_store",
    "read_trace",
    "record",
    "replay",
]

#: Public name → the module that defines it.
_HOMES: dict[str, str] = {
    "FrontClient": "amqp_rt.testing.fronts",
    "LoopbackBroker": "amqp_rt.testing.loopback",
    "Replayed": "amqp_rt.testing.replaying",
    "Script": "amqp_rt.testing.script",
    "ScriptFailed": "amqp_rt.testing.script",
    "Trace": "amqp_rt.net.traces.recording",
    "VirtualAmqp": "amqp_rt.testing.virtual",
    "assert_honest": "amqp_rt.testing.honesty",
    "check_front": "amqp_rt.testing.fronts",
    "check_store": "amqp_rt.testing.checks",
    "read_trace": "amqp_rt.net.traces.recording",
    "record": "amqp_rt.testing.replaying",
    "replay": "amqp_rt.testing.replaying",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
