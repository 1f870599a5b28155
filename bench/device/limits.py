"""Limits of the device, measured in the same run: copies from the host, memory reads and matrix products."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.device.packs import Pack
from torchrelay.engine.buffers import as_tensor
from torchrelay.engine.weights.device_link import CopyEvent, CudaLink, DeviceLink
from torchrelay.engine.weights.stager import Stager


class HostCopyEvent(CopyEvent):
    def wait(self) -> None:
        pass

    def join(self) -> None:
        pass


class HostLink(DeviceLink):
    """Synchronous copies within the host, for dry runs."""

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def is_pinned(self, memory: Tensor) -> bool:
        return False

    def space(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def follow(self) -> None:
        pass

    def event(self) -> CopyEvent:
        return HostCopyEvent()

    def ordered(self) -> AbstractContextManager[Any]:
        return nullcontext()


def link_of(device: torch.device) -> DeviceLink:
    return CudaLink(device) if device.type == "cuda" else HostLink()


def seconds_of(run: Callable[[], object], device: torch.device, num_runs: int = 5) -> float:
    """Seconds of the fastest run, after a warm-up."""
    times = []
    for _ in range(num_runs + 1):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def pinned_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Rate of a copy from pinned memory to the device."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return num_bytes / seconds_of(lambda: target.copy_(source, non_blocking=True), device)


def read_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Rate of memory reads on the device: the faster of a sum and a copy, which reads and writes."""
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    by_sum = num_bytes / seconds_of(lambda: source.sum(), device)
    return max(by_sum, 2 * num_bytes / seconds_of(lambda: target.copy_(source), device))


def product_flops_per_s(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Flops per second of a square matrix product."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, device)


@contextmanager
def staging(pack: Pack, device: torch.device) -> Iterator[Callable[[], dict[int, Tensor]]]:
    """A function that copies all segments of the pack to the device as the engine does, and waits for them."""
    link, source = link_of(device), as_tensor(pack.data)
    stager = Stager(source, link, _refuse)

    def copies() -> dict[int, Tensor]:
        arrived = queue.SimpleQueue[tuple[int, Tensor]]()

        def put(number: int, there: Tensor) -> None:
            arrived.put((number, there))

        for number, span in enumerate(pack.manifest.segments):
            stager.submit(span.begin, span.end - span.begin, partial(put, number))
        try:
            copied = dict(arrived.get(timeout=60) for _ in pack.manifest.segments)
        except queue.Empty as error:
            raise RuntimeError("the copy did not end within 60 s") from error
        link.event().wait()
        return copied

    try:
        yield copies
    finally:
        stager.close()


def staged_bytes_per_s(pack: Pack, device: torch.device) -> float:
    """Rate of the engine's copy of all segments from an arena to the device."""
    with staging(pack, device) as copies:
        return pack.num_bytes / seconds_of(copies, device, num_runs=2)


@contextmanager
def registered(pack: Pack) -> Iterator[float]:
    """Pins the arena in place; yields the rate of that."""
    source = as_tensor(pack.data)
    begin = time.perf_counter()
    if not _register(source):
        raise RuntimeError("the system refuses to pin the arena in place")
    try:
        yield len(source) / (time.perf_counter() - begin)
    finally:
        torch.cuda.cudart().cudaHostUnregister(source.data_ptr())  # type: ignore[no-untyped-call]


def _register(memory: Tensor) -> bool:
    """Pins memory in place, whose mapping must be writable. Returns whether the system allowed it."""
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # type: ignore[no-untyped-call]
    return int(status) == 0


def _refuse(reason: str) -> None:
    raise RuntimeError(reason)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
