"""The relay's figures: names, bounds, and a table that also reports missing figures."""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.report import Check, progress


@dataclass(frozen=True, slots=True)
class Figure:
    """Unit and bound of a figure (None: printed only)."""

    unit: str
    bound: float | None = None
    at_least: bool = False


FIGURES = {
    "link_use": Figure("ratio", 0.95, at_least=True),
    "chain7_over_1": Figure("ratio", 1.08),
    "source_packs": Figure("packs", 1.1),
    "first_layer_fraction": Figure("ratio", 0.12),
    "first_layer_embeddings": Figure("ratio"),
    "star7_over_1": Figure("ratio"),
    "gloo7_over_1": Figure("ratio"),
    "repair_kill": Figure("ratio", 1.15),
    "repair_silent": Figure("ratio", 1.3),
    "repair_slow": Figure("ratio", 1.3),
    "striping": Figure("ratio", 0.9, at_least=True),
    "kv_p99_opposite": Figure("ratio-1", 0.05),
    "kv_p99_same": Figure("ratio", 1.3),
    "kv_1mb_p99_opposite": Figure("ratio-1"),
    "kv_1mb_p99_same": Figure("ratio"),
    "loopback_over_iperf3": Figure("ratio", 0.6, at_least=True),
    "two_hops_over_iperf3": Figure("ratio", 0.33, at_least=True),
    "rss_mb": Figure("MB", 100),
    "replayed_over_predicted": Figure("ratio"),
}


class FigureTable:
    """Collects samples by figure; a figure without samples is reported as missed, with the reason."""

    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = {}
        self._against: dict[str, str] = {}
        self._failures: dict[str, str] = {}

    def note(self, name: str, value: float, against: str) -> None:
        """Adds a sample; the report has the median and the last ``against``."""
        if name not in FIGURES:
            raise KeyError(f"{name} is not a figure of the relay")
        self._samples.setdefault(name, []).append(value)
        self._against[name] = against
        progress(f"{name} {value:.4g}  ({against})")

    @contextmanager
    def case(self, *names: str) -> Iterator[None]:
        """Measures figures; an error inside fails only these."""
        begin = time.monotonic()
        try:
            yield
        except Exception as error:  # the report has it, see ``checks``
            traceback.print_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self._failures.update(dict.fromkeys(names, reason))
            progress(f"{', '.join(names)} failed: {reason}")
        progress(f"{', '.join(names)}: {time.monotonic() - begin:.1f} s")

    @contextmanager
    def rest(self) -> Iterator[None]:
        """An error inside fails all figures without samples; if there are none, it is raised."""
        try:
            yield
        except Exception as error:
            missing = FIGURES.keys() - self._samples.keys() - self._failures.keys()
            if not missing:
                raise
            with self.case(*sorted(missing)):
                raise error

    def checks(self) -> list[Check]:
        """Checks of all figures; a figure without samples has no value and is missed."""
        return [self._check(name, figure) for name, figure in FIGURES.items()]

    def _check(self, name: str, figure: Figure) -> Check:
        samples, failure = self._samples.get(name, []), self._failures.get(name, "")
        if failure or not samples:
            why = f"not measured: {failure or 'its case did not run'}"
            bound = 0.0 if figure.bound is None else figure.bound
            return Check(name, math.nan, figure.unit, bound, why, figure.at_least)
        against = self._against[name] + (f"; median of {spread(samples)}" if len(samples) > 1 else "")
        return Check(name, statistics.median(samples), figure.unit, figure.bound, against, figure.at_least)


def spread(samples: Sequence[float]) -> str:
    return f"{len(samples)}, {min(samples):.4g} to {max(samples):.4g}"
