"""Tokens per second of eight adapters in one batch, against their base alone, and the time an adapter takes to wake.

    python bench/lora.py [--quick]

One instance in this process, with random weights of the mid model in bf16 (583 MB; a third of its layers with
--quick), decodes eight prompts: all of the base, then each of its own adapter, in turns. The adapters have rank 16 in
all seven projections. An adapter wakes from PEFT's files in memory, in fp32: from there to the first token of a prompt
of 64 tokens, minus the time when the instance has it already.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.cold_start import MID
from bench.report import Check, finish, parser_of, progress
from bench.serving.models import LLAMA
from torchrelay.engine.buffers import as_tensor
from torchrelay.engine.core import ChoiceSpec, GroupSpec, SamplingParams
from torchrelay.engine.instance import Instance
from torchrelay.engine.kernels.low_rank import Adapter
from torchrelay.engine.kv.pool import KvPool
from torchrelay.modelspec.adapter import PROJECTIONS
from torchrelay.modelspec.config import read_config
from torchrelay.modelspec.tensor_order import tensors_by_segment
from torchrelay.transfer.pack_layout import PackLayout

NUM_ADAPTERS: Final = 8
RANK: Final = 16
PROMPT_TOKENS: Final = 64
_numbers = count()
_random = torch.Generator().manual_seed(0)
DOCUMENT: Final = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 2 * RANK,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def make_instance(num_layers: int) -> Instance:
    """The mid model with random weights, all of them there."""
    document: dict[str, Any] = {**LLAMA, **MID, "num_hidden_layers": num_layers, "dtype": "bfloat16"}
    layout = PackLayout.of(tensors_by_segment(read_config(document)), "BF16")
    data = bytearray(layout.num_bytes)
    for entry in layout.tensors:
        place = as_tensor(memoryview(data)[entry.offset : entry.offset + entry.num_bytes]).view(torch.bfloat16)
        if len(entry.shape) == 1:
            place.fill_(1)
        else:
            place.normal_(std=entry.shape[-1] ** -0.5, generator=_random)
    instance = Instance(layout.local_manifest(document), memoryview(data), KvPool(64 << 20), prefix_cache=False)
    for segment in range(num_layers + 2):
        instance.segment_ready(segment)
    return instance


def make_adapter_file(instance: Instance) -> bytes:
    """adapter_model.safetensors with random weights, in fp32 as PEFT trains them."""
    tensors = {}
    for tensors_of_segment in tensors_by_segment(instance.config):
        for spec in tensors_of_segment:
            if spec.group in PROJECTIONS:
                name = f"base_model.model.{spec.name.removesuffix('.weight')}"
                num_out, num_in = spec.shape
                tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, num_in, generator=_random) / num_in**0.5
                tensors[f"{name}.lora_B.weight"] = torch.randn(num_out, RANK, generator=_random) / 16
    return save(tensors)


def read(instance: Instance, file: bytes) -> Adapter:
    return instance.adapter_reader(f"adapter-{next(_numbers)}", json.dumps(DOCUMENT).encode(), file).read()


def start(instance: Instance, adapter: Adapter | None, num_tokens: int) -> None:
    number = next(_numbers)
    prompt = tuple((i * 7 + number * 13) % 4000 + 1 for i in range(PROMPT_TOKENS))
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens)
    instance.prefill(GroupSpec(f"{number}/0", prompt, len(prompt), sampling, (ChoiceSpec(0),), adapter=adapter))


def step_times(instance: Instance, adapters: Sequence[Adapter | None], num_steps: int) -> Iterator[float]:
    """The duration of each step in which all of the choices decode."""
    for adapter in adapters:
        start(instance, adapter, num_steps + 2)
    while instance.has_work():
        begin_s = time.perf_counter()
        result = instance.step()
        if result.num_positions_decoded == len(adapters) and not result.num_positions_prefilled:
            yield time.perf_counter() - begin_s


def first_token_s(instance: Instance, adapter: Adapter) -> float:
    begin_s = time.perf_counter()
    start(instance, adapter, 1)
    while instance.has_work():
        instance.step()
    return time.perf_counter() - begin_s


def wake_s(instance: Instance, file: bytes) -> tuple[float, float]:
    """The time from an adapter's files in memory to a first token, and that of a further first token."""
    begin_s = time.perf_counter()
    adapter = read(instance, file)
    cold_s = time.perf_counter() - begin_s + first_token_s(instance, adapter)
    return cold_s, first_token_s(instance, adapter)


def main() -> None:
    options = parser_of(__doc__, "a third of the layers and fewer steps, under 50 s").parse_args()
    num_layers, num_steps, num_rounds = (8, 12, 3) if options.quick else (24, 32, 9)
    progress(f"making the model of {num_layers} layers and {NUM_ADAPTERS} adapters")
    instance = make_instance(num_layers)
    files = [make_adapter_file(instance) for _ in range(NUM_ADAPTERS)]
    adapters = [read(instance, file) for file in files]
    pairs = []
    for _ in range(num_rounds):  # in turns, and the fastest step of each: a shared machine interrupts the others
        base, mixed = (min(step_times(instance, of, num_steps)) for of in ([None] * NUM_ADAPTERS, adapters))
        pairs.append((base, mixed))
        progress(
            f"a step of {NUM_ADAPTERS} rows: {base * 1000:.1f} ms of the base, {mixed * 1000:.1f} ms with adapters"
        )
    cold, warm = (min(times) * 1000 for times in zip(*(wake_s(instance, file) for file in files), strict=True))
    base, mixed = (statistics.median(times) for times in zip(*pairs, strict=True))
    against = f"{NUM_ADAPTERS / mixed:.1f} over {NUM_ADAPTERS / base:.1f} tok/s; rank {RANK}, all projections"
    size = f"{len(files[0]) / 1e6:.0f} MB of files; {cold:.1f} less {warm:.1f} ms, the fastest of {NUM_ADAPTERS}"
    conditions = {"layers": num_layers, "rank": RANK, "prompt_tokens": PROMPT_TOKENS, "quick": options.quick}
    ratio = statistics.median(base / mixed for base, mixed in pairs)
    checks = [
        Check("lora_over_base_c8", ratio, "ratio", 0.85, against, at_least=True),
        Check("adapter_wake_ms", cold - warm, "ms", 30, size),
    ]
    finish("lora", conditions, checks)


if __name__ == "__main__":
    main()
