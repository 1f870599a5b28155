"""The GPUs that programs of this machine may use, without CUDA: to import torch takes seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia")
DRIVER_NODE = Path("/dev/nvidiactl")  # the first use of a GPU makes it
WSL_NODE = Path("/dev/dxg")  # of a Linux on Windows, whose driver lists no GPUs
CONTAINER_FILES = [Path(name) for name in ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")]
VISIBLE = "CUDA_VISIBLE_DEVICES"
_SLICE = "MIG-"


def has_driver(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether programs can use NVIDIA's driver here. A container without GPUs sees the driver of its machine too."""
    is_container = "KUBERNETES_SERVICE_HOST" in environment or any(path.exists() for path in CONTAINER_FILES)
    return DRIVER.is_dir() and (DRIVER_NODE.exists() or not is_container)


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The GPUs that CUDA shows to a program with these variables, by the names that it takes there: numbers, or UUIDs
    of whole GPUs and of slices (MIG). Without the variable, all of the driver, and the first on WSL, which may have
    none.
    """
    is_wsl = WSL_NODE.exists()
    if not is_wsl and not has_driver(environment):
        return ()
    names = environment.get(VISIBLE)
    if names is None:
        return ("0",) if is_wsl else tuple(map(str, range(len(os.listdir(DRIVER / "gpus")))))
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

    Without GPUs, ``device`` is left to the worker, and so is ``auto``: it may have to compute on the CPU. CUDA shows a
    program one slice only, so a worker gets it by name.
    """
    if device == "cpu" or not gpus:
        return {"TORCHRELAY_DEVICE": device}
    first = first_gpu(device) + worker * num_devices
    names = gpus[first : first + num_devices]
    if device == "auto" or (names and names[0].startswith(_SLICE)):
        return {"TORCHRELAY_DEVICE": "auto" if device == "auto" else "cuda:0", VISIBLE: ",".join(names)}
    return {"TORCHRELAY_DEVICE": f"cuda:{first}"}
