"""Logs, traces and metrics: set up once per process, the same in every service.

Logs are JSON lines on standard error with the service and, within a request, its id. Traces use W3C ``traceparent``,
carried in messages because many requests share one gRPC stream. Neither contains prompt or output text.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from opentelemetry import context, metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from torchrelay.common.host.addresses import plain_host
from torchrelay.common.process.settings import ServiceSettings

if "rich" in sys.modules:
    import structlog
else:
    # structlog imports Rich where it is installed (for the CLI): 3 MB that no service uses.
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog
    finally:
        del sys.modules["rich"]

MAX_TRACE_BYTES = 64 << 20
# From an engine step to a model load; the default buckets 5, 10, 25 ... 10,000 are meant for milliseconds.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PROPAGATOR = TraceContextTextMapPropagator()
_TRACER = trace.get_tracer("torchrelay")  # finds the provider once it is set; get_tracer is slow


class SpanFile(SpanExporter):
    """Appends finished spans to a file as JSON lines: the trace store of the embedded install.

    All services share the file; whichever finds it over ``MAX_TRACE_BYTES`` truncates it.
    """

    def __init__(self, path: Path, service: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._service = service
        self._lock = threading.Lock()
        self._is_torn = False  # a full disk took only a part of the last line

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._lock:
            lines = [""] if self._is_torn else []
            for span in spans:
                parent = f"{span.parent.span_id:016x}" if span.parent else None
                line = {
                    "service": self._service,
                    "name": span.name,
                    "trace_id": f"{span.context.trace_id:032x}" if span.context else "",
                    "span_id": f"{span.context.span_id:016x}" if span.context else "",
                    "parent_id": parent,
                    "start_unix_ns": span.start_time,
                    "end_unix_ns": span.end_time,
                    "attributes": dict(span.attributes or {}),
                }
                lines.append(json.dumps(line, default=str))
            return self._append(("\n".join(lines) + "\n").encode())

    def _append(self, data: bytes) -> SpanExportResult:
        """Drops what the disk does not take."""
        try:
            num_written = os.write(self._file, data)
        except OSError:
            return SpanExportResult.FAILURE
        self._is_torn = num_written < len(data) and not data[:num_written].endswith(b"\n")
        if os.fstat(self._file).st_size > MAX_TRACE_BYTES:
            os.truncate(self._file, 0)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        os.close(self._file)


class LossyLog:
    """Log lines to ``stream``; those it does not take, for a full disk, are dropped: no line is worth a request."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class Telemetry:
    """The process's logs, traces and metrics; ``close()`` flushes what is under way."""

    def __init__(self, service: str, settings: ServiceSettings) -> None:
        _set_up_logs(service, settings)
        resource = Resource.create({"service.name": service})
        self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        if settings.trace_file:
            spans = SpanFile(settings.trace_file, service)
            self._tracers.add_span_processor(BatchSpanProcessor(spans, schedule_delay_millis=500))
        readers: list[MetricReader] = []
        if settings.otlp_endpoint:
            readers.append(self._add_otlp(settings.otlp_endpoint))
        if settings.metrics_port:
            readers.append(_serve_prometheus(settings))
        self._meters = MeterProvider(resource=resource, metric_readers=readers, shutdown_on_exit=False)
        trace.set_tracer_provider(self._tracers)
        metrics.set_meter_provider(self._meters)

    def _add_otlp(self, endpoint: str) -> MetricReader:
        # Imported on demand: the exporters take several megabytes.
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        self._tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=endpoint))

    def close(self) -> None:
        self._tracers.shutdown()
        self._meters.shutdown()


def _serve_prometheus(settings: ServiceSettings) -> MetricReader:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import make_wsgi_app, start_http_server

    from torchrelay.common.process.vllm_names import RegistryWithVllmNames

    registry = RegistryWithVllmNames()
    server, _ = start_http_server(settings.metrics_port, plain_host(settings.metrics_host), registry)
    # NOTE: for OpenMetrics, which Prometheus prefers, prometheus_client 0.26 replaces the colon of vLLM's names.
    plain_text = make_wsgi_app(registry)
    server.set_app(lambda environ, start_response: plain_text({**environ, "HTTP_ACCEPT": ""}, start_response))
    return PrometheusMetricReader(scope_info_enabled=False)


def _set_up_logs(service: str, settings: ServiceSettings) -> None:
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if settings.log_format == "console" else structlog.processors.JSONRenderer()
    )

    def name_service(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["service"] = service  # not a context variable: new threads do not inherit those
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            name_service,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, LossyLog(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=max(level, logging.WARNING), stream=sys.stderr)


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger of events with fields: ``log.info("instance_ready", instance_id=...)``."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(module=name)
    return logger


def current_traceparent() -> str:
    """The W3C ``traceparent`` of the current span; empty when there is none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent", "")


@contextmanager
def span_of(name: str, traceparent: str = "", **attributes: str | int | float | bool) -> Iterator[trace.Span]:
    """A span below ``traceparent`` (a message's), or below the current span when that is empty."""
    parent = _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else context.get_current()
    with trace.use_span(_TRACER.start_span(name, context=parent, attributes=attributes), end_on_exit=True) as span:
        yield span


def record_span(
    name: str, traceparent: str, begin_unix_ns: int, end_unix_ns: int, **attributes: str | int | float
) -> None:
    """Records a span measured elsewhere (the engine's thread, another process)."""
    parent = _PROPAGATOR.extract({"traceparent": traceparent}) if traceparent else None
    _TRACER.start_span(name, context=parent, start_time=begin_unix_ns, attributes=attributes).end(end_unix_ns)


def seconds_histogram(
    meter: metrics.Meter, name: str, description: str, buckets_s: Sequence[float] = BUCKETS_S
) -> metrics.Histogram:
    """A histogram of durations in seconds."""
    return meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=buckets_s)


def observe_counts(
    meter: metrics.Meter, name: str, description: str, attribute: str | tuple[str, ...], counts: Mapping[Any, float]
) -> None:
    """A counter with one value per key of ``counts``, read when metrics are collected: that costs less per event.

    The keys are tuples where there are several attributes. The SDK bounds what is exported.
    """

    def observe(_options: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        # Copied, because an exporter thread reads while the counts rise.
        for key, count in list(counts.items()):
            names, values = ((attribute,), (key,)) if isinstance(attribute, str) else (attribute, key)
            yield metrics.Observation(count, dict(zip(names, values, strict=True)))

    meter.create_observable_counter(name, [observe], description=description)


def observe_values(
    meter: metrics.Meter,
    name: str,
    description: str,
    attributes: tuple[str, ...],
    values: Callable[[], Mapping[tuple[str, ...], float]],
    *,
    rises: bool = False,
) -> None:
    """A gauge, or a counter if the values only rise, with one value per key of ``values()``, which is called when
    metrics are collected.
    """

    def observe(_options: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        for key, value in values().items():
            yield metrics.Observation(value, dict(zip(attributes, key, strict=True)))

    create = meter.create_observable_counter if rises else meter.create_observable_gauge
    create(name, [observe], description=description)


def observe_value(
    meter: metrics.Meter, name: str, description: str, value: Callable[[], int], *, rises: bool = False
) -> None:
    """A gauge, or a counter if the value only ``rises``, read when metrics are collected."""

    def observe(_options: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        yield metrics.Observation(value())

    create = meter.create_observable_counter if rises else meter.create_observable_gauge
    create(name, [observe], description=description)
