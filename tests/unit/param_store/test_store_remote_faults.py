"""Models come in and go out by way of an S3 protocol server that is slow, broken, cut off, damaged or away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.s3_server import Fault, FaultyProxy, ProxiedRequest, always, first
from tests.support.wait import HANG_S
from tests.unit.param_store.holders import bytes_in, held
from tests.unit.param_store.model_folders import write_folder
from tests.unit.param_store.running_store import REMOTE, RunningStore, commit, running_store, send
from torchrelay.common.errors import Unavailable
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.param_store.remote.remote_store import RemoteOptions, open_remote


@pytest.fixture
def settings(s3_version: tuple[str, str], proxy: FaultyProxy, credentials: None) -> dict[str, Any]:
    """Settings of stores with short time limits for the remote store."""
    return {
        "remote_url": s3_version[0],
        "remote_endpoint": proxy.endpoint,
        "remote_timeout_s": 0.5,
        "remote_give_up_s": 0.6,
        "disk_cache_bytes": 0,
    }


@pytest.fixture
def pack_id(s3_version: tuple[str, str]) -> str:
    return s3_version[1]


def packed(settings: dict[str, Any], pack_id: str) -> bytes:
    """The pack as it lies in the bucket."""
    remote = open_remote(settings["remote_url"], RemoteOptions(settings["remote_endpoint"]))
    return remote.get_bytes(f"packs/{pack_id}")


async def fails(store: RunningStore, pack_id: str) -> str:
    """Why the relay under way fails."""
    report = await store.until(lambda report: bool(report.copies) and report.copies[0].error != "")
    return report.copies[0].error


@pytest.mark.parametrize(
    "decide",
    [
        lambda: lambda asked: None,
        lambda: first(6, Fault(status=500)),
        lambda: first(6, Fault(status=503)),
        lambda: first(6, Fault(cut_after_bytes=100_000)),
        lambda: first(2, Fault(silent=True)),
        lambda: always(Fault(bytes_per_s=2_000_000)),
        lambda: first(1, Fault(flip_at=3_000_000), at=3_000_000),
    ],
    ids=["whole", "500", "503", "cut", "silent", "slow", "flipped on the way"],
)
async def test_download_survives_remote_faults(
    tmp_path: Path, settings: dict[str, Any], proxy: FaultyProxy, pack_id: str, decide: Any
) -> None:
    proxy.decide = decide()
    async with running_store(tmp_path / "host", **{**settings, "remote_give_up_s": 15.0}) as store:
        assert await store.relay(pack_id, REMOTE) is False
        assert (await store.until_complete(pack_id)).source == "remote"
        proxy.decide = lambda asked: None
        assert await bytes_in(store, pack_id) == packed(settings, pack_id)


@pytest.mark.parametrize(
    "fault", [Fault(status=500), Fault(status=403), Fault(silent=True), Fault(cut_after_bytes=0)], ids=str
)
async def test_failed_download_resumes_when_remote_returns(
    tmp_path: Path, settings: dict[str, Any], proxy: FaultyProxy, pack_id: str, fault: Fault
) -> None:
    proxy.decide = lambda asked: fault if asked.begin >= 2_000_000 else None
    async with running_store(tmp_path / "host", **settings) as store:
        await store.relay(pack_id, REMOTE)
        assert f"packs/{pack_id}" in await fails(store, pack_id)
        proxy.decide = lambda asked: None
        await store.relay(pack_id, REMOTE)
        await store.until_complete(pack_id)
        assert await bytes_in(store, pack_id) == packed(settings, pack_id)


async def test_unreachable_remote_replaced_by_peers(
    tmp_path: Path, settings: dict[str, Any], proxy: FaultyProxy, pack_id: str
) -> None:
    async with (
        running_store(tmp_path / "1", **settings) as holder,
        running_store(tmp_path / "2", **settings) as store,
    ):
        await holder.relay(pack_id, REMOTE)
        await holder.until_complete(pack_id)
        proxy.decide = lambda asked: Fault(status=503)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await store.relay(pack_id, REMOTE)
        assert isinstance(error_from_rpc(caught.value), Unavailable)
        assert "503 Service Unavailable" in error_from_rpc(caught.value).message
        await store.relay(pack_id, REMOTE, holder.source(pack_id, store))
        assert (await store.until_complete(pack_id)).source == holder.store_id


async def test_flipped_bytes_replaced_by_other_holder(
    tmp_path: Path, settings: dict[str, Any], proxy: FaultyProxy, pack_id: str
) -> None:
    whole = packed(settings, pack_id)
    async with (
        running_store(tmp_path / "1", **settings) as holder,
        running_store(tmp_path / "2", **settings) as store,
    ):
        await holder.relay(pack_id, REMOTE)
        await holder.until_complete(pack_id)
        proxy.decide = always(Fault(flip_at=3_000_000))
        await store.relay(pack_id, REMOTE)
        async with held(store, pack_id) as replies:
            assert "in the remote store: 1 chunk (" in await fails(store, pack_id)
            async for reply in replies:
                assert reply.num_segments_ready < 6
                if reply.error:
                    assert "damaged in the remote store" in reply.error
                    break
            await store.relay(pack_id, REMOTE, holder.source(pack_id, store))
            await store.until_complete(pack_id)
        assert await bytes_in(store, pack_id) == whole


async def test_failed_publication_can_be_retried(
    tmp_path: Path, settings: dict[str, Any], bucket_url: str, proxy: FaultyProxy
) -> None:
    def refuse_versions(asked: ProxiedRequest) -> Fault | None:
        return Fault(status=500) if asked.method == "PUT" and "/versions/" in asked.path else None

    async with running_store(tmp_path, **{**settings, "remote_url": bucket_url}) as store:
        await send(store, write_folder(tmp_path / "model"), "u1")
        proxy.decide = refuse_versions
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await commit(store, "u1")
        assert "the remote store does not serve versions/" in error_from_rpc(caught.value).message
        proxy.decide = lambda asked: None
        remote = open_remote(bucket_url, RemoteOptions(proxy.endpoint))
        assert [key for place in ("packs/", "files/", "versions/") for key in remote.objects(place)] == []
        version = (await commit(store, "u1"))[-1].version
        assert [stored.key for stored in remote.objects("versions/")] == [f"versions/{version.version_id}.json"]


async def test_drop_ends_download_from_silent_remote(
    tmp_path: Path, settings: dict[str, Any], proxy: FaultyProxy, pack_id: str
) -> None:
    proxy.decide = always(Fault(status=500))
    async with running_store(tmp_path / "host", **{**settings, "remote_give_up_s": 300.0}) as store:
        await store.relay(pack_id, REMOTE)
        assert (await store.stub.Drop(pb.DropRequest(pack_id=pack_id), timeout=HANG_S)).dropped
        assert (await store.report()).copies == []
