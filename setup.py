"""Compiles the codec, the engines and the pure parts of the broker with mypyc, where that is possible.

Everything else about the package is in pyproject.toml. The ``.py`` files are always shipped: without
the compiled modules the same source runs as it stands, slower. ``AMQP_RT_COMPILE`` chooses:

* unset: compile if it works; without a C compiler the build goes on without (``optional``);
* ``1``: compile, and fail if that does not work (our own wheels);
* ``0``: do not compile: a pure ``py3-none-any`` wheel.

Editable installs stay pure, so that a changed line takes effect at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import setup

COMPILED = [
    "amqp_rt/codec",
    "amqp_rt/core",
    "amqp_rt/broker/observed.py",
    "amqp_rt/broker/queues.py",
    "amqp_rt/broker/subscriptions.py",
]

#: Modules of those folders that stay interpreted, and why. (Class keywords: gc, frozen, kw_only.)
INTERPRETED = {
    "amqp_rt/codec/section_types.py": "msgspec Structs: mypyc drops the keywords of their classes",
    "amqp_rt/core/options.py": "msgspec Structs: mypyc drops the keywords of their classes",
    "amqp_rt/core/performatives.py": "msgspec Structs: mypyc drops the keywords of their classes",
    "amqp_rt/core/sasl_frames.py": "msgspec Structs: mypyc drops the keywords of their classes",
}


def sources() -> list[str]:
    """The modules to compile, as paths."""
    roots = [Path(name) for name in COMPILED]
    found = [path for root in roots for path in (root.glob("*.py") if root.is_dir() else [root])]
    return sorted(
        path.as_posix()
        for path in found
        if path.is_file() and path.name != "__init__.py" and path.as_posix() not in INTERPRETED
    )


def extensions() -> list[object]:
    """What setuptools is to compile in this run; nothing when it only reads the metadata."""
    wish = os.environ.get("AMQP_RT_COMPILE", "")
    if wish == "0" or not {"bdist_wheel", "build", "build_ext", "install"} & set(sys.argv):
        return []
    try:
        from mypyc.build import mypycify

        found = mypycify(["--strict", *sources()], group_name="amqp_rt", opt_level="3")
    except (
        Exception,
        SystemExit,
    ) as error:  # SystemExit is how mypyc reports what it cannot compile
        if wish == "1":
            raise
        print(f"not compiled, running as plain Python instead: {error}", file=sys.stderr)
        return []
    for extension in found:
        extension.optional = wish != "1"
    return list(found)


setup(ext_modules=extensions())
