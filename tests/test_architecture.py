"""Layers of the package: which module may import which. The table is the architecture; this test enforces it.

Read ``LAYERS`` from the top: a layer may import itself and the layers of its line, nothing else.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest

import amqp_rt

ROOT = Path(__file__).parent.parent
#: Sources of the installed package: the tree itself, or a wheel, which always ships them.
PACKAGE = Path(amqp_rt.__file__).parent
#: Folders of the distributions that are compiled.
DISTRIBUTIONS = [
    path.parent for path in (ROOT / "setup.py", *sorted(ROOT.glob("plugins/*/setup.py")))
]

VALUES = {"errors", "limits", "values"}
CODEC = VALUES | {"codec"}
NEUTRAL = {
    *("message", "outcomes", "events", "addresses", "termini", "transactions", "unsettled"),
    *(
        "annotations",
        "bodies",
        "clock",
        "compiling",
        "config_files",
        "durations",
        "loglimit",
        "observers",
        "tallies",
        "trace_context",
        "unread",
        "batches",
        "policies",
        "signatures",
        "timetables",
    ),
}
#: Routing of a mesh: what nodes tell each other, and the paths that follow from it.
ROUTING = {
    *("mesh.adjacency", "mesh.database", "mesh.directory", "mesh.origination"),
    *("mesh.paths", "mesh.records", "mesh.hops", "mesh.rules", "mesh.routing"),
}
#: Parts of protocols with exchanges and channels.
FRONT_PARTS = {
    *("fronts.anchors", "fronts.deliveries", "fronts.engines", "fronts.headers", "fronts.links"),
    *("fronts.recent", "fronts.splicing"),
}
#: Endpoints that join links, and the choice between links; they know no connections.
MESH_PARTS = {
    *("mesh.balance", "mesh.fans", "mesh.legs", "mesh.loads", "mesh.multicasts", "mesh.passing"),
    *("mesh.splices", "mesh.tracing", "mesh.via"),
}
#: Layers that every module may import: no I/O, no protocol's transport.
COMMON = CODEC | NEUTRAL

#: layer → layers that it may import. A module belongs to the layer with the longest matching name.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "limits": {"errors"},
    "values": {"errors"},
    "codec": VALUES,
    **dict.fromkeys(NEUTRAL, COMMON),
    "core": COMMON,
    "fronts": COMMON
    | {"fronts.base", "fronts.amqp10", "fronts.tracing"},  # the package itself, which re-exports
    "fronts.base": COMMON,
    "fronts.tracing": COMMON,
    **dict.fromkeys(FRONT_PARTS, COMMON | {"fronts.base"} | FRONT_PARTS),
    "fronts.amqp10": COMMON | {"core", "fronts.base"},
    "net": COMMON | {"fronts.base", "fronts.tracing"},
    "stores": COMMON,
    "security": COMMON,
    "security.jwts": COMMON | {"security"},
    "container": COMMON | {"fronts", "fronts.base", "fronts.amqp10", "net", "security"},
    "telemetry": COMMON | {"broker", "container", "fronts.base"},
    "outbox": COMMON | {"container", "fronts.base"},
    "mesh": COMMON
    | {"container", "fronts", "fronts.base", "management.answering", "net", "security"}
    | MESH_PARTS
    | ROUTING,
    **dict.fromkeys(MESH_PARTS, COMMON | {"container.credit", "fronts.base"} | MESH_PARTS),
    **dict.fromkeys(ROUTING, COMMON | ROUTING),
    "broker": COMMON | {"fronts.base", "stores", "security"},
    "management": COMMON
    | {
        *("broker", "container", "fronts.base", "security"),
        *("management.answering", "management.ordering"),
    },
    "management.answering": COMMON | {"management.ordering", "security"},
    "management.ordering": COMMON,
}
#: Modules that connect all parts, and may import any module.
COMPOSERS = {
    *("__init__", "__main__", "broker.broker", "plugins", "testing", "cli"),
    *("bridge", "aio", "sync"),
}
#: Package → names of composing modules that it looks up on first use, and imports for type checkers only.
EXPORTED_LATE = {"broker": {"broker.broker.AddOn", "broker.broker.Broker"}}

#: Standard library and msgspec only, without FORBIDDEN_IN_PURE: time and bytes are arguments.
PURE = (
    COMMON
    | {"core", "fronts.base", "security"}
    | FRONT_PARTS
    | MESH_PARTS
    | ROUTING
    | {
        "broker.queue",
        "broker.binding_arguments",
        "broker.bindings",
        "broker.expiry",
    }
)
FORBIDDEN_IN_PURE = {
    *("trio", "anyio", "asyncio", "socket", "ssl", "select", "selectors", "socketserver"),
    *("threading", "multiprocessing", "concurrent", "subprocess", "queue", "sched", "time"),
}
#: Parts of pure layers that wait for others, or need a library; mypy alone imports that of "compiling".
NOT_PURE = {"compiling", "security.jwts", "timetables"}
#: Layers that wait for a disk, in a worker thread, and do not use an event loop.
BLOCKING = {"stores"}
#: The only pure module that reads the clock.
READS_TIME = {"clock"}

#: Modules of the package that a plug-in may import.
PLUGINS_MAY_IMPORT = {
    *("amqp_rt", "amqp_rt.fronts", "amqp_rt.stores", "amqp_rt.testing", "amqp_rt.core"),
    # For stores of their own.
    "amqp_rt.stores.base",
    *("amqp_rt.net.blocking", "amqp_rt.broker.bindings", "amqp_rt.fronts.amqp10"),
    # Shared vocabulary: values of the wire, and types of messages, outcomes and errors.
    *("amqp_rt.values", "amqp_rt.message", "amqp_rt.errors", "amqp_rt.outcomes", "amqp_rt.termini"),
    *("amqp_rt.addresses", "amqp_rt.clock", "amqp_rt.config_files", "amqp_rt.batches"),
    *("amqp_rt.durations", "amqp_rt.security.identities"),
    # For commands: groups, options for log lines, signals, errors as sentences, and values of --limit.
    *("amqp_rt.cli.groups", "amqp_rt.cli.running", "amqp_rt.cli.limit_options"),
    # For nodes of their own: what they are built of, limits, and the codec of the sections that they rewrite.
    *("amqp_rt.broker.building", "amqp_rt.fronts.base", "amqp_rt.limits", "amqp_rt.codec.sections"),
    # For hosts and operations of their own.
    *("amqp_rt.fronts.hosts", "amqp_rt.management.answering.reply_of"),
    # For protocols with exchanges and channels: bases of engines and links, and octets of 1.0.
    *("amqp_rt.fronts.anchors", "amqp_rt.fronts.deliveries", "amqp_rt.fronts.engines"),
    *("amqp_rt.fronts.links", "amqp_rt.fronts.recent", "amqp_rt.fronts.splicing"),
    "amqp_rt.fronts.headers",
    # For masks of traces: what protocols share whose servers send no secrets.
    "amqp_rt.fronts.tracing",
    # For protocols whose messages name an exchange to reply to: its address.
    "amqp_rt.broker.topology.exchange_addresses",
    *("amqp_rt.codec.section_types", "amqp_rt.codec.primitives"),
    # For selectors of queues, which are checked as the broker does.
    "amqp_rt.broker.Queue",
    # For nodes that are logs of the broker with other addresses and annotations.
    "amqp_rt.broker.Log",
    # For validators of tokens: claims, refusals, and the form of audiences.
    "amqp_rt.security.tokens",
    # For logins with mechanisms of their own, as the guide to security describes them.
    "amqp_rt.security.mechanisms",
    # For shares of users, whose names may be written in several ways.
    "amqp_rt.security.scram.saslprep",
    # For clients of other protocols: opening a stream, and running an engine on it.
    *("amqp_rt.net.dial", "amqp_rt.net.driver"),
    # For doors of other protocols, whose users log in over connections in memory: how streams arrive, management, and
    # the types that it describes.
    *("amqp_rt.container.doors", "amqp_rt.container.local", "amqp_rt.container.managing"),
    *("amqp_rt.management.answering.KnownType", "amqp_rt.broker.statistics", "amqp_rt.broker"),
    *("amqp_rt.cli.tables.plain", "amqp_rt.telemetry.metrics.Metrics"),
    *("amqp_rt.cli.tables.JsonRoom", "amqp_rt.cli.tables.beginning"),
    # For the conformance kit: a codec that shares nothing with the one under test.
    "amqp_rt.net.traces.octets",
    # For consoles: frames as they pass.
    "amqp_rt.net.traces.watching",
}

#: Names that do not describe the content of a module.
VAGUE_MODULES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}

#: Most lines of a module, methods of a class, and lines of a function. Ruff bounds complexity (C901).
MODULE_LINES_MAX = 900
METHODS_MAX = 50
FUNCTION_LINES_MAX = 100
#: Modules, classes and functions over these bounds → reason. An entry that is no longer needed fails
#: the test, so that the list shrinks.
LARGE: dict[str, str] = {
    "broker.filtering.selectors": "one grammar, and the code that compiles each of its rules",
    "broker.queue.queue.MessageQueue": "all that nodes, links and the store ask of a queue, and its fast path",
    "cli.serve.serve": "click passes each option of the command as an argument",
    "codec.primitives": "every primitive type of Part 1 in each of its encodings",
    "container.recovery.connect": "each option of a connection is an argument, with its documentation",
    "core.frames.read_transfer": "the fast path decodes a transfer without calls",
    "core.receivers.ReceiverLink.on_transfer": "the fast path of a frame, with its checks in order",
    "core.session": "windows, ids, dispositions and handles of a session, all of which most frames touch",
}
_IMPLEMENTED = "a Protocol and its implementation"
#: Names of several classes of a distribution → reason. One name means one class otherwise.
NAMESAKES = {
    "Delivery": "of the protocol, and of the public client",
    "Front": _IMPLEMENTED,
    "Link": _IMPLEMENTED,
    "Session": "of the protocol, and of the public client",
    "Topology": _IMPLEMENTED,
    "Transaction": "of a broker, and of a client that controls it",
}

#: Pattern that must not occur in the repository → advice.
BANNED = {
    r"(?<![\w.])/(work|root|farm)/": "a path of somebody's machine: make it relative",
    r"\b(TODO|FIXME|HACK)\b": "finish it, or open an issue and describe the present state",
    r"\b(black|white)-?list": "allow and deny lists",
    r"\bmaster/slave\b": "primary and replica",
    r"pypi\.org|pythonhosted\.org|npmjs\.(com|org)|deb\.debian\.org": "name the package, not its host",
    r"#\s*type:\s*ignore(?!\[)": "say which error is ignored: # type: ignore[code]",
    r"#\s*noqa(?!:)": "say which rule is ignored: # noqa: CODE",
}


@lru_cache(maxsize=2_048)
def parsed(source: str) -> ast.Module:
    """Parse a module; several tests read all of them, one after the other, so that all have to fit."""
    return ast.parse(source)


@pytest.fixture(scope="module", autouse=True)
def _parsed_modules_are_forgotten() -> Iterator[None]:
    """Forget the trees when the last test here has ended: later tests of the process run the garbage collector."""
    yield
    parsed.cache_clear()


@lru_cache(maxsize=2_048)
def imports(source: str, module: str, *, package: bool) -> list[tuple[int, str]]:
    """Return each module that *module* imports, by its absolute name, with the line."""
    parts = module.split(".") if package else module.split(".")[:-1]
    found: list[tuple[int, str]] = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            # `from . import links` and `from amqp_rt import events` name modules as well.
            found += ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)
    return found


def layer_of(module: str, layers: Iterable[str]) -> str | None:
    """Return the longest of *layers* that contains *module* (without ``amqp_rt.``)."""
    fitting = [name for name in layers if module == name or module.startswith(name + ".")]
    return max(fitting, key=len, default=None)


def violations(source: str, module: str, *, package: bool = False) -> Iterator[str]:
    """Yield the forbidden imports of *module* (a dotted name below ``amqp_rt``)."""
    if layer_of(module, COMPOSERS) is not None:
        return
    layer = layer_of(module, LAYERS)
    if layer is None:
        yield f"{module}: has no line in the table of layers"
        return
    pure = layer_of(module, PURE) is not None and module not in NOT_PURE
    for line, name in imports(source, f"amqp_rt.{module}", package=package):
        origin, _, rest = name.partition(".")
        where = f"{module}:{line}: {name}:"
        if origin == "amqp_rt":
            theirs = layer_of(rest, LAYERS)
            if package and rest in EXPORTED_LATE.get(module, ()):
                continue
            if layer_of(rest, COMPOSERS) is not None:
                yield f"{where} {layer} must not know who composes it"
            elif theirs is None:
                if rest not in {"__version__", "COMPILED"}:
                    yield f"{where} import from the module that defines it"
            elif theirs != layer and not _allowed(rest, LAYERS[layer]):
                yield f"{where} {layer} must not import {theirs}"
        elif layer in BLOCKING and origin in {"trio", "anyio", "asyncio"}:
            yield f"{where} brings an event loop into {layer}"
        elif not pure:
            continue
        elif origin in FORBIDDEN_IN_PURE and not (origin == "time" and module in READS_TIME):
            yield f"{where} brings I/O into {layer}"
        elif origin not in sys.stdlib_module_names | {"msgspec"}:
            yield f"{where} {layer} uses the standard library and msgspec only"


def _allowed(name: str, layers: set[str]) -> bool:
    return layer_of(name, layers) is not None


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        package = parts[-1] == "__init__" and len(parts) > 1
        yield ".".join(parts[:-1] if package else parts), path


def plugin_modules() -> Iterator[tuple[str, Path]]:
    """Yield each module of the plug-ins, by its absolute name."""
    for path in sorted(ROOT.glob("plugins/*/amqp_rt_*/**/*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts[2:]
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@pytest.mark.slow
def test_layers_only_look_down() -> None:
    found = [
        complaint
        for module, path in modules()
        for complaint in violations(
            path.read_text("utf-8"), module, package=path.name == "__init__.py"
        )
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("core.links", "import trio", "brings I/O into core"),
        ("core.links", "from time import monotonic", "brings I/O into core"),
        ("core.links", "import attrs", "standard library and msgspec only"),
        ("core.links", "from ..fronts.base import Front", "core must not import fronts"),
        ("core.links", "from .. import broker", "core must not import broker"),
        ("core.links", "from amqp_rt import Container", "the module that defines it"),
        (
            "core.links",
            "def f():\n    from ..container.routes import Route",
            "not import container",
        ),
        ("broker.queue.queue", "import trio", "brings I/O into broker"),
        ("broker.host", "from ..net.driver import run_connection", "broker must not import net"),
        ("broker.host", "from .broker import Broker", "must not know who composes it"),
        ("container.container", "from ..broker.broker import Broker", "must not know who composes"),
        ("container.container", "from ..broker import Queue", "container must not import broker"),
        ("broker.host", "from ..management.node import Management", "not import management"),
        ("net.driver", "from ..core.engine import Engine", "net must not import core"),
        ("stores.sqlite", "import trio", "brings an event loop into stores"),
        (
            "stores.sqlite",
            "from ..broker.queue.queue import Queue",
            "stores must not import broker",
        ),
        ("attic", "import os", "no line in the table"),
    ],
)
def test_a_look_up_is_found(module: str, source: str, complaint: str) -> None:
    assert [found for found in violations(source, module) if complaint in found]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("clock", "import time"),
        ("core.links", "from ..codec import primitives\nfrom .receivers import Delivery"),
        ("core.links", "from collections import deque\nfrom msgspec import Struct"),
        (
            "broker.host",
            "import trio\nfrom .queues import Queue\nfrom ..stores.base import Store",
        ),
        ("stores.sqlite", "import apsw\nimport time\nfrom .base import ChangeSet"),
        ("management.node", "from ..broker.nodes import Node"),
        ("container.container", "import trio\nfrom ..net import dial\nfrom ..fronts import amqp10"),
        ("broker.broker", "from ..core import engine\nfrom ..container import container"),
    ],
)
def test_a_look_down_is_allowed(module: str, source: str) -> None:
    assert not list(violations(source, module))


#: Import cycles of more than three modules, type-only imports included; short for good, and never longer.
#: The engine's parts refer to each other: a link to its session, a session to its engine; so do the parts of
#: a queue, whose fast path runs through most of them. They are compiled as one group, in which a call of a class
#: costs little and one of a Protocol much.
CYCLES = [
    {"core.engine", "core.links", "core.receivers", "core.sasl", "core.senders", "core.session"},
    {
        *("broker.queue.browsing", "broker.queue.deferred", "broker.queue.large"),
        *("broker.queue.operating", "broker.queue.paging", "broker.queue.queue"),
        *("broker.queue.shelf", "broker.queue.timing", "broker.queue.turns"),
    },
]


def import_graph() -> dict[str, set[str]]:
    """Return module → modules of the package that it imports, type-only imports included."""
    found = dict(modules())
    graph: dict[str, set[str]] = {}
    for module, path in found.items():
        graph[module] = set()
        package = path.name == "__init__.py"
        for _, name in imports(path.read_text("utf-8"), f"amqp_rt.{module}", package=package):
            rest = name.removeprefix("amqp_rt.")
            target = rest if rest in found else rest.rpartition(".")[0]
            if target in found and target != module:
                graph[module].add(target)
    return graph


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that reach each other, by their imports."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for each in graph[todo.pop()] - seen:
                seen.add(each)
                todo.append(each)
        reached[start] = seen
    groups = {
        frozenset(each for each in seen if start in reached[each])
        for start, seen in reached.items()
        if start in seen
    }
    return [set(group) for group in groups]


@pytest.mark.slow
def test_no_import_cycle_spans_more_than_three_modules() -> None:
    found = [group for group in cycles(import_graph()) if len(group) > 3]
    longer = [sorted(group) for group in found if not any(group <= known for known in CYCLES)]
    assert not longer, f"break these cycles, for example by a Protocol: {longer}"
    settled = [sorted(known) for known in CYCLES if known not in found]
    assert not settled, f"remove or shorten these in CYCLES: {settled}"


@pytest.mark.parametrize(
    ("graph", "groups"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, [{"a", "b"}]),
        ({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"a"}}, [{"a", "b", "c", "d"}]),
    ],
)
def test_cycles_are_found(graph: dict[str, set[str]], groups: list[set[str]]) -> None:
    assert cycles(graph) == groups


@pytest.mark.parametrize(
    "name", ["amqp_rt", "amqp_rt.codec", "amqp_rt.core", "amqp_rt.fronts.base"]
)
def test_importing_the_engines_imports_no_io(name: str) -> None:
    program = (
        f"import sys, importlib, pkgutil\n"
        f"found = importlib.import_module({name!r})\n"
        f"if {name != 'amqp_rt'!r}:\n"
        f"    for part in pkgutil.iter_modules(getattr(found, '__path__', [])):\n"
        f"        importlib.import_module({name!r} + '.' + part.name)\n"
        f"print(*({{'trio', 'anyio', 'asyncio', 'ssl', 'click'}} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.split()) == (0, []), run.stderr


@pytest.mark.slow
def test_plugins_import_public_names_only() -> None:
    found = []
    for module, path in plugin_modules():
        package = path.name == "__init__.py"
        for line, name in imports(path.read_text("utf-8"), module, package=package):
            home = name.rpartition(".")[0]
            if name.startswith("amqp_rt.") and not {name, home} & PLUGINS_MAY_IMPORT:
                found.append(f"{module}:{line}: {name} is not public")
    assert not found, "\n" + "\n".join(found)


def test_modules_say_what_they_are_about() -> None:
    vague = [name for name, _ in modules() if set(name.split(".")) & VAGUE_MODULES]
    assert not vague, f"name the idea, not the shelf: {vague}"


def sizes(source: str, module: str) -> Iterator[tuple[str, str]]:
    """Yield what is too large in *module*: its dotted name, and its size with the bound."""
    lines = source.count("\n")
    if lines > MODULE_LINES_MAX:
        yield module, f"{lines} lines, at most {MODULE_LINES_MAX}"
    yield from _sizes(parsed(source), module)


def _sizes(parent: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    methods = 0
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            methods += 1
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{name}.{node.name}", f"{lines} lines, at most {FUNCTION_LINES_MAX}"
        named = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        yield from _sizes(node, f"{name}.{node.name}" if named else name)  # type: ignore[attr-defined]
    if isinstance(parent, ast.ClassDef) and methods > METHODS_MAX:
        yield name, f"{methods} methods, at most {METHODS_MAX}"


@pytest.mark.slow
def test_modules_classes_and_functions_fit_a_readers_mind() -> None:
    found = dict(
        each
        for module, path in (*modules(), *plugin_modules())
        for each in sizes(path.read_text("utf-8"), module)
    )
    new = [f"{name}: {size}" for name, size in found.items() if name not in LARGE]
    assert not new, "divide it, or give the reason in LARGE:\n" + "\n".join(new)
    stale = LARGE.keys() - found.keys()
    assert not stale, f"no longer too large: remove from LARGE {sorted(stale)}"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = 1\n" * 900, []),
        ("x = 1\n" * 901, ["m"]),
        ("class A:\n" + "    def f(self): ...\n" * 50, []),
        ("class A:\n" + "    def f(self): ...\n" * 51, ["m.A"]),
        ("async def f():\n" + "    x = 1\n" * 99, []),
        ("class A:\n    def f(self):\n" + "        x = 1\n" * 100, ["m.A.f"]),
        ("if x:\n    def f():\n" + "        x = 1\n" * 100, ["m.f"]),
        ("def g():\n" + "    def f(): ...\n" * 51, []),
    ],
)
def test_sizes_are_found(source: str, names: list[str]) -> None:
    assert [name for name, _ in sizes(source, "m")] == names


def class_names(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Return the files that define a class, by the name of the class."""
    found: dict[str, list[str]] = {}
    for path in paths:
        for node in ast.walk(parsed(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    return found


@pytest.mark.slow
def test_one_class_name_is_one_class() -> None:
    several: dict[str, list[str]] = {}
    for root in (PACKAGE, *ROOT.glob("plugins/*/amqp_rt_*/")):
        names = class_names(sorted(root.rglob("*.py")))
        several.update((name, places) for name, places in names.items() if len(places) > 1)
    new = [f"{name}: {', '.join(places)}" for name, places in several.items() if name not in NAMESAKES]  # fmt: skip
    assert not new, "rename all but one, or give the reason in NAMESAKES:\n" + "\n".join(new)
    stale = NAMESAKES.keys() - several.keys()
    assert not stale, f"one class only: remove from NAMESAKES {sorted(stale)}"


#: Kinds of termini, and of objects that hold the messages of a node. Their differences are methods.
KINDS = frozenset(
    {"KeptSource", "KeptTarget", "SharedSource", "MessageTopic", "MessageLog"}
    | {"QueueNode", "TopicNode", "LogNode"}
)


def distinctions(source: str) -> Iterator[tuple[int, str]]:
    """Yield the kinds that *source* distinguishes with ``isinstance``, by line."""
    if not any(kind in source for kind in KINDS):
        return
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            for name in ast.walk(node.args[1]):
                if isinstance(name, (ast.Name, ast.Attribute)):
                    last = name.id if isinstance(name, ast.Name) else name.attr
                    if last in KINDS:
                        yield node.lineno, last


def test_kinds_of_nodes_and_termini_are_not_distinguished() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {kind}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, kind in distinctions(path.read_text("utf-8"))
    ]
    assert not found, "give the kinds a method for it:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("isinstance(x, KeptSource)", ["KeptSource"]),
        ("isinstance(x, KeptTarget | topics.MessageTopic)", ["KeptTarget", "MessageTopic"]),
        ("isinstance(x, Source)", []),
        ("x = KeptSource(y)", []),
    ],
)
def test_distinctions_are_found(source: str, kinds: list[str]) -> None:
    assert sorted(kind for _, kind in distinctions(source)) == kinds


def state(source: str) -> Iterator[tuple[int, str]]:
    """Yield module-level state, which one caller could change under another.

    Tables are constants by name (``UPPER_CASE``). A function that rebinds a global, or has an
    unbounded cache, is state in disguise.
    """
    tree = parsed(source)
    for statement in tree.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            if (
                isinstance(target, ast.Name)
                and _mutable(statement.value)  # type: ignore[attr-defined]
                and not re.fullmatch(r"_?[A-Z][A-Z0-9_]*|__\w+__", target.id)
            ):
                yield statement.lineno, f"{target.id} can be changed: a table is UPPER_CASE"
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, "global: pass an object that owns it"
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for decorator in map(ast.unparse, node.decorator_list):
                if re.search(r"(^|\.)cache$|lru_cache\(.*None", decorator):
                    yield node.lineno, f"@{decorator} grows without a bound"


def _mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        factory = ast.unparse(value.func).rpartition(".")[2]
        return factory in {"list", "dict", "set", "bytearray", "deque", "defaultdict", "Counter"}
    return isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


@pytest.mark.slow
def test_modules_hold_no_state() -> None:
    found = [
        f"{module}:{line}: {complaint}"
        for module, path in modules()
        for line, complaint in state(path.read_text("utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("routes = {}", 1),
        ("routes: dict[str, int] = dict()", 1),
        ("def f():\n    global x\n    x = 1", 1),
        ("@functools.cache\ndef f(x): return x", 1),
        ("@lru_cache(maxsize=None)\ndef f(x): return x", 1),
        ("@lru_cache(maxsize=128)\ndef f(x): return x", 0),
        ("ROUTES = {1: 2}\n_TABLE: dict[int, int] = {}\n__all__ = ['x']", 0),
        ("log = logging.getLogger('amqp_rt.frames')", 0),
    ],
)
def test_state_is_found(source: str, count: int) -> None:
    assert len(list(state(source))) == count


@pytest.mark.slow
@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda folder: folder.name)
def test_compiled_modules_ask_nothing_that_mypyc_drops(folder: Path) -> None:
    """Compiled modules have no class keywords such as a Struct's gc, frozen or kw_only: mypyc ignores them.

    A module that needs them is listed as interpreted (``tool.mypyc`` of pyproject.toml); compiled, it
    would behave differently.
    """
    listed = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["tool"]["mypyc"]
    compiled, interpreted = tuple(listed["compiled"]), listed["interpreted"]
    for name in (*compiled, *interpreted):
        assert (folder / name).exists(), name
    found = [
        f"{name}:{node.lineno}: {node.name}"
        for path in sorted((folder / listed["package"]).rglob("*.py"))
        if (name := path.relative_to(folder).as_posix()).startswith(compiled)
        and name not in interpreted
        for node in ast.walk(parsed(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef) and node.keywords
    ]
    assert not found, "\n" + "\n".join(found)


def test_distributions_are_built_alike() -> None:
    """A source distribution contains its own setup.py, so that a plug-in has a copy."""
    assert len({(folder / "setup.py").read_bytes() for folder in DISTRIBUTIONS}) == 1


def texts() -> Iterator[Path]:
    """Yield every text file of the repository that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__) and b"\0" not in path.read_bytes()[:1024]:
            yield path


@pytest.mark.slow
def test_banned_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match.group()!r}: {instead}"
        for path in texts()
        for text in [path.read_text("utf-8", "replace")]
        for pattern, instead in BANNED.items()
        # Most texts have none: one search of the whole takes a tenth of the time.
        if re.search(pattern, text, re.MULTILINE)
        for number, line in enumerate(text.splitlines(), 1)
        if (match := re.search(pattern, line))
    ]
    assert not found, "\n" + "\n".join(found)
