"""Contestants of a run: amqp_rt in two modes, and the peers that are installed on this machine.

Nothing is downloaded. A peer that is missing is listed as absent, with the package that provides
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from .processes import Role, RoleFailed, descendants, end, start

HERE = Path(__file__).parent
ROOT = HERE.parent
ROLES = HERE / "roles"
NODE_MODULES = ROOT / "tests" / "peers" / "node_modules"
NODE_MODULES_091 = ROOT / "plugins" / "amqp091" / "tests" / "peers" / "node_modules"
PROTON_C_BROKER = Path("/usr/share/proton/examples/c/broker.c")

#: Seconds before the measured time, for compilers that optimize at run time (node's).
WARMUP_S = 0.3

#: Credit that every receiver grants: a window of 10, proton's default, would cost it up to half its
#: rate.
CREDIT = 1000


class Running(Struct):
    """Running broker."""

    port: int
    #: Processes whose CPU and memory are counted for the broker.
    pids: tuple[int, ...]
    #: Converts the name of a queue to the address for clients.
    address: Callable[[str], str] = str
    #: The terminus-durability with which clients get a durable queue, for brokers that use it; else
    #: 0.
    terminus_durability: int = 0


class Doors(Struct):
    """Broker with listeners of several schemes."""

    #: URLs by scheme.
    urls: dict[str, str]
    pids: tuple[int, ...]


class Contestant(Struct):
    """Program that can be measured."""

    key: str
    #: Version and other details, shown on each of its lines.
    identity: str
    command: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    #: Roles that its program supports; see ``roles/``.
    roles: frozenset[str] = frozenset()
    #: Runs it as a broker.
    broker: Callable[[], contextlib.AbstractContextManager[Running]] | None = None
    #: Largest body that it forwards unharmed as a broker; 0 for no limit.
    size_max: int = 0
    #: Runs it as a broker that keeps durable messages; None if it has no store.
    durable_broker: Callable[[], contextlib.AbstractContextManager[Running]] | None = None
    #: Runs it as a broker with its store in the given folder, which is kept.
    kept_broker: Callable[[Path], contextlib.AbstractContextManager[Running]] | None = None
    #: Runs it as a broker for 0-9-1; the argument is whether it has a store.
    broker091: Callable[[bool], contextlib.AbstractContextManager[Running]] | None = None
    #: The same for 0-10 and 0-9-1.
    broker010: Callable[[bool], contextlib.AbstractContextManager[Running]] | None = None
    #: The same with its store in the given folder, which is kept.
    kept010: Callable[[Path], contextlib.AbstractContextManager[Running]] | None = None
    #: Whether its programs can have a namespace of Service Bus.
    namespace: bool = False
    #: Listens at each of the given URLs, with a certificate (paths of its file and of its key's),
    #: and with so many edge processes, for our clients.
    doors: (
        Callable[[Sequence[str], tuple[str, str], int], contextlib.AbstractContextManager[Doors]]
        | None
    ) = None
    #: Folders of the packages that its program needs besides amqp_rt.
    packages: tuple[str, ...] = ()

    def role(self, role: str, **options: Any) -> Role:
        return Role(self.command, role, {"warmup": WARMUP_S, **options}, env=self.env)


CLIENT_ROLES = frozenset({"sink", "source", "consume", "echo", "call", "dial", "codec"})
CLIENT_ROLES_091 = frozenset({"source091", "consume091"})
OWN_ROLES = CLIENT_ROLES | {
    "hop",
    "growth",
    "idle",
    "guarded",
    "attack",
    "seeds",
    "store",
    "bus",
    "bus_growth",
    "mesh_member",
    "mesh_stream",
    "mesh_shares",
    "mesh_growth",
    "observed",
}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> dict[str, Any]:
    """Return the properties of the machine that matter for results."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "cores": cores(),
        "date": time.strftime("%Y-%m-%d"),
    }


class Field:
    """Contestants of a run, and the reasons why others are absent."""

    def __init__(self) -> None:
        self.present: dict[str, Contestant] = {}
        self.absent: dict[str, str] = {}

    def add(self, found: Contestant | str, name: str) -> None:
        """Add a contestant, or record why *name* is absent."""
        if isinstance(found, str):
            self.absent[name] = found
        else:
            self.present[found.key] = found

    def with_role(self, role: str) -> list[Contestant]:
        return [one for one in self.present.values() if role in one.roles]

    def brokers(self) -> list[Contestant]:
        return [one for one in self.present.values() if one.broker]


PEERS: dict[str, Callable[[], Contestant | str]] = {}


def peer(name: str) -> Callable[[Callable[[], Contestant | str]], Callable[[], Contestant | str]]:
    """Register the decorated function, which looks for the peer *name*."""

    def enter(look: Callable[[], Contestant | str]) -> Callable[[], Contestant | str]:
        PEERS[name] = look
        return look

    return enter


#: Prefix of the keys of another checkout, before the mode.
BEFORE = "before-"


def field_of(
    mode: str, peers: Sequence[str], compiled_python: Path, against: Path | None = None
) -> Field:
    """Return amqp_rt in *mode* (compiled, pure or both), and those of *peers* that are installed.

    With *against*, another checkout of this repository, its same modes are included.
    """
    found = Field()
    for one in ("compiled", "pure") if against is not None else ():
        if mode in (one, "both"):
            folder = ".venv-compiled" if one == "compiled" else ".venv"
            python = against / folder / "bin" / "python"
            # Its own programs: they use names that are not public, which may have changed.
            roles = against / "benchmarks" / "roles"
            found.add(ours(one, python, key=BEFORE + one, roles=roles), BEFORE + one)
    if mode in ("compiled", "both"):
        found.add(ours("compiled", compiled_python), "compiled")
    if mode in ("pure", "both"):
        found.add(ours("pure", Path(sys.executable)), "pure")
    for name in peers:
        found.add(PEERS[name](), name)
    return found


def identify(command: Sequence[str], env: Mapping[str, str]) -> dict[str, Any] | str:
    """Return the identity that a program reports, or why it does not run."""
    try:
        with Role(command, "version", {}, env=env) as role:
            return role.ready
    except (RoleFailed, OSError) as error:
        return str(error)


def ours(mode: str, python: Path, *, key: str = "", roles: Path = ROLES) -> Contestant | str:
    """Return amqp_rt as installed for *python*, under *key* or *mode*; or why it is absent."""
    if not python.exists():
        return f"no {python}: `make compiled` makes it, --compiled-python names another"
    command = (str(python), str(roles / "on_amqp_rt.py"))
    says = identify(command, {})
    if isinstance(says, str):
        return says
    if says["compiled"] != (mode == "compiled"):
        return f"the installation of {python} is {'' if says['compiled'] else 'not '}compiled"
    identity = (
        f"{key and f'{key}: '}amqp_rt {says['version']} {mode}, Python {says['python']}, {says['driver']} driver, "
        f"{cores()} cores"
    )
    # -P: import the installed package, not the current folder.
    serve = (str(python), "-P", "-c", "from amqp_rt.cli import main; main()", "serve")
    has_both = _has(python, "amqp_rt_amqp091") and _has(python, "amqp_rt_amqp010")
    return Contestant(
        key or mode,
        identity,
        command,
        roles=OWN_ROLES,
        broker=lambda: _own_broker(serve),
        durable_broker=lambda: _own_durable_broker(serve),
        kept_broker=partial(_own_kept_broker, serve),
        broker091=partial(_own_broker091, serve) if _has(python, "amqp_rt_amqp091") else None,
        broker010=partial(_own_broker010, serve) if has_both else None,
        kept010=partial(_own_kept_broker010, serve) if has_both else None,
        namespace=_has(python, "amqp_rt_servicebus"),
        doors=partial(_own_doors, serve),
    )


#: Logs are created on first use like queues, with a partition for each core of a small machine.
LOGS = ("--auto-create", "log:logs-*?partitions=2")


@contextlib.contextmanager
def _served(serve: Sequence[str], *options: str) -> Iterator[Doors]:
    """Run ``amqp-rt serve`` as a user would, with queues that are created on first use."""
    process = start(
        [*serve, *options, "--anonymous", "--auto-create", "queue:*", *LOGS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        assert process.stderr
        line = process.stdout.readline()
        if not line.startswith("ready "):
            raise RoleFailed(f"amqp-rt serve: {line or process.stderr.read()[-300:]}")
        said = json.loads(line.removeprefix("ready "))
        urls: list[str] = said["listeners"]
        pids = (process.pid, *said.get("edges", ()))
        yield Doors({url.partition("://")[0]: url for url in urls}, pids)
    finally:
        end(process, 10)


@contextlib.contextmanager
def _own_broker(serve: Sequence[str], *options: str) -> Iterator[Running]:
    with _served(serve, "--listen", "amqp://127.0.0.1:0", *options) as doors:
        yield Running(int(doors.urls["amqp"].rpartition(":")[2]), doors.pids)


@contextlib.contextmanager
def _own_durable_broker(serve: Sequence[str]) -> Iterator[Running]:
    """Run our broker with a store on disk."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _own_kept_broker(serve, Path(folder)) as running,
    ):
        yield running


def _own_kept_broker(
    serve: Sequence[str], folder: Path
) -> contextlib.AbstractContextManager[Running]:
    return _own_broker(serve, "--store", f"sqlite:{folder}/store")


def _has(python: Path, plugin: str) -> bool:
    """Whether a plug-in is installed."""
    command = [str(python), "-P", "-c", f"import {plugin}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _own_broker091(
    serve: Sequence[str], durable: bool
) -> contextlib.AbstractContextManager[Running]:
    return _own_fronts(serve, durable, "amqp091")


def _own_broker010(
    serve: Sequence[str], durable: bool
) -> contextlib.AbstractContextManager[Running]:
    return _own_fronts(serve, durable, "amqp010", "amqp091")


def _own_kept_broker010(
    serve: Sequence[str], folder: Path
) -> contextlib.AbstractContextManager[Running]:
    return _own_broker(serve, "--front", "amqp010", "--store", f"sqlite:{folder}/store")


@contextlib.contextmanager
def _own_fronts(serve: Sequence[str], durable: bool, *fronts: str) -> Iterator[Running]:
    words = [word for front in fronts for word in ("--front", front)]
    with tempfile.TemporaryDirectory() as folder:
        store = ["--store", f"sqlite:{folder}/store"] if durable else []
        with _own_broker(serve, *words, *store) as running:
            yield running


def _own_doors(
    serve: Sequence[str], urls: Sequence[str], certificate: tuple[str, str], edges: int = 0
) -> contextlib.AbstractContextManager[Doors]:
    listening = [word for url in urls for word in ("--listen", url)]
    more = ("--edges", str(edges)) if edges else ()
    return _served(
        serve, *listening, "--tls-cert", certificate[0], "--tls-key", certificate[1], *more
    )


@peer("proton")
def proton() -> Contestant | str:
    """Return python-qpid-proton as installed for this Python."""
    command = (sys.executable, str(ROLES / "on_proton.py"))
    says = identify(command, {})
    if isinstance(says, str):
        return "python-qpid-proton is not installed (make peers)"
    identity = f"python-qpid-proton {says['version']}, Python {platform.python_version()}, {cores()} cores"  # fmt: skip

    @contextlib.contextmanager
    def broker() -> Iterator[Running]:
        with Role(command, "broker", {"credit": CREDIT, "warmup": 0}) as role:
            yield Running(role.port, (role.pid,))

    return Contestant("proton", identity, command, roles=CLIENT_ROLES, broker=broker)


@peer("rhea")
def rhea() -> Contestant | str:
    """Return the library rhea, which `make peers` installs for the tests."""
    node = shutil.which("node")
    if not node:
        return "node is not installed"
    if not (NODE_MODULES / "rhea").is_dir():
        return "rhea is not installed (make peers)"
    command = (node, str(ROLES / "on_rhea.js"))
    env = {"NODE_PATH": str(NODE_MODULES)}
    says = identify(command, env)
    if isinstance(says, str):
        return says
    identity = f"rhea {says['version']}, node {says['node']}, {cores()} cores"
    return Contestant("rhea", identity, command, env, CLIENT_ROLES)


@peer("amqplib")
def amqplib() -> Contestant | str:
    """Return the 0-9-1 client for node, which `make peers` installs for the tests."""
    node = shutil.which("node")
    if not node:
        return "node is not installed"
    if not (NODE_MODULES_091 / "amqplib").is_dir():
        return "amqplib is not installed (make peers)"
    command = (node, str(ROLES / "on_amqplib.js"))
    env = {"NODE_PATH": str(NODE_MODULES_091)}
    says = identify(command, env)
    if isinstance(says, str):
        return says
    identity = f"amqplib {says['version']}, node {says['node']}, {cores()} cores"
    return Contestant("amqplib", identity, command, env, CLIENT_ROLES_091 | {"bind091"})


@peer("pika")
def pika() -> Contestant | str:
    """Return the 0-9-1 client for Python."""
    command = (sys.executable, str(ROLES / "on_pika.py"))
    says = identify(command, {})
    if isinstance(says, str):
        return "pika is not installed (make peers)"
    identity = f"pika {says['version']}, Python {platform.python_version()}, {cores()} cores"
    return Contestant("pika", identity, command, roles=CLIENT_ROLES_091)


@peer("pyamqp")
def pyamqp() -> Contestant | str:
    """Return the AMQP implementation of Azure's Python SDK: its codec, and its client of Service Bus."""
    command = (sys.executable, str(ROLES / "on_pyamqp.py"))
    says = identify(command, {})
    if isinstance(says, str):
        return "neither azure-servicebus nor azure-eventhub is installed"
    identity = f"pyamqp of {says['version']}, Python {platform.python_version()}, {cores()} cores"
    return Contestant("pyamqp", identity, command, roles=frozenset({"codec", "bus"}))


@peer("spark")
def spark() -> Contestant | str:
    """Return Apache Spark, in which our format and Spark's own sources are measured."""
    command = (sys.executable, str(ROLES / "on_spark.py"))
    says = identify(command, {})
    if isinstance(says, str):
        return says
    if "absent" in says:
        return str(says["absent"])
    identity = (
        f"Spark {says['spark']}, Java {says['java']}, pyarrow {says['arrow']}, "
        f"Python {platform.python_version()}, local[2], {cores()} cores"
    )
    return Contestant("spark", identity, command, packages=tuple(says["packages"]))


@peer("proton-c")
def proton_c() -> Contestant | str:
    """Return proton's example broker in C, which Debian ships as source."""
    if not PROTON_C_BROKER.exists():
        return "no proton C examples (Debian: libqpid-proton11-dev-examples)"
    if not shutil.which("cc") or not shutil.which("pkg-config"):
        return "a C compiler and pkg-config are needed to build proton's C broker"
    version = _output("pkg-config", "--modversion", "libqpid-proton")
    if not version:
        return "no libqpid-proton (Debian: libqpid-proton11-dev)"
    flags = _output("pkg-config", "--cflags", "libqpid-proton").split()
    # Debian ships no pkg-config file for the proactor, and no library name without the version.
    flags += ["-l:libqpid-proton-core.so.10", "-l:libqpid-proton-proactor.so.1", "-lpthread"]

    @contextlib.contextmanager
    def broker() -> Iterator[Running]:
        with tempfile.TemporaryDirectory() as scratch:
            binary = Path(scratch) / "broker"
            built = subprocess.run(
                ["cc", "-O2", "-o", str(binary), str(PROTON_C_BROKER), *flags],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if built.returncode:
                raise RoleFailed(f"proton's C broker does not build: {built.stderr[-300:]}")
            port = free_port()
            process = start(
                [str(binary), "127.0.0.1", str(port)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                wait_for(port, process)
                yield Running(port, (process.pid,))
            finally:
                end(process, 10)

    return Contestant("proton-c", f"proton C example broker {version}, {cores()} cores", broker=broker)  # fmt: skip


@peer("rabbitmq")
def rabbitmq() -> Contestant | str:
    """Return RabbitMQ with its AMQP 1.0 plug-in, run as a separate node in a scratch folder."""
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
    if not found:
        return "rabbitmq-server is not installed"
    server = found[-1]
    version = server.parent.parent.name.rpartition("-")[2]
    if not any((server.parent.parent / "plugins").glob("rabbitmq_amqp1_0-*")):
        return f"RabbitMQ {version} has no AMQP 1.0 plug-in"
    identity = f"RabbitMQ {version}, AMQP 1.0 plug-in, {cores()} cores"
    kept = partial(_rabbitmq, server)

    @contextlib.contextmanager
    def run() -> Iterator[Running]:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            kept(Path(folder)) as running,
        ):
            yield running

    return Contestant(
        "rabbitmq",
        identity,
        broker=run,
        durable_broker=run,
        kept_broker=kept,
        broker091=lambda _durable: run(),
    )


RABBITMQ_CONF = """\
listeners.tcp.1 = 127.0.0.1:{port}
log.console = false
log.file = false
amqp1_0.default_user = guest
tcp_listen_options.nodelay = true
vm_memory_high_watermark.relative = 0.6
disk_free_limit.absolute = 50MB
"""


@contextlib.contextmanager
def _rabbitmq(server: Path, scratch: Path) -> Iterator[Running]:
    port, distribution, epmd = free_port(), free_port(), free_port()
    (scratch / "rabbitmq.conf").write_text(RABBITMQ_CONF.format(port=port))
    (scratch / "enabled_plugins").write_text("[rabbitmq_amqp1_0].\n")
    env = {
        **os.environ,
        "HOME": str(scratch),
        "RABBITMQ_NODENAME": f"amqp_rt_bench_{os.getpid()}@localhost",
        "RABBITMQ_BASE": str(scratch),
        "RABBITMQ_MNESIA_BASE": str(scratch / "mnesia"),
        "RABBITMQ_LOG_BASE": str(scratch / "log"),
        "RABBITMQ_CONFIG_FILE": str(scratch / "rabbitmq"),
        "RABBITMQ_CONF_ENV_FILE": str(scratch / "none"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(scratch / "advanced.config"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(scratch / "enabled_plugins"),
        "RABBITMQ_GENERATED_CONFIG_DIR": str(scratch / "generated"),
        "RABBITMQ_PID_FILE": str(scratch / "pid"),
        "RABBITMQ_DIST_PORT": str(distribution),
        "ERL_EPMD_PORT": str(epmd),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        # Without busy waiting of its schedulers, which would use CPU while idle, also at our cost.
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none "
        "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    quiet: dict[str, Any] = {
        "env": env,
        "cwd": str(scratch),
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }
    # Started here, because a port mapper that the node starts would outlive it.
    mapper = start(["epmd", "-port", str(epmd), "-address", "127.0.0.1"], **quiet)
    process = start([str(server)], **quiet)
    try:
        wait_for(port, process, patience_s=100)
        pids = descendants(process.pid)
        yield Running(port, tuple(pids), lambda name: f"/queue/{name}", 2)
    finally:
        end(process, 20)
        end(mapper)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(port: int, process: subprocess.Popen[Any], patience_s: float = 10.0) -> None:
    """Wait until a process listens on *port*.

    Raises:
        RoleFailed: *process* has ended, or does not listen within *patience_s*.
    """
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RoleFailed(f"{process.args!r} ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.01)
    raise RoleFailed(f"{process.args!r} does not listen after {patience_s:.0f} s")
