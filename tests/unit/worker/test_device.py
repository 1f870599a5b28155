"""The GPUs of a slot: which may be used, by whom, and the sizes that fit them. torch's facts are those of a fake."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.host import gpus as host_gpus
from torchrelay.common.host.machine import Machine
from torchrelay.worker import device
from torchrelay.worker.device import gpus_of, locked, resolve_device, with_sizes
from torchrelay.worker.main import running_worker
from torchrelay.worker.settings import WorkerSettings

GIB = 1 << 30
KEY = "ab" * 32
MACHINE = Machine(num_cores=4, memory_bytes=64 * GIB, shared_memory_bytes=32 * GIB)


def settings_of(**changes: Any) -> WorkerSettings:
    return WorkerSettings(node_key=KEY, worker_id="w", **changes)


class Gpus:
    """The GPUs that torch finds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes: list[int] = []
        self.total_bytes, self.capability, self.name = 80 * GIB, (9, 0), "NVIDIA H100"
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.free_bytes) or 1)
        monkeypatch.setattr(torch.cuda, "mem_get_info", self._memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", self._properties)

    def _memory(self, number: int) -> tuple[int, int]:
        if not self.free_bytes:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        return self.free_bytes[number], self.total_bytes

    def _properties(self, number: int) -> Any:
        major, minor = self.capability
        return SimpleNamespace(name=self.name, uuid=f"test-{id(self)}-{number}", major=major, minor=minor)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


@pytest.mark.parametrize(
    ("free_mib", "num_devices", "message"),
    [
        ([100], 1, "268 MB are asked for KV and 105 MB of memory on GPU 0 are available"),
        ([500, 100], 2, "134 MB are asked for KV and 105 MB of memory on GPU 1 are available"),
        ([2000], 1, "GPU 0 has 2.1 GB of memory available; a KV pool of 268 MB and 2.16 GB for computing leave none for"
         " weights"),
        ([], 1, "GPU 0 cannot be used: CUDA error: out of memory"),
    ],
)  # fmt: skip
async def test_worker_without_gpu_memory_ends_with_a_sentence(
    gpus: Gpus, free_mib: list[int], num_devices: int, message: str
) -> None:
    gpus.free_bytes = [mib << 20 for mib in free_mib]
    with pytest.raises(InvalidRequest) as caught:
        async with running_worker(settings_of(device="cuda", devices=num_devices, kv_pool_bytes=256 << 20)):
            pass
    assert caught.value.message == message


def sizes_of(gpus: Gpus, **changes: Any) -> tuple[int, int, int, float]:
    """KV pool and unsent KV in GiB, the token budget, and the weights that fit beside, in GiB."""
    settings = settings_of(device="cuda:0", **changes)
    sized, weights_bytes = with_sizes(settings, gpus_of(settings), MACHINE)
    return sized.kv_pool_bytes >> 30, sized.unsent_kv_bytes >> 30, sized.token_budget, round(weights_bytes / GIB, 2)


def test_sizes_fit_the_gpu_unless_they_are_set(gpus: Gpus) -> None:
    gpus.free_bytes = [80 * GIB, 80 * GIB]
    assert sizes_of(gpus) == (20, 2, 8192, 80 - 20 - 20 / 16 - 5)
    assert sizes_of(gpus, kv_pool_bytes=GIB, unsent_kv_bytes=3 * GIB, token_budget=64) == (1, 3, 64, 73.75)
    assert sizes_of(gpus, devices=2, engine="vllm") == (40, 2, 8192, 2 * 53.75)
    gpus.free_bytes, gpus.total_bytes, gpus.capability = [24 * GIB, 16 * GIB], 24 * GIB, (8, 9)
    assert sizes_of(gpus) == (6, 2, 2048, 15.5)  # 8 billion parameters in bf16 take 15 GiB
    assert sizes_of(gpus, devices=2, engine="vllm")[3] == 2 * 9.75  # what the fuller of the two leaves


def test_gpus_with_nearly_as_much_free_memory_have_equal_sizes(gpus: Gpus) -> None:
    """The scheduler groups slots by their sizes."""
    settings = settings_of(device="cuda:0")
    gpus.free_bytes = [80 * GIB + 12345]
    full = with_sizes(settings, gpus_of(settings), MACHINE)
    gpus.free_bytes = [80 * GIB + (97 << 20)]
    assert with_sizes(settings, gpus_of(settings), MACHINE) == full
    assert full[0].kv_pool_bytes % (256 << 20) == full[1] % (256 << 20) == 0


def test_blocks_of_kv_hold_a_step_unless_their_size_is_set(gpus: Gpus) -> None:
    gpus.free_bytes = [80 * GIB]

    def block_tokens(**changes: Any) -> int:
        settings = settings_of(device="cuda:0", **changes)
        return with_sizes(settings, gpus_of(settings), MACHINE)[0].kv_block_tokens

    assert (block_tokens(), block_tokens(token_budget=64), block_tokens(kv_block_tokens=32)) == (8192, 512, 32)
    on_cpu = with_sizes(settings_of(token_budget=2048), [], MACHINE)[0]
    assert on_cpu.kv_block_tokens == 512


def test_sizes_on_a_cpu() -> None:
    sized, weights_bytes = with_sizes(settings_of(), [], MACHINE)
    assert (sized.kv_pool_bytes, sized.unsent_kv_bytes, sized.token_budget) == (256 << 20, 256 << 20, 512)
    assert weights_bytes == 0
    sized, _ = with_sizes(settings_of(kv_pool_bytes=3 * GIB), [], MACHINE)
    assert sized.unsent_kv_bytes == 3 * GIB
    with pytest.raises(InvalidRequest, match="are asked for KV"):
        with_sizes(settings_of(kv_pool_bytes=65 * GIB), [], MACHINE)


def test_gpu_without_the_needed_units_is_refused_by_its_name(gpus: Gpus) -> None:
    gpus.free_bytes, gpus.capability, gpus.name = [15 * GIB], (7, 5), "Tesla T4"
    with pytest.raises(InvalidRequest) as caught:
        gpus_of(settings_of(device="cuda:0"))
    assert caught.value.message == "GPU 0 (Tesla T4) has compute capability 7.5, and the kernels need 8.0"
    assert len(gpus_of(settings_of(device="cuda:0", engine="vllm"))) == 1  # it has kernels of its own


def test_a_gpu_has_one_worker(gpus: Gpus) -> None:
    gpus.free_bytes = [80 * GIB, 80 * GIB]
    both = gpus_of(settings_of(device="cuda:0", devices=2, engine="vllm"))
    with locked(both[1:]):
        used = "GPU 1 is in use by another worker: each needs a GPU of its own"
        with pytest.raises(InvalidRequest, match=used), locked(both):
            pass
        with locked(both[:1]):
            pass
    with locked(both):
        pass


async def test_refused_worker_takes_no_memory_of_the_gpu(gpus: Gpus) -> None:
    """To ask for a GPU's memory takes some, and what another worker holds would be missing for good."""
    settings = settings_of(device="cuda:0")
    with locked(gpus_of(settings)), pytest.raises(InvalidRequest, match="is in use by another worker"):
        async with running_worker(settings):  # the fake's memory cannot be asked for
            pass


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver with one GPU."""
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\nGCC\n")
    monkeypatch.setattr(host_gpus, "DRIVER", tmp_path)
    monkeypatch.setattr(host_gpus, "DRIVER_NODE", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("driver")
def test_each_slice_of_a_gpu_has_a_worker(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where CUDA tells the UUID of the whole GPU for each."""
    gpus.free_bytes, settings = [20 * GIB], settings_of(device="cuda:0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-11")
    with locked(gpus_of(settings)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-22")
        second = gpus_of(settings)
        assert second[0].uuid == "22"
        with locked(second):
            pass


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_driver_that_torch_cannot_use_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(InvalidRequest) as caught:
        resolve_device(device, 0)
    assert caught.value.message.startswith("this machine has GPUs with NVIDIA's driver 535.129.03, and torch ")
    assert "finds none: update the driver" in caught.value.message and caught.value.field == "device"
    assert resolve_device("cpu", 0) == "cpu" and resolve_device("auto", 1) == "cuda:0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # they are hidden on purpose
    assert resolve_device("auto", 0) == "cpu"


@pytest.mark.usefixtures("driver")
def test_torch_without_cuda_computes_auto_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert resolve_device("auto", 0) == "cpu"
    with pytest.raises(InvalidRequest, match="for CPUs only finds none"):
        resolve_device("cuda:0", 0)


def test_wsl_without_a_gpu_computes_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_gpus, "WSL_NODE", tmp_path)
    monkeypatch.setattr(host_gpus, "DRIVER", tmp_path / "none")
    assert resolve_device("auto", 0) == "cpu" and resolve_device("auto", 1) == "cuda:0"


async def test_gpu_that_fails_for_good_is_told_from_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")

    assert await device.device_fault("cpu", 1) == ""
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert await device.device_fault("cuda:1", 1) == ""
    assert await device.device_fault("cuda:1", 2) == "CUDA error: an illegal memory access was encountered"


async def test_gpu_that_hangs_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: answered.wait())
    monkeypatch.setattr(device, "_FAULT_LIMIT_S", 0.05)
    try:
        assert (await device.device_fault("cuda:0", 2)).startswith("GPU 0 has not answered for")
    finally:
        answered.set()
