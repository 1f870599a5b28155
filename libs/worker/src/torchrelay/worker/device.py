"""The device that a worker computes on."""

from __future__ import annotations

import re

from torchrelay.common.errors import InvalidRequest

DEVICE_FORMS = r"auto|cpu|cuda(:\d+)?"  # values of the setting


def resolve_device(wanted: str, num_gpus: int) -> str:
    """The torch device of a setting in ``DEVICE_FORMS``; ``auto`` is the first GPU, or the CPU without one.

    Raises ``InvalidRequest`` for a GPU that does not exist.
    """
    if re.fullmatch(DEVICE_FORMS, wanted) is None:
        raise InvalidRequest(f"{wanted!r} is not a valid device; use cpu, cuda:N or auto", field="device")
    if wanted == "auto":
        return "cuda:0" if num_gpus else "cpu"
    if wanted == "cpu":
        return wanted
    number = int(wanted.partition(":")[2] or 0)
    if number >= num_gpus:
        count = num_gpus or "none"
        raise InvalidRequest(f"GPU {number} is configured, but torch finds {count} on this machine", field="device")
    return f"cuda:{number}"
