"""The guide, the README and the example project: what they show is what works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.foreign, pytest.mark.slow, pytest.mark.usefixtures("azure_python")]

ROOT = Path(__file__).parents[3]
PAGES = ["docs/guides/servicebus.md", "plugins/servicebus/README.md"]


def run_pytest(folder: Path) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_tests_of_a_page_pass(page: str, tmp_path: Path) -> None:
    program = "\n".join(blocks(page, "python"))
    tests = len(re.findall(r"^def test_", program, re.MULTILINE))
    assert tests > 0
    (tmp_path / "test_page.py").write_text(program, "utf-8")
    for text in blocks(page, "toml"):
        (tmp_path / "namespace.toml").write_text(text, "utf-8")

    assert f"{tests} passed" in run_pytest(tmp_path)


def test_the_example_project_passes_its_tests(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "examples" / "servicebus", tmp_path / "shop")
    tests = len(re.findall(r"^def test_", (folder / "test_shop.py").read_text(), re.MULTILINE))
    assert tests >= 10

    assert " passed" in run_pytest(folder)
