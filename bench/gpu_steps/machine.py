"""The machine: what has to be right before anything is measured."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.gpu_steps.step import Setup, absent, at_least, at_most, figure, on_gpu
from bench.report import Check

FACTS = ("name", "driver_version", "pci.bus_id", "pcie.link.width.current", "pcie.link.width.max", "memory.used")
MB, GB = 10**6, 10**9


def gpu_facts() -> dict[str, str]:
    """The first GPU's facts by nvidia-smi; empty without it."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(FACTS)}", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(FACTS, map(str.strip, ended.stdout.partition("\n")[0].split(",")), strict=True))


def used_mb(setup: Setup) -> float:
    """Memory of the GPU that any process uses; 0 without a GPU. This process's own context is part of it."""
    if not setup.is_gpu:
        return 0.0
    free, total = torch.cuda.mem_get_info(setup.device)
    return (total - free) / MB


def _number(name: str, facts: dict[str, str], key: str) -> Check:
    text = facts.get(key, "")
    try:
        return figure(name, float(text.partition(".")[0]), "", text)
    except ValueError:
        return absent(name, f"nvidia-smi tells {text!r}" if text else "no nvidia-smi")


def machine(setup: Setup) -> Iterator[Check]:
    compiler = shutil.which(os.environ.get("CC", "")) or shutil.which("gcc") or shutil.which("clang")
    yield at_least(
        1, figure("c_compiler", float(compiler is not None), "", compiler or "Triton compiles a launcher with it")
    )
    header = Path(sysconfig.get_path("include"), "Python.h")
    yield at_least(1, figure("python_headers", float(header.exists()), "", str(header)))
    yield at_most(0, figure("allows_tf32", float(torch.backends.cuda.matmul.allow_tf32)))
    facts = gpu_facts()
    yield _number("driver", facts, "driver_version")
    width, widest = (_number("pcie_width", facts, f"pcie.link.width.{which}") for which in ("current", "max"))
    yield figure("pcie_width", width.value, "", width.against)
    yield at_least(1, figure("pcie_width_over_max", width.value / widest.value, "", widest.against))
    domain, _, rest = facts.get("pci.bus_id", "").lower().partition(":")
    node = Path("/sys/bus/pci/devices", f"{domain[-4:]}:{rest}", "numa_node")
    if node.exists():
        yield figure("numa_node", float(node.read_text()), "", "-1: the machine has a single node")
    else:
        yield absent("numa_node", f"no {node}")
    if not setup.is_gpu:
        yield from (absent(name, "no GPU") for name in ("gpus", "compute_capability", "gpu_memory_gb"))
        return
    yield at_least(
        1, figure("gpus", torch.cuda.device_count(), "", f"torch {torch.__version__} for CUDA {torch.version.cuda}")
    )
    gpu = torch.cuda.get_device_properties(setup.device)
    yield at_least(8, figure("compute_capability", gpu.major + gpu.minor / 10))
    against = f"{gpu.name}, {gpu.multi_processor_count} processors; {used_mb(setup):.0f} MB in use"
    yield on_gpu(setup, figure("gpu_memory_gb", gpu.total_memory / GB, "GB", against))
