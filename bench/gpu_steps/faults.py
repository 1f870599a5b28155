"""Too little memory, a worker that is killed in a step, and a fault of the device: each ends well."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench.device import engine, limits
from bench.device.faulting_worker import faulting_workers
from bench.device.packs import random_pack
from bench.gpu_steps.machine import used_mb
from bench.gpu_steps.platform import BOTH, COMMON, small_model
from bench.gpu_steps.step import Setup, at_least, at_most, figure, on_gpu
from bench.report import Check
from tests.support.completions import headers, stream
from tests.support.http import http
from tests.support.platform import Platform, running_platform
from tests.support.wait import wait_until
from torchrelay.common.errors import InvalidRequest
from torchrelay.common.host.machine import Machine
from torchrelay.engine.core import LoadFailed
from torchrelay.worker.device import gpus_of, with_sizes
from torchrelay.worker.settings import WorkerSettings

TOO_MANY_BYTES = 1 << 50
PROMPT = list(range(20, 40))
NUM_TOKENS = 8


def faults(setup: Setup) -> Iterator[Check]:
    start_mb = used_mb(setup)
    settings = WorkerSettings(
        worker_id="bench", node_key="00" * 32, device=str(setup.device), kv_pool_bytes=TOO_MANY_BYTES
    )
    sentence = _refusal(lambda: with_sizes(settings, gpus_of(settings), Machine.here()))
    yield at_least(1, figure("pool_refused", int(bool(sentence)), "", sentence))
    yield from _full_device(setup)
    if setup.is_gpu:
        torch.cuda.empty_cache()
    yield from _ended_workers(setup, start_mb)


def _full_device(setup: Setup) -> Iterator[Check]:
    """A pack, and a step, that find no memory on the device; another instance computes then."""
    pack = random_pack(setup.sizes.exact_config, "F32", setup.device)
    pool = engine.pool_of(setup.sizes.exact_config, 1024, setup.device, item_bytes=4)
    link = limits.link_of(setup.device)
    space = link.space
    link.space = lambda num_bytes: space(num_bytes + TOO_MANY_BYTES)  # type: ignore[method-assign]
    instance = engine.instance_of(pack, pool, link=link, is_loaded=False)
    sentence = _refusal(lambda: engine.loaded(instance))
    yield at_least(1, figure("pack_refused", int(bool(sentence)), "", sentence.partition("\n")[0]))
    instance.close()
    takes_all, outputs, failure = threading.Event(), list[list[list[int]]](), ""

    def between_layers() -> None:
        if takes_all.is_set():
            torch.empty(TOO_MANY_BYTES, dtype=torch.uint8, device=setup.device)

    for number in range(3):
        instance = engine.instance_of(pack, pool, attention=setup.attention, between_layers=between_layers)
        if number == 1:
            takes_all.set()
        try:
            outputs.append(engine.greedy(instance, [PROMPT], NUM_TOKENS))
        except RuntimeError as error:  # torch's OutOfMemoryError is one
            failure = str(error).partition("\n")[0]
        takes_all.clear()
        instance.close()
    wrong = int(len(outputs) != 2 or outputs[0] != outputs[1])
    yield at_most(0, figure("out_of_memory_mismatches", wrong, "prompts", f"after a step with: {failure}"[:120]))


def _refusal(act: Callable[[], object]) -> str:
    """The sentence with which the act is refused; empty if it is not."""
    try:
        act()
    except (InvalidRequest, LoadFailed) as error:
        return error.message
    return ""


def _ended_workers(setup: Setup, start_mb: float) -> Iterator[Check]:
    """A worker is killed, and has a fault of its device, while it streams; then how long until it answers again."""
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as name:
        folder = Path(name)
        environment = faulting_workers(folder / "python")
        device = ("--device", str(setup.device))
        with running_platform(folder / "home", (*BOTH, *COMMON, *device), environment) as platform:
            key = platform.tenant("bench")
            model = platform.upload(key, small_model(folder, setup), "model")
            for name, number in (("kill", signal.SIGKILL), ("fault", signal.SIGUSR1)):
                begin_s = _end_in_a_step(platform, key, model, number)
                wait_until(lambda: _answers(platform, key, model), f"an answer after the {name}")
                yield at_most(30, figure(f"back_after_{name}_s", time.monotonic() - begin_s, "s", "of a new request"))
            log = (platform.home.logs / "worker-0.log").read_text()
            yield at_least(1, figure("failed_steps", log.count('"engine_step_failed"'), "", "in the worker's log"))
    growth = figure("faults_growth_mb", used_mb(setup) - start_mb, "MB", "after the platform has ended")
    yield on_gpu(setup, at_most(200, growth))


def _end_in_a_step(platform: Platform, key: str, model: str, number: signal.Signals) -> float:
    """Signals the worker while it streams an answer, and reads the rest of that; returns when it was sent."""
    answer = stream(platform, key, model, PROMPT, max_tokens=200, ignore_eos=True)
    for state in answer:
        if state.token_ids:
            break
    begin_s = time.monotonic()
    os.kill(platform.pid("worker-0"), number)
    for _ in answer:
        pass
    return begin_s


def _answers(platform: Platform, key: str, model: str) -> bool:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 2}
    return http.post(f"{platform.http}/v1/completions", json=body, headers=headers(key)).status_code == 200
