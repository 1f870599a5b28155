"""The GPU bench from end to end on a CPU, which finds its errors before a run on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.gpu import kv_bytes, prefill_flops

BENCH = Path(__file__).resolve().parents[3] / "bench" / "gpu.py"
BARE = {"blake3", "grpc", "msgspec", "pydantic", "structlog"}  # a rented machine does not have them


def test_rehearsal_gives_every_figure(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({sorted(BARE)}))  # importing any of them fails\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(BENCH), "--cpu-rehearsal"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["bench"], report["conditions"]["rehearsal"]) == ("gpu", True)
    assert "figures mean nothing" in report["conditions"]["device"]
    values = {check["name"]: check["value"] for check in report["checks"]}
    assert values["triton_mismatches"] == values["gather_mismatches"] == 0
    expected = {"arena_to_device_over_pinned", "prefill_over_matmul", "decode_b1_over_hbm", "transformers_b1_tok_s"}
    assert expected <= values.keys()
    assert all(value is not None for value in values.values())
    assert all(check["bound"] is None for check in report["checks"])


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
