"""An AMQP runtime: declare a function on an address, and any AMQP client can talk to it.

The public names are looked up on first use (PEP 562), so that importing the pure parts, such as
``amqp_rt.core``, does not import trio.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

__all__ = ["COMPILED", "__version__"]

__version__ = "0.1.0"

#: Whether the codec and the engines run compiled (mypyc) or as plain Python.
COMPILED: bool

#: Public name → the module that defines it. ``__all__`` and the imports under ``TYPE_CHECKING``
#: repeat the names, for readers and type checkers; ``tests/test_public_api.py`` keeps them equal.
_HOMES: dict[str, str] = {}


def __getattr__(name: str) -> object:
    value: object
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name == "COMPILED":
        codec = find_spec("amqp_rt.codec.primitives")
        value = codec is not None and not str(codec.origin).endswith(".py")
    else:
        raise AttributeError(f"module 'amqp_rt' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
