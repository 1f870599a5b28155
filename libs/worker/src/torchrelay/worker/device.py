"""The device that a worker computes on: whether it can be used, its memory, and the sizes that fit it.

These are all questions to ``torch.cuda``, which tests answer in its place. The numbers have never been tried on a GPU.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.host.gpus import driver_version, first_gpu, has_driver, slice_uuid, visible_gpus
from torchrelay.common.host.machine import Machine, check_kv_pools
from torchrelay.common.process.telemetry import get_logger
from torchrelay.common.quantities import format_bytes
from torchrelay.worker.settings import WorkerSettings

log = get_logger(__name__)
DEVICE_FORMS = r"auto|cpu|cuda(:\d+)?"  # values of the setting
_MIN_CAPABILITY = (8, 0)  # bf16 in the matrix units, and shared memory for the tiles of attention
# A quarter of a GPU's free memory: the rest of 24 GiB holds the weights of 8 billion parameters in bf16.
_POOL_SHARE = 4
_HIDDEN_SHARE = 16  # hidden states of prompts that run while a model loads take up to this part of the pool, beside it
_RESERVED_SHARE, _MIN_RESERVED_BYTES = 16, 2 << 30  # activations, logits, recorded steps, adapters
_SIZE_STEP_BYTES = 256 << 20  # the scheduler groups slots of equal sizes, and no two GPUs have equal free memory
_CPU_POOL_BYTES, _CPU_TOKENS, _MIN_BLOCK_TOKENS = 256 << 20, 512, 512
# The numbers that vLLM chooses (EngineArgs, default_max_num_batched_tokens): more tokens would only make steps longer.
_GPU_TOKENS, _LARGE_GPU_TOKENS, _LARGE_GPU_BYTES, _LARGE_GPU_CAPABILITY = 2048, 8192, 70 << 30, (9, 0)
_MAX_UNSENT_BYTES = 2 << 30
_FAULT_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a part of it (MIG)."""

    number: int
    name: str
    uuid: str
    capability: tuple[int, int]


def resolve_device(wanted: str, num_gpus: int, num_devices: int = 1) -> str:
    """The first torch device of a slot, for a setting in ``DEVICE_FORMS``; ``auto`` is the first GPU, or the CPU
    without one. The next GPUs are the others of its ``num_devices``.

    Raises ``InvalidRequest`` for a GPU that does not exist, and where torch does not find those of the machine. A torch
    without CUDA computes ``auto`` on the CPU.
    """
    if re.fullmatch(DEVICE_FORMS, wanted) is None:
        raise InvalidRequest(f"{wanted!r} is not a valid device; use cpu, cuda:N or auto", field="device")
    if wanted != "cpu" and not num_gpus:
        _check_driver(wanted)
    if wanted == "cpu" or (wanted == "auto" and not num_gpus):
        return "cpu"
    number = first_gpu(wanted)
    last = number + num_devices - 1
    if last >= num_gpus:
        count, field = num_gpus or "none", "devices" if number < num_gpus else "device"
        raise InvalidRequest(f"GPU {last} is configured, but torch finds {count} on this machine", field=field)
    return f"cuda:{number}"


def _check_driver(wanted: str) -> None:
    """Raises ``InvalidRequest`` if this machine has GPUs: a worker would compute on the CPU without a word."""
    if not has_driver() or not visible_gpus():
        return
    if wanted == "auto" and torch.version.cuda is None:
        log.warning("gpus_not_used", why=f"torch {torch.__version__} is made for CPUs only")
        return
    made_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    raise InvalidRequest(
        f"this machine has GPUs with NVIDIA's driver {driver_version()}, and torch {torch.__version__} for {made_for}"
        " finds none: update the driver, install a torch that fits it, or set the device to cpu",
        field="device",
    )


def gpus_of(settings: WorkerSettings) -> list[Gpu]:
    """The GPUs of the slot, none on a CPU. ``device`` in ``settings`` is resolved.

    Raises ``InvalidRequest`` for a GPU that cannot be used.
    """
    if settings.device == "cpu":
        return []
    first = torch.device(settings.device).index
    gpus = [_gpu(number) for number in range(first, first + settings.devices)]
    for gpu in gpus:
        if settings.engine == "torchrelay" and gpu.capability < _MIN_CAPABILITY:
            capability, needed = (".".join(map(str, each)) for each in (gpu.capability, _MIN_CAPABILITY))
            raise InvalidRequest(
                f"GPU {gpu.number} ({gpu.name}) has compute capability {capability}, and the kernels need {needed}",
                field="device",
            )
    return gpus


def _gpu(number: int) -> Gpu:
    with _usable(number):
        facts = torch.cuda.get_device_properties(number)
    uuid = slice_uuid(number) or str(facts.uuid)  # CUDA may tell that of the whole GPU
    return Gpu(number, facts.name, uuid, (facts.major, facts.minor))


def _memory_bytes(gpu: Gpu) -> tuple[int, int]:
    """The free and the total memory. To ask takes some of it, for the context of this process."""
    with _usable(gpu.number):
        return torch.cuda.mem_get_info(gpu.number)


@contextmanager
def _usable(number: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # for example: no memory for the context of this process
        raise InvalidRequest(f"GPU {number} cannot be used: {_reason(error)}", field="device") from error


@contextmanager
def locked(gpus: Sequence[Gpu]) -> Iterator[None]:
    """Keeps the GPUs for this worker. Raises ``InvalidRequest`` while another of this machine computes on them."""
    with ExitStack() as stack:
        for gpu in gpus:
            # A name without a file: it ends with the process, whoever runs it and however it ends.
            lock = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                lock.bind(f"\0torchrelay-gpu-{gpu.uuid}")
            except OSError as error:
                message = f"GPU {gpu.number} is in use by another worker: each needs a GPU of its own"
                raise InvalidRequest(message, field="device") from error
        yield


def with_sizes(settings: WorkerSettings, gpus: Sequence[Gpu], machine: Machine) -> tuple[WorkerSettings, int]:
    """The settings with the sizes that they leave to the worker, and the bytes of weights that the GPUs hold beside the
    KV pool; 0 on a CPU, which computes in the host's arena. The GPUs are locked: what another worker holds of their
    memory would be missing for good.

    Raises ``InvalidRequest`` if there is not enough memory for the KV pool, or on a GPU for nothing else.
    """
    weights_bytes = 0
    if gpus:
        free_bytes, total_bytes, number = min((*_memory_bytes(gpu), gpu.number) for gpu in gpus)
        pool_bytes = settings.kv_pool_bytes or len(gpus) * _rounded(free_bytes // _POOL_SHARE)
        own_pool_bytes = pool_bytes // len(gpus)
        check_kv_pools(own_pool_bytes, free_bytes, f"memory on GPU {number}")
        reserved_bytes = max(free_bytes // _RESERVED_SHARE, _MIN_RESERVED_BYTES) + own_pool_bytes // _HIDDEN_SHARE
        weights_bytes = len(gpus) * _rounded(free_bytes - own_pool_bytes - reserved_bytes)
        if weights_bytes <= 0:
            free, pool, reserved = map(format_bytes, (free_bytes, own_pool_bytes, reserved_bytes))
            raise InvalidRequest(
                f"GPU {number} has {free} of memory available; a KV pool of {pool} and {reserved} for computing"
                " leave none for weights",
                field="kv_pool_bytes",
            )
        capability = min(gpu.capability for gpu in gpus)
        is_large = total_bytes >= _LARGE_GPU_BYTES and capability >= _LARGE_GPU_CAPABILITY
        token_budget = settings.token_budget or (_LARGE_GPU_TOKENS if is_large else _GPU_TOKENS)
        unsent_bytes, block_tokens = min(pool_bytes, _MAX_UNSENT_BYTES), max(token_budget, _MIN_BLOCK_TOKENS)
    else:
        pool_bytes, token_budget = settings.kv_pool_bytes or _CPU_POOL_BYTES, settings.token_budget or _CPU_TOKENS
        check_kv_pools(pool_bytes, machine.memory_bytes)
        unsent_bytes, block_tokens = pool_bytes, _MIN_BLOCK_TOKENS
    sizes = {
        "kv_pool_bytes": pool_bytes,
        "token_budget": token_budget,
        "unsent_kv_bytes": settings.unsent_kv_bytes or unsent_bytes,
        "kv_block_tokens": settings.kv_block_tokens or block_tokens,
    }
    return settings.model_copy(update=sizes), weights_bytes


def _rounded(num_bytes: int) -> int:
    return num_bytes // _SIZE_STEP_BYTES * _SIZE_STEP_BYTES


async def device_fault(device: str, num_devices: int) -> str:
    """Why this process cannot compute on its GPUs any more; empty if it can, and on a CPU. For use after an error:
    some, such as an illegal access, make every later call of CUDA fail until the process ends, others make it hang.
    """
    if device == "cpu":
        return ""
    first = first_gpu(device)
    try:
        async with asyncio.timeout(_FAULT_LIMIT_S):
            for number in range(first, first + num_devices):
                await asyncio.to_thread(torch.cuda.synchronize, number)
    except TimeoutError:
        return f"GPU {number} has not answered for {_FAULT_LIMIT_S:.0f} s"
    except RuntimeError as error:
        return _reason(error)
    return ""


def _reason(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
