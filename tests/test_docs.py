"""Run every Python block of the README.md files and of docs/, so that the documentation is known to work.

The blocks of a page are one program, from the top down, in one namespace and one process. A block
with ``await`` at its top level runs under trio; any other runs as a module would, with a
``__name__`` that is not ``"__main__"``: code under that guard is for the reader's terminal.
A block that begins with ``# NAME.py`` is a file of its own, imported as one.
No block can be marked as not to be run: code that must not run is not a Python block.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import amqp_rt
from amqp_rt import errors

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page
    for page in [ROOT / "README.md", *ROOT.glob("plugins/*/README.md"), *ROOT.glob("docs/**/*.md")]
    if "_build" not in page.relative_to(ROOT).parts
)
TIME_LIMIT_S = 200  # below pytest's own, so that the page's output is shown
#: A session of Spark takes long to start.
SPARK_LIMIT_S = 280

#: In pages that use Microsoft's SDKs.
AZURE = "from azure."

#: Starts a Java of Spark that lives until its input ends, and prints how other processes find it.
SPARK_JAVA = """
import json, os, sys
from amqp_rt_spark.java import java_home
from pyspark import SparkConf
from pyspark.java_gateway import launch_gateway

os.environ |= {"JAVA_HOME": str(java_home()), "PYSPARK_PYTHON": sys.executable}
# Pages that live for seconds gain nothing from the second compiler.
conf = SparkConf(loadDefaults=False)
conf.set("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
conf.set("spark.sql.shuffle.partitions", "2")
there = launch_gateway(conf).java_parameters
print(json.dumps({"PYSPARK_GATEWAY_PORT": str(there.port), "PYSPARK_GATEWAY_SECRET": there.auth_token}))
sys.stdout.flush()
sys.stdin.read()
"""

FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<ticks>`{3,}|~{3,}|:{3,})(?P<info>.*)$")

#: The program that runs a page: the blocks are its standard input, each with the number of lines before it.
RUNNER = """
import ast, importlib, inspect, json, pathlib, re, sys, types
import trio

page, blocks = sys.argv[1], json.load(sys.stdin)
module = types.ModuleType("docs_page")
sys.modules["docs_page"] = module
for line, text in blocks:
    if named := re.match(r"# (\\w+)\\.py\\n", text):
        # A file of its own, which later blocks may import.
        pathlib.Path(f"{named[1]}.py").write_text(text, "utf-8")
        importlib.import_module(named[1])
        continue
    source = "\\n" * line + text
    code = compile(source, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if code.co_flags & inspect.CO_COROUTINE:
        trio.run(types.FunctionType(code, module.__dict__))
    else:
        exec(code, module.__dict__)
"""


def blocks(text: str) -> list[tuple[int, str]]:
    """Yield the Python blocks of a page, each with the number of lines before it."""
    found: list[tuple[int, str]] = []
    opened: re.Match[str] | None = None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None:
            # A colon fence is a directive around ordinary Markdown: look inside it.
            if fence and not fence["ticks"].startswith(":"):
                opened, lines = fence, []
        elif (
            fence
            and not fence["info"].strip()
            and fence["ticks"][0] == opened["ticks"][0]
            and len(fence["ticks"]) >= len(opened["ticks"])
        ):
            info = opened["info"].strip()
            if info == "python":
                found.append((number - len(lines) - 1, "\n".join(lines) + "\n"))
            elif re.search(r"py(thon|con|3)?\b", info, re.IGNORECASE):
                raise ValueError(f"line {number - len(lines) - 1}: ```{info}: write ```python")
            opened = None
        else:
            lines.append(line.removeprefix(opened["indent"]))
    return found


def environment() -> dict[str, str]:
    """Return the environment of this process, without the address of a broker."""
    return {name: value for name, value in os.environ.items() if name != "AMQP_URL"}


class SparkJava:
    """Java process in which pages start Spark, one after the other: its start takes as long as a page.

    Spark resolves relative paths there, so all of them run in its folder, which each finds empty.
    """

    def __init__(self, python: list[str], folder: Path) -> None:
        self._python = python
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._environment: dict[str, str] = {}

    def start(self) -> tuple[Path, dict[str, str]]:
        """Start Java if it does not run; return its folder, and the variables by which Spark finds it."""
        if self._process is None:
            self._process = subprocess.Popen(
                [*self._python, "-c", SPARK_JAVA],
                cwd=self._folder,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._process.stdout is not None
            self._environment = json.loads(self._process.stdout.readline())
        for each in self._folder.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        return self._folder, self._environment

    def stop(self) -> None:
        """Stop Java, and with it a session that a page may have left."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="module")
def spark_java(
    spark_python: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkJava]:
    java = SparkJava(spark_python, tmp_path_factory.mktemp("spark"))
    yield java
    java.stop()


def page_case(page: Path) -> Any:
    """Return the parameter of *page*, with the mark of those that need Spark or an SDK of Azure."""
    program = "".join(text for _, text in blocks(page.read_text("utf-8")))
    needs_others = "amqp_rt_spark" in program or AZURE in program
    marks = [pytest.mark.foreign] if needs_others else []
    return pytest.param(page, marks=marks, id=str(page.relative_to(ROOT)))


@pytest.mark.slow
@pytest.mark.timeout(SPARK_LIMIT_S + 20)
@pytest.mark.parametrize("page", [page_case(page) for page in PAGES])
def test_page(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not (program := blocks(page.read_text("utf-8"))):
        return
    command, limit, folder, environ = [sys.executable], TIME_LIMIT_S, tmp_path, environment()
    java: SparkJava | None = None
    if any("amqp_rt_spark" in text for _, text in program):
        if amqp_rt.COMPILED:
            pytest.skip("Spark runs with the editable tree")
        command, limit = request.getfixturevalue("spark_python"), SPARK_LIMIT_S
        java = request.getfixturevalue("spark_java")
        folder, found = java.start()
        environ |= found
    if any(AZURE in text for _, text in program):
        if amqp_rt.COMPILED:
            pytest.skip("the SDKs of Azure are beside the editable tree")
        command = request.getfixturevalue("azure")
    try:
        run = subprocess.run(
            [*command, "-W", "error", "-c", RUNNER, str(page)],
            input=json.dumps(program),
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
    except BaseException:
        # The next page gets another Java.
        if java is not None:
            java.stop()
        raise


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_new_users_read_first_can_be_pasted(page: Path) -> None:
    """Blocks of the README and the tutorial are whole programs: no ``await`` at their top level."""
    if page.name != "README.md" and "tutorial" not in page.parts:
        return
    for line, text in blocks(page.read_text("utf-8")):
        # Without its flag for that, compile() refuses ``await`` at the top level.
        compile("\n" * line + text, str(page), "exec", dont_inherit=True)
        if "tutorial" in page.parts:
            assert re.match(r"# \w+\.py\n", text), f"line {line}: a block says what file it is"


PAGE = """
# Title

```python
x = 1
```

1. A list

   ```python
   if x:
       x += 1
   ```

```text
```python is not a fence here
```

:::{note}
```python
x
```
:::
"""


def test_blocks_keep_their_lines() -> None:
    assert blocks(PAGE) == [(4, "x = 1\n"), (10, "if x:\n    x += 1\n"), (20, "x\n")]


@pytest.mark.parametrize("info", ["python notest", "{code-block} python", "py", "pycon", "Python"])
def test_a_block_that_would_not_run_is_refused(info: str) -> None:
    with pytest.raises(ValueError, match="write ```python"):
        blocks(f"```{info}\nx\n```\n")


@pytest.mark.slow
def test_the_page_of_errors_names_each_condition() -> None:
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "amqp_rt").rglob("*.py"))
    used = set(re.findall(r'"(amqp:(?:connection:|session:|link:|transaction:)?[a-z-]+)"', source))
    used = {
        each
        for each in used
        if re.search(rf'(Error|rejected|condition\s*=)\s*\(?\s*"{each}"', source)
    }
    page = (ROOT / "docs" / "reference" / "errors.md").read_text("utf-8")

    assert len(used) > 20
    assert {each for each in used if f"`{each}`" not in page} == set()


def test_the_page_of_errors_names_each_exception() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text("utf-8")
    names = {
        name
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, errors.AmqpError)
    }
    named = set(re.findall(r"\b[A-Z][a-z]+[A-Za-z]*\b", page))

    assert len(names) > 20
    assert names - named == set()
