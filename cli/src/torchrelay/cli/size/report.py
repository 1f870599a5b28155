"""The output of `torchrelay size`: the footprint, a row per device, and the command that it means."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from torchrelay.cli.size.subject import Subject
from torchrelay.cli.views.console import NARROW_CELLS, ResultTable, WidthAware
from torchrelay.common.quantities import format_bytes, format_count, format_duration
from torchrelay.modelspec.sizing.offers import Offer
from torchrelay.modelspec.sizing.operating_point import Workload

_TIERS = {"cold: RAM": "host", "other host": "another_host", "disk": "disk", "remote": "remote"}
_NUMBERS = ("n", "req/s", "tok/s", "TTFT ms", "TBT ms", "$/h", "$/M", *_TIERS)
_OPTIONAL = ("tok/s", "other host", "disk", "remote")


def size_report(subject: Subject, made: Sequence[Offer], work: Workload) -> WidthAware:
    return WidthAware(lambda width: Group(*_parts(subject, made, work, is_small=width < NARROW_CELLS)))


def _parts(subject: Subject, made: Sequence[Offer], work: Workload, *, is_small: bool) -> list[RenderableType]:
    meeting = [offer for offer in made if offer.meets]
    parts: list[RenderableType] = [Text(line) for line in _facts(subject, work)]
    if meeting:
        parts.append(_table(meeting, is_small=is_small))
    if missing := [offer for offer in made if not offer.meets]:
        lacks = "; ".join(f"{_together(offer)}: {offer.lack}" for offer in missing)
        parts.append(Text(f"Not within the targets: {lacks}"))
    parts += [Text(line, style="dim") for line in _origins(meeting or made)]
    if meeting:
        parts.append(Text.assemble("\n", (meeting[0].device, "bold"), " is the first choice:"))
        parts.append(Text(f"  {command(subject.name, meeting[0], work)}", overflow="fold", no_wrap=False))
    return parts


def _facts(subject: Subject, work: Workload) -> list[str]:
    model = subject.footprint
    origin = "measured: its files" if subject.has_files else "estimated from config.json"
    int8 = f"; {format_bytes(subject.int8_bytes)} in int8 (estimated)" if subject.int8_bytes else ""
    dtype = f" in {subject.dtype}" if subject.dtype else ""
    kv = f"{format_bytes(model.kv_bytes_per_token)} of KV per token"
    hosts = f", fits {subject.hosts['fit']} of {subject.hosts['total']} hosts" if subject.hosts else ""
    targets = f"first token in {format_duration(work.ttft_s)}, {format_duration(work.tbt_s)} between tokens"
    return [
        f"{subject.name}: {format_bytes(model.weights_bytes)} of weights{dtype} ({origin}){int8}; {kv}{hosts}",
        f"{work.requests_per_s:g} requests/s of {work.num_prompt:,} + {work.num_answer:,} tokens; {targets}",
    ]


def _table(made: Sequence[Offer], *, is_small: bool) -> ResultTable:
    columns = ("device", *_NUMBERS, "times")
    table = ResultTable(*columns, right=_NUMBERS, whole=columns, without=_OPTIONAL if is_small else (), is_narrow=True)
    for offer in made:
        best, at_rate = offer.at_best, offer.at_rate or offer.at_best
        assert best is not None and at_rate is not None
        table.add_line(
            _together(offer),
            f"{offer.num_instances:,}",
            f"{best.requests_per_s:.1f}",
            f"{best.tokens_per_s:,.0f}",
            f"{at_rate.ttft_s * 1e3:,.0f}",
            f"{at_rate.tbt_s * 1e3:,.1f}",
            "?" if offer.price is None else f"{offer.price:,.2f}",
            "?" if offer.dollars_per_million is None else f"{offer.dollars_per_million:,.3f}",
            *(format_duration(offer.cold_start_s[tier]) for tier in _TIERS.values()),
            offer.origin,
        )
    return table


def _together(offer: Offer) -> str:
    return offer.device if offer.num_together == 1 else f"{offer.num_together} x {offer.device}"


def _origins(made: Sequence[Offer]) -> list[str]:
    rates = " or ".join(sorted({offer.rates for offer in made}))
    return [
        "n instances; req/s and tok/s: the most of each within the targets; TTFT and TBT: means at the given rate; "
        "$/M: per million tokens, prompts included; cold: until weights in RAM, or elsewhere, are loaded (estimated).",
        f"Rates of devices are {rates}, prices published or yours, times as the last column says.",
    ]


def command(name: str, offer: Offer, work: Workload) -> str:
    """The settings of the model that an offer means. Weights that arrive too late for the first token stay loaded."""
    is_late = offer.cold_start_s["host"] + (offer.at_best.ttft_s if offer.at_best else 0.0) > work.ttft_s
    least = "--min-instances 1 " if is_late else ""
    engine = f"--engine vllm:{offer.num_together} " if offer.num_together > 1 else ""
    targets = f"--standard-ttft-s {work.ttft_s:g} --tbt-target-s {work.tbt_s:g}"
    return f"torchrelay models set {shlex.quote(name)} {least}--max-instances {offer.num_instances} {engine}{targets}"


def size_json(subject: Subject, made: Sequence[Offer], work: Workload) -> dict[str, Any]:
    """All numbers, each group with its origin."""
    first = next((offer for offer in made if offer.meets), None)
    return {
        "model": subject.name,
        "weights": {
            "bytes": subject.footprint.weights_bytes,
            "int8_bytes": subject.int8_bytes,
            "origin": "measured" if subject.has_files else "estimated",
        },
        "footprint": asdict(subject.footprint),
        "hosts": subject.hosts,
        "workload": asdict(work),
        "offers": [asdict(offer) | {"meets": offer.meets} for offer in made],
        "command": command(subject.name, first, work) if first else None,
    }


def validation_table(predicted: dict[str, float], measured: dict[str, float], num_requests: int) -> ResultTable:
    """Predicted beside measured figures of a load."""
    title = f"a load of {format_count(num_requests, 'request')}"
    table = ResultTable(
        "figure", "predicted", "measured", "error", right=("predicted", "measured", "error"), title=title
    )
    for name, value in measured.items():
        unit, scale = ("tok/s", 1.0) if name == "tokens_per_s" else ("ms", 1e3)
        label = {"tokens_per_s": "tokens/s", "ttft_s": "TTFT", "tbt_s": "TBT"}[name]
        error = f"{predicted[name] / value - 1:+.0%}" if value else "?"
        table.add_line(label, f"{predicted[name] * scale:,.1f} {unit}", f"{value * scale:,.1f} {unit}", error)
    return table
