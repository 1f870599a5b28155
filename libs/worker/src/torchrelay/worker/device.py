"""The device that a worker computes on."""

from __future__ import annotations

import re

import torch

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.host.machine import Machine, check_kv_pools
from torchrelay.worker.settings import WorkerSettings

DEVICE_FORMS = r"auto|cpu|cuda(:\d+)?"  # values of the setting


def resolve_device(wanted: str, num_gpus: int, num_devices: int = 1) -> str:
    """The first torch device of a slot, for a setting in ``DEVICE_FORMS``; ``auto`` is the first GPU, or the CPU
    without one. The next GPUs are the others of its ``num_devices``.

    Raises ``InvalidRequest`` for a GPU that does not exist.
    """
    if re.fullmatch(DEVICE_FORMS, wanted) is None:
        raise InvalidRequest(f"{wanted!r} is not a valid device; use cpu, cuda:N or auto", field="device")
    if wanted == "cpu" or (wanted == "auto" and not num_gpus):
        return "cpu"
    number = int(wanted.partition(":")[2] or 0)
    last = number + num_devices - 1
    if last >= num_gpus:
        count, field = num_gpus or "none", "devices" if number < num_gpus else "device"
        raise InvalidRequest(f"GPU {last} is configured, but torch finds {count} on this machine", field=field)
    return f"cuda:{number}"


def check_kv_memory(settings: WorkerSettings, machine: Machine) -> None:
    """Raises ``InvalidRequest`` if this machine, or a GPU of the slot, has less free memory than its KV pool takes.

    ``device`` in ``settings`` is resolved.
    """
    if settings.device == "cpu":
        check_kv_pools(settings.kv_pool_bytes, machine.memory_bytes)
        return
    first = torch.device(settings.device).index
    for number in range(first, first + settings.devices):
        try:
            free_bytes, _ = torch.cuda.mem_get_info(number)
        except RuntimeError as error:  # for example: no memory for the context of this process
            reason = str(error).partition("\n")[0]
            raise InvalidRequest(f"GPU {number} cannot be used: {reason}", field="device") from error
        check_kv_pools(settings.kv_pool_bytes // settings.devices, free_bytes, f"memory on GPU {number}")
