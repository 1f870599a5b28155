"""Whether the platform names what holds a worker back, on instances whose bottleneck is known.

    python bench/bottleneck.py [--quick]

Each case runs an engine in this process and asks the worker's own metrics for the bottleneck: single answers of a model
that is larger than the caches (memory), long prompts of it (compute), layers that arrive more slowly than they are
computed (io_wait), prompts whose keys and values another instance takes over (kv_transfer), a tiny model whose answers
list many tokens (scheduling).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import Check, finish, parser_of, progress
from torchrelay.engine.buffers import as_tensor
from torchrelay.engine.core import ChoiceSpec, GroupSpec, KvBlock, SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.pool import KvPool
from torchrelay.engine.warm_up import warm_up
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.tensor_order import tensors_by_segment
from torchrelay.transfer.pack_layout import PackLayout
from torchrelay.worker.metrics.step_floor import StepFloor
from torchrelay.worker.metrics.step_metrics import InstanceLabels, StepMetrics
from torchrelay.worker.metrics.time_shares import TimeShares, bottleneck

LARGE: dict[str, Any] = {
    "hidden_size": 1536, "num_hidden_layers": 12, "intermediate_size": 4096, "num_attention_heads": 12,
    "num_key_value_heads": 4, "vocab_size": 16_384,
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4096,
}  # fmt: skip
WIDE_KV: dict[str, Any] = {  # much KV, little computation
    "hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 64, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 512,
}  # fmt: skip
LABELS = InstanceLabels("i-1", "bench/model", "pack", "prefill+decode")
POOL_BYTES = 256 << 20
GREEDY = SamplingParams(temperature=0, max_tokens=1)
_numbers = count()


class Worker:
    """An instance with random weights, and the metrics of its steps."""

    def __init__(self, pool: KvPool, read_rate: float, shape: dict[str, Any], is_loaded: bool = True) -> None:
        document = {
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "dtype": "bfloat16",
            **shape,
        }
        layout = PackLayout.of(tensors_by_segment(read_config(document)), "BF16")
        data = bytearray(layout.num_bytes)
        as_tensor(memoryview(data)).view(torch.bfloat16).normal_(std=0.02)
        manifest = layout.local_manifest(document)
        self.instance = Instance(manifest, memoryview(data), pool, prefix_cache=False)
        self.num_segments = len(manifest.segments)
        self.metrics, self._floor = StepMetrics(), StepFloor.of(manifest, read_rate)
        for segment in range(self.num_segments if is_loaded else 0):
            self.instance.segment_ready(segment)

    def group(self, num_tokens: int, sampling: SamplingParams = GREEDY) -> GroupSpec:
        number = next(_numbers)
        prompt = tuple((i * 7 + number * 13) % 400 + 1 for i in range(num_tokens))
        return GroupSpec(f"{number}/0", prompt, num_tokens, sampling, (ChoiceSpec(0),))

    def run(self) -> None:
        """Steps until there is nothing to do."""
        while self.instance.has_work():
            self.metrics.record_step(self.instance.step(), LABELS, self._floor)

    @property
    def time_shares(self) -> TimeShares:
        return self.metrics.time_shares_of(LABELS)


def single_answers(worker: Worker) -> None:
    worker.instance.prefill(worker.group(8, SamplingParams(temperature=0, max_tokens=64)))
    worker.run()


def long_prompts(worker: Worker) -> None:
    worker.instance.prefill(worker.group(512))
    worker.run()


def listed_tokens(worker: Worker) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.9, top_logprobs=20, frequency_penalty=0.5, max_tokens=64)
    worker.instance.prefill(worker.group(8, sampling))
    worker.run()


def late_layers(worker: Worker) -> None:
    """A prompt on an instance whose layers arrive 20 ms apart."""
    worker.instance.prefill(worker.group(16))

    def load() -> None:
        for segment in range(worker.num_segments):
            time.sleep(0.02)
            worker.instance.segment_ready(segment)

    loading = threading.Thread(target=load)
    loading.start()
    while loading.is_alive() or worker.instance.has_work():
        worker.run()
        time.sleep(0.0005)
    loading.join()


def taken_over(worker: Worker) -> None:
    """Keys and values that another worker computed, for an answer of two tokens."""
    group, blocks = worker.group(2000, SamplingParams(temperature=0, max_tokens=2)), []

    def copy_out(block: KvBlock) -> None:
        blocks.append((block.index, bytes(block.data)))

    sender = worker.instance
    sender.prefill(group, copy_out)
    while sender.has_work():
        sender.step()  # of the other worker
    receiver = sender.import_kv(group, sender.kv_layout(group))
    for index, data in blocks:
        receiver.write(index, data)
    receiver.start({0: 1})
    worker.run()


def cases() -> Iterator[tuple[str, dict[str, Any], Callable[[Worker], None]]]:
    yield "memory", LARGE, single_answers
    yield "compute", LARGE, long_prompts
    yield "io_wait", LARGE, late_layers
    yield "kv_transfer", WIDE_KV, taken_over
    yield "scheduling", TINY, listed_tokens


def main() -> None:
    quick = parser_of(__doc__, "one run of each case, under 50 s").parse_args().quick
    num_runs = 1 if quick else 5
    pool = KvPool(POOL_BYTES)
    warm_up(pool)
    read_rate = pool.read_rate()
    progress(f"the memory is read at {read_rate / 1e9:.1f} GB/s")
    checks = []
    for name, shape, work in cases():
        rights = []
        for _ in range(num_runs):
            worker = Worker(pool, read_rate, shape, is_loaded=work is not late_layers)
            for _ in range(1 if work is late_layers else 3):
                work(worker)
            named, shares = bottleneck(worker.time_shares), worker.time_shares
            rights.append(named == name)
            progress(f"{name}: named {named}; {shares}")
            worker.instance.close()
        against = f"the known bottleneck; last share of {name}: {getattr(shares, name):.2f}"
        checks.append(Check(f"right_{name}", sum(rights) / num_runs, "share", 1.0, against, at_least=True))
    finish("bottleneck", {"runs": num_runs, "threads": torch.get_num_threads()}, checks)


if __name__ == "__main__":
    main()
