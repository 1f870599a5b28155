"""Dispatch: the prefill and the decode instance of one attempt, by predicted latency.

Time to first token = load left + prompts queued ahead + own prompt, on the prefill instance. The decode instance must
have the KV bytes to the last token unreserved; it then costs what delays the second token: its own load left, the KV
that arrives after the first token, and a step that grows with the batch. The pair with the least sum wins; one worker
that plays both saves the hand-over, and pays for prompts that interrupt its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrelay.scheduler.core import Admission, Instance, Model, Phase, Placement, Role, Seat, Worker
from torchrelay.scheduler.latency import prefill_tokens_per_s, step_s
from torchrelay.scheduler.rules import Rules

_HANDOVER_S = 0.002  # offer, reservation and the last layer's KV
_BATCH_FREE = 8  # this many sequences decode in about the time of one
_CHUNK_TOKENS = 512  # a prompt interrupts decoding by one chunk at a time


@dataclass(frozen=True)
class Candidate:
    """An instance that requests may be sent to."""

    instance: Instance
    worker: Worker
    load_left_s: float
    queued_prefill_tokens: int
    kv_unreserved_bytes: int
    num_decoding: int

    @property
    def seat(self) -> Seat:
        return Seat(self.worker.worker_id, self.worker.grpc_address, self.instance.instance_id)


@dataclass(frozen=True)
class NoPlace:
    """Why the attempt has to wait."""

    reason: str


def place(admission: Admission, model: Model, candidates: Sequence[Candidate], rules: Rules) -> Placement | NoPlace:
    """The best pair of instances, or why there is none now."""
    prefills = [candidate for candidate in candidates if candidate.instance.plays(Role.PREFILL)]
    decodes = [candidate for candidate in candidates if candidate.instance.plays(Role.DECODE)]
    if not prefills or not decodes:
        return NoPlace(f"no instance plays {'prefill' if not prefills else 'decode'}")
    kv_bytes = admission.kv_bytes(model)
    fitting = [
        decode
        for decode in decodes
        if decode.kv_unreserved_bytes >= kv_bytes and decode.num_decoding < rules.max_open_per_instance
    ]
    if not fitting:
        most = max(decode.kv_unreserved_bytes for decode in decodes)
        return NoPlace(f"needs {kv_bytes} bytes of KV, at most {most} are unreserved on any decode instance")
    ttft_of = {prefill.instance.instance_id: _ttft_s(prefill, admission, rules) for prefill in prefills}
    best = min(
        ((prefill, decode) for prefill in prefills for decode in fitting),
        key=lambda pair: (
            _latency_s(pair[0], pair[1], ttft_of[pair[0].instance.instance_id], kv_bytes, rules),
            -pair[1].kv_unreserved_bytes,
            pair[0].instance.instance_id,
            pair[1].instance.instance_id,
        ),
    )
    prefill, decode = best
    return Placement(
        key=admission.key,
        prefill=prefill.seat,
        decode=decode.seat,
        cold=Phase.LOADING in (prefill.instance.phase, decode.instance.phase),
        predicted_ttft_s=ttft_of[prefill.instance.instance_id],
    )


def _ttft_s(prefill: Candidate, admission: Admission, rules: Rules) -> float:
    tokens = prefill.queued_prefill_tokens + admission.num_prefill_tokens
    return prefill.load_left_s + tokens / prefill_tokens_per_s(prefill.worker, rules)


def _latency_s(prefill: Candidate, decode: Candidate, ttft_s: float, kv_bytes: int, rules: Rules) -> float:
    """To the second token: the first one's time, and what the decode instance adds to it."""
    late_s = max(decode.load_left_s - ttft_s, 0.0)
    batch_step_s = step_s(decode.worker, rules) * (1 + decode.num_decoding / _BATCH_FREE)
    interruption_s = 0.0
    if decode.instance.plays(Role.PREFILL):
        queued = min(decode.queued_prefill_tokens, _CHUNK_TOKENS)
        interruption_s = queued / prefill_tokens_per_s(decode.worker, rules)
    if prefill.worker.worker_id == decode.worker.worker_id:
        return ttft_s + late_s + batch_step_s + interruption_s
    # Layers stream while later ones are computed: what is left after the first token is small beside the whole.
    return ttft_s + late_s + batch_step_s + interruption_s + _HANDOVER_S + 0.05 * kv_bytes / rules.kv_bytes_per_s
