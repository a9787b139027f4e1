"""Mutate modules with mutmut, and list the surviving mutants in docs/mutations.md.

``make mutation-score`` runs every module of ``tests/mutation_scores.toml``, ``make mutation-score
MODULES="broker/filtering/selectors"`` only the named ones. Each module is mutated in a folder of its own under
``.build/mutation``, so that the checkout is not changed and several runs can work at once. Results are kept
in ``tests/mutation_scores.json``; ``--page`` only writes the page from them, and ``--survivors`` runs the
survivors again after tests have been added.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parent.parent.parent
CONFIG = ROOT / "tests" / "mutation_scores.toml"
RESULTS = ROOT / "tests" / "mutation_scores.json"
PAGE = ROOT / "docs" / "mutations.md"
WORK = ROOT / ".build" / "mutation"

#: Mark on the page: the text after it is written here, that before it by docs/_tools/mutations.py.
MARK = "<!-- scores: written by docs/_tools/mutation_scores.py -->\n"

#: As strict as pyproject.toml, except for complaints about the way in which mutmut writes mutants: one
#: beside the other (no-redef), marked with ``type: ignore``, and with conditions that are always true.
TYPES = """\
[mypy]
strict = True
warn_unused_ignores = False
disable_error_code = no-redef
"""

HEAD = """
## Mistakes that a tool makes

[mutmut](https://mutmut.readthedocs.io) changes one expression of a function at a time: `<` to `<=`, `and` to
`or`, a number to the next, an argument to `None`. `make mutation-score` draws some of these changes by a fixed
seed and looks who notices: mypy, or the tests that are named in `tests/mutation_scores.toml` and run through
the changed function. What stands at the top of a module or in a decorated function is not changed, and neither
are lines that only log or word an error.

*Score* is the share of noticed changes among those drawn. Changes that pass the types and no test notices are
listed below with the reason why they may stay.

"""


def settings(config: dict[str, Any], module: dict[str, Any], folder: Path) -> str:
    """Return the section of pyproject.toml that restricts mutmut to *module*."""
    path = Path(module["path"])
    values = {
        "source_paths": [path.parts[0]],
        "only_mutate": [str(path)],
        "also_copy": ["plugins"],
        "do_not_mutate_patterns": config["ignored_lines"],
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-W", "ignore"],
        "pytest_add_cli_args_test_selection": module["tests"],
        "timeout_multiplier": 10.0,
        "type_check_command": [
            *(sys.executable, "-m", "mypy", str(path)),
            *("--output", "json", "--config-file", str(folder / "mypy.ini")),
        ],
    }
    # A JSON list of strings is a TOML array too.
    return "\n[tool.mutmut]\n" + "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in values.items()
    )


def prepare(config: dict[str, Any], name: str, module: dict[str, Any]) -> Path:
    """Copy the files for the tests of *module* into a folder of its own.

    The package of a plug-in is at the top there: mutmut derives the name of a module from its path.
    """
    folder = WORK / name.replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)
    leave = shutil.ignore_patterns("node_modules", "__pycache__", "*.egg-info")
    for part in ("amqp_rt", "tests", "plugins/amqp091"):
        shutil.copytree(ROOT / part, folder / part, ignore=leave)
    if Path(module["path"]).parts[0] != "amqp_rt":
        package = folder / "plugins" / "amqp091" / "amqp_rt_amqp091"
        package.rename(folder / "amqp_rt_amqp091")
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (folder / "pyproject.toml").write_text(text + settings(config, module, folder), "utf-8")
    (folder / "mypy.ini").write_text(TYPES, "utf-8")
    return folder


def mutmut(folder: Path, *arguments: str, may_fail: bool = False) -> str:
    """Run mutmut in *folder* and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode and not may_fail:
        raise SystemExit(f"{folder}: mutmut {arguments[0]} failed:\n{done.stderr[-2_000:]}")
    return done.stdout


def outcomes(folder: Path) -> dict[str, str]:
    """Return the status of each mutant in *folder*."""
    said = mutmut(folder, "results", "--all", "1")
    return dict(re.findall(r"^\s*(\S+__mutmut_\d+): (.*)$", said, re.MULTILINE))


def change(was: str, now: str) -> str:
    """Return the difference between the sources of two functions as one line, ``was → is``."""
    lines = [
        line
        for line in difflib.unified_diff(was.splitlines(), now.splitlines(), n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]
    gone = " ".join(line[1:].strip() for line in lines if line[0] == "-")
    come = " ".join(line[1:].strip() for line in lines if line[0] == "+")
    return f"{gone} → {come}"


def changes(folder: Path, path: str, mutants: list[str]) -> dict[str, dict[str, str]]:
    """Return the function and the change of each of *mutants*, read from the files of mutmut.

    ``mutmut show`` prints the same, but reads the whole file again for each mutant.
    """
    text = (folder / "mutants" / path).read_text("utf-8")
    lines = text.splitlines()
    sources = {
        node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]).replace(node.name, "", 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    found = {}
    for mutant in mutants:
        name = mutant.rpartition(".")[2]
        original = name.rpartition("__mutmut_")[0] + "__mutmut_orig"
        what = change(sources[original], sources[name])
        found[mutant] = {"function": function(mutant), "change": what}
    return found


def function(mutant: str) -> str:
    """Return the function that *mutant* changes: ``Class.method`` or ``function``."""
    mangled = mutant.rpartition(".")[2].rpartition("__mutmut_")[0]
    return mangled[2:].replace("ǁ", ".") if mangled.startswith("xǁ") else mangled[2:]


def score(
    config: dict[str, Any], name: str, module: dict[str, Any], before: dict[str, Any] | None
) -> dict[str, Any]:
    """Mutate *module* and return the results of its mutants.

    With *before*, their earlier results, only the survivors are run again.
    """
    folder = prepare(config, name, module)
    # mutmut has no command that only makes the mutants; running a name that no mutant has does so.
    mutmut(folder, "run", "none", may_fail=True)
    mutants = sorted(outcomes(folder))
    if not mutants:
        raise SystemExit(f"{name}: no mutants; {folder} and `mutmut run` there tell why")
    drawn = mutants
    most = module.get("sample", config["sample"])
    if before is not None:
        most = before["drawn"]
    if len(mutants) > most:
        drawn = sorted(Random(name).sample(mutants, most))
    known = changes(folder, module["path"], drawn)
    run = drawn
    if before is not None:
        run = [mutant for mutant in drawn if known[mutant] in before["survivors"]]
        if len(mutants) != before["mutants"] or len(run) < len(before["survivors"]):
            raise SystemExit(f"{name} has changed since it was mutated: run all of its mutants")
    found: dict[str, list[str]] = {}
    if run:
        mutmut(folder, "run", "--max-children", "1", *run)
        outcome = outcomes(folder)
        for mutant in run:
            found.setdefault(outcome[mutant], []).append(mutant)
    print(name, {status: len(names) for status, names in found.items()}, flush=True)
    survivors = [known[each] for each in (*found.get("survived", []), *found.get("no tests", []))]
    return {
        "mutants": len(mutants),
        "drawn": len(drawn),
        "types": before["types"] if before else len(found.get("caught by type check", [])),
        "survivors": sorted(survivors, key=lambda row: (row["function"], row["change"])),
    }


def reason(config: dict[str, Any], module: str, row: dict[str, str]) -> str | None:
    """Return why the survivor *row* of *module* may stay; None if no reason is given."""
    for rule in config.get("harmless", []):
        if re.search(rule["pattern"], row["change"], re.IGNORECASE):
            return str(rule["reason"])
    for given in config.get("survivor", []):
        if (module, row["function"], row["change"]) == (
            given["module"],
            given["function"],
            given["change"],
        ):
            return str(given["reason"])
    return None


def unexplained(config: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """Return the survivors without a reason, one line each."""
    return [
        f"{name}: {row['function']}: {row['change']}"
        for name, result in results.items()
        for row in result["survivors"]
        if reason(config, name, row) is None
    ]


def page(config: dict[str, Any], results: dict[str, Any]) -> str:
    """Return the part of the page behind ``MARK``."""
    table = [
        "| module | changes | drawn | noticed by types | by tests | survived | score |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    rows = ["| module | function | change | reason |", "| --- | --- | --- | --- |"]
    for name in config["module"]:
        if (result := results.get(name)) is None:
            continue
        left = len(result["survivors"])
        drawn, types = result["drawn"], result["types"]
        table.append(
            f"| `{name}` | {result['mutants']} | {drawn} | {types} | {drawn - types - left} "
            f"| {left} | {100 * (drawn - left) / max(drawn, 1):.0f} % |"
        )
        for row in result["survivors"]:
            shown = row["change"].replace("|", "\\|").replace("`", "'")
            why = reason(config, name, row) or "*open*"
            rows.append(f"| `{name}` | `{row['function']}` | `{shown}` | {why} |")
    waiting = ", ".join(f"`{name}`" for name in config["module"] if name not in results)
    rest = [f"Listed, and not run yet: {waiting}.", ""] if waiting else []
    return MARK + HEAD + "\n".join([*table, "", *rest, *rows]) + "\n"


def stored() -> dict[str, Any]:
    """Return the stored results by module."""
    found: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    return found


def write(config: dict[str, Any], results: dict[str, Any]) -> None:
    """Write the scores to the page, after the part of docs/_tools/mutations.py."""
    before = PAGE.read_text("utf-8").partition(MARK)[0].rstrip("\n")
    PAGE.write_text(before + "\n\n" + page(config, results), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "modules", nargs="*", help="such as broker/filtering/selectors; all if none is named"
    )
    parser.add_argument("--page", action="store_true", help="mutate nothing, only write the page")
    parser.add_argument("--survivors", action="store_true", help="run only what survived before")
    options = parser.parse_args()
    config = tomllib.loads(CONFIG.read_text("utf-8"))
    for name in [] if options.page else options.modules or config["module"]:
        before = stored().get(name) if options.survivors else None
        found = score(config, name, config["module"][name], before)
        # Read late and written at once, since another process may be running another module.
        results = stored() | {name: found}
        RESULTS.write_text(
            json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8"
        )
    results = stored()
    write(config, results)
    for line in (left := unexplained(config, results)):
        print(f"nothing notices, and no reason is given: {line}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
