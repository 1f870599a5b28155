"""The GPU bench from end to end on a CPU, so that the one run on a lent GPU is not spent on its mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.gpu import kv_bytes, prefill_flops

BENCH = Path(__file__).resolve().parents[3] / "bench" / "gpu.py"
BARE = {"blake3", "grpc", "msgspec", "pydantic", "structlog"}  # no machine lent for an hour has them


def test_rehearsal_gives_every_figure(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({sorted(BARE)}))  # importing any of them fails\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, str(BENCH), "--cpu-rehearsal"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr
    report = json.loads(found.stdout.splitlines()[-1])
    assert report["bench"] == "gpu"
    assert report["conditions"]["rehearsal"] is True
    assert "figures mean nothing" in report["conditions"]["device"]
    values = {check["name"]: check["value"] for check in report["checks"]}
    assert values["triton_mismatches"] == values["gather_mismatches"] == 0
    expected = {"arena_to_device_over_pinned", "prefill_over_matmul", "decode_b1_over_hbm", "transformers_b1_tok_s"}
    assert expected <= values.keys()
    assert all(value is not None for value in values.values())
    assert all(check["bound"] is None for check in report["checks"])


def test_without_a_gpu_it_says_so() -> None:
    found = subprocess.run(
        [sys.executable, str(BENCH), "--quick"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 2
    assert "no NVIDIA GPU here; --cpu-rehearsal" in found.stderr


def test_what_limits_are_counted_from() -> None:
    """Llama 3.1 8B: 128 KiB of KV a position, 7 billion weights in the layers."""
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
