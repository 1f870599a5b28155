"""The decisions in which other systems differ, as parameters of the policy, so that rivals can run on the same state.

Each is a function to a decision; all but ``evaluate_packs`` are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

from torchrelay.scheduler.policy.autoscaling.actions import Action
from torchrelay.scheduler.policy.autoscaling.auction import auction
from torchrelay.scheduler.policy.autoscaling.view import View
from torchrelay.scheduler.policy.queue.late_requests import TimedPrompt, fewest_late, late_rank
from torchrelay.scheduler.policy.relay.planning import Node, ReceiveProgress, TransferEdge, plan
from torchrelay.scheduler.policy.replication.copies import Copies, CopyKey, CopyOrder, evaluate_packs
from torchrelay.scheduler.policy.types import Admission, AttemptKey


class Plan(Protocol):
    """Plans the sources from which stores receive a pack; see ``relay/planning.py``. Edges without a predicted rate are
    not replanned.
    """

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


class ChooseLate(Protocol):
    """Chooses which requests are late if not all can be in time; see ``queue/late_requests.py``."""

    def __call__(
        self, prompts: Iterable[TimedPrompt], free_at: Sequence[float], share: float = 1.0
    ) -> Sequence[AttemptKey]: ...


# Decides which instances to load and drain; see ``autoscaling/auction.py``.
Decide: TypeAlias = Callable[[View], Sequence[Action]]
# Decides which copies of some packs are kept and made; see ``replication/copies.py``.
EvaluatePacks: TypeAlias = Callable[[Copies, Sequence[str], Sequence[CopyKey], float], Sequence[CopyOrder]]
# Rank of a late request, with its prompt time, in their order of service; see ``queue/late_requests.py``.
LateRank: TypeAlias = Callable[[Admission, float], float]


class LoadingPrompts(Enum):
    """The prompts that a loading instance gets while others are loaded; see ``dispatch/live_scaling.py``."""

    NONE = "none"  # it computes once it is loaded
    KEPT = "kept"  # it computes layer by layer as it loads, and keeps its prompts
    MOVED = "moved"  # loaded instances take them over with what is computed


@dataclass(frozen=True)
class Strategies:
    """The strategies of a policy; by default the scheduler's own."""

    decide: Decide = auction
    plan: Plan = plan
    evaluate_packs: EvaluatePacks = evaluate_packs
    choose_late: ChooseLate = fewest_late
    late_rank: LateRank = late_rank
    loading_prompts: LoadingPrompts = LoadingPrompts.MOVED

    @property
    def decides_in_turns(self) -> bool:
        """Whether models without a change may be decided on a few at a time. Another system's decisions may need the
        whole cluster.
        """
        return self.decide is auction
