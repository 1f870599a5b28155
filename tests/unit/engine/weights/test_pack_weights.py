"""Weights are views of the pack, or copies on a device, over a link that copies as late as a device may."""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.wait import HANG_S, wait_until
from tests.unit.engine.harness import ModelOf, answer, group_of, outputs, prompt_of, run
from torchrelay.common.errors import DataCorrupted
from torchrelay.engine.core import LoadFailed
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.pool import KvPool
from torchrelay.engine.weights.device_link import CopyEvent, DeviceLink, link_to
from torchrelay.engine.weights.pack_weights import PackWeights
from torchrelay.engine.weights.stager import Stager
from torchrelay.modelspec.config import read_config
from torchrelay.transfer.manifest import Manifest


@pytest.fixture
def mapped(model_of: ModelOf, tmp_path: Path) -> Iterator[tuple[Manifest, mmap.mmap]]:
    """A pack as a worker has it: a file mapped read-only, where any write would kill the process."""
    pack = model_of("qwen3").pack
    path = tmp_path / "pack"
    path.write_bytes(pack.data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        yield pack.manifest, mapping


def test_weights_are_views_of_mapping(mapped: tuple[Manifest, mmap.mmap], model_of: ModelOf) -> None:
    manifest, mapping = mapped
    config = read_config(manifest.config)
    weights = PackWeights(manifest, config, memoryview(mapping), link=None)
    for segment in range(config.num_segments):
        weights.load(segment)
    base = weights.embedding().data_ptr() - manifest.tensors[0].offset
    for layer in range(config.num_layers):
        for tensor in (weights.layer(layer).qkv, weights.layer(layer).gate_up, weights.layer(layer).down):
            assert isinstance(tensor, torch.Tensor)
            assert base <= tensor.data_ptr() < base + manifest.num_bytes
    own = model_of("qwen3").reference.model.layers[1]
    fused = torch.cat([own.self_attn.q_proj.weight, own.self_attn.k_proj.weight, own.self_attn.v_proj.weight])
    qkv, gate_up = weights.layer(1).qkv, weights.layer(1).gate_up
    assert isinstance(qkv, torch.Tensor) and isinstance(gate_up, torch.Tensor)
    assert torch.equal(qkv, fused)
    assert torch.equal(gate_up, torch.cat([own.mlp.gate_proj.weight, own.mlp.up_proj.weight]))
    weights.close()


def test_instance_runs_on_and_releases_read_only_mapping(mapped: tuple[Manifest, mmap.mmap], model_of: ModelOf) -> None:
    manifest, mapping = mapped
    view = memoryview(mapping)
    instance = Instance(manifest, view, KvPool(1 << 20))
    for segment in range(len(manifest.segments)):
        instance.segment_ready(segment)
    assert answer(instance, prompt_of(9)) == model_of("qwen3").expected(prompt_of(9))
    instance.close()
    view.release()
    mapping.close()  # raises BufferError as long as a tensor views it


def test_tensor_of_wrong_shape_is_refused(model_of: ModelOf) -> None:
    pack = model_of().pack
    wrong = [entry._replace(shape=(1, *entry.shape)) for entry in pack.manifest.tensors]
    manifest = replace(pack.manifest, tensors=tuple(wrong))
    instance = Instance(manifest, pack.view, KvPool(1 << 20))
    with pytest.raises(DataCorrupted, match=r"no model\.embed_tokens\.weight of shape \[320, 64\]"):
        instance.segment_ready(0)
    assert instance.num_segments_ready == 0


def test_non_contiguous_tensor_group_is_refused(model_of: ModelOf) -> None:
    pack = model_of().pack
    moved = [
        entry._replace(offset=entry.offset + 64) if "v_proj" in entry.name else entry for entry in pack.manifest.tensors
    ]
    manifest = replace(pack.manifest, tensors=tuple(moved))
    with pytest.raises(DataCorrupted, match="must be contiguous"):
        Instance(manifest, pack.view, KvPool(1 << 20)).segment_ready(1)


PIECE_BYTES = 1000


class LateCopyEvent(CopyEvent):
    def __init__(self, link: LateLink, place: int) -> None:
        self._link, self._place = link, place

    def wait(self) -> None:
        self._link.run_until(self._place)

    def join(self) -> None:
        self._link.num_joined += 1
        self._link.run_until(self._place)


class LateLink(DeviceLink):
    """Runs copies in order, and as late as possible."""

    def __init__(self, *, is_pinned: bool = False) -> None:
        self.num_joined = self.num_followed = 0
        self.num_buffers = 0
        self.started: list[tuple[Tensor, Tensor]] = []
        self._is_pinned = is_pinned
        self._num_run = 0
        self._lock = threading.RLock()

    def pinned(self, num_bytes: int) -> Tensor:
        self.num_buffers += 1
        return torch.empty(num_bytes, dtype=torch.uint8)

    def is_pinned(self, memory: Tensor) -> bool:
        return self._is_pinned

    def space(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with self._lock:
            self.started.append((target, source))

    def follow(self) -> None:
        self.num_followed += 1

    def event(self) -> CopyEvent:
        with self._lock:
            return LateCopyEvent(self, len(self.started))

    @contextmanager
    def ordered(self) -> Iterator[None]:
        self.event().wait()
        yield

    def run_until(self, place: int) -> None:
        with self._lock:
            for target, source in self.started[self._num_run : place]:
                target.copy_(source)
            self._num_run = max(self._num_run, place)


@pytest.mark.parametrize("is_pinned", [False, True], ids=["through buffers", "from where it lies"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_ranges_are_copied_completely(num_threads: int, is_pinned: bool) -> None:
    """Buffers are filled repeatedly, and never before their last copy is over."""
    source = torch.randint(0, 256, (50_000,), dtype=torch.uint8)
    link, arrived = LateLink(is_pinned=is_pinned), queue.SimpleQueue[tuple[int, int, Tensor]]()
    stager = Stager(source, link, pytest.fail, piece_bytes=PIECE_BYTES, num_threads=num_threads)
    ranges = [(0, 20_000), (20_000, 20_001), (20_001, 20_001), (20_001, 49_999)]

    def put(begin: int, end: int, target: Tensor) -> None:
        arrived.put((begin, end, target))

    for begin, end in ranges:
        stager.submit(begin, end - begin, partial(put, begin, end))
    for _ in ranges:
        begin, end, target = arrived.get(timeout=HANG_S)
        assert torch.equal(target, source[begin:end])
    assert link.num_buffers in ([0] if is_pinned else range(2, 2 * num_threads + 1))  # a thread may get no work
    stager.close()
    stager.close()


def test_arrival_is_signalled_after_last_copy_started() -> None:
    source = torch.arange(200, dtype=torch.uint8).repeat(100)
    link, seen = LateLink(), threading.Event()
    stager = Stager(source, link, pytest.fail, piece_bytes=PIECE_BYTES, num_threads=4)

    def check(target: Tensor) -> None:
        assert sum(len(copied) for copied, _ in link.started) == len(target) == len(source)
        seen.set()

    stager.submit(0, len(source), check)
    assert seen.wait(HANG_S)
    stager.close()


def never(_: Tensor) -> None:
    pytest.fail("it has not arrived")


class FullLink(LateLink):
    def space(self, num_bytes: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA error: out of memory")


class BrokenLink(LateLink):
    def copy(self, target: Tensor, source: Tensor) -> None:
        raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("link", [FullLink(), BrokenLink()], ids=["no memory", "no copy"])
def test_failing_copy_is_reported(link: LateLink) -> None:
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    stager = Stager(torch.zeros(10, dtype=torch.uint8), link, reasons.put, num_threads=1)
    stager.submit(0, 10, never)
    assert reasons.get(timeout=HANG_S) == "the copy to the device failed: CUDA error: out of memory"
    stager.close()


def test_close_drops_copies_not_started() -> None:
    """The arena may be unmapped afterwards."""
    source = torch.zeros(10_000_000, dtype=torch.uint8)
    stager = Stager(source, LateLink(), pytest.fail, piece_bytes=PIECE_BYTES, num_threads=1)
    for _ in range(20):
        stager.submit(0, len(source), lambda there: None)
    stager.close()
    assert len(stager._source) == 0


def test_threads_run_from_first_copy_until_close() -> None:
    """An instance that could not be built was never closed."""
    stager = Stager(torch.zeros(10, dtype=torch.uint8), LateLink(), pytest.fail, piece_bytes=PIECE_BYTES, num_threads=2)
    assert stager._threads == []
    arrived = threading.Semaphore(0)
    for _ in range(2):
        stager.submit(0, 10, lambda there: arrived.release())
        assert arrived.acquire(timeout=HANG_S)
    threads = list(stager._threads)
    assert len(threads) == 2 and all(thread.is_alive() for thread in threads)
    stager.close()
    assert not any(thread.is_alive() for thread in threads)
    stager.submit(0, 10, never)  # the last segment came too late
    assert stager._threads == []


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_instance_computes_with_copied_weights(model_of: ModelOf, family: str) -> None:
    """The prompt waits for the copies, and each segment is joined once. Norms of heads are computed from the copy."""
    model, late = model_of(family), LateLink()
    data = bytearray(model.pack.data)
    instance = Instance(model.pack.manifest, memoryview(data).toreadonly(), KvPool(1 << 20), link=late)
    num_segments = len(model.pack.manifest.segments)
    instance.prefill(group_of(prompt_of(20)))
    for segment in reversed(range(num_segments)):
        instance.segment_ready(segment)
        instance.segment_ready(segment)
    wait_until(lambda: instance.num_segments_ready == num_segments)
    assert outputs(run(instance))["r/0", 0] == model.expected(prompt_of(20))
    assert late.num_joined == num_segments
    assert sum(len(target) for target, _ in late.started) == sum(
        span.end - span.begin for span in model.pack.manifest.segments
    )
    data[:] = bytes(len(data))
    instance.prefill(group_of(prompt_of(20), "r/1"))
    assert outputs(run(instance))["r/1", 0] == model.expected(prompt_of(20))
    instance.close()


def test_instance_is_ready_when_the_last_copy_has_ended(model_of: ModelOf) -> None:
    """The start of the copies opens the segments, so that layers can be computed behind them."""
    may_end = threading.Event()

    class SlowEvent(LateCopyEvent):
        def wait(self) -> None:
            assert may_end.wait(HANG_S)
            super().wait()

    class SlowLink(LateLink):
        def event(self) -> CopyEvent:
            return SlowEvent(self, len(self.started))

        @contextmanager
        def ordered(self) -> Iterator[None]:
            self.run_until(len(self.started))
            yield

    pack = model_of().pack
    instance = Instance(pack.manifest, pack.view, KvPool(1 << 20), link=SlowLink(is_pinned=True))
    for segment in range(len(pack.manifest.segments)):
        instance.segment_ready(segment)
    wait_until(lambda: not instance.model.is_loading)
    assert not instance.is_ready
    may_end.set()
    wait_until(lambda: instance.is_ready)
    instance.close()


def test_pack_that_the_device_refuses_is_never_ready(model_of: ModelOf) -> None:
    """Without a prompt, nothing but this question shows the failure."""
    pack = model_of().pack
    changed = threading.Event()
    instance = Instance(pack.manifest, pack.view, KvPool(1 << 20), link=FullLink(), on_segment=changed.set)
    assert not instance.is_ready
    instance.segment_ready(0)
    assert changed.wait(HANG_S)
    with pytest.raises(LoadFailed, match="the copy to the device failed: CUDA error: out of memory"):
        _ = instance.is_ready
    instance.close()


def test_pack_not_matching_config_fails_load(model_of: ModelOf) -> None:
    pack = model_of().pack
    wrong = [entry._replace(shape=(1, *entry.shape)) for entry in pack.manifest.tensors]
    manifest = replace(pack.manifest, tensors=tuple(wrong))
    instance = Instance(manifest, pack.view, KvPool(1 << 20), link=LateLink())
    instance.prefill(group_of(prompt_of(4)))
    run(instance)
    instance.segment_ready(0)
    wait_until(instance.has_work)
    with pytest.raises(LoadFailed, match=r"no model\.embed_tokens\.weight of shape"):
        instance.step()
    instance.close()


def test_cpu_has_no_link() -> None:
    assert link_to(torch.device("cpu")) is None
