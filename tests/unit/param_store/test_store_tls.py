"""Stores of a cluster relay to each other within TLS; a store without TLS gets nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.certificates import Authority
from tests.unit.param_store.holders import bytes_in
from tests.unit.param_store.running_store import REMOTE, running_store
from torchrelay.common.errors import Unavailable
from torchrelay.common.identity.callers import Caller
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.control.v1 import param_store_pb2 as pb


async def test_relay_between_tls_stores(tmp_path: Path, published: tuple[Path, pb.VersionDescription]) -> None:
    pack, version = published
    authority, nowhere = Authority(tmp_path / "authority"), f"file://{tmp_path / 'empty'}"
    first: dict[str, Any] = dict(authority.node("one", *Caller).as_settings())
    other: dict[str, Any] = dict(authority.node("other", *Caller).as_settings())
    async with (
        running_store(tmp_path, **first) as source,
        running_store(tmp_path / "2", remote_url=nowhere, **other) as target,
        running_store(tmp_path / "3", remote_url=nowhere) as plain,
    ):
        await source.relay(pack.name, REMOTE)
        await target.relay(pack.name, source.source(pack.name, target))
        assert (await target.until_complete(pack.name)).source == source.store_id
        assert await bytes_in(target, pack.name) == pack.read_bytes()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await plain.relay(pack.name, source.source(pack.name, plain))
        assert isinstance(error_from_rpc(refused.value), Unavailable)
        assert (await source.report()).bytes_sent == version.pack_bytes
