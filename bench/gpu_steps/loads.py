"""Copies from the arena to the device, and loads while prompts run, end and come."""

from __future__ import annotations

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from bench.device import engine, limits
from bench.device.packs import Pack, random_pack
from bench.gpu_steps.machine import GB, MB, used_mb
from bench.gpu_steps.step import Setup, absent, at_least, at_most, figure, on_gpu
from bench.report import Check
from tests.support.calling_capturer import CallingCapturer
from torchrelay.engine.buffers import as_tensor
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.engine.kernels.capture import CudaCapturer

PROMPT_LENGTHS = (1, 17, 33, 60)
NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


def copies(setup: Setup) -> Iterator[Check]:
    sizes, device = setup.sizes, setup.device
    pack = random_pack(sizes.layered_config, "BF16", device)
    pinned = limits.pinned_bytes_per_s(device, sizes.limit_bytes)
    yield figure("pinned_copy_gb_s", pinned / GB, "GB/s")
    staged = limits.staged_bytes_per_s(pack, device)
    yield at_least(20, figure("arena_to_device_gb_s", staged / GB, "GB/s", "the engine's copy from a mapped arena"))
    yield at_least(0.9, figure("arena_to_device_over_pinned", staged / pinned, "", "one copy from pinned memory"))
    if setup.is_gpu:
        with limits.registered(pack) as pinning:
            direct = limits.staged_bytes_per_s(pack, device)
        yield figure("registered_over_pinned", direct / pinned, "", "from an arena pinned beforehand")
        yield figure("register_gb_s", pinning / GB, "GB/s", "pinning the arena in place")
    else:
        yield from (absent(name, "no GPU") for name in ("registered_over_pinned", "register_gb_s"))
    source, num_altered = as_tensor(pack.data), 0
    expected = [source[span.begin : span.end].to(device) for span in pack.manifest.segments]
    with limits.staging(pack, device) as copied, busy_allocator(device):
        for _ in range(sizes.num_copies):
            num_altered += sum(not torch.equal(there, expected[number]) for number, there in copied().items())
    against = f"of {sizes.num_copies * len(expected)}, while a thread allocates and records"
    yield at_most(0, figure("altered_segments", num_altered, "segments", against))


@contextmanager
def busy_allocator(device: torch.device) -> Iterator[None]:
    """A thread that takes and frees memory of the device and records graphs, until the block ends."""
    stop = threading.Event()

    def allocate() -> None:
        capturer = CudaCapturer() if device.type == "cuda" else CallingCapturer()
        while not stop.is_set():
            taken = [torch.full((size << 10,), size, device=device) for size in (1, 64, 300)]
            capturer.capture(lambda taken=taken: taken[0] + 1)()  # type: ignore[misc]
            stop.wait(0.001)

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(allocate)
        try:
            yield
        finally:
            stop.set()
            running.result()


@contextmanager
def arriving(instance: Instance, pack: Pack, bytes_per_s: float) -> Iterator[threading.Thread]:
    """A thread that delivers the segments of the pack at this rate."""

    def deliver() -> None:
        for segment, span in enumerate(pack.manifest.segments):
            time.sleep((span.end - span.begin) / bytes_per_s)  # the network's part
            instance.segment_ready(segment)

    thread = threading.Thread(target=deliver, name="arrival")
    thread.start()
    try:
        yield thread
    finally:
        thread.join()


def loads(setup: Setup) -> Iterator[Check]:
    sizes, device = setup.sizes, setup.device
    packs = [random_pack(sizes.exact_config, "F32", device), random_pack(sizes.exact_config, "F32", device)]
    pool = engine.pool_of(sizes.exact_config, sum(PROMPT_LENGTHS) + 256, device, item_bytes=4)
    groups = [
        engine.group_of(engine.prompt_of(length), str(number), GREEDY) for number, length in enumerate(PROMPT_LENGTHS)
    ]
    instance = engine.instance_of(packs[0], pool, attention=setup.attention)
    expected = engine.greedy(instance, [group.prompt for group in groups], NUM_TOKENS)
    instance.close()
    start_mb = _settled_mb(setup)

    wake = threading.Event()
    for name in ("loading", "cancelled", "unloaded"):
        instance = engine.instance_of(packs[0], pool, attention=setup.attention, is_loaded=False, on_segment=wake.set)
        for group in groups:
            instance.prefill(group)
        with arriving(instance, packs[0], sizes.arrival_bytes_per_s):
            outputs: dict[str, list[int]] = defaultdict(list)
            for result in engine.steps(instance, wake):
                engine.take(outputs, result)
                if name != "loading" and 2 * instance.num_segments_ready >= instance.config.num_segments:
                    break
            if name == "unloaded":
                instance.close()
                break
            if name == "cancelled":
                for group in groups:
                    instance.cancel(group.group_id)
                yield at_most(
                    0, figure("pages_kept_by_cancelled", instance.num_pages - instance.num_free_pages, "pages")
                )
                for _ in engine.steps(instance, wake):
                    pass
                tokens = engine.greedy(instance, [group.prompt for group in groups], NUM_TOKENS)
                outputs = {str(number): answer for number, answer in enumerate(tokens)}
            wrong = sum(outputs[str(number)] != right for number, right in enumerate(expected))
            against = f"of {len(groups)}, the loaded model in fp32"
            yield at_most(0, figure(f"{name}_mismatches", wrong, "prompts", against))
            instance.check_integrity()
            instance.close()

    for number in range(sizes.num_loads):
        instance = engine.instance_of(packs[number % 2], pool, attention=setup.attention)
        engine.greedy(instance, [groups[0].prompt], NUM_TOKENS)
        instance.close()
    against = f"after {sizes.num_loads} loads of two models in turn, and a load that was given up"
    yield on_gpu(setup, at_most(200, figure("loads_growth_mb", _settled_mb(setup) - start_mb, "MB", against)))
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("staging")]
    yield at_most(0, figure("threads_left", len(left), "threads"))
    stats = torch.cuda.host_memory_stats() if setup.is_gpu else {}
    yield on_gpu(setup, at_most(0, figure("pinned_left_mb", stats.get("active_bytes.current", 0) / MB, "MB", "in use")))


def _settled_mb(setup: Setup) -> float:
    gc.collect()
    if setup.is_gpu:
        torch.cuda.empty_cache()
    return used_mb(setup)
