"""The settings of one param-store process."""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import Field

from torchrelay.common.ids import new_id
from torchrelay.common.process.settings import ServiceSettings
from torchrelay.param_store.disk.cache import default_limit_bytes
from torchrelay.param_store.remote.remote_store import RemoteOptions, is_folder
from torchrelay.transfer.arena.arena_file import capacity_left_at

_SHARED_MEMORY = Path("/dev/shm")
_DEFAULT_ARENA_LIMIT_BYTES = 4 << 30


class StoreSettings(ServiceSettings):
    """One store per host. Every field is also a flag and an environment variable."""

    store_id: str = Field(default_factory=lambda: new_id("sto"), description="Stable name of this store.")
    host_id: str = Field("local", description="Name of this host; the workers of the same host carry the same.")
    failure_domain: str = Field(
        "", description="What may fail together with this host: a rack, a zone. By default itself."
    )
    port: int = Field(0, description="gRPC port; 0: any free one.")
    data_port: int = Field(0, description="Port of the data plane; 0: any free one.")
    node_key: str = Field(
        pattern="^[0-9a-fA-F]{64}$", description="Hex key of 32 bytes: derive_node_key(cluster key, store_id)."
    )
    data_dir: Path = Field(Path("store-data"), description="Folder for uploads under way.")
    remote_url: str = Field(
        "file:store-remote",
        description="Where published packs lie: file:///a/folder, s3://BUCKET/PREFIX, or, by the same client but never "
        "tried against a real server, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX.",
    )
    remote_endpoint: str = Field(
        "", description="URL of an S3-compatible server of your own; empty: the provider's, or what its variables say."
    )
    remote_timeout_s: float = Field(10.0, gt=0, description="Silence of an object store that makes a read begin anew.")
    remote_give_up_s: float = Field(
        30.0, gt=0, description="How long without any byte a read of an object store is tried again before it fails."
    )
    arena_path: Path | None = Field(
        None, description="The arena's file, in shared memory; by default /dev/shm/torchrelay-STORE_ID."
    )
    arena_bytes: int = Field(0, ge=0, description="Size the arena may grow to; 0: half of what is free, at most 4 GiB.")
    arena_step_bytes: int = Field(256 << 20, ge=1 << 20, description="Bytes faulted in at a time, in the background.")
    keep_arena: bool = Field(False, description="Leave the arena's file behind at a clean end.")
    recovery_grace_s: float = Field(
        10.0, ge=0, description="After a crash: how long packs of the old arena are kept for their workers to return."
    )
    max_relays: int = Field(16, ge=1, description="Most packs filled at once; more are refused.")
    remote_readers: int = Field(4, ge=1, le=16, description="Reads of the remote store under way at once, per pack.")
    disk_cache_bytes: int | None = Field(
        None,
        ge=0,
        description="Most bytes of packs kept on this host's disk, below data_dir; unset: for an object store half of "
        "what is free, at most 64 GiB, none for a folder.",
    )
    max_upload_bytes: int = Field(1 << 40, ge=1, description="Largest upload that is taken in.")
    upload_expiry_s: float = Field(86400.0, gt=0, description="An upload untouched for so long is removed.")
    max_waiting_commits: int = Field(16, ge=1, description="Most commits waiting for the packer; more are refused.")
    packer_memory_bytes: int = Field(384 << 20, ge=64 << 20, description="Most memory that a packer process may use.")

    @property
    def remote_options(self) -> RemoteOptions:
        return RemoteOptions(self.remote_endpoint, self.remote_timeout_s, self.remote_give_up_s)

    @property
    def disk_cache_folder(self) -> Path:
        return self.data_dir / "packs"

    def disk_cache_limit_bytes(self) -> int:
        """``disk_cache_bytes``, or what this host's disk can spare now; 0: there is no disk tier."""
        if self.disk_cache_bytes is not None:
            return self.disk_cache_bytes
        return 0 if is_folder(self.remote_url) else default_limit_bytes(self.disk_cache_folder)

    @property
    def arena_file(self) -> Path:
        return self.arena_path or _SHARED_MEMORY / f"torchrelay-{self.store_id}"

    def arena_capacity_bytes(self) -> int:
        """``arena_bytes``, or the size of what a crashed store left, or what this machine can spare now."""
        if self.arena_bytes:
            return self.arena_bytes
        # What is free now is less by that very arena: with another size it would be thrown away.
        if left := capacity_left_at(self.arena_file):
            return left
        shared = shutil.disk_usage(self.arena_file.parent).free
        return min(_available_bytes() // 2, shared, _DEFAULT_ARENA_LIMIT_BYTES)


def _available_bytes() -> int:
    """Memory that could be had without swapping; page cache counts, since the system gives it back."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 0
