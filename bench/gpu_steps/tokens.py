"""Greedy tokens in fp32: the same on the GPU, recorded or not, on the CPU, and by transformers."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.device.engine import greedy, instance_of, loaded
from bench.device.packs import Pack, pack_of_checkpoint
from bench.gpu_steps.step import Setup, at_most, figure
from bench.report import Check
from tests.support.checkpoints import greedy_reference, make_checkpoint, reference_model
from torchrelay.engine.instance import Instance
from torchrelay.engine.kv.pool import KvPool

BUDGET = 512
KINDS = ("triton", "eager", "gather", "cpu")  # recorded, not recorded, the plain backend, the CPU's own kernels


def _instance(kind: str, pack: Pack, pool_bytes: int, device: torch.device) -> Instance:
    if kind == "cpu":
        return loaded(Instance(pack.manifest, pack.data, KvPool(pool_bytes), BUDGET, prefix_cache=False))
    attention = "gather" if kind == "gather" else "triton"
    return instance_of(pack, KvPool(pool_bytes, str(device)), BUDGET, attention, records=kind == "triton")


def tokens(setup: Setup) -> Iterator[Check]:
    """Batches of these prompts in turn; another one joins each batch after its second step."""
    sizes, wrong, total = setup.sizes, Counter[str](), 0
    prompts = [[(i * i * 31 + i * 7 + 5) % 256 for i in range(length)] for length in sizes.lengths]
    batches = [[prompts[number % len(prompts)] for number in range(batch + 1)] for batch in sizes.token_batches]
    pool_bytes = (max(sizes.token_batches) + 1) * (max(sizes.lengths) + 64) << 11
    with tempfile.TemporaryDirectory() as folder:
        for family in sizes.families:
            checkpoint = make_checkpoint(Path(folder) / family, family, head_dim=32, **sizes.family_config)
            reference = reference_model(checkpoint)
            expected = [greedy_reference(reference, prompt, sizes.num_tokens) for prompt in prompts]
            pack = pack_of_checkpoint(checkpoint)
            for kind in KINDS:
                instance = _instance(kind, pack, pool_bytes, setup.device)
                for batch in batches:
                    outputs = greedy(instance, batch, sizes.num_tokens, joins_after=2)
                    wrong[kind] += sum(
                        output != expected[number % len(prompts)] for number, output in enumerate(outputs)
                    )
                instance.close()
            total += sum(map(len, batches))
    against = f"of {total} greedy continuations, transformers on the CPU"
    for kind in KINDS:
        yield at_most(0, figure(f"{kind}_mismatches", wrong[kind], "prompts", against))
