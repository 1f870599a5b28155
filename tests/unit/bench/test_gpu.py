"""The GPU bench from end to end on a CPU, which finds its errors before a run on a GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.device.packs import kv_bytes, prefill_flops
from bench.gpu import STEPS
from bench.gpu_steps.sizes import FULL
from bench.gpu_steps.step import Setup, Step, at_most, figure, run_step
from bench.report import Check

BENCH = Path(__file__).resolve().parents[3] / "bench" / "gpu.py"
BARE = {"blake3", "grpc", "msgspec", "pydantic", "structlog"}  # a rented machine does not have them
NEED_SERVICES = ("faults", "platform", "vllm")


def report_of(folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """The exit status of a dry run, its last line, and what came before."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    command = [sys.executable, str(BENCH), "--dry", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    *lines, last = done.stdout.splitlines()
    return done.returncode, json.loads(last), "\n".join(lines) + done.stderr


def test_dry_run_gives_every_figure_on_a_bare_machine(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({sorted(BARE)}))  # importing any of them fails\n"
    )
    status, report, printed = report_of(tmp_path, "--out", str(tmp_path / "out"))
    assert status == 0 and "Traceback" not in printed, printed
    assert (report["bench"], report["conditions"]["dry"]) == ("gpu", True)
    assert "figures mean nothing" in report["conditions"]["device"]
    for step in NEED_SERVICES:
        assert re.search(rf"{step}: .*grpc, .*not installed", printed)
    checks = {check["name"]: check for check in report["checks"]}
    others = [step.name for step in STEPS if step.name not in NEED_SERVICES]
    assert [name for name in checks if name.endswith("_step_s")] == [
        *(f"{name}_step_s" for name in others[:3]),
        "blocking_tokens_step_s",
        *(f"{name}_step_s" for name in others[3:]),
    ]
    exact = ("triton_mismatches", "loading_mismatches", "handover_mismatches", "moved_mismatches", "soak_pages_lost")
    assert [checks[name]["value"] for name in exact] == [0] * len(exact)
    assert {"arena_to_device_over_pinned", "prefill_over_matmul", "decode_b1_over_hbm", "record_all_s"} <= checks.keys()
    for name, check in checks.items():
        assert (check["bound"] is not None) == name.endswith("_step_s")
        assert check["value"] is not None or check["against"].startswith("absent: "), name
    assert json.loads((tmp_path / "out" / "figures.json").read_text())["checks"][0]["name"] == "c_compiler"
    assert "Self CPU" in (tmp_path / "out" / "profile.txt").read_text()


def failing(setup: Setup) -> Iterator[Check]:
    yield at_most(1, figure("first", 2.0))
    raise RuntimeError("no such kernel")


def hanging(setup: Setup) -> Iterator[Check]:
    child = os.fork()
    if child == 0:
        signal.pause()
    yield figure("child", child)
    signal.pause()


def crashing(setup: Setup) -> Iterator[Check]:
    yield figure("first", 2.0)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("measure", "reason"),
    [
        (failing, "failed: RuntimeError: no such kernel"),
        (hanging, "it took longer than its limit and was killed"),
        (crashing, "it ended without a result"),
    ],
)
def test_a_step_that_does_not_end_well_keeps_its_figures(measure: Callable[..., Iterator[Check]], reason: str) -> None:
    step, setup = Step("some", 60, f"{__name__}:{measure.__name__}"), Setup(torch.device("cpu"), FULL)
    kept, seconds = run_step(step, setup, 3.0)
    assert (seconds.name, seconds.bound, seconds.against, seconds.ok) == ("some_step_s", 3.0, reason, False)
    if kept.name == "child":
        with pytest.raises(ProcessLookupError):
            os.kill(int(kept.value), 0)
    elif measure is failing:
        assert (kept.value, kept.bound, kept.ok) == (2.0, 1, False)


def test_kv_bytes_and_prefill_flops_of_llama_8b() -> None:
    """Llama 3.1 8B has 128 KiB of KV per position and 7 billion weights in its layers."""
    config = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    }
    assert kv_bytes(config) == 128 << 10
    weights = 6_979_588_096
    both_ends = 2 * 128_256 * 4096
    flops = prefill_flops(config, 2 * (weights + both_ends), 1000)
    assert flops == 2 * weights * 1000 + 4 * 32 * 4096 * (1000 * 1001 / 2)
