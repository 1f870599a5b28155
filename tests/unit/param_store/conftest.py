"""What several tests of the store begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.param_store.folders import LARGER, write_folder
from tests.unit.param_store.stores import publish, running_store
from torchrelay.control.v1 import param_store_pb2 as pb


@pytest.fixture
async def published(tmp_path: Path) -> tuple[Path, pb.VersionDescription]:
    """A version in the remote store of ``tmp_path``, and the file of its pack."""
    async with running_store(tmp_path) as store:
        version = await publish(store, write_folder(tmp_path / "model", LARGER))
    return tmp_path / "remote/packs" / version.pack_id, version
