"""Predictions of `torchrelay size` against what this machine's CPU attains, and against published figures.

    python bench/size.py [--quick]

Three Llama models of random weights in bf16 run on the engine in this process, on one thread, each with 1 and with 8
requests at a time: as one ends, the next begins. The prediction has seen the model's config.json and the probe of the
CPU's rates, and no step. Published figures are those of AIConfigurator 0.12.0 for Qwen3-8B on vLLM, prompts of 1,024
and answers of 256 tokens, a TTFT of 500 ms and 30 ms between tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.device.engine import group_of, loaded, pool_of, prompt_of
from bench.device.packs import Pack, random_pack
from bench.random_checkpoint import LlamaShape
from bench.report import Check, finish, parser_of, progress
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.pool import KvPool
from torchrelay.engine.weights.pack_weights import PackWeights
from torchrelay.engine.weights.reorderer import Reorderer
from torchrelay.modelspec.sizing.devices import Device, devices_named, published_devices
from torchrelay.modelspec.sizing.footprint import footprint_of
from torchrelay.modelspec.sizing.operating_point import OperatingPoint, Workload, best_point, operating_point
from torchrelay.modelspec.sizing.roofline import Roofline, kv_memory_bytes

BOUND = 0.30
PROMPT_TOKENS = 64
BATCHES = (1, 8)
# Of the engine and the probe alike: threads that wait for one another are as slow as the core that others use most.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
SHAPES = {
    "69mb": LlamaShape(vocab_size=8192, num_layers=8, hidden=512, intermediate=2048),
    "256mb": LlamaShape(vocab_size=16_384, num_layers=8, hidden=1024, intermediate=3072),
    "650mb": LlamaShape(vocab_size=16_384, num_layers=6, hidden=2048, intermediate=5632),
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}
PUBLISHED_WORK = Workload(5.0, 1024, 256, 0.5, 0.03)


@dataclass(frozen=True, slots=True)
class Form:
    """Tokens of an answer, and how often each model is measured, by so many answers after the first of each place."""

    num_answer: int
    num_waves: int
    num_rounds: int


FULL, QUICK = Form(64, 3, 5), Form(24, 1, 2)


def workload(num_answer: int) -> Workload:
    """Requests without targets."""
    return Workload(1.0, PROMPT_TOKENS, num_answer, float("inf"), float("inf"))


def measured_tok_s(instance: Instance, batch: int, form: Form) -> float:
    """Tokens per second with ``batch`` requests at a time, whose begins are spread over the first wave."""
    num_answer = form.num_answer
    sampling = SamplingParams(temperature=0, max_tokens=num_answer)
    number, open_groups, tokens = 0, set[str](), 0

    def begin() -> None:
        nonlocal number
        number += 1
        open_groups.add(f"size/{batch}/{number}")
        instance.prefill(group_of(prompt_of(PROMPT_TOKENS, number), f"size/{batch}/{number}", sampling))

    begun_at, counted = 0.0, batch * num_answer  # the first wave is not counted: its requests begin one after another
    while tokens < counted * (form.num_waves + 1):
        if len(open_groups) < batch and (number >= batch or tokens >= number * num_answer // batch):
            begin()
        result = instance.step()
        for token in result.tokens:
            tokens += 1
            if token.finish is not None:
                open_groups.discard(token.group_id)
        if not begun_at and tokens >= counted:
            begun_at, first = time.perf_counter(), tokens
    took_s = time.perf_counter() - begun_at
    while instance.has_work():
        instance.step()
    return (tokens - first) / took_s


def cpu_checks(form: Form) -> list[Check]:
    """The best of rounds, each with a probe, of prediction and measurement alike: others may use a machine's cores."""
    checks, errors, probes, best = [], [], list[Device](), []
    for name, shape in SHAPES.items():
        config = {**shape.config(), "bos_token_id": 0}
        progress(f"{name}: {shape.num_bytes / 1e6:.0f} MB")
        pack = random_pack(config, "BF16", torch.device("cpu"))
        pool = pool_of(config, (max(BATCHES) + 2) * (PROMPT_TOKENS + form.num_answer + 64), torch.device("cpu"))
        instance = reordered_instance(pack, pool)
        measured = dict.fromkeys(BATCHES, 0.0)
        for _ in range(form.num_rounds):
            for batch in BATCHES:
                probes.append(probed_machine())
                measured[batch] = max(measured[batch], measured_tok_s(instance, batch, form))
        instance.close()
        best.append((name, config, measured))
    rates = {field: max(getattr(probe, field) for probe in probes) for field in ("bytes_per_s", "flops", "flops_8bit")}
    device = replace(probes[0], **rates)
    progress(f"{device.bytes_per_s / 1e9:.1f} GB/s, {device.flops / 1e9:.0f} GFLOP/s")
    for name, config, measured in best:
        for batch, tok_s in measured.items():
            predicted = predicted_tok_s(config, device, batch, form)
            errors.append(abs(predicted - tok_s) / tok_s)
            against = f"predicted {predicted:.1f}, measured {tok_s:.1f} tokens/s"
            checks.append(Check(f"{name}_c{batch}_error", errors[-1], "share", None, against))
    return [Check("size_error_max", max(errors), "share", BOUND, "of the six below"), *checks]


def reordered_instance(pack: Pack, pool: KvPool) -> Instance:
    """An instance with weights in the order that the CPU's kernels read fastest, as workers have them by default."""
    made: list[Reorderer] = []

    def reorderer(weights: PackWeights, num_layers: int) -> Reorderer:
        made.append(Reorderer(weights, num_layers, delay_s=0))
        return made[-1]

    instance = Instance(
        pack.manifest, pack.data, pool, token_budget=512, prefix_cache=False, cpu_reorder=True, reorderer=reorderer
    )
    loaded(instance)
    for each in made:
        each.start()
        each.join()
    return instance


def probed_machine() -> Device:
    """The probe as the command runs it: in a process without torch, whose threads would compete with NumPy's."""
    code = "import json, torchrelay.cli.size.this_machine as m; from dataclasses import asdict"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(json.dumps(asdict(m.this_machine())))"],
        env=os.environ | ONE_THREAD,
        capture_output=True,
        text=True,
        check=True,
    )
    return Device(**json.loads(done.stdout))


def predicted_tok_s(config: dict[str, Any], device: Device, batch: int, form: Form) -> float:
    point = operating_point(Roofline(footprint_of(config), device), workload(form.num_answer), batch)
    return point.tokens_per_s if point else float("nan")


def published_checks() -> list[Check]:
    h100, at_160 = _qwen("h100_sxm", 160)
    a100, _ = _qwen("a100_80g", 1)
    figures = {
        "h100_tokens": (h100.tokens_per_s, 5552.0, "tokens/s"),
        "h100_requests": (h100.requests_per_s, 21.8, "requests/s"),
        "h100_ttft_at_160": (at_160.ttft_s * 1e3, 123.0, "ms"),
        "a100_requests": (a100.requests_per_s, 6.4, "requests/s"),
    }
    return [
        Check(
            f"{name}_error",
            abs(predicted - published) / published,
            "share",
            BOUND,
            f"predicted {predicted:,.1f}, published by AIConfigurator {published:,g} {unit}",
        )
        for name, (predicted, published, unit) in figures.items()
    ]


def _qwen(name: str, batch: int) -> tuple[OperatingPoint, OperatingPoint]:
    """The best point of a device within the targets, and the one with ``batch`` requests."""
    footprint, (device,) = footprint_of(QWEN3_8B), devices_named(published_devices(), name)
    steps = Roofline(footprint, device)
    kv_tokens = kv_memory_bytes(footprint, device) / footprint.kv_bytes_per_token
    best, at = best_point(steps, PUBLISHED_WORK, kv_tokens), operating_point(steps, PUBLISHED_WORK, batch)
    assert best is not None and at is not None
    return best, at


def main() -> None:
    quick = parser_of(__doc__, "fewer tokens, under 50 s").parse_args().quick
    form = QUICK if quick else FULL
    torch.set_num_threads(1)
    checks = [*cpu_checks(form), *published_checks()]
    finish(
        "size", {"threads": 1, "prompt_tokens": PROMPT_TOKENS, "answer_tokens": form.num_answer, "quick": quick}, checks
    )


if __name__ == "__main__":
    main()
