"""Set-up of OpenTelemetry's SDK by its own variables, for ``amqp-rt serve --otel``."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Final

from ..errors import AmqpError

#: Name of the OTLP exporter's entry point by ``OTEL_EXPORTER_OTLP_PROTOCOL``.
_OTLP: Final = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


def start_sdk(service: str) -> Callable[[], None]:
    """Set up tracing and metrics, and return the function that sends what is left and ends them; it blocks.

    ``OTEL_TRACES_EXPORTER`` and ``OTEL_METRICS_EXPORTER`` name the exporters: ``otlp`` (the default), ``console``
    or ``none``. The exporters, the sampler and the resource read variables of their own. Nothing is set up if the
    process has a provider already, as under ``opentelemetry-instrument``.

    Args:
        service: ``service.name``, unless ``OTEL_SERVICE_NAME`` names another.

    Raises:
        AmqpError: The SDK or an exporter is not installed, and the text says what to install; or it refuses the
            value of a variable.
    """
    try:
        return _started(service)
    except AmqpError:
        raise
    except Exception as error:
        # Variables are read by the SDK and by exporters of others, each with exceptions of its own.
        raise AmqpError(
            f"OpenTelemetry cannot be set up from its variables OTEL_*: {str(error) or type(error).__name__}",
            condition="amqp:invalid-field",
        ) from error


def check_sdk() -> None:
    """Check that :func:`start_sdk` would find the SDK and the exporters, and set up nothing.

    Raises:
        AmqpError: One is not installed, and the text says what to install.
    """
    _require_sdk()
    for signal in ("traces", "metrics"):
        _exporters(signal)


def _require_sdk() -> None:
    """Raise ``AmqpError`` if the SDK is not installed; the text says what to install."""
    try:
        import opentelemetry.sdk.metrics
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise AmqpError(
            "--otel needs OpenTelemetry's SDK and an exporter: "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp",
            condition="amqp:not-implemented",
        ) from None


def _started(service: str) -> Callable[[], None]:
    """Set up tracing and metrics; return the function that ends them.

    Raises:
        AmqpError: The SDK or an exporter is not installed.
        Exception: The value of a variable is refused.
    """
    _require_sdk()
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return _nothing
    os.environ.setdefault("OTEL_SERVICE_NAME", service)
    resource = Resource.create()
    tracing = TracerProvider(resource=resource)
    for make in _exporters("traces"):
        tracing.add_span_processor(BatchSpanProcessor(make()))
    readers = [PeriodicExportingMetricReader(make()) for make in _exporters("metrics")]
    metering = MeterProvider(readers, resource=resource)
    trace.set_tracer_provider(tracing)
    metrics.set_meter_provider(metering)

    def end() -> None:
        tracing.shutdown()
        metering.shutdown()

    return end


def _exporters(signal: str) -> list[Callable[[], Any]]:
    """Return functions that make the exporters of *signal* which its variable names.

    Raises:
        AmqpError: One is not installed.
    """
    found: list[Callable[[], Any]] = []
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    for name in (os.environ.get(variable) or "otlp").split(","):
        name = name.strip()
        if name == "none":
            continue
        entry = name
        if name == "otlp":
            protocol = (
                os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL")
                or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
                or "grpc"
            )
            entry = _OTLP.get(protocol, protocol)
        known = entry_points(group=f"opentelemetry_{signal}_exporter")
        for each in known.select(name=entry):
            found.append(each.load())
            break
        else:
            installed = ", ".join(sorted({each.name for each in known})) or "none"
            raise AmqpError(
                f"there is no exporter {name!r:.60} for {signal} ({variable}); installed are: {installed}. "
                "For otlp: pip install opentelemetry-exporter-otlp",
                condition="amqp:not-found",
            )
    return found


def _nothing() -> None:
    """Do nothing: another part of the process has set up the providers."""
