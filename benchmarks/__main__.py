"""Command line of the benchmarks: ``python -m benchmarks``."""

from __future__ import annotations

import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path

import click
import msgspec

from . import report
from .contestants import BEFORE, PEERS, ROOT, environment, field_of
from .measures import (
    Plan,
    Settings,
    amqp010,
    amqp091,
    attacked,
    broker,
    codec,
    cores,
    door,
    doors,
    durable,
    growth,
    memory,
    mesh,
    observed,
    p2p,
    recovery,
    rpc,
    seeds,
    servicebus,
    setup,
    spark,
    start,
    stores,
)
from .processes import RoleFailed, exit_on_signals
from .results import Results, Target, judge
from .rounds import REPEATS, Progress, run

MEASURES = {
    "codec": codec.cases,
    "p2p": p2p.cases,
    "rpc": rpc.cases,
    "broker": broker.cases,
    "durable": durable.cases,
    "amqp091": amqp091.cases,
    "amqp010": amqp010.cases,
    "setup": setup.cases,
    "start": start.cases,
    "memory": memory.cases,
    "growth": growth.cases,
    "recovery": recovery.cases,
    "doors": doors.cases,
    "cores": cores.cases,
    "servicebus": servicebus.cases,
    "attacked": attacked.cases,
    "mesh": mesh.cases,
    "seeds": seeds.cases,
    "observed": observed.cases,
    "door": door.cases,
    "spark": spark.cases,
    "stores": stores.cases,
}

#: Measures that vary little from round to round, and take long.
STEADY = ("memory", "growth", "recovery", "attacked", "seeds")
STEADY_ROUNDS = 2

EPILOG = """\b
Examples:
  python -m benchmarks --quick                      a minute: ourselves only, for CI
  python -m benchmarks p2p rpc --sizes 100          two measures, one size
  python -m benchmarks mesh --case streamed         one case of a measure
  python -m benchmarks all --check benchmarks/targets.toml
  python -m benchmarks broker --peers proton,rhea --json now.json --compare then.json
  python -m benchmarks codec p2p broker durable --against ../before
"""


def _list(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("measures", nargs=-1, type=click.Choice([*MEASURES, "all"]))
@click.option(
    "--peers",
    default="auto",
    callback=_list,
    help=f"auto: whoever is installed; none; or a list of {', '.join(sorted(PEERS))}.",
)
@click.option(
    "--mode",
    default="both",
    type=click.Choice(["compiled", "pure", "both"]),
    help="Which of our two forms.",
)
@click.option("--sizes", default="0,100,1024,65536", callback=_list, help="Bodies in bytes.")
@click.option("--case", "part", default="", help="Only cases with this in their names.")
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    help="3 by default, 11 with --against.",
)
@click.option(
    "--seconds",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.05, 60),
    help="How long one contestant works in one round.",
)
@click.option(
    "--repeats",
    default=REPEATS,
    show_default=True,
    type=click.IntRange(0, 10),
    help="How often a sample is repeated if the machine's speed changed during it.",
)
@click.option("--quick", is_flag=True, help="About a minute: no peers, one round, small sizes.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Save all samples.")
@click.option(
    "--compare",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Show beside each number what it is of the one saved there.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Measure another checkout too, which has .venv and .venv-compiled of its own, in pairs with "
    "this one; exit 1 if a cost has grown by more than --within.",
)
@click.option(
    "--within",
    default=0.03,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="By how much costs may grow.",
)
@click.option(
    "--check",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Judge the ratios by these targets; exit 1 if one that was measured is missed.",
)
@click.option(
    "--markdown",
    is_flag=False,
    flag_value=Path("docs/benchmarks.md"),
    type=click.Path(path_type=Path),
    help="Write the tables as a page, docs/benchmarks.md if no FILE is given.",
)
@click.option(
    "--compiled-python",
    default=ROOT / ".venv-compiled" / "bin" / "python",
    type=click.Path(path_type=Path),
    help="A Python that has our compiled wheel (make compiled).",
)
def main(
    measures: tuple[str, ...],
    peers: tuple[str, ...],
    mode: str,
    sizes: tuple[str, ...],
    part: str,
    rounds: int | None,
    seconds: float,
    repeats: int,
    quick: bool,
    json_path: Path | None,
    compare: Path | None,
    against: Path | None,
    within: float,
    check: Path | None,
    markdown: Path | None,
    compiled_python: Path,
) -> None:
    """Measure amqp_rt beside every installed peer, in one run.

    MEASURES, all of them if none is named:

    \b
    codec       encode and decode a message and the frequent frames
    p2p         one link between two processes: messages/s and CPU
    rpc         requests and replies, 1 and 64 in flight
    broker      producer, queue, consumer: the broker's CPU, and messages/s
    durable     the same with messages that survive the broker
    amqp091     the same for clients of 0-9-1, and topics with up to 100,000 bindings
    amqp010     the same for clients of 0-10 and 0-9-1 alike; one by one, resumed, recovered
    setup       connections opened and closed
    start       a broker started for a test, and one message through it
    memory      for each idle connection and each queued message
    growth      growth of costs with depth, links, connections and so on
    recovery    a start after kill -9, with up to a million durable messages; cost and memory
    doors       costs of TLS and WebSocket, relative to plain TCP
    cores       TLS, large messages and logins in processes of their own
    servicebus  namespaces of Service Bus: the SDK for Python, and growth of costs
    attacked    the longest step of our event loop under attack, and a regular client's delay
    mesh        0 to 3 hops through a mesh, streams, shares of instances, convergence
    seeds       simulated worlds of the tests
    observed    costs of metrics and spans, and of none
    door        costs of an HTTP door, idle and read
    spark       rows/s that Spark reads and writes, beside the same code without it
    stores      messages/s into stores, in batches of up to 1,024

    All contestants take turns within each round; shown are the median over the rounds, the lowest
    and the highest number. A sample is repeated if the machine's speed changed by more than a
    quarter during it. Read the ratios: "compiled 12x of this" means that our number in compiled
    form is twelve times the one on that line. Only 127.0.0.1 is used, nothing is downloaded, and
    all started processes end with this program, whether it ends by itself or by a signal.
    """  # noqa: D301  # click takes \b for "do not wrap"
    if rounds is None:
        rounds = 3 if against is None else 11
    if against is not None and peers == ("auto",):
        peers = ()
    if quick:
        measures = measures or ("codec", "p2p", "rpc", "growth")
        sizes = tuple(size for size in sizes if size == "100") or sizes[:1]
        rounds, seconds = (1 if against is None else rounds), min(seconds, 0.3)
        peers = peers if peers != ("auto",) else ()
    try:
        settings = Settings(seconds=seconds, sizes=tuple(map(int, sizes)), quick=quick)
    except ValueError:
        raise click.BadParameter("numbers with commas between", param_hint="--sizes") from None
    wanted = list(MEASURES) if not measures or "all" in measures else list(dict.fromkeys(measures))
    names = list(PEERS) if peers == ("auto",) else [] if peers == ("none",) else list(peers)
    if unknown := set(names) - set(PEERS):
        raise click.BadParameter(
            f"no such peer: {', '.join(sorted(unknown))}", param_hint="--peers"
        )
    targets = _targets(check) if check else []
    old = Results.read(compare) if compare else None

    field = field_of(mode, names, compiled_python, against)
    results = Results(environment(), {key: one.identity for key, one in field.present.items()})
    results.absent = field.absent
    for name, reason in field.absent.items():
        click.echo(f"absent: {name}: {reason}", err=True)
    measured = 0
    for name in wanted:
        with ExitStack() as stack:
            plan = Plan(settings, field, stack)
            try:
                found = [case for case in MEASURES[name](plan) if part in case.name]
            except RoleFailed as error:
                results.failures[name] = str(error)
                continue
            measured += len(found)
            turns = rounds
            if name in STEADY and against is None:
                turns = min(rounds, STEADY_ROUNDS)
            progress = Progress(sum(len(case.runs) for case in found) * turns)
            for case in found:
                run(case, results, turns, progress, repeats)
            progress.end()

    if part and not measured and not results.failures:
        raise click.BadParameter(f"no case has {part!r} in its name", param_hint="--case")
    verdicts = judge(results, targets)
    report.show(results, verdicts, old)
    changes = results.changes(BEFORE, within) if against else []
    if changes:
        report.show_changes(changes)
    if json_path:
        results.write(json_path)
    if markdown:
        report.write_markdown(markdown, results, verdicts)
    missed = [one for one in verdicts if one.value is not None and not one.passed]
    worse = [one for one in changes if one.verdict == "worse"]
    if missed or worse or (results.failures and (check or against)) or (against and not changes):
        sys.exit(1)


def _targets(path: Path) -> list[Target]:
    with path.open("rb") as file:
        return msgspec.convert(tomllib.load(file)["target"], list[Target])


if __name__ == "__main__":
    exit_on_signals()
    main()
