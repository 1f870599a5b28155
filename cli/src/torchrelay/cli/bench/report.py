"""The result of a load as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from torchrelay.cli.bench.figures import Cold, Figures, Held, Spread, per_million
from torchrelay.cli.bench.targets import Targets
from torchrelay.cli.bench.workload import Scenario, Workload
from torchrelay.cli.views.console import ResultTable
from torchrelay.common.quantities import format_count, format_duration

NOT_MEASURED = "not measured: needs the admin key (--admin-key)"
_LATE_SHARE = 0.1  # of the target to the first token: a client that sends later than that distorts it
_MOST_ERRORS = 5


@dataclass(frozen=True, slots=True)
class Result:
    """``held``, ``cold``: None where they were not measured. ``is_complete``: the load was not interrupted."""

    model: str
    load: Workload
    targets: Targets
    figures: Figures
    held: Held | None
    cold: Cold | None
    bill_dollars: float
    device_price: float | None  # dollars per hour
    is_complete: bool

    @property
    def by_devices(self) -> float | None:
        """Dollars per million tokens by the price of the devices; None where that is not known."""
        if self.held is None or self.device_price is None:
            return None
        return per_million(self.held.device_s * self.device_price / 3600, self.figures)

    @property
    def tokens_per_device_s(self) -> float | None:
        return self.figures.num_output_tokens / self.held.device_s if self.held and self.held.device_s else None


def result_json(result: Result) -> dict[str, Any]:
    """Times in seconds; what was not measured is null."""
    figures, held, cold = result.figures, result.held, result.cold
    load = asdict(result.load) | {"trace": str(result.load.trace) if result.load.trace else None}
    return {
        "model": result.model,
        "is_complete": result.is_complete,
        "load": load,
        "targets": asdict(result.targets) | {"label": result.targets.label},
        **asdict(figures),
        "attainment": figures.attainment,
        "goodput_per_s": figures.goodput_per_s,
        "output_tokens_per_s": figures.output_tokens_per_s,
        "devices": asdict(held) if held else None,
        "output_tokens_per_device_s": result.tokens_per_device_s,
        "token_goodput": held.token_goodput(figures) if held else None,
        "cold_starts": asdict(cold) if cold else None,
        "dollars_per_million_tokens": {
            "by_devices": result.by_devices,
            "by_prices": per_million(result.bill_dollars, figures),
        },
    }


def result_view(result: Result) -> Group:
    """Tables of latencies, figures and, of the scenario cold, phases; then what went wrong."""
    parts: list[RenderableType] = [Text(f"{result.model}, {result.load.words}", overflow="fold")]
    parts += [_latencies(result.figures, result.targets), _figures(result)]
    if result.cold and result.load.scenario == Scenario.COLD:
        parts.append(_phases(result.cold))
    return Group(*parts, *_warnings(result))


def _latencies(figures: Figures, targets: Targets) -> ResultTable:
    table = _spreads("latency", "target")
    rows = {
        "TTFT (to the first token)": (figures.ttft_s, format_duration(targets.ttft_s)),
        "TPOT (per request)": (figures.tpot_s, format_duration(targets.tpot_s)),
        "TBT (between tokens)": (figures.tbt_s, ""),
    }
    for name, (spread, target) in rows.items():
        table.add_line(name, *_times(spread), target)
    return table


def _phases(cold: Cold) -> ResultTable:
    table = _spreads(f"phase of {format_count(cold.num_cold, 'cold start')}")
    for name, spread in cold.phases_s.items():
        table.add_line(name, *_times(spread))
    return table


def _spreads(first: str, *more: str) -> ResultTable:
    return ResultTable(first, "p50", "p90", "p99", *more, right=("p50", "p90", "p99", *more), is_narrow=True)


def _times(spread: Spread | None) -> list[str]:
    return [format_duration(each) for each in (spread.p50, spread.p90, spread.p99)] if spread else ["-"] * 3


def _figures(result: Result) -> ResultTable:
    table = ResultTable("figure", "value", "", right=("value",), whole=("figure",), is_narrow=True)
    for line in _lines(result):
        table.add_line(*line)
    return table


def _lines(result: Result) -> Iterator[tuple[str, str, str]]:
    """Name, value and remark of each figure."""
    figures, held, cold, targets = result.figures, result.held, result.cold, result.targets
    yield "completed", f"{figures.num_completed:,}", f"in {format_duration(figures.seconds)}"
    yield "failed", f"{figures.num_failed:,}", ""
    yield "met both targets", f"{figures.attainment:.1%}", targets.label
    yield "goodput", f"{figures.goodput_per_s:.3g}", "requests per second that met both"
    yield "output tokens/s", f"{figures.output_tokens_per_s:,.1f}", f"{figures.num_output_tokens:,} tokens"
    if held is None:
        yield "tokens per device second", "-", NOT_MEASURED
        yield "token goodput", "-", NOT_MEASURED
    else:
        seconds = f"{held.device_s:,.1f} device seconds, at most {format_count(held.most_devices, 'device')}"
        yield "tokens per device second", _number(result.tokens_per_device_s), f"output tokens; {seconds}"
        share = held.token_goodput(figures)
        remark = f"of {held.num_computed:,} tokens computed reached callers"
        yield "token goodput", "-" if share is None else f"{share:.1%}", remark
    if cold is not None:
        of = f"of {cold.num_explained:,} explained requests" + (
            ", the slowest" if cold.num_explained < figures.num_completed else ""
        )
        yield "cold starts", f"{cold.num_cold:,}", of
    yield (
        "dollars, by prices",
        _number(per_million(result.bill_dollars, figures)),
        "per million tokens, prompts included",
    )
    if result.device_price is not None:
        remark = f"the same, devices at {result.device_price:g} per hour" if held else NOT_MEASURED
        yield "dollars, by devices", _number(result.by_devices), remark


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _warnings(result: Result) -> Iterator[Text]:
    figures = result.figures
    for message, number in list(figures.errors.items())[:_MOST_ERRORS]:
        yield Text(f"{format_count(number, 'request')} failed: {message}", style="red", overflow="fold")
    if figures.late_s > _LATE_SHARE * result.targets.ttft_s:
        late = format_duration(figures.late_s)
        yield Text(
            f"this client sent a request {late} late: it is short of CPU, which the times include", style="yellow"
        )
    if not result.is_complete:
        yield Text("interrupted: figures of the requests that had ended", style="yellow")
