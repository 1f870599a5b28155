"""The device that a worker computes on."""

from __future__ import annotations

import re

from torchrelay.common.errors import InvalidRequest

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
