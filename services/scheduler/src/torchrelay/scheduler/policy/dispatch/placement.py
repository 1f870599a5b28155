"""Placement: the prefill and the decode instance of one attempt, by predicted latency.

Time to first token = load left + prompts queued ahead + own prompt without its cached part, on the prefill instance.
The decode instance must have unreserved KV bytes up to the last token; its cost is what delays the second token: its
own load left, the KV that arrives after the first token, and a step with this attempt in its batch. If such a step
exceeds the TBT objective, each token to come costs the excess. The pair with the lowest sum wins; one worker that plays
both roles saves the KV transfer, but prompts interrupt its decode steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchrelay.common.latency.latency_model import LatencyModel
from torchrelay.scheduler.policy import core
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.dispatch.kv_transfer_time import KvTransferTimes
from torchrelay.scheduler.policy.prediction import Prediction

_MAX_PENALIZED_TOKENS = 256  # few requests run to their maximum


@dataclass(frozen=True)
class Candidate:
    """An instance that may serve the attempt."""

    instance: core.Instance
    worker: core.WorkerStatus
    latency: LatencyModel
    load_left_s: float
    queue_s: float  # prompts ahead
    kv_unreserved_bytes: int
    num_open: int  # attempts that decode
    num_decoding: int  # choices of these: rows of a step
    num_decode_attended: int = 0  # positions that they attend to at their last tokens
    num_cached_tokens: int = 0  # of this attempt's prompt

    @property
    def worker_ref(self) -> core.WorkerRef:
        return core.WorkerRef(self.worker.worker_id, self.worker.grpc_address, self.instance.instance_id)


@dataclass(frozen=True)
class NoPlacement:
    """Why the attempt must wait."""

    reason: str


def place(
    admission: core.Admission,
    model: core.Model,
    candidates: Sequence[Candidate],
    kv_transfer_times: KvTransferTimes,
    config: PolicyConfig,
) -> core.Placement | NoPlacement:
    """The best pair of instances, or why there is none."""
    prefills = [candidate for candidate in candidates if candidate.instance.plays(core.Role.PREFILL)]
    decodes = [candidate for candidate in candidates if candidate.instance.plays(core.Role.DECODE)]
    if not prefills or not decodes:
        return NoPlacement(f"no instance plays {'prefill' if not prefills else 'decode'}")
    kv_bytes = admission.kv_bytes(model)
    fitting = [
        decode
        for decode in decodes
        if decode.kv_unreserved_bytes >= kv_bytes and decode.num_open < config.max_open_per_instance
    ]
    if not fitting:
        most = max(decode.kv_unreserved_bytes for decode in decodes)
        return NoPlacement(f"needs {kv_bytes:,} bytes of KV, at most {most:,} are unreserved on any decode instance")
    firsts = {prefill.instance.instance_id: _first_token(admission, prefill) for prefill in prefills}
    nexts = {decode.instance.instance_id: _next_tokens(admission, decode, config) for decode in fitting}
    prompt_bytes = admission.num_prefill_tokens * model.kv_bytes_per_token

    def cost(pair: tuple[Candidate, Candidate]) -> tuple[float, int, str, str]:
        """Time to the second token, plus all later delays beyond the objective."""
        prefill, decode = pair
        ids = prefill.instance.instance_id, decode.instance.instance_id
        ttft_s, (_, next_s) = firsts[ids[0]].ttft_s, nexts[ids[1]]
        latency_s = ttft_s + max(decode.load_left_s - ttft_s, 0.0) + next_s
        if prefill.worker.worker_id != decode.worker.worker_id:
            hosts = prefill.instance.host_id, decode.instance.host_id
            latency_s += kv_transfer_times.predict_s(*hosts, prompt_bytes, config.kv_bytes_per_s)
        return latency_s, -decode.kv_unreserved_bytes, *ids

    prefill, decode = min(((prefill, decode) for prefill in prefills for decode in fitting), key=cost)
    return core.Placement(
        key=admission.key,
        prefill=prefill.worker_ref,
        decode=decode.worker_ref,
        cold=core.InstancePhase.LOADING in (prefill.instance.phase, decode.instance.phase),
        predicted=replace(firsts[prefill.instance.instance_id], tbt_s=nexts[decode.instance.instance_id][0]),
    )


def _first_token(admission: core.Admission, prefill: Candidate) -> Prediction:
    decodes_beside = prefill.instance.plays(core.Role.DECODE)
    prefill_s = admission.num_contexts * prefill.latency.prefill_s(
        admission.num_context_tokens,
        prefill.num_cached_tokens,
        prefill.num_decoding if decodes_beside else 0,
        prefill.num_decode_attended if decodes_beside else 0,
    )
    ttft_s = prefill.load_left_s + prefill.queue_s + prefill_s
    return Prediction(ttft_s, prefill_s, num_cached_tokens=prefill.num_cached_tokens)


def _next_tokens(admission: core.Admission, decode: Candidate, config: PolicyConfig) -> tuple[float, float]:
    """TBT, and the cost of the second token and of all that exceed the objective, without load and KV transfer."""
    num_attended = admission.num_choices * (admission.num_prompt_tokens + admission.max_tokens)
    batch = decode.num_decoding + admission.num_choices
    tbt_s = decode.latency.tbt_s(batch, decode.num_decode_attended + num_attended)
    late_s = max(tbt_s - config.tbt_target_s, 0.0) * min(admission.max_tokens, _MAX_PENALIZED_TOKENS)
    interruption_s = 0.0
    if decode.instance.plays(core.Role.PREFILL):
        # A prompt interrupts decoding by one step at a time.
        interruption_s = min(decode.queue_s, decode.latency.prefill_s(decode.latency.token_budget))
    return tbt_s, tbt_s + late_s + interruption_s
