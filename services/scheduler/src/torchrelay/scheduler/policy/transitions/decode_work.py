"""The work of a model's answers, where each of its instances plays one role."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.scheduler.policy.autoscaling.decode_demand import DecodeDemand, most_in_time
from torchrelay.scheduler.policy.core import BOTH, Instance, Model
from torchrelay.scheduler.policy.dispatch.roster import RosterEntry
from torchrelay.scheduler.policy.state import State
from torchrelay.scheduler.policy.transitions import rosters


def decode_demand(
    state: State, model: Model, instances: Sequence[Instance], num_waiting: int, price_s: float, now: float
) -> DecodeDemand | None:
    """None: an instance plays both roles, or it is not known how long answers are and how much KV they take."""
    num_tokens = state.answer_lengths.mean(model.version_id)
    if not num_tokens or any(one.target_roles >= BOTH for one in instances):
        return None
    entries, prefills = _decodes(state, model, now), rosters.prefills(state, model, now)
    work = [state.attempts.at(entry.instance_id) for entry in entries]
    if not (num_open := sum(one.num_choices for one in work)) or not prefills:
        return None
    first, history = entries[0], state.arrivals.of(model.version_id)
    correction, cost = state.token_times.of(first.instance_id, now).correction, first.latency.decode
    base_s = correction * cost.base_s
    attended_s = cost.per_attended_s * sum(one.num_attended for one in work) / num_open
    per_answer_s = correction * (cost.per_position_s + attended_s)
    most_open = state.config.max_open_per_instance
    pool_bytes = sum(entry.kv_pool_bytes for entry in entries) / len(entries)
    kv_bytes = sum(one.kv_bytes for one in work) / num_open
    num_most = max(min(int(pool_bytes / kv_bytes), most_open), 1) if kv_bytes else most_open
    num_held = most_in_time(num_most, state.tbt_target_s(model.version_id, now), base_s, per_answer_s)
    return DecodeDemand(
        num_answers=num_open + num_waiting,
        num_held=num_held,
        num_most=num_most,
        answer_s=prefills[0].full_step_s + num_tokens * (base_s + per_answer_s * num_held),
        arrivals_per_s=history.rate(now).requests_per_s,
        target_s=history.target_s or state.config.standard_ttft_s,
        price_s=price_s,
        crowded_at=history.decode_crowded_at,
    )


def num_held_up(state: State, model: Model, decode: DecodeDemand, now: float) -> int:
    """Requests that wait for a place to decode: more instances that prefill would not help them."""
    return max(decode.num_answers - len(_decodes(state, model, now)) * decode.num_most, 0)


def _decodes(state: State, model: Model, now: float) -> list[RosterEntry]:
    return [entry for entry in rosters.roster(state, model, now) if entry.plays_decode]
