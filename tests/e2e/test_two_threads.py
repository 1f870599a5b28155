"""Two threads compute the tokens that one computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.tenants import SMALL, reference
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete
from tests.support.platform import running_platform
from tests.unit.engine.harness import Model, group_of, outputs, run
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.kernels.cpu.threads import MAX_ONE_THREAD_BYTES

pytestmark = pytest.mark.e2e
PROMPT = [(7 * i) % 251 for i in range(1, 90)]
LONG = 120
WORKERS = ("prefill-0", "decode-0")


SIZES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4
}  # fmt: skip


def test_two_compute_threads_are_exact(tmp_path: Path) -> None:
    """Small models compute on one core, whatever the threads; this one on both."""
    folder = make_checkpoint(tmp_path / "exact", "llama", **SIZES)
    assert (folder / "model.safetensors").stat().st_size > 1.2 * MAX_ONE_THREAD_BYTES
    with running_platform(tmp_path / "home", (*SMALL, "--threads", "2")) as platform:
        key = platform.tenant("acme")
        model = platform.upload(key, folder, folder.name)
        before_s = {name: _cpu_s_by_thread(platform.pid(name)) for name in WORKERS}
        answer = complete(platform, key, model, PROMPT, max_tokens=LONG, ignore_eos=True)
        assert answer["choices"][0]["token_ids"] == reference(folder, PROMPT, LONG)
        spent_s = [_spent_s(before_s[name], _cpu_s_by_thread(platform.pid(name))) for name in WORKERS]
        second_s, first_s = max(spent_s, key=sum)  # of the worker that decoded
        assert second_s > first_s / 4, "one thread has computed alone"


def test_two_threads_round_bf16_as_one_does(tmp_path: Path) -> None:
    """In one process: on a platform a worker that a busy machine delays is replaced, and a resumed answer, whose
    tokens are computed as a prompt, rounds otherwise.
    """
    folder = make_checkpoint(tmp_path / "rounded", "llama", dtype="bfloat16", num_hidden_layers=5, **SIZES)
    assert (folder / "model.safetensors").stat().st_size > 1.2 * MAX_ONE_THREAD_BYTES
    alone = _on_threads(1, folder)
    assert len(alone) == LONG
    assert _on_threads(2, folder) == alone


def _spent_s(before_s: dict[str, float], after_s: dict[str, float]) -> list[float]:
    """CPU seconds of the two busiest threads."""
    return sorted(total_s - before_s.get(thread, 0.0) for thread, total_s in after_s.items())[-2:]


def _on_threads(num_threads: int, folder: Path) -> list[int]:
    """The engine's greedy continuation on so many threads of this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        instance = Model(folder).instance(pool_bytes=32 << 20)
        instance.prefill(group_of(PROMPT, sampling=SamplingParams(temperature=0, max_tokens=LONG)))
        return outputs(run(instance))["r/0", 0]
    finally:
        torch.set_num_threads(before)


def _cpu_s_by_thread(pid: int) -> dict[str, float]:
    stats = {path.parent.name: path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")}
    ticks = {thread: int(stat.rpartition(")")[2].split()[11]) for thread, stat in stats.items()}
    return {thread: spent / os.sysconf("SC_CLK_TCK") for thread, spent in ticks.items()}
