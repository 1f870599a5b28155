"""A param-store, assembled from its parts."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from torchrelay.common.epoch_fence import EpochFence
from torchrelay.common.host.addresses import join_address, split_address
from torchrelay.common.ids import new_id
from torchrelay.common.process.telemetry import get_logger
from torchrelay.param_store.change_notifier import ChangeNotifier
from torchrelay.param_store.copies.arena_copies import ArenaCopies
from torchrelay.param_store.copies.pack_download import DownloadContext
from torchrelay.param_store.disk.disk_cache import DiskCache
from torchrelay.param_store.disk.disk_tier import DiskTier
from torchrelay.param_store.remote.remote_store import open_remote
from torchrelay.param_store.remote.versions import Versions
from torchrelay.param_store.settings import StoreSettings
from torchrelay.param_store.uploads.packer_process import CommitQueue
from torchrelay.param_store.uploads.staging_area import StagingArea
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.errors import ArenaFull
from torchrelay.transfer.fetch.follow import Receiver
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport.tls import transport_for

log = get_logger(__name__)
DRAFT_PREFIX = "object-"  # of files of tenants that are being received


class Store:
    """Owns the arena, the uploads and the data plane of a host. Create and close it on the event loop's thread."""

    def __init__(self, settings: StoreSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.incarnation = new_id("inc")
        self.grpc_address = ""
        self.epoch = EpochFence()
        self.changes = ChangeNotifier(loop)
        limit_bytes = settings.disk_cache_limit_bytes()
        self.disk = DiskCache(settings.disk_cache_folder, limit_bytes) if limit_bytes else None
        remote = open_remote(settings.remote_url, settings.remote_options)
        if self.disk is not None:
            remote = DiskTier(remote, self.disk)
        self.uploads = StagingArea(
            settings.data_dir / "uploads",
            settings.max_upload_bytes,
            settings.upload_expiry_s,
            settings.max_open_uploads,
        )
        for abandoned in settings.data_dir.glob(f"{DRAFT_PREFIX}*"):  # by a store that was killed
            abandoned.unlink()
        self.versions = Versions(remote, self.uploads.claims)
        self.packer_queue = CommitQueue(settings.num_packers, settings.max_waiting_commits)
        # Publishing takes as long as the remote store does, and must not occupy the threads that other calls need.
        self.publish_queue = CommitQueue(settings.num_packers, settings.max_open_uploads)
        self.publish_threads = ThreadPoolExecutor(settings.num_packers, thread_name_prefix="publish")
        # A separate thread: digesting again after a restart must not occupy the threads that other calls need.
        self.digest_thread = ThreadPoolExecutor(1, thread_name_prefix="upload-digest")
        node_key = bytes.fromhex(settings.node_key)
        # Before the arena, so that no shared memory is left behind if the port is taken.
        transport = transport_for(settings.tls)
        listener = transport.listen(settings.host, settings.data_port)
        self.holder = HolderServer(settings.store_id, node_key, lambda pack_id: self.arena.get(pack_id), listener)
        self.arena = Arena.create(settings.arena_file, settings.arena_capacity_bytes())
        receiver = Receiver(settings.store_id, node_key)
        downloads = DownloadContext(
            self.arena, remote, receiver, self.changes.notify, transport, settings.remote_readers
        )
        self.arena_copies = ArenaCopies(downloads, settings.max_relays)
        self._closing = threading.Event()
        self._prepared = threading.Event()
        self._background = threading.Thread(target=self._prepare, name="arena-growth", daemon=True)

    @property
    def data_address(self) -> str:
        return join_address(self.settings.advertised_host, split_address(self.holder.address)[1])

    def start(self) -> None:
        """Serves the data plane and grows the arena; returns after the first step, in about a second."""
        self.holder.start()
        self._background.start()
        self._prepared.wait()

    def _prepare(self) -> None:
        """Runs on the background thread: hashes the packs of an earlier process and prefaults memory step by step."""
        try:
            growing = self._grow()
            self._prepared.set()
            self.arena_copies.recheck()
            while growing and not self._closing.is_set():
                growing = self._grow()
        finally:
            self._prepared.set()

    def _grow(self) -> bool:
        """Prefaults the next step. False: the arena has reached its size."""
        try:
            self.arena.grow(self.settings.arena_step_bytes)
        except ArenaFull as error:
            log.warning("arena_growth_ended", error=error.message, arena_bytes=self.arena.faulted_bytes)
            return False
        self.changes.notify()
        return self.arena.faulted_bytes < self.arena.capacity_bytes

    def close(self) -> None:
        """Ends downloads and streams, then closes the arena. Blocks until all threads have ended."""
        self._closing.set()
        self.digest_thread.shutdown(wait=False, cancel_futures=True)
        # A version that is being published is finished and recorded, within stop_limit_s.
        self.publish_threads.shutdown(wait=False)
        self.arena.stop_growing()  # a download may be waiting for gigabytes
        self.arena_copies.close()
        self.holder.close()
        # Instances that compute on it stay: the next store recovers it, as after a crash.
        is_mapped = any(self.arena.is_mapped(slab) for slab in self.arena.slabs())
        self.arena.close(unlink=not (self.settings.keep_arena or is_mapped))
        if self._background.ident is not None:
            self._background.join()

    def activity(self) -> tuple[int, ...]:
        """A value that changes when a report should be published early."""
        return (
            self.holder.bytes_sent,
            *self.arena_copies.counts.num_bytes_received.values(),
            self.arena.faulted_bytes,
            self.arena.free_bytes,
            self.uploads.num_open,
        )
