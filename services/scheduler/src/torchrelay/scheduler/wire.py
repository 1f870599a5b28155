"""Between the protocol's messages and the core's nouns."""

from __future__ import annotations

from collections.abc import Iterable

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.latency_model import LatencyModel, StepCost
from torchrelay.control.v1 import reports_pb2, scheduler_pb2, types_pb2
from torchrelay.scheduler.core import (
    Admission,
    AttemptKey,
    Copy,
    Model,
    Phase,
    Placement,
    Role,
    Roles,
    Seat,
    Share,
    Slot,
    Store,
    Wire,
    Worker,
)
from torchrelay.scheduler.effects import Happening, RefusalReason
from torchrelay.scheduler.explain import micros
from torchrelay.scheduler.measured import Measured

_PHASES = {
    reports_pb2.SlotState.STATE_UNSPECIFIED: Phase.FREE,
    reports_pb2.SlotState.STATE_FREE: Phase.FREE,
    reports_pb2.SlotState.STATE_LOADING: Phase.LOADING,
    reports_pb2.SlotState.STATE_READY: Phase.READY,
    reports_pb2.SlotState.STATE_DRAINING: Phase.DRAINING,
}


def roles_of(roles: Iterable[int]) -> Roles:
    """Roles this version knows; others are left out."""
    known = {int(role) for role in Role}
    return frozenset(Role(role) for role in roles if role in known)


def preferred(roles: Iterable[int]) -> Role | None:
    """The first role of this version that a worker names."""
    known = {int(role) for role in Role}
    return next((Role(role) for role in roles if role in known), None)


def roles_to_wire(roles: Roles) -> list[types_pb2.Role.ValueType]:
    return [types_pb2.ROLE_PREFILL if role is Role.PREFILL else types_pb2.ROLE_DECODE for role in sorted(roles)]


def worker_of(report: reports_pb2.WorkerReport, now: float) -> Worker:
    slot = report.slot
    return Worker(
        worker_id=report.worker_id,
        incarnation=report.incarnation,
        host_id=report.host_id,
        grpc_address=report.grpc_address,
        data_address=report.data_address,
        can_play=roles_of(report.roles),
        seen_at=now,
        prefers=preferred(report.roles),
        epoch=report.epoch,
        slot=Slot(
            phase=_PHASES.get(slot.state, Phase.FREE),
            instance_id=slot.instance_id,
            model=slot.model,
            version_id=slot.version_id,
            pack_id=slot.pack_id,
            roles=roles_of(slot.roles),
            num_layers_ready=slot.num_layers_ready,
            num_layers=slot.num_layers,
            load_phases=tuple(
                Measured(phase.name, phase.begin_unix_us, phase.end_unix_us, report.worker_id)
                for phase in slot.load_phases
            ),
            error=slot.error,
        ),
        kv_pool_bytes=report.kv_pool_bytes,
        kv_free_bytes=report.kv_free_bytes,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        num_queued_prefill_tokens=report.num_queued_prefill_tokens,
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        step_s=report.step_s,
        kv_bytes_sent=report.kv_bytes_sent,
        kv_bytes_received=report.kv_bytes_received,
        device=report.device,
        latency=_latency_of(report.latency) if report.HasField("latency") else None,
        queued_prefill_s=report.queued_prefill_s,
        keeps_prefixes=report.keeps_prefixes,
    )


def _latency_of(learned: reports_pb2.LatencyModel) -> LatencyModel:
    prefill, decode = (
        StepCost(cost.base_s, cost.per_position_s, cost.per_seen_s, cost.num_steps, cost.error)
        for cost in (learned.prefill, learned.decode)
    )
    return LatencyModel(prefill, decode, max(learned.token_budget, 1))


def store_of(report: reports_pb2.StoreReport, now: float) -> Store:
    return Store(
        store_id=report.store_id,
        incarnation=report.incarnation,
        host_id=report.host_id,
        grpc_address=report.grpc_address,
        data_address=report.data_address,
        seen_at=now,
        epoch=report.epoch,
        arena_target_bytes=report.arena_target_bytes,
        copies={
            copy.pack_id: Copy(
                pack_id=copy.pack_id,
                pack_bytes=copy.pack_bytes,
                num_chunks=copy.num_chunks,
                num_chunks_verified=copy.num_chunks_verified,
                num_pins=copy.num_pins,
                error=copy.error,
                relay_begin_us=copy.relay_begin_unix_us,
                relay_first_us=copy.relay_first_unix_us,
                relay_end_us=copy.relay_end_unix_us,
                source=copy.source,
                shares=tuple(
                    Share(share.holder_id, share.num_bytes, share.bytes_per_s, share.following, share.error)
                    for share in copy.shares
                ),
                guarded=copy.guarded,
                num_repairs=copy.num_repairs,
            )
            for copy in report.copies
        },
        failure_domain=report.failure_domain,
        bytes_sent=report.bytes_sent,
        bytes_received=report.bytes_received,
        wire=_wire_of(report.link) if report.HasField("link") else None,
    )


def _wire_of(link: reports_pb2.LinkReport) -> Wire:
    return Wire(link.bytes_sent, link.bytes_received, link.bytes_per_s)


def model_of(version: types_pb2.ModelVersion) -> Model:
    shape = version.shape
    return Model(
        name=version.model,
        version_id=version.version_id,
        pack_id=version.pack_id,
        pack_bytes=version.pack_bytes,
        kv_bytes_per_token=2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.kv_dtype_bytes,
        idle_timeout_s=version.scaling.idle_timeout_s,
        max_instances=version.scaling.max_instances,
        routing_block_tokens=version.routing_block_tokens,
    )


def key_of(key: types_pb2.AttemptKey) -> AttemptKey:
    if not key.request_id:
        raise InvalidRequest("an attempt needs a request id", field="key.request_id")
    return AttemptKey(key.request_id, key.attempt)


def key_to_wire(key: AttemptKey) -> types_pb2.AttemptKey:
    return types_pb2.AttemptKey(request_id=key.request_id, attempt=key.attempt)


def admission_of(request: scheduler_pb2.AdmitRequest, gateway_id: str, now: float) -> Admission:
    if not request.version.version_id or not request.version.pack_id:
        raise InvalidRequest("an admission names a version and its pack", field="version")
    return Admission(
        key=key_of(request.key),
        gateway_id=gateway_id,
        version_id=request.version.version_id,
        num_prompt_tokens=request.num_prompt_tokens,
        num_forced_tokens=request.num_forced_tokens,
        max_tokens=request.max_tokens,
        num_choices=max(request.num_choices, 1),
        admitted_at=now,
        lost_workers=frozenset(request.lost_workers),
        traceparent=request.traceparent,
        block_hashes=tuple(request.block_hashes),
        model=request.version.model,
    )


def placement_of(placement: scheduler_pb2.Placement, key: AttemptKey) -> Placement:
    """A placement an earlier scheduler made."""
    return Placement(key, _seat_of(placement.prefill), _seat_of(placement.decode), placement.cold)


def _seat_of(ref: scheduler_pb2.WorkerRef) -> Seat:
    return Seat(ref.worker_id, ref.grpc_address, ref.instance_id)


def placement_to_wire(placement: Placement, ticket: types_pb2.Ticket | None) -> scheduler_pb2.Placement:
    return scheduler_pb2.Placement(
        key=key_to_wire(placement.key),
        prefill=_seat_to_wire(placement.prefill),
        decode=_seat_to_wire(placement.decode),
        kv_ticket=ticket,
        cold=placement.cold,
    )


def _seat_to_wire(seat: Seat) -> scheduler_pb2.WorkerRef:
    return scheduler_pb2.WorkerRef(
        worker_id=seat.worker_id, grpc_address=seat.grpc_address, instance_id=seat.instance_id
    )


def phases_of(phases: Iterable[scheduler_pb2.Phase]) -> list[Measured]:
    return [Measured(one.name, one.begin_unix_us, one.end_unix_us, one.where, one.detail) for one in phases]


def phase_to_wire(phase: Measured) -> scheduler_pb2.Phase:
    return scheduler_pb2.Phase(
        name=phase.name,
        begin_unix_us=phase.begin_us,
        end_unix_us=phase.end_us,
        where=phase.where,
        detail=phase.detail,
    )


def decision_to_wire(happening: Happening) -> scheduler_pb2.Decision:
    return scheduler_pb2.Decision(
        at_unix_us=micros(happening.at), kind=happening.kind, subject=happening.subject, reason=happening.reason
    )


REFUSALS = {
    RefusalReason.QUEUE_FULL: scheduler_pb2.Refusal.REASON_QUEUE_FULL,
    RefusalReason.NO_CAPACITY: scheduler_pb2.Refusal.REASON_NO_CAPACITY,
    RefusalReason.LOAD_FAILED: scheduler_pb2.Refusal.REASON_LOAD_FAILED,
    RefusalReason.WITHDRAWN: scheduler_pb2.Refusal.REASON_WITHDRAWN,
}
