"""Prompts that wait for a version, in seconds of its instances."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torchrelay.scheduler.policy.core import (
    InstancePhase,
    Model,
)
from torchrelay.scheduler.policy.dispatch.roster_entry import RosterEntry
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.transitions import rosters


def backlog_s(state: State, model: Model, now: float, num_left_out: int = 0) -> float:
    """All prompts that wait for the version, here (but for so many tokens) and at its instances, in seconds of one."""
    return _backlog_s(state, model, rosters.prefills(state, model, now), now, num_left_out)


def _backlog_s(state: State, model: Model, entries: Sequence[RosterEntry], now: float, num_left_out: int = 0) -> float:
    """``entries``: the version's instances that play prefill."""
    bound = state.attempts.bound
    works = [(entry, work) for entry in entries if (work := bound.get(entry.instance_id)) is not None]
    bound_s = sum(entry.queued_s(work.queue, now) for entry, work in works)
    bound_s += sum(one.excess_until - now for one in entries if one.excess_until > now and one.instance_id not in bound)
    num_tokens = state.queues.num_prefill_tokens(model.version_id) - num_left_out
    return bound_s + _prompts_s(state, model, entries, num_tokens)


def prompts_s(state: State, model: Model, num_tokens: float, now: float) -> float:
    """Prompts of so many tokens in all, in seconds of one instance, or of a worker that could have one."""
    return _prompts_s(state, model, rosters.prefills(state, model, now), num_tokens) if num_tokens else 0.0


def _prompts_s(state: State, model: Model, entries: Sequence[RosterEntry], num_tokens: float) -> float:
    return computation_s(state, model, entries)(num_tokens) if num_tokens else 0.0


def computation_s(state: State, model: Model, entries: Sequence[RosterEntry]) -> Callable[[float], float]:
    """Computation time as a function of the number of unbound prompt tokens. Where an instance is loaded, the recent
    mean share of them is assumed to be cached.
    """
    is_loaded = any(entry.phase is not InstancePhase.LOADING for entry in entries)
    share = state.cached_prompts.uncached_share(model.version_id) if is_loaded else 1.0
    if entries:
        latency = entries[0].latency
    else:
        able = (one for one in state.membership.workers.values() if one.num_devices == model.num_devices)
        if (worker := next(able, None)) is None:
            return lambda num_tokens: 0.0
        latency = state.latency_models.of(worker, model.pack_id, state.config)
    return lambda num_tokens: latency.queued_s(math.ceil(num_tokens * share))


def first_load_left_s(state: State, model: Model, now: float) -> float:
    """Until an instance of the model can compute prompts."""
    entries = rosters.prefills(state, model, now)
    if not entries:
        return state.config.slot_setup_s + model.pack_bytes / state.config.relay_bytes_per_s
    if any(entry.phase is not InstancePhase.LOADING for entry in entries):
        return 0.0
    return min(entry.load_left_s(now) for entry in entries)


def prompts_ahead_s(state: State, model: Model, now: float) -> float:
    entries = rosters.prefills(state, model, now)
    if not entries:
        return state.queues.num_prefill_tokens(model.version_id) / state.config.default_prefill_tokens_per_s
    return _backlog_s(state, model, entries, now) / len(entries)
