"""vLLM's start in a slot: what it refuses is named, and a start that computes counts as progress."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.llm_engine import LLMEngine

from tests.integration.roles_testbed import DECODE, PREFILL, RunningWorker, model_version, running_test_worker
from tests.support.checkpoints import make_checkpoint
from tests.support.wait import eventually
from tests.unit.param_store.running_store import REMOTE, publish, running_store
from torchrelay.engine.core import ChoiceSpec, GroupSpec, SamplingParams, StepResult
from torchrelay.vllm.computed_time import ComputedTime, main_thread_tenths
from torchrelay.vllm.served_model import VllmModel
from torchrelay.worker.slot.slot import FREE, LOADING


@asynccontextmanager
async def loading(folder: Path, checkpoint: Path, nats_url: str, **settings: Any) -> AsyncIterator[RunningWorker]:
    async with running_store(folder) as store:
        description = await publish(store, checkpoint)
        await store.relay(description.pack_id, REMOTE)
        async with running_test_worker(nats_url, store, engine="vllm", **settings) as worker:
            await worker.load(model_version(description), [PREFILL, DECODE])
            yield worker


async def test_a_config_that_vllm_refuses_fails_the_load_with_its_reason(tmp_path: Path, nats_url: str) -> None:
    # Attention on a CPU has no heads of 16 dimensions.
    checkpoint = make_checkpoint(tmp_path / "llama", "llama", head_dim=16)
    async with loading(tmp_path, checkpoint, nats_url) as worker:
        slot = worker.worker.slot
        await eventually(lambda: slot.state == FREE and slot.error, "the end of the load")
        assert "vLLM does not serve this model in this slot: " in slot.error
        assert "head" in slot.error and "16" in slot.error


async def test_a_pool_below_two_blocks_fails_the_load(tmp_path: Path, nats_url: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "llama", "llama", head_dim=512)
    async with loading(tmp_path, checkpoint, nats_url, kv_pool_bytes=1 << 20) as worker:
        slot = worker.worker.slot
        await eventually(lambda: slot.state == FREE and slot.error, "the end of the load")
        assert slot.error == "vLLM needs a KV pool of at least 6291456 bytes for this model, not 1048576"


async def test_the_slot_is_ready_once_vllm_computes_and_each_waiting_choice_is_cancelled_alone(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, step = VllmModel._build, VllmModel.step
    seen: list[int] = []  # states of the slot after the last bytes
    ended: list[int] = []

    def start_late(model: VllmModel) -> LLMEngine:
        sampling, choices = SamplingParams(temperature=0, max_tokens=2), tuple(map(ChoiceSpec, range(3)))
        model.prefill(GroupSpec("r/0", (1, 2, 3), 3, sampling, choices))
        model.cancel("r/0", 1)
        vllm = start(model)  # which has taken the last bytes
        seen.append(slot.state)
        return vllm

    def watched_step(model: VllmModel) -> StepResult:
        result = step(model)
        ended.extend(token.choice for token in result.tokens if token.finish is not None)
        return result

    monkeypatch.setattr(VllmModel, "_build", start_late)
    monkeypatch.setattr(VllmModel, "step", watched_step)
    checkpoint = make_checkpoint(tmp_path / "llama", "llama", head_dim=32)
    async with loading(tmp_path, checkpoint, nats_url, kv_pool_bytes=8 << 20) as worker:
        slot = worker.worker.slot
        await worker.until_ready()
        assert seen == [LOADING]
        assert [phase.name for phase in slot.report().load_phases][-2:] == ["last_layer", "engine"]
        await eventually(lambda: sorted(ended) == [0, 2], "the other choices")


def test_computed_time_is_that_of_its_own_thread() -> None:
    mine, begun_s = ComputedTime(), time.monotonic()
    before = mine.tenths
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(ComputedTime).result()
        while mine.tenths < before + 3 and time.monotonic() - begun_s < 60:
            sum(range(10_000))
        assert (mine.tenths >= before + 3, waiting.tenths) == (True, 0)


SPINNING_HELPER = """
import sys, threading, time

def spin():
    while time.thread_time() < 1:
        pass

helper = threading.Thread(target=spin)
helper.start()
helper.join()
print(time.thread_time(), flush=True)
sys.stdin.read()
"""


def test_computed_time_of_a_process_is_that_of_its_main_thread() -> None:
    command = (sys.executable, "-c", SPINNING_HELPER)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        main_thread_s = float(process.stdout.readline())
        assert abs(main_thread_tenths(process.pid) - 10 * main_thread_s) < 2
    assert main_thread_tenths(process.pid) == 0
