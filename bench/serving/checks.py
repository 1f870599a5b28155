"""The checks that `engine.py` reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.processes import MB
from bench.report import Check
from bench.serving.client import Sample
from bench.serving.memory_bound import Round
from bench.serving.models import BenchModel

KV_POOL_BYTES: Final = 256 << 20
TOK_S_OVER_PEER: Final = {1: 1.4, 8: 1.5, 32: 1.6}
# vLLM 0.32's CPU server, eager, on two cores of an AMD EPYC with bf16 arithmetic.
DOCUMENTED_TOK_S: Final = {"tiny": {1: 373, 8: 899, 32: 2971}, "mid": {1: 36, 8: 139, 32: 180}}
Samples = Mapping[str, Mapping[int, Sample]]


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of a worker in both roles: samples by model and concurrency, and the mid model's memory-bound rounds."""

    samples: Samples
    rounds: Sequence[Round]
    prefix_hit_ratio: float
    long_ttft_ms: float


def model_checks(model: BenchModel, mine: Measured, peers: Samples) -> list[Check]:
    """Checks of a model's speed against the measured peer, or against its documented figure."""
    checks = []
    for concurrency, sample in mine.samples[model.name].items():
        name = f"{model.name}_c{concurrency}"
        if model.name in peers:
            checks += _against_peer(name, concurrency, sample, peers[model.name][concurrency])
        else:
            documented = f"vLLM elsewhere, in full: {DOCUMENTED_TOK_S[model.name][concurrency]}"
            checks.append(Check(f"{name}_tok_s", sample.tok_s, "tok/s", None, documented))
            checks.append(Check(f"{name}_tbt_ms", sample.tbt_ms, "ms"))
            checks.append(Check(f"{name}_ttft_ms", sample.ttft_ms, "ms"))
    return checks


def _against_peer(name: str, concurrency: int, sample: Sample, peer: Sample) -> list[Check]:
    bound = TOK_S_OVER_PEER[concurrency]
    rates = f"{sample.tok_s:.1f} over {peer.tok_s:.1f} tok/s"
    tbt, ttft = f"{sample.tbt_ms:.1f} over {peer.tbt_ms:.1f} ms", f"{sample.ttft_ms:.0f} over {peer.ttft_ms:.0f} ms"
    return [
        Check(f"{name}_over_vllm", sample.tok_s / peer.tok_s, "ratio", bound, rates, at_least=True),
        Check(f"{name}_tbt_over_vllm", sample.tbt_ms / peer.tbt_ms, "ratio", 1.0, tbt),
        Check(
            f"{name}_ttft_over_vllm", sample.ttft_ms / peer.ttft_ms, "ratio", 0.5 if concurrency == 32 else None, ttft
        ),
    ]


def prefix_check(mine: Measured) -> Check:
    against = f"of the first's TTFT: {mine.long_ttft_ms:.0f} ms"
    return Check("prefix_hit_ratio", mine.prefix_hit_ratio, "ratio", 0.1, against)


def apart_checks(model: BenchModel, both: Mapping[int, Sample], split: Mapping[int, Sample]) -> list[Check]:
    """Checks of separate workers against a worker in both roles. CPU time, with waits within a step, shows the reason:
    a separate decode step reads all weights for few rows, which a mixed step computes with the prompts.
    """
    checks = []
    for concurrency, sample in split.items():
        together = both[concurrency]
        cpu = f"ms of CPU a token: {sample.cpu} (prefill + decode) over {together.cpu}"
        against = f"{sample.tok_s:.1f} over {together.tok_s:.1f} tok/s; {cpu}"
        ratio = sample.tok_s / together.tok_s
        checks.append(
            Check(f"{model.name}_c{concurrency}_apart_over_both", ratio, "ratio", 0.9, against, at_least=True)
        )
    return checks


def memory_checks(model: BenchModel, private_off: int, private_on: int, arena_pss: int) -> list[Check]:
    """Checks of private memory without the KV pool, and of the arena share of two workers (PSS)."""
    weights = sum(path.stat().st_size for path in model.folder.glob("*.safetensors"))
    off = private_off - KV_POOL_BYTES
    return [
        Check("private_mb", off / MB, "MB", 400, "beside arena and KV pool, cpu_reorder off"),
        Check("arena_pss_over_weights", arena_pss / weights, "ratio", 1.05, "of two workers together, cpu_reorder off"),
        Check("reordered_over_weights", (private_on - private_off) / weights, "ratio", 1.05, "more with it on"),
    ]
