"""Compile the modules listed in ``[tool.mypyc]`` of pyproject.toml, where that is possible.

Modules under ``compiled`` are Python, which mypyc translates to C, and those under ``c`` are C. The latter
use the limited API of Python 3.11 only; a distribution with nothing else to compile has one wheel for all
versions. The ``.py`` files are always shipped: without the compiled modules the same source is interpreted,
which is slower. ``AMQP_RT_COMPILE`` selects the build:

* unset: compile if that works; if not, build without compiled modules and give the reason;
* ``1``: compile, and fail if that does not work (our own wheels);
* ``0``: do not compile: a pure ``py3-none-any`` wheel.

The reason for a build without compiled modules is written to ``not_compiled.txt`` in the package, where
``amqp-rt --version`` finds it: pip shows the output of a build only with ``--verbose``.

Editable installs interpret the Python modules, so that a changed line takes effect at once. C is compiled
for them, too, unless there are modules to interpret: those are plain Python as a whole, or compiled as a
whole. The distributions of this repository have equal copies of this file, since each one builds
from its own source distribution.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

PROJECT = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["tool"]["mypyc"]
PACKAGE: str = PROJECT["package"]
NOTE = "not_compiled.txt"
WISH = os.environ.get("AMQP_RT_COMPILE", "")
#: Level of optimization, by the variable that mypyc's own command reads.
LEVEL = os.environ.get("MYPYC_OPT_LEVEL", "3")

#: Configuration of mypyc's own type check. The environment of the build has neither our dependencies nor
#: their stubs, and other environments have old ones: foreign packages are Any, except those that ship
#: their own types (msgspec, which is a build requirement), and mypyc's decorators, whose types mypy ships.
#: ``make types`` checks the types.
TYPES = f"""\
[mypy]
follow_imports = skip
ignore_missing_imports = True
[mypy-{PACKAGE}.*]
follow_imports = silent
[mypy-mypy_extensions]
follow_imports = silent
"""


class NotCompiled(Exception):
    """Compilation failed; the message is one line."""


def sources() -> list[str]:
    """List the modules to compile, as paths."""
    roots = [Path(name) for name in PROJECT["compiled"]]
    found = [path for root in roots for path in (root.glob("*.py") if root.is_dir() else [root])]
    interpreted = PROJECT["interpreted"]
    return sorted(
        path.as_posix()
        for path in found
        if path.name != "__init__.py" and path.as_posix() not in interpreted
    )


def check_compiler() -> None:
    """Look for a C compiler and Python's headers before mypyc works for half a minute.

    Raises:
        NotCompiled: One of them is missing.
    """
    if os.name != "posix":
        return  # setuptools finds MSVC, or fails with a message of its own.
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        raise NotCompiled(f"no C compiler: {compiler!r} was not found")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        raise NotCompiled(f"no headers of Python: {header} is missing (package python3-dev)")


def extensions() -> list[Extension]:
    """Translate the modules to C.

    Raises:
        NotCompiled: That was not possible.
    """
    check_compiler()
    if not PROJECT["compiled"]:
        return c_extensions()
    printed = io.StringIO()
    try:
        from mypyc.build import mypycify

        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "mypyc.ini")
            config.write_text(TYPES, "utf-8")
            # mypyc prints compile errors and exits.
            with redirect_stdout(printed), redirect_stderr(printed):
                found: list[Extension] = mypycify(
                    [f"--config-file={config}", *sources()], group_name=PACKAGE, opt_level=LEVEL
                )
    except (Exception, SystemExit) as error:
        print(printed.getvalue(), file=sys.stderr)
        first = next((line for line in printed.getvalue().splitlines() if "error:" in line), error)
        raise NotCompiled(f"mypyc: {first}") from error
    return found + c_extensions()


def c_extensions() -> list[Extension]:
    """List the modules that are written in C."""
    return [
        Extension(path.removesuffix(".c").replace("/", "."), [path], py_limited_api=True)
        for path in PROJECT.get("c", [])
    ]


class BuildModules(build_py):
    """Build command that notes beside the modules why they are not compiled."""

    reason = ""

    def run(self) -> None:
        """Copy the modules, and write the reason where there is one."""
        super().run()
        if self.reason and not self.editable_mode:
            write_note(self.build_lib, self.reason)


class BuildExtensions(build_ext):
    """Build command for all extensions or none: a module without its shared library cannot be imported."""

    def run(self) -> None:
        """Compile; if that is not possible, remove the extensions built so far and write the reason."""
        try:
            super().run()
        except Exception as error:
            if WISH == "1":
                raise
            for name in map(self.get_ext_fullpath, (each.name for each in self.extensions)):
                Path(name).unlink(missing_ok=True)
            self.extensions.clear()
            if not self.editable_mode:
                write_note(self.build_lib, f"the C compiler failed: {one_line(error)}")


def write_note(folder: str, reason: str) -> None:
    """Print *reason*, and write it to the package in *folder*."""
    print(f"{PACKAGE} is not compiled and runs as plain Python: {reason}", file=sys.stderr)
    Path(folder, PACKAGE, NOTE).write_text(reason + "\n", "utf-8")


def one_line(error: BaseException) -> str:
    """Return the first line of *error*'s message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def compiled() -> list[Extension]:
    """Return the extensions to compile in this run; none if setuptools only reads the metadata."""
    if "sdist" in sys.argv:
        return c_extensions()  # whose files belong to the source distribution
    if "editable_wheel" in sys.argv and WISH != "0":
        return [] if PROJECT["compiled"] else c_extensions()
    if not {"bdist_wheel", "build", "build_ext", "install"} & set(sys.argv):
        return []
    if WISH == "0":
        BuildModules.reason = "AMQP_RT_COMPILE was 0 when it was built"
        return []
    try:
        return extensions()
    except NotCompiled as error:
        if WISH == "1":
            raise
        BuildModules.reason = one_line(error)
        return []


setup(
    ext_modules=compiled(),
    cmdclass={"build_py": BuildModules, "build_ext": BuildExtensions},
    options={} if PROJECT["compiled"] else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
