"""Devices that serve a model's requests within their targets, the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from torchrelay.modelspec.sizing.devices import Device
from torchrelay.modelspec.sizing.footprint import Footprint
from torchrelay.modelspec.sizing.operating_point import (
    OperatingPoint,
    Workload,
    best_point,
    operating_point,
    point_at_rate,
)
from torchrelay.modelspec.sizing.roofline import Roofline, Steps, cold_start_s, kv_memory_bytes

_TOGETHER: Final = (1, 2, 4, 8)  # devices that compute an instance together; vLLM's tensor parallelism


@dataclass(frozen=True, slots=True)
class Offer:
    """A device, or several together, and what they give. Without ``at_best`` they miss ``lack``."""

    device: str
    num_together: int
    num_instances: int
    at_best: OperatingPoint | None  # of an instance, within the targets
    at_rate: OperatingPoint | None  # of an instance, with its part of the rate
    price: float | None  # dollars per hour, of all
    dollars_per_million: float | None  # of prompts' and answers' tokens, at the rate
    cold_start_s: dict[str, float]
    origin: str  # of the times
    rates: str  # whose rates they are: published, the file's, or measured
    lack: str = ""

    @property
    def meets(self) -> bool:
        return self.at_best is not None


def offers(footprint: Footprint, devices: Iterable[Device], work: Workload) -> list[Offer]:
    """An offer of each device: those that meet the targets first, by their price."""
    made = [_offer(footprint, device, work) for device in devices]
    unknown = math.inf
    return sorted(made, key=lambda each: (not each.meets, unknown if each.price is None else each.price))


def learned_offer(steps: Steps, footprint: Footprint, device: Device, work: Workload, kv_tokens: float) -> Offer:
    """The offer of a device whose steps were learned."""
    return _with_steps(steps, footprint, device, 1, work, kv_tokens)


def _offer(footprint: Footprint, device: Device, work: Workload) -> Offer:
    """The offer of the fewest devices together that meet the targets; of the most, if none does."""
    offer = None
    for number in _TOGETHER if device.link_bytes_per_s else (1,):
        several = device.times(number)
        kv_tokens = kv_memory_bytes(footprint, several) / footprint.kv_bytes_per_token
        offer = _with_steps(Roofline(footprint, several), footprint, several, number, work, kv_tokens)
        if offer.meets:
            break
    assert offer is not None
    return offer


def _with_steps(
    steps: Steps, footprint: Footprint, device: Device, together: int, work: Workload, kv_tokens: float
) -> Offer:
    best = best_point(steps, work, kv_tokens)
    number = math.ceil(work.requests_per_s / best.requests_per_s) if best else 1
    price = None if device.price is None else device.price * number
    tokens_per_hour = work.requests_per_s * work.num_tokens * 3600
    return Offer(
        device=device.name,
        num_together=together,
        num_instances=number,
        at_best=best,
        at_rate=point_at_rate(steps, work, work.requests_per_s / number) if best else None,
        price=price,
        dollars_per_million=None if price is None or not best else price / tokens_per_hour * 1e6,
        cold_start_s=cold_start_s(footprint, device),
        origin=steps.origin,
        rates=device.origin,
        lack="" if best else _lack(steps, work, kv_tokens),
    )


def _lack(steps: Steps, work: Workload, kv_tokens: float) -> str:
    if kv_tokens <= 0:
        return "the weights do not fit"
    if kv_tokens < work.num_tokens:
        return "no memory for the KV of a request"
    alone = operating_point(steps, work, 1)
    if alone is None:
        return "its steps cannot hold the prompts"
    if alone.tbt_s > work.tbt_s:
        return f"{alone.tbt_s * 1e3:.0f} ms between tokens"
    return f"{alone.ttft_s * 1e3:.0f} ms to the first token"
