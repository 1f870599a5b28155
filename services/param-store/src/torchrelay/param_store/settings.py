"""The settings of a param-store process."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import Field

from torchrelay.common.errors import NotFound
from torchrelay.common.host.machine import SHARED_MEMORY, Machine, check_arena
from torchrelay.common.identity.callers import Caller
from torchrelay.common.process.settings import NODE_ID, ServiceSettings
from torchrelay.param_store.disk.disk_cache import default_limit_bytes
from torchrelay.param_store.remote.remote_store import RemoteOptions, is_folder
from torchrelay.transfer.arena.arena_file import capacity_left_at


class StoreSettings(ServiceSettings):
    """Settings of a store, of which each host has one. Every field is also a flag and an environment variable."""

    caller = Caller.STORE
    store_id: str = Field(pattern=NODE_ID, description="Stable name of this store; node_key is derived from it.")
    host_id: str = Field("local", description="Name of this host, the same as in its workers' settings.")
    failure_domain: str = Field(
        "", description="Hosts that may fail together, such as a rack or a zone; by default only this host."
    )
    port: int = Field(0, description="gRPC port; 0: any free port.")
    data_port: int = Field(0, description="Data-plane port; 0: any free port.")
    node_key: str = Field(
        pattern="^[0-9a-fA-F]{64}$", description="Hex key of 32 bytes: derive_node_key(cluster key, store_id)."
    )
    data_dir: Path = Field(Path("store-data"), description="Folder of staged uploads and the disk cache.")
    remote_url: str = Field(
        "file:store-remote",
        description="Where published packs are stored: file:///a/folder, s3://BUCKET/PREFIX or, by the same client but "
        "untested against a real server, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX.",
    )
    remote_endpoint: str = Field(
        "", description="URL of your own S3-compatible server; empty: the provider's, or as its variables say."
    )
    remote_timeout_s: float = Field(
        10.0, gt=0, description="A read of an object store is retried after this long without a byte."
    )
    remote_give_up_s: float = Field(
        30.0, gt=0, description="A read of an object store fails after this long without any progress."
    )
    arena_path: Path | None = Field(
        None, description="The arena's file in shared memory; by default /dev/shm/torchrelay-STORE_ID."
    )
    arena_bytes: int = Field(
        0, ge=0, description="Maximum size of the arena; 0: half of the free memory, at most arena_limit_bytes."
    )
    arena_limit_bytes: int = Field(
        4 << 30, ge=0, description="Limit of an arena whose size is chosen; 0: none, as for workers on GPUs."
    )
    arena_step_bytes: int = Field(
        256 << 20, ge=1 << 20, description="Bytes of the arena prefaulted per step, in the background."
    )
    keep_arena: bool = Field(
        False, description="Keep the arena's file after a clean shutdown, even if no worker maps it."
    )
    recovery_grace_s: float = Field(
        10.0, ge=0, description="How long packs are kept after a crash until their workers hold them again."
    )
    max_relays: int = Field(16, ge=1, description="Maximum packs downloaded at once; more are refused.")
    remote_readers: int = Field(4, ge=1, le=16, description="Concurrent reads of the remote store per pack.")
    disk_cache_bytes: int | None = Field(
        None,
        ge=0,
        description="Maximum bytes of packs cached on disk, below data_dir; unset: for an object store half of the "
        "free space; for a folder none.",
    )
    max_upload_bytes: int = Field(
        1 << 40, ge=1, le=5 << 40, description="Maximum bytes of one upload; object stores take 5 TiB."
    )
    upload_expiry_s: float = Field(86400.0, gt=0, description="An upload left untouched for this long is removed.")
    max_open_uploads: int = Field(256, ge=1, description="Maximum open uploads of all tenants; more are refused.")
    num_packers: int = Field(
        2, ge=1, le=16, description="Commits that pack at once, and as many that publish; at most one of each tenant."
    )
    max_waiting_commits: int = Field(
        16, ge=1, description="Maximum commits waiting for a packer, a quarter of them one tenant's; more are refused."
    )
    commit_stall_s: float = Field(120.0, gt=0, description="A commit that makes no progress for this long fails.")
    stop_limit_s: int = Field(
        8,
        ge=0,
        description="The kernel ends a store this many seconds after it was told to stop, whatever it still waits for, "
        "such as a version that is being published; 0: never. Keep it below its supervisor's time limit for stopping.",
    )
    packer_memory_bytes: int = Field(384 << 20, ge=64 << 20, description="Maximum memory of a packer process.")

    @property
    def remote_options(self) -> RemoteOptions:
        return RemoteOptions(self.remote_endpoint, self.remote_timeout_s, self.remote_give_up_s)

    @property
    def remote_folder(self) -> Path:
        """The folder that ``remote_url`` names, if it names a folder."""
        return Path(unquote(urlsplit(self.remote_url).path))

    @property
    def disk_cache_folder(self) -> Path:
        return self.data_dir / "packs"

    def disk_cache_limit_bytes(self) -> int:
        """``disk_cache_bytes``, or what this host's disk can spare now; 0: there is no disk cache."""
        if self.disk_cache_bytes is not None:
            return self.disk_cache_bytes
        return 0 if is_folder(self.remote_url) else default_limit_bytes(self.disk_cache_folder)

    @property
    def arena_file(self) -> Path:
        return self.arena_path or SHARED_MEMORY / f"torchrelay-{self.store_id}"

    def arena_capacity_bytes(self) -> int:
        """``arena_bytes``, or the size of a crashed store's arena, or what this machine can spare now.

        Raises ``InvalidRequest`` when ``arena_bytes`` are not available.
        """
        if not self.arena_file.parent.is_dir():
            raise NotFound(f"the arena's folder {self.arena_file.parent} does not exist", field="arena_path")
        machine = Machine.here(self.arena_file.parent)
        if self.arena_bytes:
            own_bytes = self.arena_file.stat().st_blocks * 512 if self.arena_file.exists() else 0
            check_arena(self.arena_bytes, own_bytes, machine)
            return self.arena_bytes
        # A crashed store's arena occupies part of the memory; with another size it would be discarded.
        if left := capacity_left_at(self.arena_file):
            return left
        size = min((machine.memory_bytes or 0) // 2, machine.shared_memory_bytes or 0)
        return min(size, self.arena_limit_bytes or size)
