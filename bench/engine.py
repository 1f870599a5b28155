"""Tokens per second of the engine through the whole HTTP path, beside vLLM's CPU server and the memory's own limit.

    python bench/engine.py [--quick] [--peer vllm] [--peer-bin PATH]

`torchrelay up` with one worker in both roles and `cpu_reorder` on; random checkpoints; 64 tokens in, 32 out. The peer
gets the same load from the same client in the same run, on all cores. PATH is its `vllm` command, also named by
TORCHRELAY_BENCH_VLLM. Then a prompt seen before, transformers' `generate_batch`, prefill and decode on workers of
their own, and memory; --quick leaves the last three out: each starts processes anew, which alone takes a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.cold_start import Model, first_token_s, publish
from bench.engine_checks import PROMPT_TOKENS, Measured, Sample, apart_checks, memory_checks, model_checks, prefix_check
from bench.engine_memory import await_settled, worker_memory
from bench.engine_models import NUM_BYTES_ALONE, BenchModel, make_models, read_bytes_per_s
from bench.engine_peers import generate_batch_tok_s, vllm_server
from bench.report import Check, finish, progress
from tests.support.platform import Platform, running_platform

ROOT = Path(__file__).resolve().parents[1]
OUTPUT_TOKENS = 32
CONCURRENCIES = (1, 8, 32)
LONG_PROMPT_TOKENS = 1024
BATCHED = 8
ARENA = "/dev/shm/torchrelay-"
LOAD_S = 600.0
BOTH = ("--prefill-workers", "0", "--decode-workers", "0", "--both-workers", "1")
APART = ("--prefill-workers", "1", "--decode-workers", "1")
COMMON = ("--arena-mb", "1280", "--idle-timeout-s", "600", "--kv-pool-mb", "256", "--quiet")


@dataclass(frozen=True, slots=True)
class Door:
    """A server and the name by which it knows a model."""

    port: int
    model: str
    key: str = ""

    def load(self, model: BenchModel, concurrency: int, num_requests: int) -> Sample:
        """Raises ``RuntimeError`` unless every request gave all its tokens."""
        job = {
            "host": "127.0.0.1",
            "port": self.port,
            "path": "/v1/completions",
            "headers": {"Authorization": f"Bearer {self.key}"} if self.key else {},
            "bodies": [self._body(prompt) for prompt in prompts_of(model, num_requests)],
            "num_requests": num_requests,
            "concurrency": concurrency,
        }
        command = [sys.executable, "-m", "bench.engine_load"]
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, cwd=ROOT, timeout=LOAD_S, check=True
        )
        found = json.loads(done.stdout)
        if found["output_tokens"] != num_requests * OUTPUT_TOKENS or found["num_errors"]:
            raise RuntimeError(f"{found['output_tokens']} tokens came for {num_requests} requests: {found}")
        return Sample(found["output_tokens"] / found["seconds"], found["ttft_p50_ms"], found["tbt_p50_ms"])

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        settings = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, **settings}


def prompts_of(model: BenchModel, count: int, num_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Never the same prompt twice in a run: prefixes must not be found again."""
    return [[_random.randrange(NUM_BYTES_ALONE, model.vocab_size) for _ in range(num_tokens)] for _ in range(count)]


_random = random.Random(0)


def sweep(door: Door, model: BenchModel, quick: bool) -> dict[int, Sample]:
    """One sample per concurrency, after one request that nobody counts."""
    door.load(model, 1, 1)
    waves = 1 if quick else 3
    found = {}
    for concurrency in CONCURRENCIES:
        found[concurrency] = sample = door.load(model, concurrency, max(2, concurrency) * waves)
        progress(f"{door.model} at {concurrency}: {sample}")
    return found


@contextmanager
def platform_with(
    root: Path, name: str, workers: tuple[str, ...], models: list[BenchModel], env: dict[str, str]
) -> Iterator[tuple[Platform, list[Door]]]:
    """A running platform and a door to each model."""
    with running_platform(root / name, (*workers, *COMMON), env=env) as platform:
        key = platform.tenant("bench")
        port = int(platform.http.rpartition(":")[2])
        yield platform, [Door(port, publish(platform, each.folder, key, each.name).name, key) for each in models]


def ours(root: Path, models: list[BenchModel], quick: bool) -> Measured:
    """All that one worker in both roles is measured for."""
    samples = {}
    with platform_with(root, "both", BOTH, models, {"TORCHRELAY_CPU_REORDER": "true"}) as (platform, doors):
        for model, door in zip(models, doors, strict=True):
            door.load(model, 1, 1)
            await_settled(platform.pid("worker-0"))
            samples[model.name] = sweep(door, model, quick)
        rate = read_bytes_per_s(models[-1].step_bytes)
        prompt = prompts_of(models[-1], 1, LONG_PROMPT_TOKENS)[0]
        asked = Model(doors[-1].model, "", 0, doors[-1].key)
        ttft_s = [first_token_s(platform, asked, prompt) for _ in range(2)]
    return Measured(samples, rate, ttft_s[1] / ttft_s[0], ttft_s[0])


def theirs(root: Path, command: str, models: list[BenchModel], quick: bool) -> dict[str, dict[int, Sample]]:
    samples = {}
    for model in models:
        progress(f"starting vLLM on {model.name}")
        with vllm_server(command, model.folder, root / "vllm.log") as port:
            samples[model.name] = sweep(Door(port, "peer"), model, quick)
    return samples


def apart(root: Path, model: BenchModel, quick: bool) -> tuple[dict[int, Sample], int]:
    """Prefill and decode on workers of their own: figures, and the decode worker's private bytes."""
    with platform_with(root, "apart", APART, [model], {"TORCHRELAY_CPU_REORDER": "true"}) as (platform, doors):
        doors[0].load(model, 1, 1)
        for worker in ("prefill-0", "decode-0"):
            await_settled(platform.pid(worker))
        samples = sweep(doors[0], model, quick)
        return samples, worker_memory(platform.pid("decode-0"), ARENA).private


def shared(root: Path, model: BenchModel) -> tuple[int, int]:
    """With `cpu_reorder` off: the larger of two workers' private bytes, and what both hold of the arena (PSS)."""
    with platform_with(root, "shared", APART, [model], {"TORCHRELAY_CPU_REORDER": "false"}) as (platform, doors):
        doors[0].load(model, 8, 8)
        found = [worker_memory(platform.pid(worker), ARENA) for worker in ("prefill-0", "decode-0")]
    return max(each.private for each in found), sum(each.arena_share for each in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="fewer requests and figures: about a minute without a peer"
    )
    parser.add_argument("--peer", choices=["vllm"], help="measure it beside")
    parser.add_argument("--peer-bin", default=os.environ.get("TORCHRELAY_BENCH_VLLM", "vllm"), help="its command")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-") as folder:
        root = Path(folder)
        progress("making the checkpoints")
        models = list(make_models(root))
        checks = measure(root, models, options.quick, options.peer_bin if options.peer else "")
    conditions = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "quick": options.quick}
    finish("engine", conditions, checks)


def measure(root: Path, models: list[BenchModel], quick: bool, peer: str) -> list[Check]:
    mid = models[-1]
    mine = ours(root, models, quick)
    peers = theirs(root, peer, models, quick) if peer else {}
    checks = [check for model in models for check in model_checks(model, mine, peers)]
    checks.append(prefix_check(mine))
    if quick:
        return checks
    for model in models:
        tok_s = generate_batch_tok_s(model.folder, prompts_of(model, BATCHED), OUTPUT_TOKENS)
        against = f"transformers, {BATCHED} at once"
        checks.append(Check(f"{model.name}_generate_batch_tok_s", tok_s, "tok/s", None, against))
    split, private_on = apart(root, mid, quick)
    private_off, arena_pss = shared(root, mid)
    checks += apart_checks(mid, mine.samples[mid.name], split)
    return checks + memory_checks(mid, private_off, private_on, arena_pss)


if __name__ == "__main__":
    main()
