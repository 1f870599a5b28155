"""The GPUs that programs of this machine may use, without CUDA: to import torch takes seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia")
DRIVER_NODE = Path("/dev/nvidiactl")  # missing in a container without GPUs, where the driver of its machine can be seen
VISIBLE = "CUDA_VISIBLE_DEVICES"
_SLICE = "MIG-"


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The GPUs that CUDA shows to a program with these variables, by the names that it takes there: numbers, or UUIDs
    of whole GPUs and of slices (MIG). Without the variable, all of the driver.
    """
    if not DRIVER_NODE.exists() or not DRIVER.is_dir():
        return ()
    names = environment.get(VISIBLE)
    if names is None:
        return tuple(map(str, range(len(os.listdir(DRIVER / "gpus")))))
    stripped = (name.strip() for name in names.split(","))
    return tuple(takewhile(lambda name: name.startswith(("GPU-", _SLICE)) or name.isdecimal(), stripped))


def slice_uuid(number: int) -> str:
    """The UUID of a visible slice; empty for a whole GPU."""
    name = dict(enumerate(visible_gpus())).get(number, "")
    return name.removeprefix(_SLICE) if name.startswith(_SLICE) else ""


def driver_version() -> str:
    """The driver's version, as the first line of its file tells it; empty if it tells none."""
    words = (DRIVER / "version").read_text().partition("\n")[0].split()
    return next((word for word in words if word[0].isdecimal() and "." in word), "")


def first_gpu(device: str) -> int:
    """The number of the first GPU of a device setting: ``cuda:1`` or, for the first of all, ``auto`` or ``cuda``."""
    return int(device.partition(":")[2] or 0)


def gpu_settings(device: str, gpus: Sequence[str], worker: int = 0, num_devices: int = 1) -> dict[str, str]:
    """The variables that give a worker its own of the visible GPUs. ``worker``: its number on this machine.

    Without GPUs, ``device`` is left to the worker. CUDA shows a program one slice only, so a worker gets it by name.
    """
    if device == "cpu" or not gpus:
        return {"TORCHRELAY_DEVICE": device}
    first = first_gpu(device) + worker * num_devices
    names = gpus[first : first + num_devices]
    if names and names[0].startswith(_SLICE):
        return {"TORCHRELAY_DEVICE": "cuda:0", VISIBLE: ",".join(names)}
    return {"TORCHRELAY_DEVICE": f"cuda:{first}"}
