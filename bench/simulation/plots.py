"""Plots of runs over time and of figures by cluster size. They need matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchrelay.cli.errors import CliError
from torchrelay.sim.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _HEIGHT = 9.0, 8.0  # inches
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def check_available() -> None:
    """Raises ``CliError`` without matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise CliError("plots need matplotlib, which is not installed", "install it: pip install matplotlib") from error


def plot_runs(path: Path, runs: Sequence[Run], title: str) -> None:
    """Plots instances, queue and time to first token of each run over time. Raises ``CliError`` without matplotlib."""
    check_available()
    from matplotlib.figure import Figure

    figure = Figure((_WIDTH, _HEIGHT), layout="constrained")
    instances, queue, ttft = figure.subplots(3, 1, sharex=True)
    for number, run in reversed(list(enumerate(runs))):  # draws the first run on top
        times = [sample.at_s for sample in run.samples]
        colour = f"C{number}"
        instances.plot(times, [sample.num_instances for sample in run.samples], colour, label=run.system, linewidth=1.2)
        queue.plot(times, [sample.num_waiting for sample in run.samples], colour, linewidth=1.2)
        for place, (style, width) in enumerate(((":", 1.0), ("-", 1.4))):
            # NaN breaks the line where a percentile is infinite.
            values = [ttfts[place] if math.isfinite(ttfts[place]) else math.nan for _, ttfts in run.ttfts]
            ttft.plot([at_s for at_s, _ in run.ttfts], values, style, color=colour, linewidth=width)
    _finish(instances, title, "instances")
    _finish(queue, "", "requests without\na first token")
    _finish(ttft, "", "time to first token, s\n(P50 dotted, P95)")
    for axes in (instances, queue):
        axes.set_ylim(bottom=0)
        axes.yaxis.get_major_locator().set_params(integer=True)
    ttft.set_yscale("log")
    ttft.set_xlabel("seconds")
    ttft.set_xlim(0, shown_until_s(runs) or 1.0)
    handles, labels = instances.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=120)


def shown_until_s(runs: Sequence[Run]) -> float:
    """A time shortly after the last change of any queue: requests that are never answered stay in a queue for hours."""
    latest = 0.0
    for run in runs:
        num_left = run.samples[-1].num_waiting if run.samples else 0
        latest = max([latest, *(sample.at_s for sample in run.samples if sample.num_waiting != num_left)])
    return 1.05 * latest


def plot_by_size(path: Path, figures: Mapping[str, Sequence[tuple[float, float]]], title: str, unit: str) -> None:
    """Plots lines of (number of devices, value). Raises ``CliError`` without matplotlib."""
    check_available()
    from matplotlib.figure import Figure

    figure = Figure((_WIDTH, _HEIGHT / 2), layout="constrained")
    axes = figure.subplots()
    for mark, (name, points) in zip(_MARKS, figures.items(), strict=False):
        axes.plot([size for size, _ in points], [value for _, value in points], marker=mark, label=name)
    _finish(axes, title, unit)
    axes.set_xscale("log")
    sizes = sorted({size for points in figures.values() for size, _ in points})
    axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("devices")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
