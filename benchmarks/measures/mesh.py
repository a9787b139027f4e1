"""A mesh: links over 0 to 3 hops beside a direct one, calls, shares of instances, streams, and growth.

Each member is a process of its own, and so is each client; the client's messages go to the first member, and the last one
serves them. With 0 hops these are the same. *A core each*: members share the cores of this machine, so that rates over hops
show the machine. The rate of a chain whose processes have a core each is that of its busiest process, whose processor time
per message is compared with that of the busier end of a direct link. A hop is a member between the first and the last.

*Streamed*: a message of at least 1 GiB passes three hops for as long as calls are measured, and the calls pass the same
nodes; *apart* are calls over other nodes, which have the same share of the cores, while the same message passes.

*Nodes*: routing engines in simulated time, with eight neighbours each. Of 1,000, the start takes minutes: only their paths
are measured, unless --seconds is at least 10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from ..contestants import CREDIT, ROOT, Contestant
from ..processes import Role, RoleFailed, cpu_s, memory_bytes, peak_bytes
from ..rounds import Case, Sample
from . import Plan, size_name
from .rpc import SIZE

SIZES = (100, 65_536)
HOPS = (0, 1, 2, 3)
NODES = (50, 200, 1_000)
QUICK_NODES = 50
#: Nodes whose start is simulated only with as many seconds for each sample.
MANY, MANY_S = 1_000, 10
STREAM = 2**30
STREAM_QUICK = 2**28
_PATIENCE_S = 600
#: Seconds of calls beside a stream, which lasts as long: a 99th percentile of few calls would be one of chance.
_CALLS_S = 3.0
_CALLS_QUICK_S = 1.0


def cases(plan: Plan) -> list[Case]:
    able = plan.field.with_role("mesh_member")
    seconds, quick = plan.settings.seconds, plan.settings.quick

    def case(name: str, sample: Callable[..., Sample], *arguments: object) -> Case:
        return Case("mesh", name, {one.key: partial(sample, one, *arguments) for one in able})

    found = [
        case(f"{size_name(size)}, {_hops(hops)}", link, hops, size, seconds)
        for size in SIZES
        if size in plan.settings.sizes
        for hops in HOPS
    ]
    found.append(case("calls, direct", calls, None, seconds))
    found += [case(f"calls, {_hops(hops)}", calls, hops, seconds) for hops in HOPS]
    found.append(case("eight instances, one ten times slower", shares, 5 * seconds))
    stream = (STREAM_QUICK, _CALLS_QUICK_S) if quick else (STREAM, _CALLS_S)
    found.append(case("1 GiB streamed, 3 hops", streamed, *stream))
    found += [
        case(f"{nodes:,} nodes", growth, nodes, nodes < MANY or seconds >= MANY_S)
        for nodes in NODES
        if not quick or nodes <= QUICK_NODES
    ]
    return found


def _hops(count: int) -> str:
    return "1 hop" if count == 1 else f"{count} hops"


@contextmanager
def chain(one: Contestant, hops: int, *serve: str, name: str = "node") -> Iterator[list[Role]]:
    """Run members in a row, the last of which serves; the first one is ready when it reaches it."""
    found: list[Role] = []
    with ExitStack() as stack:
        for at in reversed(range(hops + 1)):
            role = one.role(
                "mesh_member",
                name=f"{name}-{at}",
                credit=CREDIT,
                seeds=[f"amqp://127.0.0.1:{found[0].port}"] if found else [],
                serve=serve if at == hops else [],
                reach=serve if at == 0 else [],
            )
            found.insert(0, stack.enter_context(role))
        yield found


def link(one: Contestant, hops: int, size: int, seconds: float) -> Sample:
    """Measure a link over *hops*, and a direct one, in this order."""
    with chain(one, hops, "bench") as nodes:
        before = [cpu_s([each.pid]) for each in nodes]
        with one.role(
            "source", port=nodes[0].port, size=size, settled=False, seconds=seconds
        ) as source:
            sent = source.result(30 + 3 * seconds)
        spent = [cpu_s([each.pid]) - cpu for each, cpu in zip(nodes, before, strict=True)]
        taken = nodes[-1].tell()["n"]
    count = sent["n"]
    if taken != count:
        raise RoleFailed(f"{taken} of {count} messages arrived")
    costs = [each / count * 1e6 for each in spent]
    source_us = sent["cpu"] / sent["measured"] * 1e6
    direct = _direct(one, size, seconds)
    found = {
        "rate": sent["measured"] / sent["elapsed"],
        "of_direct_link": max(direct) / max(source_us, *costs),
        "ingress_us": costs[0],
    }
    if hops > 1:
        hop = sum(costs[1:-1]) / (hops - 1)
        found |= {"hop_us": hop, "over_end": hop / (sum(direct) / 2)}
    return found


def _direct(one: Contestant, size: int, seconds: float) -> Sequence[float]:
    """Return the processor time in µs for a message at both ends of a direct link."""
    with (
        one.role("sink", credit=CREDIT) as sink,
        one.role("source", port=sink.port, size=size, settled=False, seconds=seconds) as source,
    ):
        sent = source.result(30 + 3 * seconds)
        heard = sink.end()
    return sent["cpu"] / sent["measured"] * 1e6, heard["cpu"] / heard["measured"] * 1e6


def calls(one: Contestant, hops: int | None, seconds: float) -> Sample:
    with ExitStack() as stack:
        if hops is None:
            port = stack.enter_context(one.role("echo", credit=CREDIT)).port
        else:
            port = stack.enter_context(chain(one, hops, "echo"))[0].port
        return _called(stack.enter_context(_caller(one, port, seconds)), seconds)


def _caller(one: Contestant, port: int, seconds: float) -> Role:
    return one.role("call", port=port, size=SIZE, in_flight=1, seconds=seconds, credit=CREDIT)


def _called(client: Role, seconds: float) -> Sample:
    heard = client.result(30 + 3 * seconds)
    return {name: heard[name] for name in ("p50_ms", "p99_ms")}


def shares(one: Contestant, seconds: float) -> Sample:
    with one.role("mesh_shares", instances=8, busy_s=0.005, in_flight=8, seconds=seconds) as role:
        done = role.result(60 + 3 * seconds)
    return {
        "slow_share": done["slow"] / done["fast"],
        "p50_ms": done["p50_ms"],
        "p99_ms": done["p99_ms"],
    }


def streamed(one: Contestant, size: int, seconds: float) -> Sample:
    with (
        chain(one, 3, "big", "echo", name="streams") as nodes,
        chain(one, 3, "echo", name="apart") as others,
    ):
        apart = _beside_stream(one, nodes, others[0].port, size, seconds)
        # From here on all that is kept once, such as buffers of connections, is there.
        before = [memory_bytes([each.pid]) for each in nodes]
        within = _beside_stream(one, nodes, nodes[0].port, size, seconds)
        grown = [peak_bytes([each.pid]) - was for each, was in zip(nodes, before, strict=True)]
    return {"growth_bytes": max(grown), "p99_ms": within, "over_apart": within / apart}


def _beside_stream(
    one: Contestant, nodes: Sequence[Role], port: int, size: int, seconds: float
) -> float:
    """Return the p99 in ms of calls at *port* while a message of *size* is streamed over *nodes*."""
    with one.role("mesh_stream", port=nodes[0].port, size=size) as source:
        with _caller(one, port, seconds) as client:
            found = _called(client, seconds)["p99_ms"]
        source.end(_PATIENCE_S)
    return found


def growth(one: Contestant, nodes: int, converge: bool) -> Sample:
    with one.role("mesh_growth", nodes=nodes, converge=converge, tests=str(ROOT / "tests")) as role:
        return role.result(_PATIENCE_S)
