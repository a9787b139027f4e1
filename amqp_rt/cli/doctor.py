"""``amqp-rt doctor``: what is wrong with this machine and the files of a broker, and what to do about it."""

from __future__ import annotations

import ctypes
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Final, NamedTuple

import click
from msgspec import Struct

from ..errors import AmqpError
from ..limits import DEFAULT_LIMITS
from ..net.tls import ServerTls
from ..security.access import EVERYBODY, EVERYWHERE, Access, Rights, Rule
from .environment import PREFIX, check_variables, name_variables
from .limit_options import limits_of
from .listing import json_option
from .tables import cell
from .versions import form_of

#: Descriptors that a broker has besides those of its connections.
_OWN_FDS: Final = 64
#: Commits measured, and the octets of each.
_COMMITS: Final = 20
_COMMIT_BYTES: Final = 4096
#: Seconds of a commit above which durable messages are slow, and below which nothing can have reached a disk.
_SLOW_S: Final = 0.02
_NO_DISK_S: Final = 0.00002
_SOON: Final = timedelta(days=30)
#: Answer of the kernel for a clock that nothing synchronizes (adjtimex(2), TIME_ERROR).
_UNSYNCHRONIZED: Final = 5

#: Beginning of the variables of ``serve``.
_OF_SERVE: Final = f"{PREFIX}_SERVE"

OK: Final = "ok"
WARNING: Final = "warning"
WRONG: Final = "wrong"


class Finding(Struct, frozen=True):
    """Result of one check."""

    check: str
    #: ``ok``, ``warning`` or ``wrong``.
    state: str
    #: What was found, as a sentence.
    found: str
    #: What to do, as a sentence; empty if there is nothing to do.
    advice: str = ""


class _Files(NamedTuple):
    """Configuration to examine: what a broker with the options would use."""

    store: str | None
    tls_cert: str | None
    tls_key: str | None
    users: str | None
    access: str | None
    connections_max: int = DEFAULT_LIMITS.connections_max
    #: Why a broker would not start with the options and files; empty if it would.
    refusal: str = ""


@click.command()
@click.option("--config", metavar="FILE", help="File of serve --config, whose files are examined.")
@click.option("--store", metavar="STORE", help="Store of a broker, such as sqlite:PATH.")
@click.option("--tls-cert", metavar="FILE", help="Certificate of a broker (PEM).")
@click.option("--tls-key", metavar="FILE", help="Its private key, if it is in another file.")
@click.option("--users", metavar="FILE", help="File of users.")
@click.option("--access", metavar="FILE", help="File of access rules.")
@json_option
def doctor(
    config: str | None,
    store: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    users: str | None,
    access: str | None,
    as_json: bool,
) -> None:
    """Examine this machine and the files of a broker, and say what to do.

    \b
    compiled      whether the package is compiled, and why not
    clock         whether the clock is synchronized
    descriptors   whether there are enough for the connections that the limits allow
    fsync         how long a commit takes where the store is
    certificate   whether key and certificate fit, and when they expire
    modes         whether others can read secrets
    rights        rules that give more than is usually meant
    options       whether serve takes the options, the variables AMQP_RT_SERVE_... and the files

    Run it as the user of the broker, on its machine, with the options or the --config of serve. Exit code 1:
    something is wrong. Warnings alone are exit code 0.
    """  # noqa: D301
    files = _used(
        config, _Files(store=store, tls_cert=tls_cert, tls_key=tls_key, users=users, access=access)
    )
    wrong: list[str] = []
    for check in _CHECKS:
        for each in check(files):
            # Why a broker would not start is left out if the check of a file has given the reason.
            if any(found in each.found for found in wrong):
                continue
            if each.state == WRONG:
                wrong.append(each.found)
            _write(each, as_json=as_json)
    if wrong:
        raise click.exceptions.Exit(1)


def _used(config: str | None, given: _Files) -> _Files:
    """Return what ``serve`` would use with the file *config* and *given* options, and why it would not start.

    Its own code reads and checks them.
    """
    from .serve import serve

    arguments = {"--config": config, "--store": given.store, "--tls-cert": given.tls_cert}
    arguments |= {"--tls-key": given.tls_key, "--users": given.users, "--access": given.access}
    name_variables(serve, _OF_SERVE)
    try:
        check_variables(serve, _OF_SERVE, "amqp-rt serve")
        context = serve.make_context(
            "serve", [f"{name}={value}" for name, value in arguments.items() if value is not None]
        )
        used = context.params
        given = _Files(
            *(used[name] for name in ("store", "tls_cert", "tls_key", "users_file", "rules"))
        )
        limits = limits_of(context, used["given_limits"])
        given = given._replace(connections_max=limits.connections_max)
        serve.check(context)
    except click.ClickException as error:
        return given._replace(refusal=error.format_message().removesuffix("."))
    return given


def _write(found: Finding, *, as_json: bool) -> None:
    if as_json:
        fields = {name: getattr(found, name) for name in found.__struct_fields__}
        click.echo(json.dumps(fields))
        return
    advice = f". {found.advice[0].upper()}{found.advice[1:]}" if found.advice else ""
    click.echo(cell(f"{found.state.ljust(8)} {found.check.ljust(12)} {found.found}{advice}"))


def _compiled(_: _Files) -> Iterator[Finding]:
    form = form_of("amqp_rt")
    if form == "compiled":
        yield Finding("compiled", OK, "the package is compiled")
        return
    yield Finding(
        "compiled",
        WARNING,
        f"the package is {form}, which takes several times the processor time",
        "install a wheel for this Python and platform, or a C compiler and the package from its source",
    )


def _clock(_: _Files) -> Iterator[Finding]:
    synchronize = (
        "start a time service, such as chrony or systemd-timesyncd: ttl and schedules need the time"
    )
    if time.time() < datetime(2025, 1, 1, tzinfo=UTC).timestamp():
        yield Finding("clock", WRONG, f"the clock says {time.strftime('%Y-%m-%d')}", synchronize)
    elif not sys.platform.startswith("linux"):
        yield Finding("clock", OK, "whether the clock is synchronized is known on Linux only")
    elif (state := _clock_state()) == _UNSYNCHRONIZED:
        yield Finding(
            "clock", WARNING, "the kernel says that nothing synchronizes the clock", synchronize
        )
    elif state < 0:
        yield Finding("clock", OK, "the kernel does not tell whether the clock is synchronized")
    else:
        yield Finding("clock", OK, "the clock is synchronized")


def _clock_state() -> int:
    """Return the state of the kernel's clock (adjtimex(2)); negative if it cannot be asked."""
    # Its struct timex has some 200 octets; modes 0 at its beginning changes nothing.
    buffer = ctypes.create_string_buffer(1024)
    try:
        return int(ctypes.CDLL(None, use_errno=True).adjtimex(buffer))
    except (AttributeError, OSError):
        return -1


def _descriptors(files: _Files) -> Iterator[Finding]:
    try:
        import resource
    except ImportError:
        return  # Windows has no such limit.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files.connections_max + _OWN_FDS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        yield Finding("descriptors", OK, f"{soft} file descriptors are enough for {wanted}")
        return
    beyond = "" if hard == resource.RLIM_INFINITY or hard >= wanted else f", of {hard} at most"
    yield Finding(
        "descriptors",
        WARNING,
        f"{soft} file descriptors{beyond} are fewer than connections_max {files.connections_max} needs",
        f"set LimitNOFILE={wanted} in the unit or ulimit -n {wanted}, or lower --limit connections_max",
    )


def _fsync(files: _Files) -> Iterator[Finding]:
    if files.store is None or not files.store.startswith("sqlite:"):
        yield Finding("fsync", OK, "no store in a file was named, whose disk could be measured")
        return
    folder = Path(files.store.removeprefix("sqlite:")).absolute().parent
    took = []
    try:
        with TemporaryFile(dir=folder) as file:
            for _ in range(_COMMITS):
                began = time.perf_counter()
                file.write(bytes(_COMMIT_BYTES))
                file.flush()
                os.fsync(file.fileno())
                took.append(time.perf_counter() - began)
    except OSError as error:
        yield Finding(
            "fsync", WRONG, f"{folder} cannot be written: {error.strerror}",
            "create it, and give it to the user of the broker",
        )  # fmt: skip
        return
    seconds = median(took)
    measured = f"a commit in {folder} takes {1000 * seconds:.2f} ms"
    if seconds < _NO_DISK_S:
        yield Finding(
            "fsync", WARNING, f"{measured}, too little for a disk",
            "move the store off tmpfs and other file systems in memory: it would not survive a crash",
        )  # fmt: skip
    elif seconds > _SLOW_S:
        yield Finding(
            "fsync", WARNING, f"{measured}: durable messages wait for it",
            "use a disk with a protected write cache, and not one over the network",
        )  # fmt: skip
    else:
        yield Finding("fsync", OK, measured)


def _certificate(files: _Files) -> Iterator[Finding]:
    if files.tls_cert is None:
        return
    try:
        ServerTls(files.tls_cert, files.tls_key)
    except AmqpError as error:
        yield Finding(
            "certificate",
            WRONG,
            error.description,
            "name the certificate and its own key, both in PEM",
        )
        return
    try:
        from cryptography import x509
    except ImportError:
        yield Finding(
            "certificate", OK, f"{files.tls_cert} fits its key; its dates were not read",
            "install amqp-rt[jwt], whose cryptography reads them",
        )  # fmt: skip
        return
    now = datetime.now(UTC)
    for each in x509.load_pem_x509_certificates(Path(files.tls_cert).read_bytes()):
        name = each.subject.rfc4514_string()
        begins, ends = each.not_valid_before_utc, each.not_valid_after_utc
        dates = f"{name!r} of {files.tls_cert} is valid from {begins:%Y-%m-%d} to {ends:%Y-%m-%d}"
        renew = "renew it, and send SIGHUP to the broker, which reads it again"
        if now >= ends:
            yield Finding("certificate", WRONG, f"{dates}: it has expired", renew)
        elif now < begins:
            yield Finding(
                "certificate", WRONG, f"{dates}: it is not valid yet", "compare the clocks"
            )
        elif ends - now < _SOON:
            yield Finding(
                "certificate", WARNING, f"{dates}: {(ends - now).days} days are left", renew
            )
        else:
            yield Finding("certificate", OK, dates)


def _modes(files: _Files) -> Iterator[Finding]:
    secrets = {
        "users": files.users,
        "private key": files.tls_key or files.tls_cert,
        "store": None
        if files.store is None or not files.store.startswith("sqlite:")
        else files.store.removeprefix("sqlite:"),
    }
    for what, name in secrets.items():
        if name is None:
            continue
        try:
            mode = stat.S_IMODE(Path(name).stat().st_mode)
        except OSError:
            continue  # The broker creates it, or cannot start and gives the reason.
        if os.name == "posix" and mode & 0o077:
            state = WARNING if what == "store" else WRONG
            yield Finding(
                "modes", state, f"others can use {name} ({what}): its mode is {mode:03o}",
                f"run chmod 600 {name}",
            )  # fmt: skip
        else:
            yield Finding("modes", OK, f"only its owner can use {name} ({what})")


def _rights(files: _Files) -> Iterator[Finding]:
    if files.access is None:
        if files.users is not None:
            yield Finding(
                "rights", WARNING, "without access rules every user may do everything",
                "write a file for --access, in which each user gets what it needs",
            )  # fmt: skip
        return
    try:
        rules = Access.load(files.access)
    except AmqpError as error:
        yield Finding(
            "rights", WRONG, error.description, "correct the file: the broker would not start"
        )
        return
    dangers = [found for rule in rules.rules if (found := _danger(rule, rules)) is not None]
    yield from dangers
    if not dangers:
        yield Finding(
            "rights", OK, f"none of {len(rules.rules)} rules gives more than is usually meant"
        )


def _options(files: _Files) -> Iterator[Finding]:
    if files.refusal:
        yield Finding(
            "options", WRONG, files.refusal,
            "correct that option or file: the broker would not start",
        )  # fmt: skip
    else:
        yield Finding("options", OK, "a broker would start with these options and files")


def _danger(rule: Rule, rules: Access) -> Finding | None:
    """Return what is dangerous about *rule*, None if nothing is."""
    addresses = (rule.address,) if rule.realm is None else rules.realms[rule.realm]
    where = (
        f"the rule for {rule.address!r}"
        if rule.realm is None
        else f"the rule for realm {rule.realm!r}"
    )
    manages = Rights.MANAGE in rule.rights
    if rule.anonymous and manages:
        return Finding(
            "rights", WRONG, f"{where} lets clients without a login manage nodes",
            "leave anonymous out, or give send or listen alone",
        )  # fmt: skip
    if EVERYBODY in rule.users and manages:
        return Finding(
            "rights", WARNING, f"{where} lets every user manage nodes, which includes to delete them",
            "name the users or a group",
        )  # fmt: skip
    if rule.anonymous and EVERYWHERE in addresses:
        return Finding(
            "rights", WARNING, f"{where} lets clients without a login {rule.rights} everywhere",
            "name the addresses that are meant",
        )  # fmt: skip
    return None


_CHECKS: Final[tuple[Callable[[_Files], Iterator[Finding]], ...]] = (
    *(_compiled, _clock, _descriptors, _fsync, _certificate, _modes, _rights, _options),
)
