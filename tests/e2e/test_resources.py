"""Resources of models: two tenants share an instance, and one of them floods it within its limits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tenants import ONE_WORKER, SMALL
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete
from tests.support.http import http
from tests.support.platform import Platform, running_platform
from tests.support.wait import HANG_S
from torchrelay.cli.errors import CliError

pytestmark = pytest.mark.e2e
NUM_FLOODED, NUM_TOKENS = 8, 200
PROMPT = list(range(30, 42))


def most_running(platform: Platform, flooded: Iterable[Future[Any]], model: str) -> int:
    """The most requests of the model at once, until its flood is over."""
    most = 0
    for view in platform.views():
        most = max([most, *(demand.num_running for demand in view.demand if demand.model == model)])
        if all(each.done() for each in flooded):
            return most
    raise AssertionError("the scheduler ended its view")


def test_capped_model_leaves_places_to_its_neighbour(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=16)
    options = (*SMALL, *ONE_WORKER, "--label", "zone=a", "--label", "gpu=none")
    with running_platform(tmp_path / "home", options) as platform, ThreadPoolExecutor(NUM_FLOODED + 1) as threads:
        keys = {name: platform.tenant(name) for name in ("acme", "birch")}
        flooding, lone = (platform.upload(keys[name], checkpoint, "m") for name in keys)
        platform.cli("models", "set", flooding, "--max-concurrency", "2", "--kv-share", "0.5", "--threads", "1")
        platform.cli("models", "set", flooding, "--hosts", "zone=a")
        shown = platform.cli("models", "show", flooding)
        assert "2 at once per instance" in shown and "0.5 of an instance's pool" in shown and "with zone=a" in shown
        complete(platform, keys["birch"], lone, PROMPT, max_tokens=2)

        def flood() -> dict[str, Any]:
            return complete(platform, keys["acme"], flooding, PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)

        flooded = [threads.submit(flood) for _ in range(NUM_FLOODED)]
        most = threads.submit(most_running, platform, flooded, flooding)
        for number in range(3):
            complete(platform, keys["birch"], lone, [number, *PROMPT], max_tokens=2)
            assert not all(each.done() for each in flooded), "its request did not wait for the backlog"
        assert all(each.result()["usage"]["completion_tokens"] == NUM_TOKENS for each in flooded)
        assert 1 <= most.result() <= 2

        with platform.admin() as admin, pytest.raises(CliError, match="no host has the labels zone=b; the hosts have"):
            admin.call("PATCH", f"/v1/models/{flooding}", json={"hosts": ["zone=b"]})
        view = json.loads(platform.cli("top", "--json"))
        (worker,) = view["workers"]
        assert worker["labels"] == ["gpu=none", "zone=a"]
        assert int(view["slot_bytes"][worker["worker_id"]]) == (256 + 32) << 20


def test_request_beyond_its_models_share_names_the_setting(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "llama", "llama", max_position_embeddings=4096)
    with running_platform(tmp_path / "home", (*SMALL, *ONE_WORKER, "--kv-pool-mb", "1")) as platform:
        key = platform.tenant("acme")
        model = platform.upload(key, checkpoint, "m")
        platform.cli("models", "set", model, "--kv-share", "0.25")
        complete(platform, key, model, PROMPT, max_tokens=2)
        body = {"model": model, "prompt": PROMPT, "max_tokens": 4000}
        headers = {"Authorization": f"Bearer {key}"}
        refused = http.post(f"{platform.http}/v1/completions", json=body, headers=headers, timeout=HANG_S)
        assert refused.status_code == 503, refused.text
        assert "(kv_share 0.25) has 262,144" in refused.json()["error"]["message"]
