"""A prompt moves between real workers at each layer, for families with different layers, greedy and sampled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.move_cluster import Prompt, running_cluster
from tests.support.checkpoints import make_checkpoint
from tests.support.wait import HANG_S, eventually
from tests.unit.engine.harness import Model, prompt_of
from torchrelay.engine.core import SamplingParams
from torchrelay.prefill import prompt_moves


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
async def test_prompt_moves_at_each_boundary(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(prompt_moves, "_KEPT_S", HANG_S)
    model = Model(make_checkpoint(tmp_path / family, family))
    samplings = (SamplingParams(temperature=0, max_tokens=6), SamplingParams(temperature=1.3, seed=5, max_tokens=6))
    async with running_cluster(tmp_path, model, nats_url, monkeypatch) as cluster:
        for boundary in (1, 2, 3):
            for number, sampling in enumerate(samplings):
                prompt = Prompt(family, prompt_of(70, number), sampling, num_choices=2).with_reference(model)
                await cluster.start_source()
                cluster.let_layers(boundary)
                answer = cluster.send(prompt, tenant_id=f"{boundary}")
                await eventually(lambda boundary=boundary: cluster.boundaries == [boundary])  # type: ignore[misc]
                await cluster.scheduler.recall_prompt(answer.request_id)
                usages = await cluster.assert_complete(answer)
                assert [usage.num_cached_prompt_tokens for usage in usages] == [0, 0]
                [detail] = answer.imports
                assert detail.startswith(f"{boundary} layer")
