"""Conversions between the store's objects and protobuf messages."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import asdict

from torchrelay.control.v1 import param_store_pb2 as pb
from torchrelay.control.v1 import reports_pb2, types_pb2
from torchrelay.modelspec.tensor_order import DTYPE_BYTES
from torchrelay.param_store.copies.arena_copies import CopyReport
from torchrelay.param_store.embedding import EmbeddingSpec
from torchrelay.param_store.nic_counters import read_nic_counters
from torchrelay.param_store.remote.versions import Version
from torchrelay.param_store.store import Store
from torchrelay.param_store.uploads.staged_upload import FileProgress, StagedUpload
from torchrelay.transfer.fetch.follow import SourceAddress


def source_address(source: types_pb2.Source) -> SourceAddress | None:
    """The address of a source; None stands for the remote store."""
    if not source.data_address:
        return None
    return SourceAddress(source.holder_id, source.data_address, source.ticket)


def upload_state(upload: StagedUpload) -> pb.UploadState:
    files = [file_state(progress) for progress in upload.progress()]
    return pb.UploadState(upload_id=upload.record.upload_id, files=files, version_id=upload.claimed_version)


def file_state(progress: FileProgress) -> pb.FileState:
    return pb.FileState(**asdict(progress))


def version_description(version: Version) -> pb.VersionDescription:
    """A version, for the catalog and the scheduler."""
    config = version.config
    return pb.VersionDescription(
        version_id=version.version_id,
        pack_id=version.pack_id,
        pack_bytes=version.manifest.num_bytes,
        architecture=version.manifest.architecture,
        dtype=config.weights_dtype(version.manifest.dtype),
        shape=types_pb2.ModelShape(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            kv_dtype_bytes=DTYPE_BYTES[version.manifest.dtype],
            max_context_tokens=config.max_context_tokens,
            vocab_size=config.vocab_size,
        ),
        routing_block_tokens=version.document.routing_block_tokens,
        file_digests=version.document.files,
        eos_token_ids=version.eos_token_ids,
        stored_bytes=version.stored_bytes,
        has_no_head=not version.config.has_head,
        base_version_id=version.document.base_id,
        embedding=None if version.embedding is None else _embedding(version.embedding),
        engine=config.needed_engine,
    )


def _embedding(spec: EmbeddingSpec) -> pb.Embedding:
    return pb.Embedding(
        pooling=types_pb2.Pooling.ValueType(spec.pooling),
        num_dimensions=spec.num_dimensions,
        is_normalized=spec.is_normalized,
    )


def store_report(store: Store, disk_pack_ids: Iterable[str] | None = None) -> reports_pb2.StoreReport:
    """The store's state for the scheduler. ``disk_pack_ids``: None if they are unchanged since the last report."""
    retained, counters = store.arena.retention.ranks, read_nic_counters()
    return reports_pb2.StoreReport(
        store_id=store.settings.store_id,
        incarnation=store.incarnation,
        host_id=store.settings.host_id,
        grpc_address=store.grpc_address,
        data_address=store.data_address,
        epoch=store.epoch.highest,
        arena_target_bytes=store.arena.capacity_bytes,
        arena_bytes=store.arena.faulted_bytes,
        arena_free_bytes=store.arena.free_bytes,
        copies=[_pack_copy(copy, retained) for copy in store.arena_copies.copies()],
        bytes_sent=store.holder.bytes_sent,
        bytes_received=sum(store.arena_copies.counts.num_bytes_received.values()),
        num_running_uploads=store.uploads.num_open,
        failure_domain=store.settings.failure_domain or store.settings.host_id,
        nic=reports_pb2.NicCounters(**asdict(counters)) if counters else None,
        disk=None if disk_pack_ids is None else reports_pb2.DiskPacks(pack_ids=disk_pack_ids),
    )


def store_beat(store: Store) -> reports_pb2.StoreReport:
    """A sign of life."""
    return reports_pb2.StoreReport(
        store_id=store.settings.store_id, incarnation=store.incarnation, epoch=store.epoch.highest, is_beat=True
    )


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
        shares=[reports_pb2.SourceShare(**asdict(stats)) for stats in record.stats.by_source()],
        num_repairs=record.stats.num_repairs,
        retained=record.pack_id in retained,
    )
