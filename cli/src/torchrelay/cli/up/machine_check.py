"""Checks that the machine has enough for `torchrelay up`, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

from torchrelay.cli.errors import CliError
from torchrelay.cli.up.plan import OWN_ENGINE, UpOptions, worker_engine
from torchrelay.common.errors import InvalidRequest
from torchrelay.common.host.machine import Machine, check_arena, check_kv_pools, check_threads

MIN_ARENA_BYTES = 16 << 20
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_WSL_GPU = Path("/dev/dxg")
_HINTS = {
    "threads": "pass fewer with --threads, or 0 for one per core",
    "kv_pool_bytes": "pass less with --kv-pool-mb, or start fewer workers",
    "arena_bytes": "pass less with --arena-mb, or 0 to have it chosen",
}


def check_machine(options: UpOptions, arena: Path, machine: Machine, gpus: Path = _NVIDIA) -> None:
    """Raises ``CliError`` for options that this machine cannot fulfil. ``arena``: the arena's file."""
    if options.device.startswith("cuda") and not options.on:
        _check_gpu(options.device, options.num_devices, gpus)
    if options.num_devices > 1 and worker_engine() == OWN_ENGINE:
        raise CliError(
            f"the engine {OWN_ENGINE} computes a model on one device, and --devices is {options.num_devices}",
            "set TORCHRELAY_ENGINE=vllm, which splits models, or leave --devices out",
        )
    if 0 < options.arena_bytes < MIN_ARENA_BYTES:
        raise CliError(
            f"an arena of {options.arena_bytes >> 20} MiB holds no model",
            f"pass at least {MIN_ARENA_BYTES >> 20} with --arena-mb, or 0 to have it chosen",
        )
    num_workers = options.num_prefill_workers + options.num_decode_workers + options.num_both_workers
    try:
        if not options.on:
            check_threads(options.threads, machine)
        check_arena(options.arena_bytes, _allocated_bytes(arena), machine)
        if options.device == "cpu":
            check_kv_pools(options.kv_pool_bytes * num_workers, machine.memory_bytes)
    except InvalidRequest as error:
        raise CliError(error.message, _HINTS[error.field or ""]) from error


def _check_gpu(device: str, num_devices: int, gpus: Path) -> None:
    """Counts the GPUs that the driver lists, because importing torch takes seconds. Each worker checks again."""
    num_gpus = len(os.listdir(gpus)) if gpus.is_dir() else 0
    last = int(device.partition(":")[2] or 0) + num_devices - 1
    if last >= num_gpus and not _WSL_GPU.exists():
        asked = device if num_devices == 1 else f"{device} to cuda:{last}"
        available = f"has {num_gpus}" if num_gpus else "has none"
        raise CliError(f"{asked} is asked for and this machine {available}", "pass --device cpu or --device auto")


def _allocated_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
