"""Placement: chooses the prefill and the decode instance of an attempt by predicted latency.

A prompt is dispatched only to an instance with less than one full step of prefill queued; other prompts wait at the
scheduler, where they can still go elsewhere. Time to first token = load left + prompts ahead + own prompt without its
cached part. The decode instance must have unreserved KV bytes up to the last token. Its cost is the delay of the second
token: its load left, the KV that arrives after the first token, and a step with this attempt in its batch. If such a
step exceeds the TBT objective, each further token costs the excess. The pair with the lowest sum wins. An instance that
plays both roles saves the KV transfer, but prompts interrupt its decode steps, so between prompts it gets the pauses
that its answers need. An instance whose engine hands no KV over answers its own prompts only. An instance where the
model has its most requests at once, or its share of the KV, is no candidate for it; other models that share it are not
affected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import msgspec

from torchrelay.scheduler.policy import types
from torchrelay.scheduler.policy.cluster.instance import Instance
from torchrelay.scheduler.policy.cluster.open_attempts import NO_WORK, ModelWork
from torchrelay.scheduler.policy.prediction import Prediction
from torchrelay.scheduler.policy.state import State

MAX_SCORED = 8  # instances per role
_FETCH_S = 0.5  # before a worker drops a prompt, another must ask for it
MOVE_S = 0.03  # to move a prompt between two workers, beside the transfer of its bytes
_PAUSE_AIM = 0.85  # aim as a share of the target between tokens: answers are short, and their interruptions are random
_MIN_WAIT_S = 0.001  # an overdue prompt is checked again after this time
_MAX_PENALIZED_TOKENS = 256  # few requests run to their maximum


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """Why the attempt must wait. ``due``: when another prompt may be dispatched, by prediction; infinite if that needs
    a change. ``is_own``: the reason is this attempt's size, and other attempts may fit. ``is_capped``: a limit of the
    attempt's model excludes instances, which attempts of other models may use. ``is_of_all``: no attempt can be placed
    before ``due``, unless an instance changes or prompts leave it.
    """

    reason: str
    due: float = math.inf
    is_own: bool = False
    is_capped: bool = False
    is_of_all: bool = False


# Plain tuples, because each admission makes a tuple per instance, and they are compared in the order of fields.
# TTFT, instance, seconds of the prompt itself, cached tokens of the prompt, correction of times to the first token.
_Prefill: TypeAlias = tuple[float, str, float, int, float, Instance]
# Cost of later tokens, instance, TBT, seconds of a step, correction of TBT, load left.
_Decode: TypeAlias = tuple[float, str, float, float, float, float, Instance]


def place(
    state: State,
    admission: types.Admission,
    model: types.Model,
    prefills: Sequence[Instance],
    decodes: Sequence[Instance],
    now: float,
) -> types.Placement | NoPlacement:
    """The best pair of a prefill and a decode instance, or why there is none."""
    caps = state.versions.of(admission.version_id).aliases.caps_of(admission.model, admission.caps)
    if caps == types.NO_CAPS:
        return _best(state, admission, model, prefills, decodes, now)
    kv_bytes = admission.kv_bytes(model)
    limits = f"{admission.model} has its most requests at once, or its share of KV, on"
    open_decodes = [each for each in decodes if is_within(each, admission, caps, kv_bytes)]
    if decodes and not open_decodes:
        is_own = any(
            is_within(each, admission, caps, 0) and not caps.holds(kv_bytes, each.kv_pool_bytes) for each in decodes
        )
        return NoPlacement(f"{limits} each instance", is_own=is_own, is_capped=True)
    open_prefills = [each for each in prefills if is_within(each, admission, caps, 0)]
    placement = _best(state, admission, model, open_prefills, open_decodes, now)
    is_limited = len(open_prefills) < len(prefills) or len(open_decodes) < len(decodes)
    if not is_limited or isinstance(placement, types.Placement):
        return placement
    return NoPlacement(f"{placement.reason}; {limits} other instances", placement.due, is_capped=True)


def is_within(instance: Instance, admission: types.Admission, caps: types.Caps, kv_bytes: int) -> bool:
    """Whether the limits of the request's model allow it there, beside its recalled prompts that return first."""
    own = instance.work.of_model.get(admission.model, NO_WORK)
    if instance.returning and admission.key.request_id not in instance.returning:
        num_returning = sum(prompt.model == admission.model for prompt in instance.returning.values())
        own = ModelWork(own.num_open + num_returning, own.kv_bytes)
    return own.is_within(caps, kv_bytes, instance.kv_pool_bytes)


def _best(
    state: State,
    admission: types.Admission,
    model: types.Model,
    prefills: Sequence[Instance],
    decodes: Sequence[Instance],
    now: float,
) -> types.Placement | NoPlacement:
    """The best pair of these instances."""
    ranked = _prefills(state, admission, model, prefills, now)
    if isinstance(ranked, NoPlacement):
        return ranked
    able = _decodes(state, admission, model, decodes, set(prefills), now)
    if isinstance(able, NoPlacement):
        return able
    prompt_bytes = admission.num_prefill_tokens * model.kv_bytes_per_token

    def transfer_s(prefill_host: str, decode_host: str) -> float:
        return state.kv_transfer_times.predict_s(prefill_host, decode_host, prompt_bytes, state.config.kv_bytes_per_s)

    pair = _best_pair(ranked, able, transfer_s)
    if pair is None:
        due = min((now + prefill[-1].full_step_s for prefill in ranked), default=math.inf)
        return NoPlacement("no instance with KV for the answer can compute the prompt or get its KV", due)
    (ttft_s, _, prefill_s, num_cached, ttft_correction, first), (_, _, tbt_s, step_s, tbt_correction, _, second) = pair
    return types.Placement(
        key=admission.key,
        prefill=first.worker_ref,
        decode=second.worker_ref,
        cold=first.is_loading or second.is_loading,
        predicted=Prediction(
            ttft_s=ttft_s,
            prefill_s=prefill_s,
            tbt_s=tbt_s,
            step_s=step_s,
            num_cached_tokens=num_cached,
            ttft_correction=ttft_correction,
            tbt_correction=tbt_correction,
            pause_s=_pause_after_s(admission, first, num_cached, is_answered_there=second is first),
        ),
        prompt_source=_prompt_source(admission, first, num_cached, transfer_s, now),
    )


def _prompt_source(
    admission: types.Admission, prefill: Instance, num_cached: int, transfer_s: Callable[[str, str], float], now: float
) -> types.PromptSource | None:
    """The worker that keeps the prompt, which computes on until the prefill instance can almost begin."""
    source = admission.prompt_source
    if source is None or source.worker.worker_id == prefill.worker_id:
        return None
    wait_s, latest_s = _ahead_s(prefill, admission, now), source.kept_until - now - _FETCH_S
    is_cached = 2 * num_cached > admission.num_context_tokens
    if latest_s < 0 or is_cached:
        return None
    share = 1 - source.left_share(now + wait_s)
    wait_s -= MOVE_S + transfer_s(source.host_id, prefill.host_id) * share
    return msgspec.structs.replace(source, wait_s=min(max(wait_s, 0.0), latest_s), saved_s=source.prompt_s * share)


def _pause_after_s(admission: types.Admission, prefill: Instance, num_cached: int, *, is_answered_there: bool) -> float:
    """The pause without prompts that the instance's answers need after this prompt, by the strictest target that can be
    met. At most a full step, even after a prompt of many steps, because a pause can follow each step.
    """
    work, latency = prefill.work, prefill.latency
    if not work.has_answers:
        return 0.0
    decode_s = latency.tbt_s(work.num_choices, work.num_attended)
    full_s = prefill.full_step_s + latency.decode.marginal_s(work.num_choices, work.num_attended)
    num_positions = admission.num_contexts * (admission.num_context_tokens - num_cached)
    targets_s = {attempt.admission.tbt_target_s for attempt in work.decodes.values()}
    if is_answered_there:
        targets_s.add(admission.tbt_target_s)
    per_full_step_s = max(pause_s(full_s, decode_s, target_s) for target_s in targets_s)
    return min(num_positions / latency.token_budget * per_full_step_s, prefill.full_step_s)


def pause_s(full_step_s: float, decode_step_s: float, tbt_target_s: float) -> float:
    """Time to decode answers alone after each full step of prompts so that the mean time between their tokens meets the
    target; 0 if it does so anyway, or cannot. Prompts get at least half of the time.

    On an instance with both roles each answer gets one token per step. If full steps of prompts follow each other
    without a pause, all answers miss a target that a few steps without prompts would meet (S. Agrawal et al.,
    "Sarathi-Serve", OSDI 2024, on stalls of decoding; its chunks are the engine's). ``full_step_s``, ``decode_step_s``:
    times of a step with these answers, full of prompts and without any.
    """
    aim_s = _PAUSE_AIM * tbt_target_s
    if full_step_s <= aim_s or decode_step_s >= aim_s:
        return 0.0
    num_steps = (full_step_s - aim_s) / (aim_s - decode_step_s)
    return min(num_steps * decode_step_s, full_step_s)


def _prefills(
    state: State,
    admission: types.Admission,
    model: types.Model,
    instances: Sequence[Instance],
    now: float,
) -> list[_Prefill] | NoPlacement:
    """The best few instances for the prompt, by predicted time to its first token. None while an instance that has a
    full step of prompts ahead, or pauses for its answers, would still compute the prompt sooner. Empty if all those
    that could take it would have to answer it, too, and have no KV for it.
    """
    # Runs thousands of times a second for a dozen instances: repeated look-ups are hoisted out of the loop.
    num_contexts, num_tokens, hashes = admission.num_contexts, admission.num_context_tokens, admission.block_hashes
    source, is_batch = admission.prompt_source, admission.service_class is types.ServiceClass.BATCH
    num_cached_blocks = state.prefix_index.num_blocks
    due = soonest_s = math.inf
    is_full = False
    prefills: list[_Prefill] = []
    for instance in instances:
        instance_id, work, latency = instance.instance_id, instance.work, instance.latency
        if not instance.hands_over and not _holds_answer(state, instance, admission.kv_bytes(model)):
            is_full = True
            continue
        num_cached = num_cached_blocks(instance_id, hashes) * model.routing_block_tokens if hashes else 0
        correction, paused_s, decode_s = instance.ttft_correction.factor(now), 0.0, 0.0
        if work.decodes:  # also of an instance that gave up decode
            context_s = latency.prefill_s(num_tokens, num_cached, work.num_choices, work.num_attended)
            if work.queue.owes_pauses and work.has_answers:
                decode_s = latency.tbt_s(work.num_choices, work.num_attended)
                paused_s = work.queue.paused_s(decode_s, now)
        else:
            context_s = latency.prefill_s(num_tokens, num_cached)
        prefill_s, load_left_s = num_contexts * context_s * correction, 0.0
        if instance.phase is types.InstancePhase.LOADING:
            load_left_s = instance.load_left_s(now)
        queued_s, overdue_s = instance.queued_and_overdue_s(now)
        expected_s = instance.returning_s(now, before=admission.key.request_id) if instance.returning else 0.0
        queued_s += expected_s
        if source is not None and source.worker.worker_id != instance.worker_id:
            prefill_s *= source.left_share(now + queued_s)
        if load_left_s:
            left_s = work.queue.left_by_layer_s(instance.share_loaded_at(now), now)
            ttft_s = instance.computed_s(left_s + prefill_s, now) + paused_s
        else:
            ttft_s = queued_s + overdue_s + paused_s + prefill_s
        # Later requests would wait behind batch work that is dispatched to a load.
        can_take = queued_s < instance.full_step_s
        if not can_take and load_left_s and not is_batch:
            can_take = instance.can_take(queued_s, prefill_s, now)
        if can_take and not paused_s:
            prefills.append((ttft_s, instance_id, prefill_s, num_cached, correction, instance))
            continue
        soonest_s = min(soonest_s, ttft_s)
        unpaused_at = work.queue.paused_until(decode_s) if paused_s else 0.0
        due = min(due, max(instance.bindable_at(now, expected_s), unpaused_at, now + _MIN_WAIT_S))
    if prefills:
        prefills.sort()
        if prefills[0][0] <= soonest_s:
            return _scored(prefills)
    if math.isinf(soonest_s):
        if is_full:
            return []
        return NoPlacement("no instance plays prefill")
    reason = "a step of prompts is ahead of it on the instance that will have it soonest"
    return NoPlacement(reason, due, is_of_all=not (prefills or is_full))


def _decodes(
    state: State,
    admission: types.Admission,
    model: types.Model,
    instances: Sequence[Instance],
    prefills: Container[Instance],
    now: float,
) -> list[_Decode] | NoPlacement:
    """The best few instances with unreserved KV bytes for the whole answer, by their delay of its later tokens.
    ``prefills``: those that may compute its prompt, and go on with other prompts.
    """
    num_answer_tokens = state.versions.of(model.version_id).usage.answers.expected(admission.max_tokens)
    kv_bytes, num_choices = admission.kv_bytes(model), admission.num_choices
    num_attended = admission.num_attended(num_answer_tokens)
    num_tokens = min(num_answer_tokens, _MAX_PENALIZED_TOKENS)
    target_s = admission.tbt_target_s
    most_bytes = largest_pool = -1
    decodes: list[_Decode] = []
    for instance in instances:
        instance_id, work = instance.instance_id, instance.work
        if not _holds_answer(state, instance, kv_bytes):
            most_bytes = max(most_bytes, instance.kv_unreserved_bytes)
            largest_pool = max(largest_pool, instance.kv_pool_bytes)
            continue
        step_s = instance.latency.tbt_s(work.num_choices + num_choices, work.num_attended + num_attended)
        tbt_s = instance.token_time.mean_s(step_s, now)
        cost_s = tbt_s + (tbt_s - target_s) * num_tokens if tbt_s > target_s else tbt_s
        if instance in prefills:  # a prompt interrupts decoding by one step at a time
            cost_s += min(_ahead_s(instance, admission, now), instance.full_step_s)
        left_s = instance.load_left_s(now)
        correction = instance.token_time.correction.factor(now)
        decodes.append((cost_s, instance_id, tbt_s, step_s, correction, left_s, instance))
    if decodes:
        if len(decodes) > MAX_SCORED:
            decodes.sort(key=lambda decode: (decode[5] + decode[0], decode[1]))  # includes the load left
            decodes = _scored(decodes)
        decodes.sort()
        return decodes
    if most_bytes < 0:
        return NoPlacement("no instance plays decode")
    reason = f"needs {kv_bytes:,} bytes of KV, at most {most_bytes:,} are unreserved on any decode instance"
    return NoPlacement(reason, is_own=kv_bytes > largest_pool)


def _ahead_s(instance: Instance, admission: types.Admission, now: float) -> float:
    """Expected time until the instance has computed the prompts before this one, with those on their way to it."""
    returning_s = instance.returning_s(now, before=admission.key.request_id) if instance.returning else 0.0
    return instance.ahead_s(now) + returning_s


def _holds_answer(state: State, instance: Instance, kv_bytes: int) -> bool:
    """Whether the instance has unreserved KV for another answer."""
    max_open = state.config.max_open_per_instance
    return instance.kv_unreserved_bytes >= kv_bytes and len(instance.work.decodes) < max_open


_Ranked = TypeVar("_Ranked", _Prefill, _Decode)


def _scored(ranked: list[_Ranked]) -> list[_Ranked]:
    """The first few, and each that pairs with itself alone."""
    return ranked[:MAX_SCORED] + [each for each in ranked[MAX_SCORED:] if not each[-1].hands_over]


def _best_pair(
    prefills: Sequence[_Prefill], decodes: Sequence[_Decode], transfer_s: Callable[[str, str], float]
) -> tuple[_Prefill, _Decode] | None:
    """The pair with the least time to the second token plus all later delays beyond the objective, by branch and bound:
    both lists are sorted, and the shortest transfer from a host bounds all its transfers. ``transfer_s``: between two
    hosts. None if the engines of none of them hand KV over.
    """
    if len(prefills) == len(decodes) == 1:
        ends = prefills[0][-1], decodes[0][-1]
        may_pair = ends[0] is ends[1] or (ends[0].hands_over and ends[1].hands_over)
        return (prefills[0], decodes[0]) if may_pair else None
    decode_hosts = {decode[-1].host_id for decode in decodes}
    by_id = {decode[1]: decode for decode in decodes}
    # By prefill host: to each decode host, and the least.
    transfers_s: dict[str, tuple[Mapping[str, float], float]] = {}
    least_s = math.inf
    best: tuple[float, int, str, str] = (least_s, 0, "", "")
    pair: tuple[_Prefill, _Decode] | None = None
    for prefill in prefills:
        ttft_s, prefill_id, first = prefill[0], prefill[1], prefill[-1]
        if ttft_s + decodes[0][0] > least_s:
            break  # the same holds for every later prefill instance
        host_id = first.host_id
        if (from_host := transfers_s.get(host_id)) is None:
            to_each_s = {decode_host: transfer_s(host_id, decode_host) for decode_host in decode_hosts}
            from_host = transfers_s[host_id] = to_each_s, min(to_each_s.values())
        arrivals_s, least_arrival_s = from_host
        own = by_id.get(prefill_id)  # the only decode instance without a transfer
        others = decodes if first.hands_over else ()
        for decode in others if own is None else (own, *others):
            later_s, decode_id, _, _, _, load_left_s, second = decode
            if not second.hands_over and decode is not own:
                continue
            cost_s = later_s + (load_left_s if load_left_s > ttft_s else ttft_s)
            if decode is not own:
                if ttft_s + later_s + least_arrival_s > least_s:
                    break
                cost_s += arrivals_s[second.host_id]
            if cost_s > least_s:
                continue
            rank = (cost_s, -second.kv_unreserved_bytes, prefill_id, decode_id)
            if rank < best:
                best, least_s, pair = rank, cost_s, (prefill, decode)
    return pair
