"""The engine on the device: exactness, decode and prefill speed."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.device.packs import Pack, pack_of_checkpoint
from tests.support.calling_capturer import CallingCapturer
from tests.support.checkpoints import greedy_reference, make_checkpoint, reference_model
from torchrelay.engine.core import ChoiceSpec, GroupSpec, SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.engine.kernels.backends import backends_for
from torchrelay.engine.kernels.capture import Capturer
from torchrelay.engine.kernels.triton.ops import TritonOps
from torchrelay.engine.kv.pool import KvPool

_WARM_STEPS = 4  # the first step of a size records its graph


def instance_of(
    pack: Pack, pool: KvPool, token_budget: int = 512, attention: str = "triton", capturer: Capturer | None = None
) -> Instance:
    """A loaded instance without a prefix cache, whose keys would need another library."""
    backends = backends_for(pool.device, attention)
    if pool.device.type == "cpu":  # a rehearsal of the GPU's computation
        capturer = capturer or (CallingCapturer() if attention == "triton" else None)
        backends = replace(backends, fused_ops=TritonOps())
    instance = Instance(
        pack.manifest,
        pack.data,
        pool,
        token_budget=token_budget,
        backends=replace(backends, capturer=capturer or backends.capturer),
        prefix_cache=False,
    )
    for segment in range(len(pack.manifest.segments)):
        instance.segment_ready(segment)
    return instance


def greedy(instance: Instance, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Output tokens of all prompts, batched as far as possible."""
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens)
    for number, prompt in enumerate(prompts):
        instance.prefill(GroupSpec(str(number), tuple(prompt), len(prompt), sampling, (ChoiceSpec(0),)))
    outputs: dict[str, list[int]] = defaultdict(list)
    while instance.has_work():
        for token in instance.step().tokens:
            outputs[token.group_id].append(token.token_id)
    return [outputs[str(number)] for number in range(len(prompts))]


def mismatches(
    families: Sequence[str], lengths: Sequence[int], num_tokens: int, device: torch.device
) -> tuple[int, int, int]:
    """Numbers of fp32 continuations: wrong by Triton, wrong by the reference backend, and all."""
    wrong = dict.fromkeys(("triton", "gather"), 0)
    prompts = [[(i * i * 31 + i * 7 + 5) % 256 for i in range(length)] for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        for family in families:
            checkpoint = make_checkpoint(Path(folder) / family, family, head_dim=32)
            reference = reference_model(checkpoint)
            expected = [greedy_reference(reference, prompt, num_tokens) for prompt in prompts]
            pack = pack_of_checkpoint(checkpoint)
            for attention in wrong:
                instance = instance_of(pack, KvPool(8 << 20, str(device)), 128, attention)
                outputs = greedy(instance, prompts, num_tokens)
                instance.close()
                wrong[attention] += sum(output != right for output, right in zip(outputs, expected, strict=True))
    return wrong["triton"], wrong["gather"], len(families) * len(prompts)


def decode_step_s(instance: Instance, batch: int, num_prompt_tokens: int, num_steps: int) -> float:
    """Median time of a decode step of ``batch`` sequences: planning, computing, sampling."""
    sampling = SamplingParams(temperature=0, max_tokens=num_steps + _WARM_STEPS + 1)
    for number in range(batch):
        prompt = tuple((i + number) % 250 + 1 for i in range(num_prompt_tokens))
        instance.prefill(GroupSpec(f"{batch}/{number}", prompt, len(prompt), sampling, (ChoiceSpec(0),)))
    times = []
    while instance.has_work():
        begin = time.perf_counter()
        result = instance.step()
        if result.num_positions_decoded == batch and not result.num_positions_prefilled:
            times.append(time.perf_counter() - begin)
    if len(times) < num_steps:
        raise RuntimeError(f"{batch} sequences did not decode side by side: {len(times)} steps")
    return statistics.median(times[_WARM_STEPS:])


def prefill_s(instance: Instance, num_tokens: int, num_runs: int) -> float:
    """Fastest prefill of a prompt in a single step, with its first token, after a warm-up."""
    sampling, times = SamplingParams(temperature=0, max_tokens=1), []
    for number in range(num_runs + 1):
        prompt = tuple((i + number) % 250 + 1 for i in range(num_tokens))
        instance.prefill(GroupSpec(f"p/{number}", prompt, num_tokens, sampling, (ChoiceSpec(0),)))
        begin = time.perf_counter()
        while instance.has_work():
            instance.step()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def load_s(pack: Pack, pool: KvPool) -> tuple[Instance, float]:
    """An instance, and the time from its first segment to the first token of a short prompt."""
    begin = time.perf_counter()
    instance = instance_of(pack, pool, token_budget=8192)
    greedy(instance, [[1, 2, 3]], 1)
    return instance, time.perf_counter() - begin


def profile_table(instance: Instance, batch: int, num_prompt_tokens: int) -> str:
    """A table of a decode step's kernels by time."""
    decode_step_s(instance, batch, num_prompt_tokens, 4)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        decode_step_s(instance, batch, num_prompt_tokens, 8)
    table: str = profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70)
    return table
