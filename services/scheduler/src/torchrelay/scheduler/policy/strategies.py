"""The decisions that another system would make otherwise: a policy is given them, so that rivals run on its state.

Each is a pure function: an input and the parameters in, a decision out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchrelay.scheduler.planning import Node, ReceiveProgress, TransferEdge, plan
from torchrelay.scheduler.policy.admission.late_requests import TimedPrompt, fewest_late, late_rank
from torchrelay.scheduler.policy.autoscaling.autoscaler_input import Action, AutoscalerInput
from torchrelay.scheduler.policy.autoscaling.decision import decide
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.core import Admission, AttemptKey, Model, Placement
from torchrelay.scheduler.policy.dispatch.placement import Candidate, NoPlacement, place
from torchrelay.scheduler.policy.estimates.kv_transfer_time import KvTransferTimes
from torchrelay.scheduler.policy.replication.repair import ReplicationInput, ReplicationPlan, repair


class Place(Protocol):
    """Where an attempt runs; see ``dispatch/placement.py``."""

    def __call__(
        self,
        admission: Admission,
        model: Model,
        candidates: Sequence[Candidate],
        kv_transfer_times: KvTransferTimes,
        config: PolicyConfig,
        now: float,
        num_answer_tokens: int | None = None,
    ) -> Placement | NoPlacement: ...


class Decide(Protocol):
    """Decide which instances to load and drain; see ``autoscaling/decision.py``."""

    def __call__(
        self, autoscaler_input: AutoscalerInput, config: PolicyConfig, *, is_complete: bool = True
    ) -> tuple[Action, ...]: ...


class Plan(Protocol):
    """From whom stores receive a pack; see ``planning/plan.py``. Edges that predict no rate are not planned anew."""

    def __call__(
        self,
        whole: Sequence[str],
        receiving: Sequence[str],
        targets: Sequence[str],
        *,
        nodes: Mapping[str, Node] | None = None,
        arriving: Mapping[str, ReceiveProgress] | None = None,
        live: Collection[str] = (),
        num_bytes: float = 0.0,
    ) -> tuple[TransferEdge, ...]: ...


class Repair(Protocol):
    """Which copies are kept and made; see ``replication/repair.py``."""

    def __call__(self, replication_input: ReplicationInput, config: PolicyConfig) -> ReplicationPlan: ...


class ChooseLate(Protocol):
    """Which requests others go before though these are late then; see ``admission/late_requests.py``."""

    def __call__(
        self, prompts: Iterable[TimedPrompt], free_at: Sequence[float], share: float = 1.0
    ) -> Sequence[AttemptKey]: ...


class LateRank(Protocol):
    """The order of requests that are late; see ``admission/late_requests.py``."""

    def __call__(self, admission: Admission, prompt_s: float) -> float: ...


@dataclass(frozen=True)
class Strategies:
    """The scheduler's own, unless others are given."""

    place: Place = place
    decide: Decide = decide
    plan: Plan = plan
    repair: Repair = repair
    choose_late: ChooseLate = fewest_late
    late_rank: LateRank = late_rank

    @property
    def decides_in_turns(self) -> bool:
        """Whether models that nothing has happened to may be decided on a few at a time. What another system decides
        may be about the whole cluster.
        """
        return self.decide is decide
