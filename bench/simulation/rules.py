"""The rules of the policy that can be left out, and what then takes their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torchrelay.scheduler.policy.autoscaling.price import IdlePlan
from torchrelay.scheduler.policy.estimates import token_time
from torchrelay.scheduler.policy.strategies import LoadingPrompts, Strategies
from torchrelay.sim.policies.deadline_order import by_deadline
from torchrelay.sim.policies.relay_plans import no_copies

_POLICY = "torchrelay.scheduler.policy"


def _returns(value: object) -> Callable[..., Any]:
    return lambda *_, **__: value


# By rule: what takes the place of each name below ``_POLICY``.
REPLACED: Mapping[str, Mapping[str, object]] = {
    "crowded_spare": {"autoscaling.decision._uncrowded": _returns([])},
    "end_time_slice": {"autoscaling.eviction.evict.end_time_slice": _returns([])},
    "evict_to_grow": {"autoscaling.decision.evict_to_grow": _returns([])},
    "exchange_pays": {"autoscaling.eviction.exchange.Exchange.pays": True},
    "forecast": {"autoscaling.price._with_load": lambda gaps_s, keep_s, *_: IdlePlan(keep_s)},
    "growth": {"autoscaling.decision._growth": _returns(None)},
    "late_before": {"autoscaling.arrivals.ArrivalHistory.num_late": _returns(0)},
    "learned_keep": {"autoscaling.price.IdleGaps.plan": lambda _, break_even_s, __: IdlePlan(break_even_s)},
    "overdue": {"autoscaling.eviction.evict.overdue_tenant_of": _returns("")},
    "preempt_spare": {"autoscaling.eviction.evict.preempt_spare": _returns([])},
    "shared_versions": {"dispatch.shared_versions.SharedVersions.is_shared": _returns(value=False)},
    "answers": {"handlers.demands._answer_demand": _returns(None)},
    "token_pause": {"dispatch.placement.pause_s": _returns(0.0)},
    "token_time": {"estimates.token_time.TokenTimes.of": _returns(token_time.UNKNOWN)},
    "ttft_correction": {"estimates.correction.Corrections.of": _returns(1.0)},
    "usual_step": {"estimates.token_time._USUAL_SHARE": 0.0},
}
# By rule: strategies without it.
STRATEGIES: Mapping[str, Strategies] = {
    "fewest_late": by_deadline(Strategies()),
    "live_scaling": Strategies(loading_prompts=LoadingPrompts.NONE),
    "moved_prompts": Strategies(loading_prompts=LoadingPrompts.KEPT),
    "second_copies": Strategies(repair=no_copies),
}
RULES = tuple(sorted((*REPLACED, *STRATEGIES)))


@contextmanager
def without(rule: str) -> Iterator[Strategies]:
    """Leaves the rule out in this process; the strategies to use meanwhile. Every rule applies if it is empty."""
    with ExitStack() as stack:
        for name, value in REPLACED.get(rule, {}).items():
            stack.enter_context(patch(f"{_POLICY}.{name}", value))
        yield STRATEGIES.get(rule, Strategies())
