"""Modules in C, compiled here from their source.

``AMQP_RT_SANITIZE=1`` compiles them with the checks of memory and of undefined behaviour, which the process
must have loaded (``LD_PRELOAD=$(cc -print-file-name=libasan.so)``).
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
#: Whether the modules have to be compiled with checks, instead of using installed ones.
SANITIZE: Final = os.environ.get("AMQP_RT_SANITIZE") == "1"


def compiled_here(source: Path) -> Any:
    """Return the module that *source* makes; None if there is no source or no compiler."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None or not source.is_file():
        return None
    flags = ["-O1", "-g", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    flags += ["-Wno-missing-field-initializers"]
    if SANITIZE:
        flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    known = hashlib.sha256(source.read_bytes() + repr(flags).encode()).hexdigest()[:16]
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    built = ROOT / ".build" / source.stem.strip("_") / known / f"{source.stem}{suffix}"
    if not built.is_file():
        built.parent.mkdir(parents=True, exist_ok=True)
        made = built.with_name(f"{os.getpid()}{suffix}")
        include = f"-I{sysconfig.get_path('include')}"
        command = [*compiler, *flags, include, str(source), "-o", str(made)]
        # With the checks loaded, the compiler itself would be checked for leaks at its end.
        environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        subprocess.run(command, check=True, timeout=100, env=environ)
        made.rename(built)
    spec = importlib.util.spec_from_file_location(f"{source.parent.name}.{source.stem}", built)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
