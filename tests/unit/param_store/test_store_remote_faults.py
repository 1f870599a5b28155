"""Models come in and go out by way of an S3 protocol server that is broken, cut off, damaged or away."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.s3_server import Fault, first
from tests.unit.param_store.holders import RemoteScene
from tests.unit.param_store.running_store import REMOTE, refusal
from torchrelay.common.errors import Unavailable


@pytest.mark.parametrize(
    "decide",
    [lambda: first(6, Fault(cut_after_bytes=100_000)), lambda: first(1, Fault(flip_at=3_000_000), at=3_000_000)],
    ids=["cut", "flipped on the way"],
)
async def test_download_survives_remote_faults(remote: RemoteScene, decide: Any) -> None:
    remote.proxy.decide = decide()
    async with remote.store(remote_give_up_s=15.0) as store:
        assert (await store.fetch(remote.pack.pack_id)).source == "remote"
        assert await store.bytes_in(remote.pack.pack_id) == remote.pack.data


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(status=403)], ids=str)
async def test_failed_download_resumes_when_remote_returns(remote: RemoteScene, fault: Fault) -> None:
    remote.proxy.decide = lambda asked: fault if asked.begin >= 2_000_000 else None
    async with remote.store() as store:
        await store.relay(remote.pack.pack_id, REMOTE)
        assert f"packs/{remote.pack.pack_id}" in await store.until_failed()
        remote.proxy.decide = lambda asked: None
        await store.fetch(remote.pack.pack_id)
        assert await store.bytes_in(remote.pack.pack_id) == remote.pack.data


async def test_unreachable_remote_replaced_by_peers(remote: RemoteScene) -> None:
    pack_id = remote.pack.pack_id
    async with remote.store(name="1") as holder, remote.store(name="2") as store:
        await holder.fetch(pack_id)
        remote.proxy.decide = lambda asked: Fault(status=503)
        error = await refusal(store.relay(pack_id, REMOTE))
        assert isinstance(error, Unavailable) and "503 Service Unavailable" in error.message
        assert (await store.fetch(pack_id, REMOTE, holder.source(pack_id, store))).source == holder.store_id
