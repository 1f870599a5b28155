"""The engine on the device: instances of packs, decode and prefill speed."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import save

from bench.device.limits import link_of
from bench.device.packs import Pack, kv_bytes
from tests.support.calling_capturer import CallingCapturer
from tests.support.wait import wait_until
from torchrelay.engine.core import ChoiceSpec, GroupAdapter, GroupSpec, SamplingParams, StepResult
from torchrelay.engine.instance import Instance
from torchrelay.engine.kernels.backends import backends_for
from torchrelay.engine.kernels.capture import Capturer
from torchrelay.engine.kernels.triton.ops import TritonOps
from torchrelay.engine.kv.pool import KvPool
from torchrelay.engine.weights.device_link import DeviceLink
from torchrelay.modelspec.adapter import PROJECTIONS
from torchrelay.modelspec.tensor_order import tensors_by_segment

PROFILED_STEPS = 8
_WARM_STEPS = 4  # the first step of a size records its graph


def instance_of(
    pack: Pack,
    pool: KvPool,
    token_budget: int = 512,
    attention: str = "triton",
    *,
    records: bool = True,
    capturer: Capturer | None = None,
    link: DeviceLink | None = None,
    is_loaded: bool = True,
    between_layers: Callable[[], None] = lambda: None,
    on_segment: Callable[[], None] | None = None,
) -> Instance:
    """An instance without a prefix cache, whose keys would need another library. ``records``: its decode steps."""
    backends = backends_for(pool.device, attention)
    if pool.device.type == "cpu" and attention != "cpu":  # a dry run of the GPU's computation
        capturer = capturer or (CallingCapturer() if attention == "triton" else None)
        backends = replace(backends, fused_ops=TritonOps())
    instance = Instance(
        pack.manifest,
        pack.data,
        pool,
        token_budget=token_budget,
        backends=replace(backends, capturer=(capturer or backends.capturer) if records else None),
        prefix_cache=False,
        between_layers=between_layers,
        on_segment=on_segment,
        link=link or link_of(pool.device),
    )
    return loaded(instance) if is_loaded else instance


def loaded(instance: Instance) -> Instance:
    """The instance with all of its segments on the device."""
    deliver(instance)
    wait_until(lambda: instance.is_ready, "the load")
    return instance


def deliver(instance: Instance) -> None:
    """Announces all segments; their copies to the device take their time."""
    for segment in range(instance.config.num_segments):
        instance.segment_ready(segment)


def steps(instance: Instance, wake: threading.Event) -> Iterator[StepResult]:
    """Steps until the load and all prompts have ended. ``wake``: set by the instance's ``on_segment``."""
    while instance.has_work() or not instance.is_ready:
        if instance.has_work():
            yield instance.step()
        else:
            wake.wait(1.0)
            wake.clear()


def pool_of(config: dict[str, Any], num_positions: int, device: torch.device, item_bytes: int = 2) -> KvPool:
    """A pool for so many positions, in pages, of a model."""
    return KvPool((num_positions + 64) * kv_bytes(config, item_bytes), str(device))


def group_of(
    prompt: Sequence[int], group_id: str, sampling: SamplingParams, adapter: GroupAdapter | None = None
) -> GroupSpec:
    return GroupSpec(group_id, tuple(prompt), len(prompt), sampling, (ChoiceSpec(0),), adapter=adapter)


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    """A prompt without a pattern, the same every time."""
    return tuple((i * i * 31 + i * 7 + salt * 101 + 5) % 250 for i in range(length))


def take(outputs: dict[str, list[int]], result: StepResult) -> None:
    """Adds the tokens of a step to those of its groups."""
    for token in result.tokens:
        outputs[token.group_id].append(token.token_id)


def greedy(
    instance: Instance, prompts: Sequence[Sequence[int]], num_tokens: int, joins_after: int = 0
) -> list[list[int]]:
    """Output tokens of all prompts, batched as far as possible; the last one joins after so many steps."""
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens)
    groups = [group_of(prompt, str(number), sampling) for number, prompt in enumerate(prompts)]
    outputs: dict[str, list[int]] = defaultdict(list)
    for group in groups[:-1]:
        instance.prefill(group)
    for _ in range(joins_after):
        take(outputs, instance.step())
    instance.prefill(groups[-1])
    while instance.has_work():
        take(outputs, instance.step())
    return [outputs[str(number)] for number in range(len(prompts))]


def decode_step_s(
    instance: Instance,
    batch: int,
    num_prompt_tokens: int,
    num_steps: int,
    sampling: SamplingParams | None = None,
    adapters: Sequence[GroupAdapter] = (),
) -> float:
    """Median time of a decode step of ``batch`` sequences: planning, computing, sampling. The first sequences have
    the ``adapters``.
    """
    sampling = replace(sampling or SamplingParams(temperature=0), max_tokens=num_steps + _WARM_STEPS + 1)
    for number in range(batch):
        prompt = tuple((i + number) % 250 + 1 for i in range(num_prompt_tokens))
        adapter = adapters[number] if number < len(adapters) else None
        instance.prefill(group_of(prompt, f"{batch}/{number}", sampling, adapter))
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


def load_s(pack: Pack, pool: KvPool, token_budget: int) -> tuple[Instance, float]:
    """An instance, and the time from its first segment to the first token of a short prompt."""
    wake, begin = threading.Event(), time.perf_counter()
    instance = instance_of(pack, pool, token_budget, is_loaded=False, on_segment=wake.set)
    instance.prefill(group_of((1, 2, 3), "first/0", SamplingParams(temperature=0, max_tokens=1)))
    deliver(instance)
    for _ in steps(instance, wake):
        pass
    return instance, time.perf_counter() - begin


def random_adapter(instance: Instance, rank: int = 16) -> GroupAdapter:
    """A LoRA adapter of all projections with random weights, as read from PEFT's files."""
    tensors, modules = {}, set()
    for spec in (spec for specs in tensors_by_segment(instance.config) for spec in specs if spec.group in PROJECTIONS):
        name, (num_out, num_in) = spec.name.removesuffix(".weight"), spec.shape
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, num_in) / num_in**0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(num_out, rank) / 16
        modules.add(name.rpartition(".")[2])
    document = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(modules)}
    return instance.adapter_reader("random", json.dumps(document).encode(), save(tensors)).read()


def decode_profile(instance: Instance, batch: int, num_prompt_tokens: int) -> torch.profiler.profile:
    """The profile of decode steps of ``batch`` sequences, and of their prefill."""
    decode_step_s(instance, batch, num_prompt_tokens, 4)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] * (instance.model.device.type == "cuda")
    profile = torch.profiler.profile(activities=activities)
    with profile:
        decode_step_s(instance, batch, num_prompt_tokens, PROFILED_STEPS)
    return profile


def profile_table(profile: torch.profiler.profile) -> str:
    """A table of the profile's kernels by time."""
    table: str = profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70)
    return table
