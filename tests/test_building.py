"""setup.py with and without a working compiler, tried on a distribution of two modules.

The real distributions are built by make, in an environment that has nothing else, and for other machines by
cibuildwheel; the last test checks its list of builds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from amqp_rt.cli.versions import form_of

pytest.importorskip("mypyc")

ROOT = Path(__file__).parent.parent

PROJECT = """\
[project]
name = "tiny"
version = "1"
[tool.setuptools]
packages = ["tiny"]
[tool.mypyc]
package = "tiny"
compiled = ["tiny"]
interpreted = ["tiny/slow.py"]
"""
#: Uses an interpreted module, which type-checks only where absent_from_here is installed.
HOT = """\
from .slow import Kept

def twice(kept: Kept) -> int:
    return kept.value + kept.value
"""
SLOW = """\
import absent_from_here
import yaml

class Kept(absent_from_here.Base):
    value: int

def known() -> str:
    return absent_from_here.known()  # type: ignore[no-any-return]
"""


C_PROJECT = PROJECT.replace('compiled = ["tiny"]', 'compiled = []\nc = ["tiny/_fast.c"]')
C = """\
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_fast", NULL, 0, NULL};
PyMODINIT_FUNC PyInit__fast(void) { return PyModule_Create(&definition); }
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    package = tmp_path / "tiny"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "hot.py").write_text(HOT)
    (package / "slow.py").write_text(SLOW)
    return tmp_path


def build(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build", "--build-lib", "built"],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def note(folder: Path) -> str:
    return (folder / "built" / "tiny" / "not_compiled.txt").read_text()


@pytest.mark.slow
def test_a_plain_build_says_that_it_was_asked_for(tiny: Path) -> None:
    assert build(tiny, AMQP_RT_COMPILE="0").returncode == 0
    assert note(tiny) == "AMQP_RT_COMPILE was 0 when it was built\n"
    assert (tiny / "built" / "tiny" / "hot.py").is_file()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="CC names the compiler on POSIX only")
@pytest.mark.parametrize("compiler", ["no-such-compiler", "no-such-compiler -pthread"])
def test_without_a_compiler_the_build_goes_on_and_says_why(tiny: Path, compiler: str) -> None:
    done = build(tiny, CC=compiler)
    assert done.returncode == 0, done.stderr
    assert note(tiny) == "no C compiler: 'no-such-compiler' was not found\n"
    assert f"tiny is not compiled and runs as plain Python: {note(tiny)}" in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="CC names the compiler on POSIX only")
def test_a_build_that_has_to_compile_fails_without_a_compiler(tiny: Path) -> None:
    done = build(tiny, CC="no-such-compiler", AMQP_RT_COMPILE="1")
    assert done.returncode != 0
    assert "no C compiler: 'no-such-compiler' was not found" in done.stderr


@pytest.mark.slow
def test_what_mypyc_cannot_compile_is_named(tiny: Path) -> None:
    (tiny / "tiny" / "hot.py").write_text(
        "def twice(value: int) -> str:\n    return value + value\n"
    )
    done = build(tiny)
    assert done.returncode == 0, done.stderr
    told = note(tiny)
    assert told.startswith("mypyc: tiny/hot.py:2: error: Incompatible return value type"), told
    assert told.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="CC names the compiler on POSIX only")
def test_packages_that_are_absent_do_not_matter_and_nothing_is_compiled_by_halves(
    tiny: Path,
) -> None:
    # mypyc succeeds; the C compiler, a fake, compiles the first file only.
    compiler = tiny / "cc"
    compiler.write_text(
        '#!/bin/sh\n[ -e used ] && exit 1\nif [ "$1" = -shared ]; then touch used; fi\n'
        'for each; do out=$each; done; : >"$out"\n'
    )
    compiler.chmod(0o755)
    done = build(tiny, CC=str(compiler), LDSHARED=f"{compiler} -shared")
    assert done.returncode == 0, done.stderr
    assert (tiny / "used").exists(), done.stderr
    assert note(tiny).lower().startswith("the c compiler failed: command '")
    assert not list(tiny.glob("built/**/*.so"))


@pytest.mark.slow
def test_a_module_in_c_is_compiled_for_all_versions(tiny: Path) -> None:
    (tiny / "pyproject.toml").write_text(C_PROJECT)
    (tiny / "tiny" / "_fast.c").write_text(C)
    done = build(tiny)
    assert done.returncode == 0, done.stderr
    if not list(tiny.glob("built/tiny/_fast*")):
        pytest.skip(note(tiny))
    if os.name == "posix":
        assert (tiny / "built" / "tiny" / "_fast.abi3.so").is_file()
    code = "import tiny._fast"
    subprocess.run([sys.executable, "-c", code], cwd=tiny / "built", check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "environ", "why"),
    [
        (C, {"AMQP_RT_COMPILE": "0"}, "AMQP_RT_COMPILE was 0"),
        (C, {"CC": "no-such-compiler"}, "no C compiler"),
        ("#error no\n", {}, "the C compiler failed"),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="CC names the compiler on POSIX only")
def test_without_a_module_in_c_the_build_goes_on_and_says_why(
    tiny: Path, source: str, environ: dict[str, str], why: str
) -> None:
    (tiny / "pyproject.toml").write_text(C_PROJECT)
    (tiny / "tiny" / "_fast.c").write_text(source)
    done = build(tiny, **environ)
    assert done.returncode == 0, done.stderr
    if shutil.which("cc") or "compiler failed" not in why:
        assert note(tiny).startswith(why)
    assert not list(tiny.glob("built/**/*.so"))


@pytest.mark.slow
def test_a_source_distribution_has_the_modules_in_c(tiny: Path) -> None:
    (tiny / "pyproject.toml").write_text(C_PROJECT)
    (tiny / "tiny" / "_fast.c").write_text(C)
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", "made"]
    environ = {**os.environ, "CC": "no-such-compiler"}
    subprocess.run(command, cwd=tiny, env=environ, check=True, timeout=100, capture_output=True)
    with tarfile.open(next((tiny / "made").iterdir())) as packed:
        assert "tiny-1/tiny/_fast.c" in packed.getnames()


def test_the_version_tells_the_form_and_the_reason(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tiny)
    assert form_of("tiny") == "plain Python"
    (tiny / "tiny" / "not_compiled.txt").write_text("no C compiler\n")
    assert form_of("tiny") == "plain Python: no C compiler"
    (tiny / "tiny" / f"hot{EXTENSION_SUFFIXES[0]}").touch()
    assert form_of("tiny") == "compiled"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distribution", "pythons"),
    [
        (".", {"cp311", "cp312", "cp313", "cp314"}),
        ("plugins/amqp010", {"cp311", "cp312", "cp313", "cp314"}),
        ("plugins/amqp091", {"cp311", "cp312", "cp313", "cp314"}),
        ("plugins/servicebus", {"cp311", "cp312", "cp313", "cp314"}),
        # The limited API: one wheel for all versions.
        ("plugins/spark", {"cp311"}),
    ],
)
@pytest.mark.parametrize(
    ("platform", "wheels"),
    [("linux", "manylinux"), ("linux", "musllinux"), ("macos", "macosx"), ("windows", "win")],
)
def test_wheels_for_each_platform_and_python(
    platform: str, wheels: str, distribution: str, pythons: set[str], tmp_path: Path
) -> None:
    pytest.importorskip("cibuildwheel")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cibuildwheel", "--print-build-identifiers"),
            *("--platform", platform, "--archs", "auto64", str(ROOT / distribution)),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    listed = [name for name in done.stdout.split() if f"-{wheels}_" in name]
    assert {name.partition("-")[0] for name in listed} == pythons
