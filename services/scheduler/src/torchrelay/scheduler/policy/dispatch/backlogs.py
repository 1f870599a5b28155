"""Computation time of the prompts that wait for a version."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.dispatch import endpoints
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import Model


def backlog_s(state: State, model: Model, now: float, num_left_out: int = 0) -> float:
    """Seconds that one instance would take for all prompts of the version that wait: in the queue, except for
    ``num_left_out`` tokens, and at its instances.
    """
    return _backlog_s(state, model, endpoints.of_version(state, model, now).prefills, now, num_left_out)


def _backlog_s(state: State, model: Model, prefills: Sequence[Instance], now: float, num_left_out: int = 0) -> float:
    """``prefills``: the version's instances that play prefill."""
    bound_s = sum(instance.queued_and_overdue_s(now)[0] for instance in prefills)
    num_tokens = state.queues.num_prefill_tokens(model.version_id) - num_left_out
    return bound_s + _prompts_s(state, model, prefills, num_tokens)


def prompts_s(state: State, model: Model, num_tokens: float, now: float) -> float:
    """Seconds for prompts of ``num_tokens`` tokens in all on one instance, or on a worker that could have one."""
    return _prompts_s(state, model, endpoints.of_version(state, model, now).prefills, num_tokens) if num_tokens else 0.0


def _prompts_s(state: State, model: Model, prefills: Sequence[Instance], num_tokens: float) -> float:
    return computation_s(state, model, prefills)(num_tokens) if num_tokens else 0.0


def computation_s(state: State, model: Model, prefills: Sequence[Instance]) -> Callable[[float], float]:
    """Computation time as a function of the number of unbound prompt tokens. If an instance is loaded, their recent
    mean share is assumed to be cached.
    """
    is_loaded = any(not instance.is_loading for instance in prefills)
    share = state.versions.of(model.version_id).usage.prompts.uncached if is_loaded else 1.0
    if prefills:
        latency = prefills[0].latency
    else:
        workers = state.membership.workers.values()
        worker = next((worker for worker in workers if model.slot_class.fits(worker)), None)
        if worker is None:
            return lambda num_tokens: 0.0
        latency = state.latency_models.of(worker, model.pack_id, state.config)
    return lambda num_tokens: latency.queued_s(math.ceil(num_tokens * share))


def cold_wait_s(state: State, model: Model, now: float) -> float | None:
    """Time until all prompts that wait for a model are computed, in the queue and at its instances, once the first of
    these is loaded; without an instance, as if its load began now. None if a loaded instance serves the model.
    """
    prefills = endpoints.loading_prefills(state, model, now)
    if prefills is None:
        return None
    queued_s = prompts_s(state, model, state.queues.num_prefill_tokens(model.version_id), now)
    if not prefills:
        return state.expected_load_s(model) + queued_s
    return min(instance.free_s(now) for instance in prefills) + queued_s / len(prefills)


def prompts_ahead_s(state: State, model: Model, now: float) -> float:
    """Time until the version's instances have computed all prompts that wait."""
    prefills = endpoints.of_version(state, model, now).prefills
    if not prefills:
        return prompts_s(state, model, state.queues.num_prefill_tokens(model.version_id), now)
    return _backlog_s(state, model, prefills, now) / len(prefills)
