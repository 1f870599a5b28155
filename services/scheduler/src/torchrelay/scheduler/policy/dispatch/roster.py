"""The instances of a version that take requests, with what changes only when a report or a command arrives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.scheduler.policy.core import InstancePhase, WorkerRef
from torchrelay.scheduler.policy.dispatch.prefill_lane import PrefillLane

MAX_PROMPTS_AHEAD = 8  # a worker takes some milliseconds to begin and hand over each, however short


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """An instance that takes requests."""

    worker_ref: WorkerRef
    host_id: str
    plays_prefill: bool
    plays_decode: bool
    phase: InstancePhase
    loaded_at: float  # predicted; of a loaded instance any past time
    latency: LatencyModel
    kv_pool_bytes: int
    full_step_s: float  # of a step full of prompts: more than that is not bound ahead
    excess_until: float = 0.0  # its worker reported more prompts than are bound to it: until then they run

    @property
    def instance_id(self) -> str:
        return self.worker_ref.instance_id

    def load_left_s(self, now: float) -> float:
        return max(self.loaded_at - now, 0.0) if self.phase is InstancePhase.LOADING else 0.0

    def ahead_s(self, lane: PrefillLane, now: float) -> float:
        """Prompts ahead of a new one, in seconds of work; an instance that loads has begun none."""
        excess_s = max(self.excess_until - now, 0.0)
        return excess_s + (lane.work_s() if self.phase is InstancePhase.LOADING else lane.ahead_s(now))

    def takes_prompts(self, lane: PrefillLane, ahead_s: float) -> bool:
        """Whether less is ahead than it should have; ``ahead_s`` as given above."""
        return ahead_s < self.full_step_s and len(lane) < MAX_PROMPTS_AHEAD

    def bindable_at(self, lane: PrefillLane) -> float:
        """When it takes prompts again, by the passing of time alone."""
        if self.phase is InstancePhase.LOADING or len(lane) >= MAX_PROMPTS_AHEAD:
            return math.inf
        return max(lane.less_ahead_at(self.full_step_s), self.excess_until - max(self.full_step_s - lane.work_s(), 0.0))


class Rosters:
    """By version, built when they are asked for, and again after ``forget``."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[RosterEntry, ...]] = {}

    def of(self, version_id: str, build: Callable[[], Sequence[RosterEntry]]) -> tuple[RosterEntry, ...]:
        found = self._of.get(version_id)
        if found is None:
            found = self._of[version_id] = tuple(build())
        return found

    def forget(self, version_id: str) -> None:
        self._of.pop(version_id, None)
