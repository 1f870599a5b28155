"""Computation time of the prompts that wait for a version."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torchrelay.scheduler.policy.dispatch.endpoint import Endpoint
from torchrelay.scheduler.policy.handlers import endpoints
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.types import InstancePhase, Model


def backlog_s(state: State, model: Model, now: float, num_left_out: int = 0) -> float:
    """Seconds that one instance would take for all prompts of the version that wait: in the queue, except for
    ``num_left_out`` tokens, and at its instances.
    """
    return _backlog_s(state, model, endpoints.prefills(state, model, now), now, num_left_out)


def _backlog_s(state: State, model: Model, entries: Sequence[Endpoint], now: float, num_left_out: int = 0) -> float:
    """``entries``: the version's instances that play prefill."""
    bound = state.attempts.work
    works = [(entry, work) for entry in entries if (work := bound.get(entry.instance_id)) is not None]
    bound_s = sum(entry.queued_s(work.queue, now) for entry, work in works)
    num_tokens = state.queues.num_prefill_tokens(model.version_id) - num_left_out
    return bound_s + _prompts_s(state, model, entries, num_tokens)


def prompts_s(state: State, model: Model, num_tokens: float, now: float) -> float:
    """Seconds for prompts of ``num_tokens`` tokens in all on one instance, or on a worker that could have one."""
    return _prompts_s(state, model, endpoints.prefills(state, model, now), num_tokens) if num_tokens else 0.0


def _prompts_s(state: State, model: Model, entries: Sequence[Endpoint], num_tokens: float) -> float:
    return computation_s(state, model, entries)(num_tokens) if num_tokens else 0.0


def computation_s(state: State, model: Model, entries: Sequence[Endpoint]) -> Callable[[float], float]:
    """Computation time as a function of the number of unbound prompt tokens. If an instance is loaded, their recent
    mean share is assumed to be cached.
    """
    is_loaded = any(entry.phase is not InstancePhase.LOADING for entry in entries)
    share = state.cached_prompts.uncached_share(model.version_id) if is_loaded else 1.0
    if entries:
        latency = entries[0].latency
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
    entries = endpoints.loading_prefills(state, model, now)
    if entries is None:
        return None
    queued_s = prompts_s(state, model, state.queues.num_prefill_tokens(model.version_id), now)
    if not entries:
        return state.expected_load_s(model) + queued_s
    bound_s = min(entry.free_s(state.attempts.at(entry.instance_id).queue, now) for entry in entries)
    return bound_s + queued_s / len(entries)


def prompts_ahead_s(state: State, model: Model, now: float) -> float:
    """Time until the version's instances have computed all prompts that wait."""
    entries = endpoints.prefills(state, model, now)
    if not entries:
        return prompts_s(state, model, state.queues.num_prefill_tokens(model.version_id), now)
    return _backlog_s(state, model, entries, now) / len(entries)
