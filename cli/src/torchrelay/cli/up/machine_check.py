"""Checks that the machine has enough for `torchrelay up`, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchrelay.cli.errors import CliError
from torchrelay.cli.up.plan import OWN_ENGINE, UpOptions, worker_engine
from torchrelay.common.errors import InvalidRequest
from torchrelay.common.host.gpus import WSL_NODE, first_gpu
from torchrelay.common.host.machine import Machine, check_arena, check_kv_pools, check_threads
from torchrelay.common.quantities import format_count

MIN_ARENA_BYTES = 16 << 20
_HINTS = {
    "threads": "pass fewer with --threads, or 0 for one per core",
    "kv_pool_bytes": "pass less with --kv-pool-mb, or start fewer workers",
    "arena_bytes": "pass less with --arena-mb, or 0 to have it chosen",
}


def check_machine(options: UpOptions, arena: Path, machine: Machine) -> None:
    """Raises ``CliError`` for options that this machine cannot fulfil. ``arena``: the arena's file."""
    num_workers = options.num_prefill_workers + options.num_decode_workers + options.num_both_workers
    if not options.on:
        check_gpus(options.device, options.gpus, num_workers, options.num_devices)
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
    try:
        if not options.on:
            check_threads(options.threads, machine)
        check_arena(options.arena_bytes, _allocated_bytes(arena), machine)
        if options.device == "cpu":
            check_kv_pools(options.kv_pool_bytes * num_workers, machine.memory_bytes)
    except InvalidRequest as error:
        raise CliError(error.message, _HINTS[error.field or ""]) from error


def check_gpus(device: str, gpus: Sequence[str], num_workers: int, num_devices: int = 1) -> None:
    """Raises ``CliError`` if there are fewer visible GPUs than the workers need. Each worker checks its own again."""
    if device == "cpu" or (device == "auto" and not gpus):
        return
    if device != "auto" and WSL_NODE.exists():
        return  # its GPUs cannot be counted
    first, available = first_gpu(device), f"has {len(gpus)}" if gpus else "has none"
    last = first + num_devices - 1
    if last >= len(gpus):
        asked = device if num_devices == 1 else f"{device} to cuda:{last}"
        raise CliError(f"{asked} is asked for and this machine {available}", "pass --device cpu or --device auto")
    last += (num_workers - 1) * num_devices
    if last >= len(gpus):
        asked = f"{format_count(num_workers, 'worker')} need the GPUs {first} to {last}"
        raise CliError(f"{asked}, and this machine {available}", "start fewer workers: each has GPUs of its own")


def _allocated_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
