"""Recorded decode steps. A replay is a call here, on the same fixed batches."""

from __future__ import annotations

import shutil
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.calling_capturer import CallingCapturer
from tests.support.checkpoints import make_headless
from tests.unit.engine.harness import Model, ModelOf, answer, assert_idle, group_of, load_rest, outputs, prompt_of, run
from tests.unit.engine.kernels.test_attention import DEVICE
from torchrelay.common.latency.latency_model import NO_WORK
from torchrelay.engine.core import EMPTY_STEP, SamplingParams
from torchrelay.engine.device_counts import DECODE_STEPS
from torchrelay.engine.execution.decode_graphs import BATCH_SIZES, SIZES_AHEAD, batch_size_for
from torchrelay.engine.instance import Instance
from torchrelay.engine.kernels.attention import AttentionBackend
from torchrelay.engine.kernels.backends import Backends, backends_for
from torchrelay.engine.kernels.capture import Capturer, Replay
from torchrelay.engine.kernels.gather_attention import GatherAttention
from torchrelay.engine.model.batch import Batch
from torchrelay.engine.model.decoder import Decoder

SAMPLING = SamplingParams(temperature=0, max_tokens=4)
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}  # the interpreter is slow


class Counting(CallingCapturer):
    """Counts recordings and replays."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def capture(self, compute: Replay) -> Replay:
        self.num_recorded += 1

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            return compute()

        return replay


def recording(capturer: Capturer, attention: str = "triton") -> Backends:
    return replace(backends_for(DEVICE, attention), capturer=capturer)


@pytest.mark.parametrize(
    ("num_decoding", "num_chunks", "layer", "expected"),
    [
        (1, 0, 0, 1),
        (3, 0, 0, 4),
        (4, 0, 0, 4),
        (5, 0, 0, 8),
        (256, 0, 0, 256),
        (257, 0, 0, None),  # larger than any recording
        (0, 0, 0, None),
        (4, 1, 0, None),  # prompts are of any length
        (4, 0, 2, None),  # begins with hidden states
    ],
)
def test_batch_size_for_batch_shape(num_decoding: int, num_chunks: int, layer: int, expected: int | None) -> None:
    assert batch_size_for(num_decoding, num_chunks, layer) == expected


@pytest.mark.parametrize("options", [ONE_LAYER, {"family": "gemma3"}], ids=["one layer", "windows"])
def test_replayed_output_is_exact(model_of: ModelOf, options: dict[str, Any]) -> None:
    """Batches shrink as sequences end: each of three sizes is recorded once, one with a padding row."""
    model, capturer = model_of(**options), Counting()
    instance = model.instance(backends=recording(capturer), page_tokens=8, device=str(DEVICE))
    expected = {}
    for number, length in enumerate((3, 9, 24)):
        prompt, sampling = prompt_of(length), SamplingParams(temperature=0, max_tokens=2 + number)
        expected[f"{number}/0", 0] = model.expected(prompt, sampling.max_tokens)
        instance.prefill(group_of(prompt, f"{number}/0", sampling))
    before = dict(DECODE_STEPS)
    steps = run(instance)
    assert outputs(steps) == expected
    num_mixed = len([step for step in steps if step.num_positions_prefilled and step.num_positions_decoded])
    counted = {kind: count - before.get(kind, 0) for kind, count in DECODE_STEPS.items()}
    assert (counted.get("eager", 0), counted["replayed"]) == (num_mixed, capturer.num_replayed)
    decode_only = [step.num_positions_decoded for step in steps if not step.num_positions_prefilled]
    assert capturer.num_replayed == len(decode_only)
    assert capturer.num_recorded == len({batch_size_for(rows, 0, 0) for rows in decode_only}) >= 3
    assert_idle(instance)


def test_recording_is_visible_to_watchers(model_of: ModelOf) -> None:
    seen: list[tuple[bool, int]] = []

    class Watched(CallingCapturer):
        def capture(self, compute: Replay) -> Replay:
            seen.append((instance.is_recording, instance.num_advances))

            def replay() -> torch.Tensor:
                seen.append((instance.is_recording, instance.num_advances))
                return compute()

            return replay

    instance = model_of(**ONE_LAYER).instance(backends=recording(Watched()), device=str(DEVICE))
    instance.prefill(group_of(prompt_of(5), sampling=SAMPLING))
    run(instance)
    (is_recording, before), (is_still_recording, after), *replays = seen
    assert is_recording and not is_still_recording and after > before
    assert len(replays) == SAMPLING.max_tokens - 2 and not any(each for each, _ in replays)


def test_steps_that_record_or_compile_predict_nothing(model_of: ModelOf) -> None:
    class Compiling(Counting):
        """Records, and compiles a kernel at the second replay."""

        def capture(self, compute: Replay) -> Replay:
            replay = super().capture(compute)

            def compile_and_replay() -> torch.Tensor:
                if self.num_replayed == 1:
                    running.append("kernel")
                    assert instance.is_recording, "watchers would take the step for one that hangs"
                    before = instance.num_advances
                    compiled.append(running.pop())
                    assert not instance.is_recording and instance.num_advances == before + 1
                return replay()

            return compile_and_replay

    running: list[str] = []
    compiled: list[str] = []
    backends = replace(recording(Compiling()), num_compiled=lambda: len(compiled), is_compiling=lambda: bool(running))
    instance = model_of(**ONE_LAYER).instance(backends=backends, device=str(DEVICE))
    instance.prefill(group_of(prompt_of(5), sampling=SamplingParams(temperature=0, max_tokens=5)))
    prefill, recorded, compiles, *others = run(instance)
    assert (recorded.work, compiles.work) == (NO_WORK, NO_WORK)
    assert len(others) == 2 and NO_WORK not in [prefill.work, *(step.work for step in others)]


def prepare(instance: Instance, num_preparations: int) -> None:
    """Steps an idle instance, as its thread does."""
    for _ in range(num_preparations):
        assert instance.max_sleep_s() == 0 and not instance.has_work()
        assert instance.step() == EMPTY_STEP


def test_idle_instance_compiles_prompts_and_records_largest_size_first(model_of: ModelOf) -> None:
    model, capturer, seen = model_of(family="gemma3"), Counting(), list[tuple[int, ...]]()
    instance = model.instance(loaded=False, backends=recording(capturer), device=str(DEVICE))
    decoder, graphs = instance.model.transformer, instance.model.graphs
    assert isinstance(decoder, Decoder) and graphs is not None
    embed = decoder.embed

    def embed_and_tell(batch: Batch) -> torch.Tensor:
        seen.append((len(batch.token_ids), capturer.num_recorded))
        return embed(batch)

    decoder.embed = embed_and_tell  # type: ignore[method-assign]
    assert instance.max_sleep_s() is None, "weights are still to come"
    load_rest(instance)
    prepare(instance, 1 + len(SIZES_AHEAD))
    assert instance.max_sleep_s() is None
    assert seen == [(16, 0)], "a prompt of one page, before the recordings"
    assert graphs.sizes == SIZES_AHEAD == tuple(size for size in reversed(BATCH_SIZES) if size <= 32)
    assert_idle(instance)
    decoder.embed = embed  # type: ignore[method-assign]
    prompts = {f"{number}/0": prompt_of(length) for number, length in enumerate((3, 9, 24))}
    for group_id, prompt in prompts.items():
        instance.prefill(group_of(prompt, group_id, SAMPLING))
    steps = run(instance)
    expected = {(group_id, 0): model.expected(prompt, 4) for group_id, prompt in prompts.items()}
    assert outputs(steps) == expected
    assert capturer.num_recorded == len(SIZES_AHEAD), "nothing is left to the first batch"
    assert not [step for step in steps if step.work == NO_WORK]


def test_instance_that_does_not_decode_compiles_prompts_alone(model_of: ModelOf) -> None:
    instance = model_of(**ONE_LAYER).instance(backends=recording(Counting()), device=str(DEVICE), decodes=False)
    prepare(instance, 1)
    assert instance.max_sleep_s() is None


def test_model_without_head_prepares_prompts_alone(model_of: ModelOf, tmp_path: Path) -> None:
    folder = shutil.copytree(model_of(**ONE_LAYER).folder, tmp_path / "headless")
    instance = Model(make_headless(folder)).instance(backends=recording(Counting()), device=str(DEVICE))
    assert not instance.model.config.has_head and not instance.model.config.tied_embeddings
    prepare(instance, 1)
    assert instance.max_sleep_s() is None


def test_failed_preparation_ends_no_instance(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(**ONE_LAYER)
    instance = model.instance(backends=recording(Counting()), device=str(DEVICE))

    def fail(size: int) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(instance.model, "_preparations", deque([partial(fail, 1), partial(fail, 2)]))
    prepare(instance, 1)
    assert instance.max_sleep_s() is None, "none follows"
    assert answer(instance, prompt_of(5), SAMPLING) == model.expected(prompt_of(5), 4)


def test_requests_precede_recordings_and_close_ends_them(model_of: ModelOf) -> None:
    model, capturer = model_of(**ONE_LAYER), Counting()
    instance = model.instance(backends=recording(capturer), device=str(DEVICE))
    prepare(instance, 3)
    graphs = instance.model.graphs
    assert graphs is not None and list(graphs.sizes) == [32, 24]
    instance.prefill(group_of(prompt_of(5), sampling=SAMPLING))
    steps = []
    while instance.groups():
        assert instance.max_sleep_s() == 0
        steps.append(instance.step())
    assert outputs(steps) == {("r/0", 0): model.expected(prompt_of(5), 4)}
    assert list(graphs.sizes) == [32, 24, 1], "its own size, at its first batch"
    prepare(instance, 2)
    assert list(graphs.sizes) == [32, 24, 1, 16, 8]
    held = instance.import_kv(group_of(prompt_of(5)), instance.kv_layout(group_of(prompt_of(5))))
    assert instance.max_sleep_s() is None, "chunks may come at any moment"
    held.drop()
    prepare(instance, 1)
    instance.close()
    assert instance.max_sleep_s() is None and not graphs.sizes


def test_sizes_without_memory_are_computed_without_recording(model_of: ModelOf) -> None:
    class Full(CallingCapturer):
        def capture(self, compute: Replay) -> Replay:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = model_of(**ONE_LAYER)
    instance = model.instance(backends=recording(Full()), device=str(DEVICE))
    prepare(instance, 1 + len(SIZES_AHEAD))
    assert answer(instance, prompt_of(5), sampling=SAMPLING) == model.expected(prompt_of(5), SAMPLING.max_tokens)
    graphs = instance.model.graphs
    assert graphs is not None and not graphs.sizes and not instance.is_recording


def test_step_that_cannot_be_recorded_is_computed_without(model_of: ModelOf) -> None:
    class Failing(CallingCapturer):
        def capture(self, compute: Replay) -> Replay:
            raise RuntimeError("an operation that cannot be recorded")

    model = model_of(**ONE_LAYER)
    instance = model.instance(backends=recording(Failing()), device=str(DEVICE))
    assert answer(instance, prompt_of(5), SAMPLING) == model.expected(prompt_of(5), 4)
    assert not instance.is_recording


def test_padding_rows_write_to_scratch_slot_only(model_of: ModelOf) -> None:
    model = model_of(**ONE_LAYER)
    instance = model.instance(backends=recording(CallingCapturer()), device=str(DEVICE))
    kv, tables = instance.model.pages.kv, instance.model.pages.tables
    assert kv.shape[2] == tables.scratch_slot + tables.page_tokens
    kv.fill_(torch.nan)
    for number in range(3):
        instance.prefill(group_of(prompt_of(5), f"{number}/0", SAMPLING))
    run(instance)
    written = ~kv[0, 0, :, 0, 0].isnan()
    # Three prompts of 5, and 3 tokens after each, of which the pages of the prompt itself are not shared.
    assert int(written[: tables.scratch_slot].sum()) == 3 * (5 + 3)
    assert written[tables.scratch_slot :].tolist() == [True] + [False] * 15


def test_prompts_and_loading_models_are_not_recorded(model_of: ModelOf) -> None:
    model, capturer = model_of(**ONE_LAYER), Counting()
    instance = model.instance(loaded=False, backends=recording(capturer), device=str(DEVICE))
    load_rest(instance)
    graphs = instance.model.graphs
    assert graphs is not None
    graphs._is_loaded = lambda: False
    assert answer(instance, prompt_of(5), sampling=SAMPLING) == model.expected(prompt_of(5), SAMPLING.max_tokens)
    assert capturer.num_replayed == 0
    graphs._is_loaded = lambda: True
    assert answer(instance, prompt_of(5), sampling=SAMPLING) == model.expected(prompt_of(5), SAMPLING.max_tokens)
    assert capturer.num_replayed == SAMPLING.max_tokens - 1
    assert list(graphs.sizes) == [1]
    instance.close()
    assert not graphs.sizes


@pytest.mark.parametrize(("family", "attention"), [("mixtral", "triton"), ("llama", "gather")])
def test_experts_and_gathered_attention_are_not_recorded(model_of: ModelOf, family: str, attention: str) -> None:
    """Experts depend on the rows, and the number of gathered slots on the lengths."""
    backends = recording(CallingCapturer(), attention)
    instance = model_of(family).instance(backends=backends, device=str(DEVICE))
    assert instance.model.graphs is None


def test_backend_without_fixed_plans_raises() -> None:
    backend: AttentionBackend = GatherAttention()
    assert not backend.replays
    with pytest.raises(TypeError, match="GatherAttention has no plans"):
        backend.fixed_plan(1, 10, None, 0, torch.device("cpu"))
