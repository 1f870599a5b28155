"""The sizes that a store derives from its settings and the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.small_disk import small_disk
from torchrelay.common.errors import InvalidRequest
from torchrelay.param_store.settings import StoreSettings


@pytest.mark.lab
def test_arena_must_fit_file_system_of_its_folder(tmp_path: Path) -> None:
    """In a container that is a volume, while /dev/shm is the container's own and small."""
    with small_disk(tmp_path / "arena", 64 << 20) as disk:
        settings = StoreSettings(
            store_id="store-1", node_key="0" * 64, arena_path=disk.folder / "parameters", arena_bytes=128 << 20
        )
        with pytest.raises(InvalidRequest, match=f"62.9 MB of {disk.folder} are free"):
            settings.arena_capacity_bytes()
        assert settings.model_copy(update={"arena_bytes": 32 << 20}).arena_capacity_bytes() == 32 << 20
