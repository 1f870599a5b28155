"""A platform whose arena holds one model: a request for a second one waits for its turn, or fails with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete, headers, stream
from tests.support.http import http
from tests.support.platform import Platform, running_platform

pytestmark = pytest.mark.e2e
OPTIONS = ("--prefill-workers", "0", "--decode-workers", "0", "--both-workers", "2", "--threads", "1")
SIZES = ("--arena-mb", "16", "--kv-pool-mb", "32", "--idle-timeout-s", "2")
PROMPT = list(range(30, 60))
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("platform"), (*OPTIONS, *SIZES)) as running:
        yield running


@pytest.fixture(scope="module")
def key(platform: Platform) -> str:
    return platform.tenant("acme")


def uploaded(platform: Platform, key: str, folder: Path, name: str, num_layers: int, seed: int) -> str:
    """A model of about 2.3 MB per layer."""
    checkpoint = make_checkpoint(folder / name, "llama", seed=seed, num_hidden_layers=num_layers, **WIDE)
    return platform.upload(key, checkpoint, name)


def test_request_waits_while_the_arena_is_pinned(platform: Platform, key: str, tmp_path: Path) -> None:
    first, second = (uploaded(platform, key, tmp_path, name, 4, seed) for seed, name in enumerate(("one", "two")))
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    alone = complete(platform, key, second, PROMPT, **options)["choices"][0]["token_ids"]
    waiting: Future[dict[str, Any]] | None = None
    with ThreadPoolExecutor(1) as pool:
        for state in stream(platform, key, first, PROMPT, max_tokens=400, ignore_eos=True):
            if waiting is None and state.token_ids:
                waiting = pool.submit(complete, platform, key, second, PROMPT, **options)
        assert state.error is None and state.done and len(state.token_ids) == 400
        assert waiting is not None and not waiting.done()  # two do not fit
        assert waiting.result(60)["choices"][0]["token_ids"] == alone
    assert len(complete(platform, key, first, PROMPT, **options)["choices"][0]["token_ids"]) == 8


def test_model_larger_than_every_arena_is_refused(platform: Platform, key: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "large", "llama", num_hidden_layers=8, **WIDE)
    with pytest.raises(Exception, match="largest slot"):
        platform.upload(key, checkpoint, "large")
    answer = http.get(f"{platform.http}/v1/models", headers=headers(key)).json()
    assert all("large" not in entry["id"] for entry in answer["data"])
