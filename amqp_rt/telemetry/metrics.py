"""Metrics of a container and its broker for Prometheus: ``Metrics(container)``.

Needs ``prometheus-client`` (``pip install amqp-rt[metrics]``). The values are read from the state of the container
when they are asked for, but for the time that handlers take, which is observed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Final, TypeAlias

import trio

from .. import COMPILED, __version__
from ..broker.host import BrokerHost
from ..container.container import Container
from ..tallies import Distribution
from .handler_times import HandlerTimes
from .snapshots import STATES, TOTALS, Snapshot, take_snapshot

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.parser import text_string_to_metric_families
    from prometheus_client.registry import CollectorRegistry
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "Metrics() needs prometheus-client: pip install 'amqp-rt[metrics]'"
    ) from error

_PREFIX: Final = "amqp_rt_"

#: Values of labels → value.
_Samples: TypeAlias = Iterable[tuple[tuple[str, ...], float]]

#: What is said of each family: the help of Prometheus.
HELP: Final[Mapping[str, str]] = {
    "messages": "Messages in nodes, by state.",
    "bytes": "Bytes of the messages in nodes.",
    "node_messages": "Messages in one node, by state.",
    "node_bytes": "Bytes of the messages in one node.",
    "messages_enqueued": "Messages that nodes have taken in.",
    "messages_delivered": "Deliveries to consumers.",
    "messages_accepted": "Messages that consumers have accepted.",
    "messages_requeued": "Deliveries that ended with the message back in its node.",
    "messages_expired": "Messages whose time to live has passed.",
    "messages_dropped": "Messages that were dropped and not dead-lettered.",
    "messages_dead_lettered": "Messages that were dead-lettered, by reason.",
    "connections": "Open connections of peers, by protocol.",
    "connections_opened": "Connections that peers have opened, by protocol.",
    "connections_closed": "Connections of peers that have ended, by protocol.",
    "links_refused": "Links of peers that were refused, by condition.",
    "sessions": "Sessions of peers.",
    "links": "Attached links of peers, by the role of the peer.",
    "logins_failed": "Logins that failed, by mechanism.",
    "memory_bytes": "Bytes of messages in memory.",
    "memory_limit_bytes": "Most bytes of messages in memory.",
    "store_bytes": "Bytes of the store on the disk.",
    "store_commit_seconds": "Durations of commits of the store.",
    "store_batch_messages": "Messages that a commit has added.",
    "log_lag_records": "Records of a log that a group has not read.",
    "handler_seconds": "Time that handlers took for a message, by the pattern of their address.",
    "handler_running": "Messages that handlers are processing.",
    "handler_outcomes": "Messages that handlers have processed, by outcome.",
    "stuck": "What is stuck, by cause.",
    "metrics_left_out": "Nodes and groups beyond the limit, which have no values of their own here.",
    "build_info": "Version of amqp_rt, and whether it runs compiled.",
}


class Metrics:
    """Metrics of *container*, and of the broker in it.

    ::

        metrics = Metrics(broker.container)
        body, content_type = await metrics.render(request.headers.get("accept", ""))

    The sums over all nodes are always there; the values of single nodes only for those that are named, at most
    ``Limits.metrics_nodes_max``. Handlers are timed on links that attach after this was created.
    """

    def __init__(self, container: Container) -> None:
        self._container = container
        self._times = HandlerTimes(container.limits.metrics_nodes_max)
        container.observe(self._times)

    @property
    def _broker(self) -> BrokerHost | None:
        found = (each for each in self._container.hosts if isinstance(each, BrokerHost))
        return next(found, None)

    async def render(self, accept: str = "", *, node: str | None = None) -> tuple[bytes, str]:
        """Return a page for Prometheus and its content-type.

        The values are read in slices, and written in a thread. If cancelled, nothing has changed.

        Args:
            accept: ``Accept`` of the request; OpenMetrics if it asks for that, else Prometheus' text.
            node: Pattern with ``*`` and ``?`` of the nodes whose own values are wanted, such as ``orders-*``.
        """
        snapshot = await take_snapshot(self._container, self._broker, named=node)
        times = {name: each.copy() for name, each in self._times.routes.items()}
        return await trio.to_thread.run_sync(partial(_render, snapshot, times, accept, node))


def _render(
    snapshot: Snapshot, times: Mapping[str, Distribution], accept: str, node: str | None
) -> tuple[bytes, str]:
    return render_families(families(snapshot, times, detailed=node is not None), accept)


def render_families(made: Iterable[Metric], accept: str) -> tuple[bytes, str]:
    """Return a page with the families *made*, in the format that *accept* asks for, and its content-type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(list(made)))
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):
        # It reads the version that the client accepts, which may be no version.
        encode, content_type = choose_encoder("")
    return encode(registry), content_type


def join_pages(pages: Iterable[tuple[str, str]], accept: str) -> tuple[bytes, str]:
    """Return one page with the samples of all *pages*, each labelled with its worker, and its content-type.

    Args:
        pages: Name of a worker, and its page.
        accept: The formats that the client accepts.
    """
    found: dict[str, Metric] = {}
    for worker, page in pages:
        for family in text_string_to_metric_families(page):
            into = found.setdefault(
                family.name, Metric(family.name, family.documentation, family.type, family.unit)
            )
            for sample in family.samples:
                into.add_sample(sample.name, {**sample.labels, "worker": worker}, sample.value)
    return render_families(found.values(), accept)


class _Families:
    """Collector of families that have been made."""

    def __init__(self, made: list[Metric]) -> None:
        self._made = made

    def collect(self) -> Iterable[Metric]:
        return self._made


def _gauge(name: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, HELP[name], labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _counter(name: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, HELP[name], labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _histogram(
    name: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], Distribution]]
) -> Metric:
    family = HistogramMetricFamily(_PREFIX + name, HELP[name], labels=labels)
    for values, found in samples:
        buckets: list[tuple[str, float]] = []
        count = 0
        for bound, here in zip((*found.bounds, None), found.counts, strict=True):
            count += here
            buckets.append(("+Inf" if bound is None else str(bound), count))
        family.add_metric(values, buckets, found.total)
    return family


def families(
    found: Snapshot, times: Mapping[str, Distribution], *, detailed: bool
) -> Iterator[Metric]:
    """Yield the families of *found*; those of single nodes only if *detailed*."""
    by_kind = ("virtual_host", "kind")
    yield _gauge("messages", (*by_kind, "state"), found.messages.items())
    yield _gauge("bytes", by_kind, found.bytes.items())
    if detailed:
        yield _gauge(
            "node_messages",
            (*by_kind, "node", "state"),
            (
                ((each.virtual_host, each.kind, each.name, state), count)
                for each in found.nodes
                for state, count in zip(STATES, each.messages, strict=True)
            ),
        )
        yield _gauge(
            "node_bytes",
            (*by_kind, "node"),
            (((each.virtual_host, each.kind, each.name), each.bytes) for each in found.nodes),
        )
    for name in TOTALS:
        yield _counter(
            f"messages_{name}",
            by_kind,
            ((labels, getattr(counts, name)) for labels, counts in found.totals.items()),
        )
    yield _counter("messages_dead_lettered", ("reason",), _of_one(found.dead_lettered))
    yield _gauge("connections", ("protocol",), _of_one(found.connections))
    yield _counter("connections_opened", ("protocol",), _of_one(found.opened))
    yield _counter("connections_closed", ("protocol",), _of_one(found.closed))
    yield _counter("links_refused", ("condition",), _of_one(found.refused))
    yield _gauge("sessions", (), [((), found.sessions)])
    yield _gauge("links", ("role",), _of_one(found.links))
    yield _counter("logins_failed", ("mechanism",), _of_one(found.logins_failed))
    if found.memory is not None:
        held, limit = found.memory
        yield _gauge("memory_bytes", (), [((), held)])
        yield _gauge("memory_limit_bytes", (), [((), limit)])
    if found.store is not None:
        yield _gauge("store_bytes", (), [((), found.store.size_on_disk())])
    if found.commit_seconds is not None and found.batch_messages is not None:
        yield _histogram("store_commit_seconds", (), [((), found.commit_seconds)])
        yield _histogram("store_batch_messages", (), [((), found.batch_messages)])
    yield _gauge(
        "log_lag_records",
        ("virtual_host", "node", "group"),
        (((host, name, group), lag) for host, name, group, lag in found.lags),
    )
    yield _histogram(
        "handler_seconds", ("route",), (((name,), each) for name, each in times.items())
    )
    yield _gauge("handler_running", ("route",), _of_one(found.running))
    yield _counter("handler_outcomes", ("route", "outcome"), found.outcomes.items())
    yield _gauge("stuck", ("what",), _of_one(found.stuck))
    yield _gauge("metrics_left_out", (), [((), found.left_out)])
    compiled = "true" if COMPILED else "false"
    yield _gauge("build_info", ("version", "compiled"), [((__version__, compiled), 1)])


def _of_one(counts: Mapping[str, int]) -> _Samples:
    """Return samples with one label."""
    return [((name,), count) for name, count in counts.items()]
