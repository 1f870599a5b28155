"""The times of a model's steps on a device: by the device's rates, or by costs that a worker has learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from torchrelay.modelspec.sizing.devices import LINK_SHARE, Device
from torchrelay.modelspec.sizing.footprint import Footprint

# What a GPU's memory holds beside weights and KV: the runtime, activations and captured graphs.
USABLE_SHARE: Final = 0.9
GPU_TOKEN_BUDGET: Final = 2048  # of a step, as the workers have on a GPU
CPU_TOKEN_BUDGET: Final = 512
MAX_CHOICES: Final = 4096


class Steps(Protocol):
    """The times of steps. A step of ``num_choices``, each after ``context`` positions, may also prefill
    ``num_prefilled`` positions of prompts, which attend to ``num_attended`` positions in all.
    """

    @property
    def token_budget(self) -> int:
        """The most positions of one step."""

    @property
    def max_choices(self) -> int:
        """The most choices of a step whose time is known."""

    @property
    def origin(self) -> str:
        """Whether the times are measured or estimated."""

    def step_s(self, num_choices: float, context: float, num_prefilled: float = 0, num_attended: float = 0) -> float:
        """Seconds of a step."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Steps that take the longer of reading the weights and multiplying with them, then attention, then a fixed time.
    The cores of a CPU do not read while they multiply: there both times count.

    The roofline model is of Williams, Waterman and Patterson (Communications of the ACM 52(4), 2009).
    """

    footprint: Footprint
    device: Device

    @property
    def token_budget(self) -> int:
        return GPU_TOKEN_BUDGET if self.device.link_bytes_per_s else CPU_TOKEN_BUDGET

    @property
    def max_choices(self) -> int:
        return MAX_CHOICES

    @property
    def origin(self) -> str:
        return "estimated"

    def step_s(self, num_choices: float, context: float, num_prefilled: float = 0, num_attended: float = 0) -> float:
        device, model = self.device, self.footprint
        num_tokens = num_choices + num_prefilled
        peak = device.flops_8bit if model.has_8bit_activations else device.flops
        bytes_per_s, flops = device.bytes_per_s * device.bandwidth_share, peak * device.compute_share
        parts = model.read_bytes(num_tokens) / bytes_per_s, model.flops_per_token * num_tokens / flops
        linear_s = max(parts) if device.link_bytes_per_s else sum(parts)
        attended = num_choices * model.attended(context)
        decode_s = max(
            attended * model.kv_bytes_per_token / bytes_per_s,
            attended * model.flops_per_attended / (device.flops * device.compute_share),
        )
        prefill_s = num_attended * model.flops_per_attended / (device.flops * device.compute_share)
        return linear_s + decode_s + prefill_s + device.step_overhead_s + num_choices * device.choice_overhead_s


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of a step, of each position that it computes, and of each position that it attends to."""

    base_s: float
    per_position_s: float
    per_attended_s: float


@dataclass(frozen=True, slots=True)
class LearnedSteps:
    """Steps by the costs that a worker has learned from its own."""

    prefill: LinearCost
    decode: LinearCost
    token_budget: int
    origin: str = "measured"

    @property
    def max_choices(self) -> int:
        """Only 1 while nothing tells what further choices cost: the worker has computed one at a time."""
        return MAX_CHOICES if self.decode.per_position_s or self.decode.per_attended_s else 1

    def step_s(self, num_choices: float, context: float, num_prefilled: float = 0, num_attended: float = 0) -> float:
        decode, prefill = self.decode, self.prefill
        decode_s = num_choices * (decode.per_position_s + decode.per_attended_s * context)
        if not num_prefilled:
            return decode.base_s + decode_s
        own_s = prefill.per_position_s * num_prefilled + prefill.per_attended_s * num_attended
        return prefill.base_s + decode_s + own_s

    def of_size(self, ratio: float) -> LearnedSteps:
        """An estimate for a model of ``ratio`` times the weights on the same device."""

        def times(cost: LinearCost) -> LinearCost:
            return LinearCost(cost.base_s * ratio, cost.per_position_s * ratio, cost.per_attended_s * ratio)

        return LearnedSteps(times(self.prefill), times(self.decode), self.token_budget, "estimated")


def kv_memory_bytes(footprint: Footprint, device: Device) -> float:
    """The memory that is left for KV; at most 0 if the weights do not fit."""
    return device.memory_bytes * USABLE_SHARE - footprint.weights_bytes


# Rates of the tiers below the device's own link, where the cluster has not been measured.
NETWORK_BYTES_PER_S: Final = 100e9 / 8 * 0.9  # a link of 100 Gbit/s, after its headers
DISK_BYTES_PER_S: Final = 3e9  # an NVMe drive that reads large blocks
REMOTE_BYTES_PER_S: Final = 1.25e9  # an object store over 10 Gbit/s
START_S: Final = 0.1  # to choose the slot and map the pack


def cold_start_s(footprint: Footprint, device: Device) -> dict[str, float]:
    """Seconds until the weights are on the device, by where they are. Tiers overlap: the slowest one counts."""
    link = device.link_bytes_per_s * LINK_SHARE or float("inf")
    tiers = {
        "host": float("inf"),
        "another_host": NETWORK_BYTES_PER_S,
        "disk": DISK_BYTES_PER_S,
        "remote": REMOTE_BYTES_PER_S,
    }
    return {name: START_S + footprint.weights_bytes / min(rate, link) for name, rate in tiers.items()}
