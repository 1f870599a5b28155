"""One param-store: its parts put together, and what it says of itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Container

from torchrelay.common.ids import new_id
from torchrelay.common.process.telemetry import get_logger
from torchrelay.control.v1 import reports_pb2
from torchrelay.param_store.change_notifier import ChangeNotifier
from torchrelay.param_store.copies.arena_copies import ArenaCopies, CopyReport
from torchrelay.param_store.disk.cache import DiskCache
from torchrelay.param_store.disk.tier import DiskTier
from torchrelay.param_store.epoch_fence import EpochFence
from torchrelay.param_store.nic_counters import read_nic_counters
from torchrelay.param_store.remote.remote_store import RemoteStore, open_remote
from torchrelay.param_store.remote.versions import Versions
from torchrelay.param_store.settings import StoreSettings
from torchrelay.param_store.uploads.packer_process import PackerQueue
from torchrelay.param_store.uploads.staging_area import StagingArea
from torchrelay.transfer.arena.arena import Arena
from torchrelay.transfer.buffers import Buffer
from torchrelay.transfer.errors import ArenaFull
from torchrelay.transfer.fetch.follow import Receiver
from torchrelay.transfer.serve.holder import HolderServer
from torchrelay.transfer.transport.tls import transport_for

log = get_logger(__name__)


class Store:
    """Owns the arena, the uploads and the data plane of one host. Made and closed on the event loop's thread."""

    def __init__(self, settings: StoreSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.incarnation = new_id("inc")
        self.grpc_address = ""
        self.epoch = EpochFence()
        self.changes = ChangeNotifier(loop)
        self.disk = _open_disk(settings)
        remote = _open_remote(settings, self.disk)
        self.versions = Versions(remote)
        self.uploads = StagingArea(settings.data_dir / "uploads", settings.max_upload_bytes, settings.upload_expiry_s)
        self.packer_queue = PackerQueue(settings.max_waiting_commits)
        node_key = bytes.fromhex(settings.node_key)
        # Before the arena: when the port is taken, no shared memory is left behind.
        transport = transport_for(settings.tls)
        listener = transport.listen(settings.host, settings.data_port)
        self.holder = HolderServer(settings.store_id, node_key, self._find, listener)
        self.arena = Arena.create(settings.arena_file, settings.arena_capacity_bytes())
        self.arena_copies = ArenaCopies(
            self.arena,
            remote,
            Receiver(settings.store_id, node_key),
            self.changes.notify,
            settings.max_relays,
            settings.remote_readers,
            transport,
        )
        self._closing = threading.Event()
        self._prepared = threading.Event()
        self._background = threading.Thread(target=self._prepare, name="arena-growth", daemon=True)

    @property
    def data_address(self) -> str:
        port = self.holder.address.rpartition(":")[2]
        return f"{self.settings.advertised_host}:{port}"

    def _find(self, buffer_id: str) -> Buffer | None:
        return self.arena.get(buffer_id)

    def start(self) -> None:
        """Serves the data plane and grows the arena; returns once its first step is there, in about a second."""
        self.holder.start()
        self._background.start()
        self._prepared.wait()

    def _prepare(self) -> None:
        """The background thread: what an earlier process left is hashed, and memory is faulted in step by step."""
        try:
            growing = self._grow()
            self._prepared.set()
            self.arena_copies.recheck()
            while growing and not self._closing.is_set():
                growing = self._grow()
        finally:
            self._prepared.set()

    def _grow(self) -> bool:
        """Faults in the next step; False: the arena stays as large as it is."""
        try:
            self.arena.grow(self.settings.arena_step_bytes)
        except ArenaFull as error:
            log.warning("arena_growth_ended", error=error.message, arena_bytes=self.arena.faulted_bytes)
            return False
        self.changes.notify()
        return self.arena.faulted_bytes < self.arena.capacity_bytes

    def close(self) -> None:
        """Ends fillings and streams, then lets go of the arena. Blocks until all threads are gone."""
        self._closing.set()
        self.arena.stop_growing()  # a filling may wait for gigabytes of it
        self.arena_copies.close()
        self.holder.close()
        self.arena.close(unlink=not self.settings.keep_arena)
        if self._background.ident is not None:
            self._background.join()

    def activity(self) -> tuple[int, ...]:
        """Differs from what it was when something has gone on here."""
        return (
            self.holder.bytes_sent,
            self.arena_copies.num_bytes_received,
            self.arena.faulted_bytes,
            self.arena.free_bytes,
            self.uploads.num_open,
        )

    def report(self) -> reports_pb2.StoreReport:
        """The store's state as the scheduler hears of it."""
        retained = self.arena.retention.ranks
        return reports_pb2.StoreReport(
            store_id=self.settings.store_id,
            incarnation=self.incarnation,
            host_id=self.settings.host_id,
            grpc_address=self.grpc_address,
            data_address=self.data_address,
            epoch=self.epoch.highest,
            arena_target_bytes=self.arena.capacity_bytes,
            arena_bytes=self.arena.faulted_bytes,
            arena_free_bytes=self.arena.free_bytes,
            copies=[_pack_copy(copy, retained) for copy in self.arena_copies.copies()],
            bytes_sent=self.holder.bytes_sent,
            bytes_received=self.arena_copies.num_bytes_received,
            num_running_uploads=self.uploads.num_open,
            failure_domain=self.settings.failure_domain or self.settings.host_id,
            nic=_nic(),
        )


def _nic() -> reports_pb2.NicCounters | None:
    counters = read_nic_counters()
    if counters is None:
        return None
    return reports_pb2.NicCounters(
        bytes_sent=counters.bytes_sent, bytes_received=counters.bytes_received, link_bytes_per_s=counters.bytes_per_s
    )


def _open_disk(settings: StoreSettings) -> DiskCache | None:
    limit_bytes = settings.disk_cache_limit_bytes()
    return DiskCache(settings.disk_cache_folder, limit_bytes) if limit_bytes else None


def _open_remote(settings: StoreSettings, disk: DiskCache | None) -> RemoteStore:
    remote = open_remote(settings.remote_url, settings.remote_options)
    return remote if disk is None else DiskTier(remote, disk)


def _pack_copy(copy: CopyReport, retained: Container[str]) -> reports_pb2.PackCopy:
    record = copy.record
    return reports_pb2.PackCopy(
        pack_id=record.pack_id,
        pack_bytes=record.pack_bytes,
        num_chunks=record.num_chunks,
        num_chunks_verified=copy.num_chunks_verified,
        num_pins=copy.num_pins,
        error=record.error,
        relay_begin_unix_us=record.begin_unix_us,
        relay_first_unix_us=record.first_unix_us,
        relay_end_unix_us=record.end_unix_us,
        source=record.source,
        shares=[
            reports_pb2.SourceShare(
                holder_id=share.holder_id,
                num_bytes=share.num_bytes,
                bytes_per_s=share.bytes_per_s,
                following=share.following,
                error=share.error,
            )
            for share in record.stats.by_source()
        ],
        num_repairs=record.stats.num_repairs,
        retained=record.pack_id in retained,
    )
