"""While a model loads, the comments of a waiting stream tell how long it takes, from the layers that have arrived."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.calibration.padding import padded_workers
from tests.e2e.tenants import ONE_WORKER, SMALL
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import wake
from tests.support.platform import running_platform
from torchrelay.common.latency.latency_model import LatencyModel

pytestmark = pytest.mark.e2e
NUM_LAYERS, LAYER_LOAD_S = 10, 0.6


def test_comments_count_down_to_the_first_token(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=NUM_LAYERS)
    env = padded_workers(tmp_path, LatencyModel(), LAYER_LOAD_S)
    with running_platform(tmp_path / "home", (*SMALL, *ONE_WORKER), env) as platform:
        key = platform.tenant("acme")
        model = platform.upload(key, checkpoint, "slow")
        told, first_token_s = wake(platform, key, model, [5, 6, 7])
    by_layers = [each for each in told if each.num_layers_ready]
    assert len(by_layers) >= 4
    # The embedding and the head are loaded as segments of their own.
    assert {each.num_layers for each in by_layers} <= {NUM_LAYERS, NUM_LAYERS + 2}
    layers = [each.num_layers_ready for each in by_layers]
    assert layers == sorted(layers) and layers[-1] > layers[0]
    left_s = [each.left_s for each in by_layers]
    assert left_s[-1] < left_s[0] / 2
    # The end that each comment predicts is nearer than half of the load.
    assert all(abs(each.at_s + each.left_s - first_token_s) < first_token_s / 2 for each in by_layers)
