"""Peers of `engine.py`: vLLM's CPU server, and transformers' `generate_batch`."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.brokers import free_port

START_S = 180.0


@contextmanager
def vllm_server(command: str, folder: Path, log: Path) -> Iterator[int]:
    """Runs vLLM on a free loopback port with all cores; yields the port."""
    port = free_port()
    cores = f"0-{(os.cpu_count() or 1) - 1}"
    settings = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": cores,  # by default it reserves a core for its other processes
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    options = ["--max-model-len", "1024", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [command, "serve", str(folder), "--served-model-name", "peer", *options],
            stdout=output,
            stderr=output,
            env={**os.environ, **settings},
        )
    try:
        _await_health(process, f"http://127.0.0.1:{port}/health", log)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_health(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if httpx.get(url, timeout=2, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")


def load_transformers() -> Any:
    """Imports transformers (untyped) and the parts that are used, which takes seconds."""
    hf: Any = importlib.import_module("transformers")
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # it complains about missing psutil
    hf.logging.disable_progress_bar()
    for name in ("LlamaForCausalLM", "GenerationConfig", "ContinuousBatchingConfig"):
        getattr(hf, name)
    return hf


def generate_batch_tok_s(hf: Any, folder: Path, prompts: list[list[int]], num_tokens: int) -> float:
    """Output tokens/s of transformers' continuous batching with all prompts together."""
    model = hf.LlamaForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="sdpa")
    generation = hf.GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = hf.ContinuousBatchingConfig(max_batch_tokens=512, num_blocks=64)  # same step budget as ours
    begin_s = time.perf_counter()
    outputs = model.eval().generate_batch(
        prompts, generation, batching, record_timestamps=True, progress_bar=False, warmup=False
    )
    seconds = time.perf_counter() - begin_s
    return sum(len(output.generated_tokens) for output in outputs.values()) / seconds
