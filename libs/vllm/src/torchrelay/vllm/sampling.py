"""Torchrelay's sampling parameters in vLLM's words."""

from __future__ import annotations

from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSampling

from torchrelay.engine.core import ChoiceSpec, Logprobs, SamplingParams

_SEEDS = 2**63


def sampling_of(params: SamplingParams, spec: ChoiceSpec) -> VllmSampling:
    """The parameters of a choice that continues after its forced output, which is part of vLLM's prompt."""
    num_forced = len(spec.forced_output)
    return VllmSampling(
        temperature=0.0 if params.greedy else params.temperature,
        top_p=max(params.top_p, 1e-9),
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        min_tokens=max(params.min_tokens - num_forced, 0),
        max_tokens=params.max_tokens - num_forced,
        logit_bias=dict(params.logit_bias) or None,
        logprobs=params.top_logprobs,
        seed=None if params.greedy else (params.seed * 1_000_003 + spec.choice * 8191 + num_forced) % _SEEDS,
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=True,  # the gateway names every token that ends an answer
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def logprobs_of(token_id: int, ranked: dict[int, object], num_top: int) -> Logprobs:
    """The chosen token's and the top tokens' of one position."""
    values = {token: float(each.logprob) for token, each in ranked.items()}  # type: ignore[attr-defined]
    by_rank = sorted(ranked, key=lambda token: ranked[token].rank)  # type: ignore[attr-defined]
    return Logprobs(values[token_id], tuple((token, values[token]) for token in by_rank[:num_top]))
