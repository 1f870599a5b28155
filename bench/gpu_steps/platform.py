"""`torchrelay up` on the device: upload, a call, scale to zero, another call, and what `explain` and `top` tell."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.gpu_steps.step import Setup, absent, at_least, at_most, figure
from bench.random_checkpoint import LLAMA_33MB
from bench.report import Check
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete
from tests.support.platform import Platform, running_platform

COMMON = ("--arena-mb", "512", "--threads", "1", "--quiet")
APART = ("--prefill-workers", "1", "--decode-workers", "1")
BOTH = ("--prefill-workers", "0", "--decode-workers", "0", "--both-workers", "1")
PROMPT = list(range(20, 52))
NUM_CALLERS = 8


def small_model(folder: Path, setup: Setup) -> Path:
    """A checkpoint of 33 MB; of a layer in a dry run."""
    return make_checkpoint(folder / "small", "llama", **({"num_hidden_layers": 1} if setup.dry else LLAMA_33MB))


def platform(setup: Setup) -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as name:
        folder = Path(name)
        checkpoint = small_model(folder, setup)
        layouts = {"both": BOTH, "apart": APART}
        if torch.cuda.device_count() < 2:
            del layouts["apart"]  # each worker needs a GPU of its own; a dry run starts the platform once
        for layout, workers in layouts.items():
            options = (*workers, *COMMON, "--device", "auto", "--idle-timeout-s", "1")
            with running_platform(folder / layout, options) as running:
                key, begin_s = running.tenant("bench"), time.monotonic()
                model = running.upload(key, checkpoint, "model")
                if layout == "both":
                    size_mb = (checkpoint / "model.safetensors").stat().st_size / 1e6
                    yield figure("upload_s", time.monotonic() - begin_s, "s", f"{size_mb:.1f} MB")
                    yield from _cold_calls(running, key, model)
                against = f"{NUM_CALLERS} callers, {' '.join(workers)}"
                yield figure(f"{layout}_tok_s", _rate(running, key, model), "tok/s", against)


def _call_s(running: Platform, key: str, model: str, **options: Any) -> tuple[float, str]:
    begin_s = time.monotonic()
    answer = complete(running, key, model, PROMPT, ignore_eos=True, **options)
    return time.monotonic() - begin_s, str(answer["id"])


def _cold_calls(running: Platform, key: str, model: str) -> Iterator[Check]:
    seconds, _ = _call_s(running, key, model, max_tokens=4)
    yield figure("first_call_s", seconds, "s", "the model is published and at zero; kernels may be compiled")
    running.await_zero()
    seconds, request_id = _call_s(running, key, model, max_tokens=4)
    yield figure("second_call_s", seconds, "s", "the pack is in the arena")
    top = running.cli("top", "--once")
    yield at_least(1, figure("top_names_model", model in top.replace("\n", ""), "", "and its worker"))
    phases = json.loads(running.cli("explain", "--json", request_id))["phases"]
    spans = {phase["name"]: (phase["begin_unix_us"] / 1e6, phase["end_unix_us"] / 1e6) for phase in phases}
    covered_s, end_s = 0.0, 0.0
    for begin, end in sorted(spans.values()):
        covered_s += max(end - max(begin, end_s), 0.0)
        end_s = max(end, end_s)
    longest = ", ".join(f"{name} {(end - begin) * 1e3:.0f} ms" for name, (begin, end) in spans.items())
    yield at_most(30, figure("unexplained_ms", (seconds - covered_s) * 1e3, "ms", f"of {seconds * 1e3:.0f}: {longest}"))
    if "engine" in spans:
        late_s = spans["engine"][1] - spans["last_layer"][1]
        yield at_least(0, figure("ready_after_last_layer_s", late_s, "s", "until the last copy has ended"))
    else:
        yield absent("ready_after_last_layer_s", "the engine had no copies to wait for")


def _rate(running: Platform, key: str, model: str) -> float:
    """Tokens per second of some callers at once; of three rounds after a first one, the median."""
    ended_s = []
    with ThreadPoolExecutor(NUM_CALLERS) as callers:
        for _ in range(5):
            list(callers.map(lambda _: _call_s(running, key, model, max_tokens=32), range(NUM_CALLERS)))
            ended_s.append(time.monotonic())
    return 32 * NUM_CALLERS / statistics.median(end - begin for begin, end in pairwise(ended_s))
