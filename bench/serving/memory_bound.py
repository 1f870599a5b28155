"""Single requests against memory bandwidth: every weight is read once per token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from bench.processes import MB
from bench.report import Check, progress
from bench.serving.client import Burst, LoadClient, prompts_of
from bench.serving.models import BenchModel


class Memory:
    """Buffers that all cores read; allocated once, because first touches are slow."""

    def __init__(self, num_bytes: int) -> None:
        self._numbers = torch.ones(num_bytes // 4096 * 512, dtype=torch.int64)
        self._matrix, self._vector = torch.ones(num_bytes // 4096, 1024), torch.ones(1024)

    def read_bytes_per_s(self, num_reads: int = 8) -> float:
        """Bytes per second of the fastest of ``num_reads`` sums and matrix-vector products."""
        best_s = float("inf")
        for _ in range(num_reads):
            for read, operands in ((torch.sum, (self._numbers,)), (torch.mv, (self._matrix, self._vector))):
                begin_s = time.perf_counter()
                read(*operands)
                best_s = min(best_s, time.perf_counter() - begin_s)
        return self._matrix.numel() * self._matrix.element_size() / best_s


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens/s between two bandwidth measurements, and the faster of these."""

    tok_s: float
    read_bytes_per_s: float


def rounds_of(client: LoadClient, model: BenchModel, count: int, num_requests: int, output_tokens: int) -> list[Round]:
    """Rounds that alternate with bandwidth measurements, because a shared machine changes from second to second."""
    memory = Memory(model.step_bytes)
    rates, measured = [memory.read_bytes_per_s()], []
    for _ in range(count):
        [sample] = client.load([Burst(prompts_of(model, num_requests), 1, output_tokens)])
        measured.append(sample.tok_s)
        rates.append(memory.read_bytes_per_s())
    rounds = [Round(tok_s, max(around)) for tok_s, around in zip(measured, pairwise(rates), strict=True)]
    progress(", ".join(f"{each.tok_s:.1f} tok/s at {each.read_bytes_per_s / 1e9:.1f} GB/s" for each in rounds))
    return rounds


def limit_check(model: BenchModel, rounds: Sequence[Round]) -> Check:
    """Check of the median of the rounds."""
    ratios = sorted(each.tok_s * model.step_bytes / each.read_bytes_per_s for each in rounds)
    rate = statistics.median(each.read_bytes_per_s for each in rounds)
    limit = f"{model.step_bytes / MB:.0f} MB a step at {rate / 1e9:.1f} GB/s: {rate / model.step_bytes:.1f} tok/s"
    against = f"{limit}; rounds {ratios[0]:.3f} to {ratios[-1]:.3f}"
    return Check(f"{model.name}_c1_over_limit", statistics.median(ratios), "ratio", 0.65, against, at_least=True)
