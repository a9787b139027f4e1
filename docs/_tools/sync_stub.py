"""Write ``amqp_rt/sync.pyi``: the public classes as they appear to threads.

``python docs/_tools/sync_stub.py`` writes the file, with ``--check`` it only checks that the file is up to
date. In the stub coroutines are plain functions, ``async with`` is ``with`` and ``async for`` is ``for``;
everything else is unchanged.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STUB = ROOT / "amqp_rt" / "sync.pyi"

#: Module → its classes whose objects threads may hold.
CLASSES = {
    "container.blocks": ["TrioBlock"],
    "container.container": ["Container"],
    "container.connections": ["Session", "Connection"],
    "container.links": ["LinkHandle"],
    "container.sending": ["Receipt", "Sender"],
    "container.writing": ["StreamedMessage"],
    "container.receiving": ["Receiver"],
    "container.deliveries": ["Delivery"],
    "container.managing": ["ManagementClient"],
    "container.requests": ["ReplyStream"],
    "container.calling": ["Calling"],
    "container.streams": ["ByteStream"],
    "container.transactions": ["Transaction"],
    "broker.broker": ["Broker"],
    "mesh.mesh": ["Mesh"],
}
#: Class → the module and the class of its compiled steps, a base whose public members are shown as its own.
STEPS = {
    "Receipt": ("container.submitting", "ReceiptSteps"),
    "Sender": ("container.submitting", "SenderSteps"),
}
#: Names for use between the modules only, which the stub omits.
# fmt: off
INSIDE = frozenset({
    "abandon", "accept", "add", "add_host", "admitted", "attach", "begin", "begin_stream",
    "closing", "connection_nursery", "consume", "default_session", "deliver", "done", "encode",
    "end", "end_pause", "end_stream", "engine", "engine_over", "fail", "finish", "follow",
    "forget_session", "freed", "give_up", "going", "handle", "keep", "link", "listener_nursery", "lose",
    "lost", "lost_error", "may_be_replaced", "move", "new_name", "observed_by", "on_attached", "on_credit",
    "on_data", "on_detached", "on_flow", "on_outcomes", "on_settled", "refuse_if_closed", "remove",
    "restart", "retire", "retract_outcome", "returns", "run", "run_async", "say", "session_for_tokens", "start",
    "start_connection", "start_handler", "state", "submit", "submit_run", "takes_now", "wait_settled", "withdraw",
})
# fmt: on
#: Class → names that are public in it although they are in INSIDE, or special methods to include.
PUBLIC = {
    "Broker": {"move"},
    "Connection": {"state"},
    "Container": {"add", "add_host", "remove"},
    "Delivery": {"accept", "__enter__", "__exit__"},
    "Receiver": {"start"},
    "Receipt": {"done", "withdraw"},
}
#: Base classes that the stub keeps.
BASES = frozenset({"LinkHandle", "TrioBlock"})
DUNDERS = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}
PLAIN = {
    "AbstractAsyncContextManager": "AbstractContextManager",
    "AsyncIterator": "Iterator",
    "AsyncGenerator": "Generator",
    "AsyncIterable": "Iterable",
    "asynccontextmanager": "contextmanager",
}
HEADER = """\
# Written by docs/_tools/sync_stub.py; what is said here is said by the classes that it is made from.
"""


class Waiting(ast.NodeTransformer):
    """Transformer that replaces async types in a signature by plain ones."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(PLAIN.get(node.id, node.id), node.ctx)


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.FunctionDef:
    """Return *node* as a plain function without a body."""
    fields = {name: getattr(node, name, []) for name in ast.FunctionDef._fields}
    plain = ast.FunctionDef(**fields)
    plain.name = DUNDERS.get(node.name, node.name)
    plain.body = [ast.Expr(ast.Constant(...))]
    for arguments in (plain.args.defaults, plain.args.kw_defaults):
        arguments[:] = [None if each is None else ast.Constant(...) for each in arguments]
    made = Waiting().visit(plain)
    assert isinstance(made, ast.FunctionDef)
    return made


def is_public(owner: str, name: str) -> bool:
    if name in PUBLIC.get(owner, ()):
        return True
    return (
        not name.startswith("_") or name in DUNDERS or name == "__init__"
    ) and name not in INSIDE


def steps_of(name: str) -> list[ast.stmt]:
    """Return the members of the compiled base of a class."""
    if name not in STEPS:
        return []
    module, base = STEPS[name]
    text = (ROOT / "amqp_rt" / f"{module.replace('.', '/')}.py").read_text("utf-8")
    return next(
        each.body
        for each in ast.parse(text).body
        if isinstance(each, ast.ClassDef) and each.name == base
    )


def reduced(node: ast.ClassDef) -> ast.ClassDef:
    """Return the public part of a class; its constructor only if users call it."""
    body: list[ast.stmt] = []
    names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    for each in [*steps_of(node.name), *node.body]:
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not is_public(node.name, each.name):
            continue
        if each.name == "__init__" and node.name not in ("Broker", "Container", "Mesh"):
            continue
        if each.name in DUNDERS and DUNDERS[each.name] in names:
            continue
        before = body[-1] if body else None
        overloads = isinstance(before, ast.FunctionDef) and is_overload(before)
        if overloads and before.name == each.name and not is_overload(each):
            continue
        body.append(signature(each))
    bases = [base for base in node.bases if isinstance(base, ast.Name) and base.id in BASES]
    for name in ("node", "rpc", "source"):
        if node.name == "Container":
            kind = ast.Name(f"{name.capitalize()}Decorator", ast.Load())
            body.insert(0, ast.AnnAssign(ast.Name(name, ast.Store()), kind, None, 1))
    return ast.ClassDef(
        name=node.name, bases=bases, keywords=[], body=body or [ast.Pass()], decorator_list=[]
    )


def is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)


def names_in(nodes: list[ast.stmt]) -> set[str]:
    found = set()
    for top in nodes:
        for node in ast.walk(top):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def imports_of(tree: ast.Module, package: str) -> dict[str, str]:
    """Return name → line that imports it."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            home = node.module or ""
            if node.level:
                parts = package.split(".")
                home = ".".join(parts[: len(parts) - node.level + 1] + ([home] if home else []))
            for alias in node.names:
                name = alias.asname or alias.name
                found[name] = f"from {home} import {alias.name}"
        elif isinstance(node, ast.Import):
            found |= {each.name: f"import {each.name}" for each in node.names if not each.asname}
    return found


def stub() -> str:
    """Return the text of the file."""
    classes: list[ast.stmt] = []
    imports: dict[str, str] = {}
    known = {name for names in CLASSES.values() for name in names}
    for module, names in CLASSES.items():
        path = ROOT / "amqp_rt" / f"{module.replace('.', '/')}.py"
        tree = ast.parse(path.read_text("utf-8"))
        package = f"amqp_rt.{module}".rpartition(".")[0]
        imports |= imports_of(tree, package)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                if node.name in names:
                    classes.append(reduced(node))
                elif node.name not in known:
                    imports.setdefault(node.name, f"from amqp_rt.{module} import {node.name}")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        line = f"from amqp_rt.{module} import {target.id}"
                        imports.setdefault(target.id, line)
    recovery = ast.parse((ROOT / "amqp_rt/container/recovery.py").read_text("utf-8"))
    imports = imports_of(recovery, "amqp_rt.container") | imports
    imports["Reconnect"] = "from amqp_rt.container.recovery import Reconnect"
    classes += [
        signature(node)
        for node in recovery.body
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "connect"
    ]
    imports |= {
        "Iterator": "from collections.abc import Iterator",
        "AbstractContextManager": "from contextlib import AbstractContextManager",
        "contextmanager": "from contextlib import contextmanager",
        "NodeDecorator": "from amqp_rt.container.declaring import NodeDecorator",
        "RpcDecorator": "from amqp_rt.container.declaring import RpcDecorator",
        "SourceDecorator": "from amqp_rt.container.declaring import SourceDecorator",
    }
    wanted = names_in(classes) - known
    lines = sorted({imports[name] for name in wanted if name in imports})
    body = "\n\n".join(ast.unparse(ast.fix_missing_locations(each)) for each in classes)
    text = (
        HEADER
        + "\n".join(lines)
        + '\n\n__all__ = ["Broker", "Container", "Mesh", "connect"]\n\n'
        + body
    )
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--fix", "--quiet", "--select", "I,F401"], ["format", "--quiet"]):
        done = subprocess.run(
            [*ruff, *command, "--stdin-filename", str(STUB), "-"],
            input=text, capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
        text = done.stdout
    return text


def main() -> None:
    text = stub()
    if "--check" in sys.argv[1:]:
        if STUB.read_text("utf-8") != text:
            sys.exit("amqp_rt/sync.pyi is old: python docs/_tools/sync_stub.py")
    else:
        STUB.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
