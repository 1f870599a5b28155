"""The first 15 minutes on an NVIDIA GPU: twelve steps from the machine's compiler to minutes of load, in this order.

    python bench/gpu.py [--quick] [--only STEP ...] [--profile] [--out FOLDER] [--dry]

Each step has a limit, runs in a process of its own and is killed at its limit; the next one follows a failure too.
Only without a compiler or a GPU that torch finds does the bench end after the first step. The steps are functions in
bench/gpu_steps. Most run from a checkout on a machine with torch, triton, transformers, safetensors, tokenizers and
numpy, and read Torchrelay's packages from libs/; `faults` and `platform` need an environment as `make developer` makes
it, and `vllm` needs vLLM. The weights are random, in the shape of Llama 3.1 8B where speed is measured.

``--dry`` runs the code of every step with tiny shapes on a CPU, with Triton's interpreter: its figures mean nothing,
and no bound applies but the limits. ``--out`` keeps Triton's cache, the profile and all figures in a folder.

NOTE: this bench has never run on a GPU, only dry.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu_steps.step import Setup, Step, run_step
from bench.report import Check, finish, parser_of

ROOT = Path(__file__).resolve().parents[1]
sys.path.extend(str(ROOT / "libs" / name / "src") for name in ("common", "modelspec", "transfer", "engine"))
NEEDED = ("numpy", "torch", "triton", "transformers", "safetensors", "tokenizers")
SERVICES = ("grpc", "msgspec", "pydantic", "structlog", "httpx", "nats", "blake3")
QUICK = ("machine", "kernels", "tokens", "copies", "speed")
QUICK_S = 50.0
DRY_LIMIT_S = 120.0  # of a step: the machine may be busy
STEPS = (
    Step("machine", 20, "bench.gpu_steps.machine:machine"),
    Step("kernels", 60, "bench.gpu_steps.kernels:kernels"),
    Step("tokens", 60, "bench.gpu_steps.tokens:tokens"),
    Step("copies", 30, "bench.gpu_steps.loads:copies"),
    Step("loads", 60, "bench.gpu_steps.loads:loads"),
    Step("speed", 60, "bench.gpu_steps.speed:speed"),
    Step("kinds", 30, "bench.gpu_steps.speed:kinds_of_steps"),
    Step("handover", 60, "bench.gpu_steps.handover:handover"),
    Step("faults", 60, "bench.gpu_steps.faults:faults", SERVICES),
    Step("platform", 120, "bench.gpu_steps.platform:platform", SERVICES),
    Step("vllm", 120, "bench.gpu_steps.vllm:vllm", ("vllm", *SERVICES)),
    Step("soak", 240, "bench.gpu_steps.soak:soak"),
)


def run(steps: list[Step], setup: Setup, total_s: float) -> list[Check]:
    """The checks of the steps, which together take at most ``total_s``."""
    checks: list[Check] = []
    end_s = time.monotonic() + total_s
    for step in steps:
        limit_s = DRY_LIMIT_S if setup.dry else min(step.limit_s, max(end_s - time.monotonic(), 0.0))
        measured = run_step(step, setup, limit_s)
        checks += measured
        if step.name == "tokens" and (setup.dry or not all(check.ok for check in measured)):
            # With a wait after each launch a race disappears, and wrong arithmetic stays.
            again = run_step(step, setup, limit_s, {"CUDA_LAUNCH_BLOCKING": "1"})
            checks += [replace(check, name=f"blocking_{check.name}") for check in again]
        if step.name == "machine" and not setup.dry and not all(check.ok for check in measured[:2]):
            break  # Triton would fail at its first kernel
    return checks


def main() -> None:
    parser = parser_of(__doc__, f"the steps {', '.join(QUICK)} with smaller sizes; under {QUICK_S:.0f} s")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], help="run these steps alone")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a decode step")
    parser.add_argument("--out", type=Path, help="folder for Triton's cache, the profile and all figures")
    parser.add_argument("--dry", action="store_true", help="run the code of each step on the CPU with tiny shapes")
    options = parser.parse_args()
    # The folder of this script has a vllm.py, which is not the package.
    sys.path[:] = [each for each in sys.path if Path(each).resolve() != ROOT / "bench"]
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        parser.error(f"{', '.join(missing)} not installed: pip install {' '.join(NEEDED)}")
    dry: bool = options.dry
    os.environ["TRITON_INTERPRET"] = "1" if dry else "0"  # before triton is imported
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # without a context: processes are forked from this one
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        os.environ["TRITON_CACHE_DIR"] = str(options.out / "triton")

    import torch
    import transformers
    import triton

    transformers.LlamaForCausalLM  # noqa: B018  # imports it once, for all steps
    from bench.gpu_steps import sizes
    from bench.gpu_steps.machine import gpu_facts

    if not dry and not torch.cuda.is_available():
        parser.error("torch finds no NVIDIA GPU here; --dry tests the bench without a GPU")
    named = gpu_facts().get("name", "cuda:0")
    setup = Setup(
        torch.device("cpu" if dry else "cuda:0"),
        sizes.DRY if dry else sizes.QUICK if options.quick else sizes.FULL,
        dry,
        options.profile,
        options.out,
    )
    chosen = options.only or (QUICK if options.quick else [step.name for step in STEPS])
    is_limited = options.quick and not options.only
    checks = run([step for step in STEPS if step.name in chosen], setup, QUICK_S if is_limited else math.inf)
    conditions = {
        "device": "cpu, Triton interpreted: a dry run, the figures mean nothing" if dry else named,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "quick": options.quick,
        "dry": dry,
        "steps": list(chosen),
        "layers": setup.sizes.config["num_hidden_layers"],
    }
    if options.out is not None:
        figures = json.dumps({"conditions": conditions, "checks": [asdict(check) for check in checks]}, indent=1)
        (options.out / "figures.json").write_text(figures)
    finish("gpu", conditions, checks)


if __name__ == "__main__":
    main()
