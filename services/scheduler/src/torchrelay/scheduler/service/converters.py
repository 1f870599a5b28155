"""Converts between protocol messages and the core's types."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.common.liveness import NO_ENGINE, EngineProgress
from torchrelay.control.v1 import reports_pb2, scheduler_pb2, types_pb2
from torchrelay.scheduler.policy import inputs, types
from torchrelay.scheduler.policy.effects import AdmissionRefused, LoadNotice, Recall, SchedulerEvent
from torchrelay.scheduler.policy.explain import unix_us
from torchrelay.scheduler.policy.timed_phase import TimedPhase

CallTokens: TypeAlias = tuple[str, str]  # the gateway's, and the other worker's
# Fields of an ``AdmitEvent``. There are thousands a second: the outgoing message is filled with fields directly, where
# it would have to copy an event.
EventFields: TypeAlias = dict[str, Any]
_ROLES = frozenset(types.Role)
_SERVICE_CLASSES = {service_class.value: service_class for service_class in types.ServiceClass}
_PHASES = {
    reports_pb2.SlotState.STATE_UNSPECIFIED: types.InstancePhase.FREE,
    reports_pb2.SlotState.STATE_FREE: types.InstancePhase.FREE,
    reports_pb2.SlotState.STATE_LOADING: types.InstancePhase.LOADING,
    reports_pb2.SlotState.STATE_READY: types.InstancePhase.READY,
    reports_pb2.SlotState.STATE_DRAINING: types.InstancePhase.DRAINING,
}


def _known_roles(roles: Iterable[int]) -> list[types.Role]:
    """The roles that this version knows; others are dropped."""
    return [types.Role(role) for role in roles if role in _ROLES]


def roles_to_proto(roles: types.Roles) -> list[types_pb2.Role.ValueType]:
    return [types_pb2.ROLE_PREFILL if role is types.Role.PREFILL else types_pb2.ROLE_DECODE for role in sorted(roles)]


def worker_from_proto(report: reports_pb2.WorkerReport, now: float) -> types.WorkerStatus:
    slot, roles, can = report.slot, _known_roles(report.roles), report.capabilities
    knows_engine = report.HasField("capabilities")  # else: a worker of an earlier release
    return types.WorkerStatus(
        worker_id=report.worker_id,
        incarnation=report.incarnation,
        host_id=report.host_id,
        grpc_address=report.grpc_address,
        playable_roles=frozenset(roles),
        seen_at=now,
        preferred_role=roles[0] if roles else None,
        slot=types.SlotStatus(
            phase=_PHASES.get(slot.state, types.InstancePhase.FREE),
            instance_id=slot.instance_id,
            model=slot.model,
            version_id=slot.version_id,
            pack_id=slot.pack_id,
            roles=frozenset(_known_roles(slot.roles)),
            num_layers_ready=slot.num_layers_ready,
            num_layers=slot.num_layers,
            loaded_share=slot.loaded_share,
            load_phases=tuple(
                TimedPhase(phase.name, phase.begin_unix_us, phase.end_unix_us, report.worker_id)
                for phase in slot.load_phases
            ),
            error=slot.error,
            store_was_lost=slot.store_was_lost,
        ),
        kv_pool_bytes=report.kv_pool_bytes,
        num_running=report.num_running,
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        step_s=report.step_s,
        kv_bytes_sent=report.kv_bytes_sent,
        kv_bytes_received=report.kv_bytes_received,
        device=report.device,
        latency=_latency_from_proto(report.latency) if report.HasField("latency") else None,
        has_prefix_cache=report.has_prefix_cache,
        progress=progress_from_proto(report.engine),
        is_leaving=report.is_leaving,
        num_devices=report.num_devices or 1,
        engine=can.engine or types.OWN_ENGINE,
        hands_over=can.kv_handover or not knows_engine,
        computes_by_layer=can.layer_spans or not knows_engine,
    )


def peer_of(report: reports_pb2.WorkerReport | reports_pb2.StoreReport) -> types.Peer:
    if isinstance(report, reports_pb2.WorkerReport):
        return types.Peer(report.worker_id)
    return types.Peer(report.store_id, is_store=True)


def beat_from_proto(report: reports_pb2.WorkerReport | reports_pb2.StoreReport) -> inputs.Beat:
    progress = progress_from_proto(report.engine) if isinstance(report, reports_pb2.WorkerReport) else NO_ENGINE
    return inputs.Beat(peer_of(report), report.incarnation, progress)


def progress_from_proto(engine: types_pb2.EngineProgress) -> EngineProgress:
    return EngineProgress(engine.num_advances, engine.has_work, engine.expected_s)


def _latency_from_proto(learned: reports_pb2.LatencyModel) -> LatencyModel:
    prefill, decode = (
        StepCost(cost.base_s, cost.per_position_s, cost.per_attended_s, cost.num_steps, cost.error)
        for cost in (learned.prefill, learned.decode)
    )
    return LatencyModel(prefill, decode, max(learned.token_budget, 1))


def store_from_proto(report: reports_pb2.StoreReport, now: float) -> types.StoreStatus:
    nic = report.nic
    return types.StoreStatus(
        store_id=report.store_id,
        incarnation=report.incarnation,
        host_id=report.host_id,
        grpc_address=report.grpc_address,
        data_address=report.data_address,
        seen_at=now,
        arena_target_bytes=report.arena_target_bytes,
        copies={
            copy.pack_id: types.PackCopy(
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
                    types.SourceShare(share.holder_id, share.num_bytes, share.bytes_per_s, share.following, share.error)
                    for share in copy.shares
                ),
                retained=copy.retained,
                num_repairs=copy.num_repairs,
            )
            for copy in report.copies
        },
        failure_domain=report.failure_domain,
        bytes_sent=report.bytes_sent,
        bytes_received=report.bytes_received,
        nic=types.NicCounters(nic.bytes_sent, nic.bytes_received, nic.link_bytes_per_s)
        if report.HasField("nic")
        else None,
        disk_pack_ids=frozenset(report.disk.pack_ids) if report.HasField("disk") else None,
    )


def model_from_proto(version: types_pb2.ModelVersion) -> types.Model:
    shape, targets = version.shape, version.targets
    return types.Model(
        name=version.model,
        version_id=version.version_id,
        pack_id=version.pack_id,
        pack_bytes=version.pack_bytes,
        kv_bytes_per_token=2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.kv_dtype_bytes,
        idle_timeout_s=version.scaling.idle_timeout_s,
        max_instances=version.scaling.max_instances,
        num_devices=version.scaling.num_devices or 1,
        engine=version.scaling.engine,
        routing_block_tokens=version.routing_block_tokens,
        min_instances=version.scaling.min_instances,
        scheduled=tuple(
            types.ScheduledMinimum(float(each.begin_unix_s), float(each.end_unix_s), each.num_instances, each.entry)
            for each in version.scaling.scheduled
        ),
        targets=types.LatencyTargets(
            targets.interactive_ttft_s, targets.standard_ttft_s, targets.batch_ttft_s, targets.tbt_target_s
        ),
    )


def key_from_proto(key: types_pb2.AttemptKey) -> types.AttemptKey:
    if not key.request_id:
        raise InvalidRequest("request id must not be empty", field="key.request_id")
    return types.AttemptKey(key.request_id, key.attempt)


def key_to_proto(key: types.AttemptKey) -> types_pb2.AttemptKey:
    return types_pb2.AttemptKey(request_id=key.request_id, attempt=key.attempt)


def admission_from_proto(request: scheduler_pb2.AdmitRequest, gateway_id: str, now: float) -> types.Admission:
    version_id, model = request.version.version_id, request.version.model
    if not version_id or not request.version.pack_id:
        raise InvalidRequest("version must have a version id and a pack id", field="version")
    return types.Admission(
        key=key_from_proto(request.key),
        gateway_id=gateway_id,
        version_id=version_id,
        num_prompt_tokens=request.num_prompt_tokens,
        num_forced_tokens=request.num_forced_tokens,
        max_tokens=request.max_tokens,
        num_choices=max(request.num_choices, 1),
        admitted_at=now,
        age_s=request.age_ms / 1000,
        lost_workers=tuple(request.lost_workers),
        traceparent=request.traceparent,
        block_hashes=tuple(request.block_hashes),
        model=model,
        service_class=_SERVICE_CLASSES.get(request.service_class, types.ServiceClass.STANDARD),
    )


def placement_from_proto(placement: scheduler_pb2.Placement, key: types.AttemptKey) -> types.Placement:
    """A placement by an earlier scheduler."""
    return types.Placement(
        key, _worker_ref_from_proto(placement.prefill), _worker_ref_from_proto(placement.decode), placement.cold
    )


def _worker_ref_from_proto(ref: types_pb2.WorkerRef) -> types.WorkerRef:
    return types.WorkerRef(ref.worker_id, ref.grpc_address, ref.instance_id)


def placed_to_fields(
    placement: types.Placement,
    kv_ticket: dict[str, Any] | None,
    prompt_ticket: dict[str, Any] | None,
    call_tokens: Callable[[str], CallTokens],
) -> EventFields:
    """Fields of a placement, with the fields of its tickets. ``call_tokens``: tokens that a worker accepts."""
    placed: dict[str, Any] = {
        "key": {"request_id": placement.key.request_id, "attempt": placement.key.attempt},
        "prefill": _worker_ref_fields(placement.prefill, call_tokens),
        "decode": _worker_ref_fields(placement.decode, call_tokens),
        "cold": placement.cold,
    }
    if kv_ticket is not None:
        placed["kv_ticket"] = kv_ticket
    if (source := placement.prompt_source) is not None:
        placed["prompt_source"] = {
            "key": {"request_id": source.key.request_id, "attempt": source.key.attempt},
            "worker": _worker_ref_fields(source.worker, call_tokens),
            "ticket": prompt_ticket,
            "wait_ms": round(source.wait_s * 1000),
        }
    return {"placement": placed}


def _worker_ref_fields(worker_ref: types.WorkerRef, call_tokens: Callable[[str], CallTokens]) -> dict[str, str]:
    gateway_token, worker_token = call_tokens(worker_ref.worker_id)
    return {
        "worker_id": worker_ref.worker_id,
        "grpc_address": worker_ref.grpc_address,
        "instance_id": worker_ref.instance_id,
        "gateway_token": gateway_token,
        "worker_token": worker_token,
    }


def phases_from_proto(phases: Iterable[types_pb2.Phase]) -> list[TimedPhase]:
    return [
        TimedPhase(phase.name, phase.begin_unix_us, phase.end_unix_us, phase.where, phase.detail) for phase in phases
    ]


def phase_to_proto(phase: TimedPhase) -> types_pb2.Phase:
    return types_pb2.Phase(
        name=phase.name, begin_unix_us=phase.begin_us, end_unix_us=phase.end_us, where=phase.where, detail=phase.detail
    )


def decision_to_proto(event: SchedulerEvent) -> scheduler_pb2.Decision:
    return scheduler_pb2.Decision(
        at_unix_us=unix_us(event.at), kind=event.kind, subject=event.subject, reason=event.reason
    )


def refusal_to_proto(refused: AdmissionRefused) -> scheduler_pb2.Refusal:
    return scheduler_pb2.Refusal(
        key=key_to_proto(refused.key),
        reason=scheduler_pb2.Refusal.Reason.Value(f"REASON_{refused.reason.name}"),
        message=refused.message,
        retry_after_s=refused.retry_after_s,
    )


def recall_to_proto(recall: Recall) -> scheduler_pb2.Recall:
    return scheduler_pb2.Recall(key=key_to_proto(recall.key), keeps_prompt=recall.keeps_prompt)


def notice_to_proto(notice: LoadNotice) -> scheduler_pb2.Loading:
    return scheduler_pb2.Loading(
        version_id=notice.version_id,
        has_slot=notice.has_slot,
        num_layers_ready=notice.num_layers_ready,
        num_layers=notice.num_layers,
        left_s=notice.left_s,
    )
