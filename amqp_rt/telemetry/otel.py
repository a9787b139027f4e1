"""Spans and metrics of OpenTelemetry: ``Container(observe=[Otel()])``.

Needs ``opentelemetry-api`` (``pip install amqp-rt[otel]``); without an SDK, which applications choose and set up, the
API does nothing. The trace context of messages is that of W3C, whatever propagator the process has for others, since
its draft for AMQP says where it goes.

Most messages of a busy system are not sampled, so what only a recorded span needs is made after the sampler has decided, and
the trace context is read and written here: the API's propagator, which parses it again and makes a context for it, takes longer
than all else that an unsampled span costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from .. import __version__
from ..addresses import parse_url
from ..compiling import mypyc_attr
from ..errors import AmqpError
from ..message import Message
from ..observers import (
    Kind,
    LinkObserver,
    ObservedLink,
    ObservedOperation,
    log_failed,
    log_left_out,
)
from ..trace_context import NO_TRACE, TRACEPARENT, TRACESTATE, trace_of
from ..unread import UnreadMessage
from . import conventions as names

try:
    from opentelemetry import context as contexts
    from opentelemetry import metrics, trace
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "Otel() needs opentelemetry-api: pip install 'amqp-rt[otel]', and an SDK with an exporter"
    ) from error

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import Counter, Histogram, MeterProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

_SCOPE: Final = "amqp_rt"
#: Value of ``error.type`` where there are too many, by the conventions.
_OTHER: Final = "_OTHER"
#: The usual class of spans that are not recorded; it keeps no attributes.
_UNRECORDED: Final = trace.NonRecordingSpan
#: Octets of trace flags: as objects of the API, and in hexadecimal.
_FLAGS: Final = tuple(trace.TraceFlags(value) for value in range(256))
_HEXADECIMAL: Final = tuple(f"{value:02x}" for value in range(256))


# An ordinary class: applications may derive from it, and of messages only those that fail pass through it.
@mypyc_attr(native_class=False)
class Otel:
    """Observer that makes spans and metrics of OpenTelemetry, by its conventions for messaging.

    ======================  ================  =============================================================
    span                    kind              relation
    ======================  ================  =============================================================
    ``send A``              PRODUCER          child of the current span; its context goes with the message
    ``create A``            PRODUCER          in outboxes: child of the current span; its context goes with the message
    ``process A``           CONSUMER          links to the contexts of its messages; a child with *parent*
    ``settle A``            CLIENT            child of the current span, links to the message's context
    ``call A``              CLIENT            child of the current span; its context goes with the request
    ``process A``           SERVER            child of the request's context
    ``relay A``             PRODUCER          in brokers: child of the context of a sampled message
    ======================  ================  =============================================================

    Args:
        parent: Make ``process`` a child of the message's context, so that both are one trace.
        tracer_provider: Makes the tracer; by default the one of the process.
        meter_provider: Makes the meter; by default the one of the process.
        destinations_max: Different addresses in the attributes of metrics; further ones are left out, as each is kept for good.
        errors_max: Different values of ``error.type`` in the attributes of metrics, which peers choose; further ones
            are ``_OTHER``.
    """

    def __init__(
        self,
        *,
        parent: bool = False,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        destinations_max: int = 1_000,
        errors_max: int = 100,
    ) -> None:
        self.parent = parent
        self.destinations_max = destinations_max
        self.errors_max = errors_max
        self.tracer: Tracer = trace.get_tracer(
            _SCOPE, __version__, tracer_provider, schema_url=names.SCHEMA_URL
        )
        meter = metrics.get_meter(_SCOPE, __version__, meter_provider, names.SCHEMA_URL)
        self._counters: dict[str, Counter] = {
            names.SENT: meter.create_counter(
                names.SENT, "{message}", "Messages that were sent, or could not be"
            ),
            names.CONSUMED: meter.create_counter(
                names.CONSUMED, "{message}", "Messages that the application was given"
            ),
        }
        self._histograms: dict[str, Histogram] = {
            name: meter.create_histogram(
                name, "s", what, explicit_bucket_boundaries_advisory=names.BUCKETS
            )
            for name, what in (
                (names.OPERATION_DURATION, "Duration of operations of a client"),
                (names.PROCESS_DURATION, "Duration of processing a message"),
            )
        }
        self._destinations: set[str] = set()
        self._errors: set[str] = set()

    def observe(self, link: ObservedLink) -> LinkObserver | None:
        """Return the observer of *link*."""
        named = names.OPERATIONS[link.kind]
        counter = None if named.counter is None else self._counters[named.counter]
        histogram = None if named.histogram is None else self._histograms[named.histogram]
        if link.kind == "receive":
            assert counter is not None
            return _Count(counter, self._of_metrics(link))
        measured = counter is not None or histogram is not None
        of_metrics = self._of_metrics(link) if measured else {}
        return _LinkSpans(self, link, counter, histogram, of_metrics)

    def error_of_metrics(self, error: str) -> str:
        """Return ``error.type`` of metrics for *error*: itself, or ``_OTHER`` once there are too many."""
        if error not in self._errors:
            if len(self._errors) >= self.errors_max:
                return _OTHER
            self._errors.add(error)
        return error

    def _of_metrics(self, link: ObservedLink) -> dict[str, str | bool]:
        """Return the attributes of metrics: as those of spans, but with a bounded number of addresses."""
        found = attributes_of(link)
        name = str(found.get(names.DESTINATION_NAME, ""))
        if name and name not in self._destinations:
            if len(self._destinations) < self.destinations_max:
                self._destinations.add(name)
            else:
                del found[names.DESTINATION_NAME]
        return found

    def __repr__(self) -> str:
        return "Otel()"


def attributes_of(link: ObservedLink) -> dict[str, str | bool]:
    """Return the attributes of all spans of *link*, apart from the address of its server."""
    named = names.OPERATIONS[link.kind]
    found: dict[str, str | bool] = {
        names.SYSTEM: names.system_of(link.peer),
        names.OPERATION_NAME: named.name,
        names.OPERATION_TYPE: named.type,
    }
    if link.template is not None:
        found[names.DESTINATION_TEMPLATE] = link.template
    elif link.address:
        found[names.DESTINATION_NAME] = link.address
    if link.temporary:
        found[names.DESTINATION_TEMPORARY] = True
    return found


def _server_of(link: ObservedLink) -> dict[str, str | int]:
    if not link.dialled or link.peer is None:
        return {}
    try:
        url = parse_url(link.peer.address)
    except (AmqpError, ValueError):
        return {}
    if url.scheme in ("amqp+unix", "memory") or not url.host:
        return {}
    return {names.SERVER_ADDRESS: url.host, names.SERVER_PORT: url.port}


class _Count:
    """Counter of the messages of a receiver."""

    def __init__(self, counter: Counter, attributes: Mapping[str, str | bool]) -> None:
        self._counter = counter
        self._attributes = attributes

    def begin(self, message: Message | None) -> None:
        self._counter.add(1, self._attributes)

    def begin_unread(self, message: UnreadMessage) -> None:
        self._counter.add(1, self._attributes)


class _LinkSpans:
    """Spans of one link."""

    #: What the SDK raises is logged here.
    guards_itself = True

    def __init__(
        self,
        otel: Otel,
        link: ObservedLink,
        counter: Counter | None,
        histogram: Histogram | None,
        of_metrics: Mapping[str, str | bool],
    ) -> None:
        named = names.OPERATIONS[link.kind]
        self._otel = otel
        self._link = link
        self.kind: Kind = link.kind
        #: Methods of the counter and the histogram.
        self.add = None if counter is None else counter.add
        self.record = None if histogram is None else histogram.record
        self.of_metrics = of_metrics
        self.error_of_metrics = otel.error_of_metrics
        self._measured = counter is not None or histogram is not None
        self._start_span: Callable[..., Span] = otel.tracer.start_span
        self._attributes: dict[str, Any] = {**attributes_of(link), **_server_of(link)}
        destination = "(temporary)" if link.temporary else link.template or link.address
        self._name = f"{named.name} {destination}" if destination else named.name
        self._span_kind = trace.SpanKind[named.span_kind]
        self._is_child = named.is_child or (link.kind == "process" and otel.parent)
        #: Whether messages carry our context, and whether they may have one of others.
        self._writes = link.kind in ("send", "call", "serve", "create", "relay")
        self._reads = link.kind != "call"
        self._relays = link.kind == "relay"
        #: Whether what carries our context runs no code of the application.
        self._sends = self._writes and link.kind != "serve"
        #: Whether the tracer makes no spans, as where the SDK is switched off, and there is no context to pass on either. A
        #: tracer whose provider is set later is none of these.
        self._silent = False
        if isinstance(otel.tracer, trace.NoOpTracer):
            # Links are for spans of ours.
            self._reads = self._is_child
            self._silent = not (self._reads or self._writes)
        self._anonymous = link.kind == "send" and not link.address

    def begin(self, message: Message | None) -> ObservedOperation | None:
        return self.begin_unread(UnreadMessage(None, message))

    def begin_unread(self, message: UnreadMessage) -> ObservedOperation | None:
        if self._silent:
            return _Measured(self) if self._measured else None
        try:
            given = message.trace() if self._reads else NO_TRACE
            context: Context | None = None
            links: tuple[trace.Link, ...] = ()
            parent: str | None = None
            if given:
                parent = given[TRACEPARENT]
                sampled = _is_sampled(parent)
                if self._relays and not sampled:
                    return None
                if self._is_child:
                    found = trace.NonRecordingSpan(_context_of(parent, given))
                    context = trace.set_span_in_context(found)
                elif sampled:
                    # A sampler may decide by the links, of which one to a trace that is not recorded says nothing.
                    links = (trace.Link(_context_of(parent, given)),)
            elif self._relays:
                return None
            name, attributes = self._name, self._attributes
            if self._anonymous and message.message is not None and message.message.to:
                to = message.message.to
                name = f"{name} {to}"
                attributes = {**attributes, names.DESTINATION_NAME: to}
            span = self._start_span(name, context, self._span_kind, attributes, links)
            if type(span) is _UNRECORDED:
                if span is trace.INVALID_SPAN:
                    # There is no SDK, and no context to pass on.
                    return _Measured(self) if self._measured else None
                if not self._writes:
                    return _Unrecorded(self, span)
                written = _written(span.get_span_context())
                return _Carried(self, written) if self._sends else _Unrecorded(self, span, written)
            if span.is_recording():
                if parent is not None and not links and context is None:
                    span.add_link(_context_of(parent, given))
                ids = self._ids_of(message)
                if ids:
                    span.set_attributes(ids)
            written = _written(span.get_span_context()) if self._writes else NO_TRACE
            return _Recorded(self, span, written)
        except Exception as error:
            log_left_out(self._otel, self._link, error)
            self._silent, self._measured = True, False
            return None

    def _ids_of(self, message: UnreadMessage) -> dict[str, str]:
        """Return the attributes with the ids of *message*."""
        found: dict[str, str] = {}
        own, conversation = message.ids()
        if conversation is None and self.kind == "serve":
            conversation = own
        if own is not None:
            found[names.MESSAGE_ID] = _text(own)
        if conversation is not None:
            found[names.CONVERSATION_ID] = _text(conversation)
        return found


def _is_sampled(parent: str) -> bool:
    """Return whether the flags of *parent*, a well-formed ``traceparent``, have *sampled*."""
    # The lowest bit of a hexadecimal digit.
    return parent[54] in "13579bdf"


def _context_of(parent: str, given: Mapping[str, str]) -> trace.SpanContext:
    """Return the context of *parent*, which is well-formed, and of the ``tracestate`` in *given*."""
    state = given.get(TRACESTATE)
    return trace.SpanContext(
        int(parent[3:35], 16),
        int(parent[36:52], 16),
        True,
        _FLAGS[int(parent[53:55], 16)],
        None if state is None else trace.TraceState.from_header([state]),
    )


def _written(context: trace.SpanContext) -> Mapping[str, str]:
    """Return *context* as it is written into messages; nothing if there is none, as without an SDK."""
    if not context.is_valid:
        return NO_TRACE
    # Octets are written in hexadecimal three times as fast as integers.
    ids = (context.trace_id << 64 | context.span_id).to_bytes(24).hex()
    written = {TRACEPARENT: f"00-{ids[:32]}-{ids[32:]}-{_HEXADECIMAL[context.trace_flags]}"}
    state = context.trace_state
    # The usual one is empty; asking it takes a call.
    if state is not trace.DEFAULT_TRACE_STATE and state:
        written[TRACESTATE] = state.to_header()
    return written


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


class _Measured:
    """Operation without a span, of which there are metrics."""

    __slots__ = ("_began", "_count", "_over", "_spans")

    #: There is nothing to pass on.
    trace = NO_TRACE

    def __init__(self, spans: _LinkSpans) -> None:
        self._spans = spans
        self._count = 1
        self._over = False
        self._began = perf_counter()

    def add(self, message: Message | None) -> None:
        self._count += 1

    def identify(self, message_id: object, conversation_id: object) -> None:
        """Do nothing: metrics are not those of single messages."""

    def enter(self) -> None:
        """Do nothing: there is no span."""

    def leave(self) -> None:
        """Do nothing: there is no span."""

    def end(self, error: str | None = None) -> None:
        if self._over:
            return
        self._over = True
        spans = self._spans
        attributes = spans.of_metrics
        try:
            if error is not None:
                attributes = {**attributes, names.ERROR_TYPE: spans.error_of_metrics(error)}
            if spans.add is not None:
                spans.add(self._count, attributes)
            if spans.record is not None:
                spans.record(perf_counter() - self._began, attributes)
        except Exception as failure:
            log_failed("end", self, failure)


class _Carried(_Measured):
    """Operation whose span is not recorded; only the message carries its context on."""

    __slots__ = ("trace",)

    def __init__(self, spans: _LinkSpans, written: Mapping[str, str]) -> None:
        # As in the class above, without another call for each message.
        self._spans = spans
        self._count = 1
        self._over = False
        self._began = perf_counter()
        self.trace = written


class _Unrecorded(_Measured):
    """Operation whose span is not recorded, and is the current one while code of the application runs."""

    __slots__ = ("_span", "_token", "trace")

    def __init__(
        self, spans: _LinkSpans, span: Span, written: Mapping[str, str] = NO_TRACE
    ) -> None:
        self._spans = spans
        self._count = 1
        self._over = False
        self._began = perf_counter()
        self.trace = written
        self._span = span
        self._token: Any = None

    def enter(self) -> None:
        try:
            self._token = contexts.attach(trace.set_span_in_context(self._span))
        except Exception as failure:
            log_failed("enter", self, failure)

    def leave(self) -> None:
        # What is raised is logged there.
        if self._token is not None:
            contexts.detach(self._token)


class _Recorded(_Unrecorded):
    """Operation with a span that may be recorded, from its beginning to its end."""

    __slots__ = ()

    def add(self, message: Message | None) -> None:
        self._count += 1
        try:
            if self._span.is_recording():
                self._span.set_attribute(names.BATCH_COUNT, self._count)
                given = NO_TRACE if message is None else trace_of(message)
                parent = given.get(TRACEPARENT)
                if parent is not None:
                    self._span.add_link(_context_of(parent, given))
        except Exception as failure:
            log_failed("add", self, failure)

    def identify(self, message_id: object, conversation_id: object) -> None:
        try:
            self._span.set_attribute(names.MESSAGE_ID, _text(message_id))
            self._span.set_attribute(names.CONVERSATION_ID, _text(conversation_id))
        except Exception as failure:
            log_failed("identify", self, failure)

    def end(self, error: str | None = None) -> None:
        if self._over:
            return
        self._over = True
        spans, span = self._spans, self._span
        attributes: Mapping[str, str | bool] = spans.of_metrics
        try:
            if error is not None:
                attributes = {**attributes, names.ERROR_TYPE: spans.error_of_metrics(error)}
                span.set_attribute(names.ERROR_TYPE, error)
                span.set_status(trace.StatusCode.ERROR)
            if spans.add is not None:
                spans.add(self._count, attributes)
            if spans.record is not None:
                spans.record(perf_counter() - self._began, attributes)
            span.end()
        except Exception as failure:
            log_failed("end", self, failure)
