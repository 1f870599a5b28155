"""Greedy output equals transformers' generate, token id for token id, through the whole HTTP path and a hand-over."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.conftest import SMALL, Tenant
from tests.support.checkpoints import make_checkpoint, reference_model
from tests.support.completions import complete, stream
from tests.support.platform import Platform, running_platform
from tests.unit.engine.harness import Model, group_of, outputs, run
from torchrelay.engine.core import SamplingParams
from torchrelay.engine.kernels.cpu.threads import MAX_ONE_THREAD_BYTES

pytestmark = pytest.mark.e2e
PROMPT = [(7 * i) % 251 for i in range(1, 90)]
NUM_TOKENS = 24
LONG = 120
WORKERS = ("prefill-0", "decode-0")


def reference(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    generated = reference_model(folder).generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        *product(["llama", "qwen2", "qwen3"], [False, True]),
        *product(["mistral", "gemma2", "gemma3", "phi3", "mixtral", "qwen3-moe"], [True]),
    ],
)
def test_greedy_output_equals_transformers(platform: Platform, tenant: Tenant, family: str, tied: bool) -> None:
    model = tenant.model(family, tied)
    answer = complete(platform, tenant.key, model, PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = reference(tenant.checkpoint(family, tied), PROMPT, NUM_TOKENS)
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS


def test_concurrent_streams_of_many_lengths_are_exact(platform: Platform, tenant: Tenant) -> None:
    model = tenant.model("llama")
    lengths = (1, 2, 17, 64, 65)
    running = [
        stream(platform, tenant.key, model, PROMPT[:length], max_tokens=NUM_TOKENS, ignore_eos=True)
        for length in lengths
    ]
    states = [next(answer) for answer in running]  # all run concurrently
    for answer in running:
        for _ in answer:
            pass
    for state, length in zip(states, lengths, strict=True):
        assert state.token_ids == reference(tenant.checkpoint("llama"), PROMPT[:length], NUM_TOKENS)


def test_two_compute_threads_are_exact(tmp_path: Path) -> None:
    """Small models compute on one core, whatever the threads. What bf16 gives one thread, it gives two."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    exact = make_checkpoint(tmp_path / "exact", "llama", num_key_value_heads=4, **sizes)
    rounded = make_checkpoint(
        tmp_path / "rounded", "llama", dtype="bfloat16", num_key_value_heads=4, num_hidden_layers=5, **sizes
    )
    expected = {exact: reference(exact, PROMPT, LONG), rounded: _on_this_thread(rounded)}
    # Reordered weights, which a CPU with bf16 arithmetic gets in the midst of an answer, round otherwise.
    as_they_are = {"TORCHRELAY_CPU_REORDER": "false"}
    with running_platform(tmp_path / "home", (*SMALL, "--threads", "2"), as_they_are) as platform:
        key = platform.tenant("acme")
        for folder, token_ids in expected.items():
            assert (folder / "model.safetensors").stat().st_size > 1.2 * MAX_ONE_THREAD_BYTES
            model = platform.upload(key, folder, folder.name)
            before_s = {name: _cpu_s_by_thread(platform.pid(name)) for name in WORKERS}
            answer = complete(platform, key, model, PROMPT, max_tokens=LONG, ignore_eos=True)
            assert answer["choices"][0]["token_ids"] == token_ids
            spent_s = [_spent_s(before_s[name], _cpu_s_by_thread(platform.pid(name))) for name in WORKERS]
            second_s, first_s = max(spent_s, key=sum)  # of the worker that decoded
            assert second_s > first_s / 4, "one thread has computed alone"


def _spent_s(before_s: dict[str, float], after_s: dict[str, float]) -> list[float]:
    """CPU seconds of the two busiest threads."""
    return sorted(total_s - before_s.get(thread, 0.0) for thread, total_s in after_s.items())[-2:]


def _on_this_thread(folder: Path) -> list[int]:
    """The engine's own greedy continuation, in this process, on the one thread it has."""
    instance = Model(folder).instance(pool_bytes=32 << 20)
    instance.prefill(group_of(PROMPT, sampling=SamplingParams(temperature=0, max_tokens=LONG)))
    return outputs(run(instance))["r/0", 0]


def _cpu_s_by_thread(pid: int) -> dict[str, float]:
    stats = {path.parent.name: path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")}
    ticks = {thread: int(stat.rpartition(")")[2].split()[11]) for thread, stat in stats.items()}
    return {thread: spent / os.sysconf("SC_CLK_TCK") for thread, spent in ticks.items()}


def test_seed_repeats_the_tokens(platform: Platform, tenant: Tenant) -> None:
    model = tenant.model("llama")
    options = {"max_tokens": 16, "temperature": 1.0, "top_p": 0.9, "ignore_eos": True}
    first, again, other = (
        complete(platform, tenant.key, model, PROMPT[:20], seed=seed, **options)["choices"][0]["token_ids"]
        for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


def test_choices_differ_and_share_the_prompt(platform: Platform, tenant: Tenant) -> None:
    answer = complete(
        platform,
        tenant.key,
        tenant.model("llama"),
        PROMPT[:20],
        n=3,
        seed=3,
        temperature=1.0,
        max_tokens=12,
        ignore_eos=True,
    )
    outputs = [tuple(choice["token_ids"]) for choice in sorted(answer["choices"], key=lambda c: int(c["index"]))]
    assert len(set(outputs)) == 3 and all(len(output) == 12 for output in outputs)
    assert answer["usage"]["prompt_tokens"] == 20 and answer["usage"]["completion_tokens"] == 36
