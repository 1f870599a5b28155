"""Predicted times of prompts, decode steps and loads, from measurements or, before there are any, from defaults."""

from __future__ import annotations

from collections.abc import Iterable

from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.common.recent import Recent
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.storage_tiers import Tier
from torchrelay.scheduler.policy.types import MAX_VERSIONS, WorkerStatus

_MIN_STEPS = 8  # below this, a worker's model gives way to that of other workers with the same device
_BATCH_FREE = 8  # default: this many sequences decode in twice the time of an empty step
_MAX_DEVICES = 4  # kinds of devices per pack
_UNKNOWN = LatencyModel()


class LatencyModels:
    """The latest model of any worker for each (pack, kind of device), for workers that are new to a pack."""

    def __init__(self) -> None:
        self._learned: Recent[tuple[str, str], LatencyModel] = Recent(MAX_VERSIONS * _MAX_DEVICES)

    def observe(self, worker: WorkerStatus) -> None:
        """Learns from a report."""
        if worker.latency is None or not worker.slot.pack_id:
            return
        key = (worker.slot.pack_id, worker.device)
        self._learned[key] = _merged(worker.latency, self._learned.get(key, _UNKNOWN))

    def learned(self, pack_id: str, devices: Iterable[str]) -> LatencyModel | None:
        """The model of a pack on that of the kinds of device which has decoded most with it; None if none has."""
        models = [model for device in devices if (model := self._learned.get((pack_id, device))) is not None]
        most = max(models, key=lambda model: model.decode.num_steps, default=_UNKNOWN)
        return most if most.decode.known else None

    def of(self, worker: WorkerStatus, pack_id: str, config: PolicyConfig) -> LatencyModel:
        """The worker's latency with a pack that it has or would have; uses defaults for unknown parts."""
        shared = self._learned.get((pack_id, worker.device), _UNKNOWN)
        own = worker.latency if worker.latency is not None and worker.slot.pack_id == pack_id else _UNKNOWN
        merged = _merged(own, shared)
        is_whole = merged.prefill.known and merged.decode.known
        return merged if is_whole else _merged(merged, _default_model(worker, config))


def _merged(first: LatencyModel, second: LatencyModel) -> LatencyModel:
    """The parts of the first model that have seen enough steps or more than the second's, otherwise the second's."""
    return LatencyModel(
        prefill=_better(first.prefill, second.prefill),
        decode=_better(first.decode, second.decode),
        token_budget=first.token_budget if first.prefill.known else second.token_budget,
    )


def _better(first: StepCost, second: StepCost) -> StepCost:
    return first if first.num_steps >= min(_MIN_STEPS, second.num_steps + 1) else second


def _default_model(worker: WorkerStatus, config: PolicyConfig) -> LatencyModel:
    """A model from the rates that the worker reports for its last computations, or from the defaults."""
    decode_s = step_s(worker, config)
    return LatencyModel(
        prefill=StepCost(per_position_s=1 / prefill_tokens_per_s(worker, config)),
        decode=StepCost(base_s=decode_s, per_position_s=decode_s / _BATCH_FREE),
    )


def prefill_tokens_per_s(worker: WorkerStatus, config: PolicyConfig) -> float:
    return worker.prefill_tokens_per_s or config.default_prefill_tokens_per_s


def step_s(worker: WorkerStatus, config: PolicyConfig) -> float:
    """Median decode step."""
    return worker.step_s or config.default_step_s


def load_s(pack_bytes: int, tier: Tier, config: PolicyConfig) -> float:
    """Default load time, from an empty slot to all layers ready."""
    rate = config.map_bytes_per_s if tier is Tier.HOST else config.relay_bytes_per_s
    return config.slot_setup_s + pack_bytes / rate
