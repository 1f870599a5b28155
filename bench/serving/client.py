"""The load that `engine.py` sends to a server from a separate process."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.serving.models import NUM_BYTES_ALONE, BenchModel

ROOT: Final = Path(__file__).resolve().parents[2]
LOAD_S: Final = 600.0
PROMPT_TOKENS: Final = 64
_random = random.Random(0)


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests to send, tokens of each, and the processes whose CPU time counts."""

    prompts: list[list[int]]
    concurrency: int
    output_tokens: int
    workers: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """Output tokens/s, median latencies, and each worker's CPU time per token."""

    tok_s: float
    ttft_ms: float
    tbt_ms: float
    cpu_ms: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"{self.tok_s:.1f} tok/s, TTFT {self.ttft_ms:.0f} ms, TBT {self.tbt_ms:.1f} ms"

    @property
    def cpu(self) -> str:
        return " + ".join(f"{each:.1f}" for each in self.cpu_ms)


@dataclass(frozen=True, slots=True)
class LoadClient:
    """A server, and its name of a model."""

    port: int
    model: str
    key: str = ""

    def load(self, bursts: Sequence[Burst]) -> list[Sample]:
        """Sends the bursts in turn; returns a sample of each. Raises ``RuntimeError`` unless all tokens arrived."""
        done = subprocess.run(
            [sys.executable, "-m", "bench.streaming.timed_load"],
            input=json.dumps([self._job(burst) for burst in bursts]),
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=LOAD_S,
            check=True,
        )
        samples = []
        for burst, figures in zip(bursts, json.loads(done.stdout), strict=True):
            num_tokens = figures["output_tokens"]
            if num_tokens != len(burst.prompts) * burst.output_tokens or figures["num_errors"]:
                raise RuntimeError(f"{num_tokens} tokens arrived for {len(burst.prompts)} requests: {figures}")
            cpu_ms = tuple(seconds / num_tokens * 1000 for seconds in figures["cpu_s"])
            tok_s = num_tokens / figures["seconds"]
            samples.append(Sample(tok_s, figures["ttft_p50_ms"], figures["tbt_p50_ms"], cpu_ms))
        return samples

    def _job(self, burst: Burst) -> dict[str, Any]:
        settings = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.model, "max_tokens": burst.output_tokens, **settings}
        return {
            "host": "127.0.0.1",
            "port": self.port,
            "path": "/v1/completions",
            "headers": {"Authorization": f"Bearer {self.key}"} if self.key else {},
            "bodies": [{**body, "prompt": prompt} for prompt in burst.prompts],
            "num_requests": len(burst.prompts),
            "concurrency": burst.concurrency,
            "workers": list(burst.workers),
        }


def prompts_of(model: BenchModel, count: int, num_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Random prompts that do not repeat in a run, so that the prefix cache does not help."""
    return [[_random.randrange(NUM_BYTES_ALONE, model.vocab_size) for _ in range(num_tokens)] for _ in range(count)]
