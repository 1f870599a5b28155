"""Observable instruments of the gateway, read when metrics are collected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation


def observe_counts(meter: Meter, name: str, description: str, attribute: str, counts: Counter[str]) -> None:
    """A counter with one value per key of ``counts``."""

    def observe(_options: CallbackOptions) -> Iterable[Observation]:
        # Copied, because an exporter thread reads while requests end.
        return [Observation(count, {attribute: key}) for key, count in list(counts.items())]

    meter.create_observable_counter(f"torchrelay_gateway_{name}", [observe], description=description)


def observe_value(meter: Meter, name: str, description: str, value: Callable[[], int]) -> None:
    """A gauge."""

    def observe(_options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(value())

    meter.create_observable_gauge(f"torchrelay_gateway_{name}", [observe], description=description)
