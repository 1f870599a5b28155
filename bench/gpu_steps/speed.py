"""The speed of decode and prefill against the device's limits, and what recording, sampling, adapters, int8 and experts
cost.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.device import engine, limits
from bench.device.packs import Pack, kv_bytes, prefill_flops, random_pack
from bench.device.transformers_peer import Peer
from bench.gpu_steps.machine import GB, used_mb
from bench.gpu_steps.step import Setup, at_least, figure, on_gpu
from bench.report import Check
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.engine.kernels.capture import Capturer, CudaCapturer, Replay
from torchrelay.modelspec.quantization import INT8_PER_OUTPUT

SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=1)
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


def speed(setup: Setup) -> Iterator[Check]:
    sizes, device = setup.sizes, setup.device
    pack = random_pack(sizes.config, "BF16", device)
    num_positions = max(sizes.batches) * (sizes.num_prompt_tokens + sizes.num_steps + 64)
    pool = engine.pool_of(sizes.config, max(num_positions, 2 * sizes.num_prefill_tokens), device)
    for budget in sizes.token_budgets:
        instance, load_s = engine.load_s(pack, pool, budget)
        against = f"with token_budget {budget}; all segments are in the arena; kernels may be compiled"
        if budget == sizes.token_budgets[0]:
            yield figure("load_to_first_token_s", load_s, "s", against)
        seconds = engine.prefill_s(instance, sizes.num_prefill_tokens, sizes.num_prefills)
        rate, against = sizes.num_prefill_tokens / seconds, f"a prompt of {sizes.num_prefill_tokens}"
        yield figure(f"prefill_budget{budget}_tok_s", rate, "tok/s", against)
        if budget == sizes.token_budgets[-1]:
            limit = limits.product_flops_per_s(device, sizes.matrix, torch.bfloat16)
            flops = prefill_flops(sizes.config, pack.num_bytes, sizes.num_prefill_tokens)
            yield figure("matmul_tflop_s", limit / 1e12, "Tflop/s", f"{sizes.matrix} square, bf16")
            yield at_least(
                0.5, figure("prefill_over_matmul", flops / seconds / limit, "", f"the matrix rate; {against}")
            )
            yield from _decode(setup, instance, pack)
            yield from _profile(setup, instance)
        instance.close()
    del instance, pool
    if setup.is_gpu:
        torch.cuda.empty_cache()
    peer = Peer(sizes.config, torch.bfloat16, device)
    for batch in sizes.peer_batches:
        step_s = peer.decode_step_s(batch, sizes.num_prompt_tokens, min(sizes.num_steps, 16))
        yield figure(f"transformers_b{batch}_tok_s", batch / step_s, "tok/s")
    rate = sizes.num_prefill_tokens / peer.prefill_s(sizes.num_prefill_tokens)
    yield figure("transformers_prefill_tok_s", rate, "tok/s")


def _decode(setup: Setup, instance: Instance, pack: Pack) -> Iterator[Check]:
    sizes = setup.sizes
    read = limits.read_bytes_per_s(setup.device, sizes.limit_bytes)
    yield figure("hbm_read_gb_s", read / GB, "GB/s")
    for batch in sizes.batches:
        step_s = engine.decode_step_s(instance, batch, sizes.num_prompt_tokens, sizes.num_steps)
        num_positions = batch * (sizes.num_prompt_tokens + sizes.num_steps // 2)
        num_bytes = pack.num_bytes - pack.segment_bytes(0) + num_positions * kv_bytes(sizes.config)
        yield figure(f"decode_b{batch}_tok_s", batch / step_s, "tok/s", f"{step_s * 1e3:.2f} ms per step")
        against = f"{num_bytes / GB:.1f} GB per step, contexts of {sizes.num_prompt_tokens}"
        over_hbm = figure(f"decode_b{batch}_over_hbm", num_bytes / read / step_s, "", against)
        yield at_least(0.75, over_hbm) if batch == 1 else over_hbm


def _profile(setup: Setup, instance: Instance) -> Iterator[Check]:
    """The calls of CUDA per step of a single row, and the share of the time without a kernel."""
    profile = engine.decode_profile(instance, 1, setup.sizes.num_short_tokens)
    if setup.profile:
        print(engine.profile_table(profile))
    if setup.out is not None:
        Path(setup.out, "profile.txt").write_text(engine.profile_table(profile))
    calls = Counter({each.key: each.count for each in profile.key_averages()})
    for name, keys in {"launches": LAUNCHES, "allocations": ("cudaMalloc",), "waits": WAITS}.items():
        per_step = sum(calls[key] for key in keys) / engine.PROFILED_STEPS
        yield on_gpu(setup, figure(f"decode_{name}", per_step, "per step", ", ".join(keys)))
    kernels = sorted(
        (each.time_range.start, each.time_range.end)
        for each in profile.events() or []  # type: ignore[no-untyped-call]
        if each.device_type.name == "CUDA"
    )
    span_us = kernels[-1][1] - kernels[0][0] if kernels else 0.0
    busy_us = sum(end - begin for begin, end in kernels)
    yield on_gpu(setup, figure("decode_idle_share", 1 - busy_us / max(span_us, 1.0), "", "time between kernels"))


class TimedCapturer(Capturer):
    """Seconds and bytes of each recording of ``inner``."""

    def __init__(self, setup: Setup, inner: Capturer | None) -> None:
        self._setup, self._inner = setup, inner
        self.costs: list[tuple[float, float]] = []

    def capture(self, compute: Callable[[], Tensor]) -> Replay:
        limits.synchronize(self._setup.device)
        before_mb, begin_s = used_mb(self._setup), time.perf_counter()
        replay = compute if self._inner is None else self._inner.capture(compute)
        limits.synchronize(self._setup.device)
        self.costs.append((time.perf_counter() - begin_s, used_mb(self._setup) - before_mb))
        return replay


def kinds_of_steps(setup: Setup) -> Iterator[Check]:
    sizes, device = setup.sizes, setup.device
    config, pool = sizes.layered_config, engine.pool_of(sizes.layered_config, max(sizes.recorded) * 64, device)
    capturer = TimedCapturer(setup, CudaCapturer() if setup.is_gpu else None)
    instance = engine.instance_of(random_pack(config, "BF16", device), pool, 8192, capturer=capturer)
    for size in sizes.recorded:
        engine.decode_step_s(instance, size, sizes.num_short_tokens, 2)
        seconds, grown_mb = capturer.costs[-1]
        yield figure(f"record_b{size}_s", seconds, "s", f"{grown_mb:.0f} MB")
    total_s, total_mb = (sum(costs) for costs in zip(*capturer.costs, strict=True))
    yield figure("record_all_s", total_s, "s", f"{len(capturer.costs)} sizes, {total_mb:.0f} MB")

    def step_ms(instance: Instance, rows: int, sampling: SamplingParams | None = None, num_adapted: int = 0) -> float:
        adapters = [engine.random_adapter(instance) for _ in range(num_adapted)]
        return 1e3 * engine.decode_step_s(
            instance, rows, sizes.num_short_tokens, sizes.num_steps // 2 or 1, sampling, adapters
        )

    rows, layers = sizes.num_sampled, f"{config['num_hidden_layers']} layers"
    greedy_ms, sampled_ms = step_ms(instance, rows), step_ms(instance, rows, SAMPLED)
    yield figure(
        "sampled_over_greedy", sampled_ms / greedy_ms, "", f"{sampled_ms:.2f} of {greedy_ms:.2f} ms, {rows} rows"
    )
    rows = sizes.num_beside_adapter
    plain_ms, adapted_ms = step_ms(instance, rows), step_ms(instance, rows, num_adapted=1)
    against = f"{adapted_ms:.2f} of {plain_ms:.2f} ms, {rows} rows, one with an adapter, {layers}"
    yield figure("adapter_over_base", adapted_ms / plain_ms, "", against)
    instance.close()
    kinds: dict[str, dict[str, Any]] = {
        "int8": {"quantization_config": dict(INT8_PER_OUTPUT)},
        "experts": {
            "architectures": ["MixtralForCausalLM"],
            "intermediate_size": config["intermediate_size"] // 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    }
    for name, changes in kinds.items():
        instance = engine.instance_of(random_pack(config | changes, "BF16", device), pool)
        milliseconds = step_ms(instance, rows)
        against = f"{milliseconds:.2f} of {plain_ms:.2f} ms in bf16, {rows} rows, {layers}"
        yield figure(f"{name}_over_base", milliseconds / plain_ms, "", against)
        instance.close()
