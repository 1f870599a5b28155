"""Many streams of two tenants for minutes, with cancels and adapters: no page is lost, and no fault is reported."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from bench.device import engine
from bench.device.packs import random_pack
from bench.gpu_steps.machine import used_mb
from bench.gpu_steps.step import Setup, absent, at_most, figure, on_gpu
from bench.report import Check
from torchrelay.engine.core import SamplingParams

CANCELLED_SHARE = 0.1
MAX_PROMPT_TOKENS, MAX_TOKENS = 200, 64


def soak(setup: Setup) -> Iterator[Check]:
    sizes, chance = setup.sizes, random.Random(0)
    faults = _fault_counts(setup)
    positions = sizes.num_soak_streams * (MAX_PROMPT_TOKENS + MAX_TOKENS) // 2  # some groups are preempted
    pool = engine.pool_of(sizes.layered_config, positions, setup.device)
    instance = engine.instance_of(random_pack(sizes.layered_config, "BF16", setup.device), pool, 2048, setup.attention)
    adapters = [None, None, None, engine.random_adapter(instance)]
    start_mb, began_s, running, num_begun, num_tokens = used_mb(setup), time.monotonic(), set[str](), 0, 0
    steps_s: list[float] = []
    for check in range(sizes.num_soak_checks):
        while time.monotonic() < began_s + sizes.soak_s * (check + 1) / sizes.num_soak_checks:
            while len(running) < sizes.num_soak_streams:
                sampling = SamplingParams(
                    temperature=chance.choice((0.0, 1.0)),
                    top_p=0.9,
                    seed=num_begun,
                    max_tokens=chance.randint(1, MAX_TOKENS),
                )
                prompt = engine.prompt_of(chance.randint(1, MAX_PROMPT_TOKENS), num_begun)
                group = engine.group_of(prompt, f"{num_begun}/0", sampling, adapters[num_begun % 4])
                instance.prefill(replace(group, tenant_id=f"tenant-{num_begun % 2}"))
                running.add(group.group_id)
                num_begun += 1
            if chance.random() < CANCELLED_SHARE:
                cancelled = chance.choice(sorted(running))
                instance.cancel_soon(cancelled)
                running.discard(cancelled)
            begin_s = time.perf_counter()
            result = instance.step()
            steps_s.append(time.perf_counter() - begin_s)
            num_tokens += len(result.tokens)
            running -= {token.group_id for token in result.tokens if token.finish is not None}
        instance.check_integrity()
    for group_id in running:
        instance.cancel(group_id)
    instance.check_integrity()
    rate, against = num_tokens / sum(steps_s), f"{num_begun} streams, {sizes.num_soak_streams} at a time"
    yield figure("soak_tok_s", rate, "tok/s", against)
    yield figure("soak_longest_s", max(steps_s), "s", f"the median is {statistics.median(steps_s) * 1e3:.1f} ms")
    yield at_most(0, figure("soak_pages_lost", instance.num_pages - instance.num_free_pages, "pages"))
    yield on_gpu(setup, figure("soak_growth_mb", used_mb(setup) - start_mb, "MB", "recordings are part of it"))
    instance.close()
    if isinstance(faults, str):
        yield absent("xids", faults)
    else:
        seen = faults.xids()
        yield at_most(0, figure("xids", sum(seen.values()), "faults", ", ".join(f"XID {xid}" for _, xid in seen)))


def _fault_counts(setup: Setup) -> Any:
    """The worker's figures of the GPU, which count its faults from now on; the reason where there are none."""
    if not setup.is_gpu:
        return "no GPU"
    try:
        from torchrelay.worker.metrics.gpu_metrics import GpuFigures

        nvml: Any = import_module("pynvml")
    except ImportError as error:
        return str(error)
    import torch

    return GpuFigures(nvml, [str(torch.cuda.get_device_properties(setup.device).uuid)])
