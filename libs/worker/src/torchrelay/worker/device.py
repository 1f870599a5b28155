"""Which device a worker computes on."""

from __future__ import annotations

import re

from torchrelay.common.errors import InvalidRequest

DEVICE_FORMS = r"auto|cpu|cuda(:\d+)?"  # what the setting may say


def resolve_device(wanted: str, num_gpus: int) -> str:
    """The torch name of the device for a setting of one of ``DEVICE_FORMS``, on a machine with so many GPUs.

    ``auto`` is the first GPU where there is one. Raises ``InvalidRequest`` for a GPU that is not there.
    """
    if re.fullmatch(DEVICE_FORMS, wanted) is None:
        raise InvalidRequest(
            f"{wanted!r} is no device: give cpu, cuda:N with the GPU's number, or auto", field="device"
        )
    if wanted == "auto":
        return "cuda:0" if num_gpus else "cpu"
    if wanted == "cpu":
        return wanted
    number = int(wanted.partition(":")[2] or 0)
    if number >= num_gpus:
        found = f"{num_gpus} of them" if num_gpus else "none"
        raise InvalidRequest(f"this worker was told to use GPU {number}, but torch finds {found} here", field="device")
    return f"cuda:{number}"
