"""Converts between protocol messages and the core's types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

from google.protobuf.message import Message

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.latency.latency_model import LatencyModel, StepCost
from torchrelay.common.liveness import NO_ENGINE, EngineProgress
from torchrelay.control.v1 import reports_pb2, scheduler_pb2, types_pb2
from torchrelay.scheduler.policy import inputs, types
from torchrelay.scheduler.policy.effects import SchedulerEvent
from torchrelay.scheduler.policy.explain import unix_us
from torchrelay.scheduler.policy.timed_phase import TimedPhase

_SAME_NAMES: dict[tuple[type[Message], type], tuple[str, ...]] = {}
_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)

_ROLES = frozenset(types.Role)
_SERVICE_CLASSES = {service_class.value: service_class for service_class in types.ServiceClass}
_PHASES = {reports_pb2.SlotState.State.Value(f"STATE_{phase.name}"): phase for phase in types.InstancePhase}


def _from_message(kind: type[_T], message: Message, **others: Any) -> _T:
    """An object with all fields that its class and the message have by the same name, and ``others``."""
    return kind(**_fields_of(message, kind) | others)


def _fields_of(message: Message, kind: type) -> dict[str, Any]:
    return {name: getattr(message, name) for name in _same_names(type(message), kind)}


def to_message(kind: type[_M], value: object, **others: Any) -> _M:
    """A message with all fields that it and the object have by the same name, and ``others``."""
    return kind(**{name: getattr(value, name) for name in _same_names(kind, type(value))} | others)


def _same_names(message: type[Message], kind: type) -> tuple[str, ...]:
    """Names of fields that a message and a class have; only single numbers, texts and truth values."""
    if (names := _SAME_NAMES.get((message, kind))) is None:
        own: Iterable[str] = getattr(kind, "__struct_fields__", None) or map(attrgetter("name"), fields(kind))
        plain = {
            field.name
            for field in message.DESCRIPTOR.fields
            if not field.is_repeated and field.message_type is None and field.enum_type is None
        }
        names = _SAME_NAMES[message, kind] = tuple(name for name in own if name in plain)
    return names


def _known_roles(roles: Iterable[int]) -> list[types.Role]:
    """The roles that this version knows; others are dropped."""
    return [types.Role(role) for role in roles if role in _ROLES]


def roles_to_proto(roles: types.Roles) -> list[types_pb2.Role.ValueType]:
    return [types_pb2.ROLE_PREFILL if role is types.Role.PREFILL else types_pb2.ROLE_DECODE for role in sorted(roles)]


def worker_from_proto(report: reports_pb2.WorkerReport, now: float) -> types.WorkerStatus:
    slot, roles, can = report.slot, _known_roles(report.roles), report.capabilities
    knows_engine = report.HasField("capabilities")  # else: a worker of an earlier release
    return _from_message(
        types.WorkerStatus,
        report,
        playable_roles=frozenset(roles),
        seen_at=now,
        preferred_role=roles[0] if roles else None,
        slot=_from_message(
            types.SlotStatus,
            slot,
            phase=_PHASES.get(slot.state, types.InstancePhase.FREE),
            roles=frozenset(_known_roles(slot.roles)),
            load_phases=tuple(
                TimedPhase(phase.name, phase.begin_unix_us, phase.end_unix_us, report.worker_id)
                for phase in slot.load_phases
            ),
        ),
        latency=latency_from_proto(report.latency) if report.HasField("latency") else None,
        progress=progress_from_proto(report.engine),
        num_devices=report.num_devices or 1,
        engine=can.engine or types.OWN_ENGINE,
        hands_over=can.kv_handover or not knows_engine,
        computes_by_layer=can.layer_spans or not knows_engine,
        labels=frozenset(report.labels),
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


def latency_to_proto(model: LatencyModel | None) -> reports_pb2.LatencyModel | None:
    if model is None:
        return None
    prefill, decode = (to_message(reports_pb2.StepCost, cost) for cost in (model.prefill, model.decode))
    return reports_pb2.LatencyModel(prefill=prefill, decode=decode, token_budget=model.token_budget)


def latency_from_proto(learned: reports_pb2.LatencyModel) -> LatencyModel:
    prefill, decode = _from_message(StepCost, learned.prefill), _from_message(StepCost, learned.decode)
    return LatencyModel(prefill, decode, max(learned.token_budget, 1))


def store_from_proto(report: reports_pb2.StoreReport, now: float) -> types.StoreStatus:
    nic = report.nic
    return _from_message(
        types.StoreStatus,
        report,
        seen_at=now,
        copies={copy.pack_id: _copy_from_proto(copy) for copy in report.copies},
        nic=types.NicCounters(nic.bytes_sent, nic.bytes_received, nic.link_bytes_per_s)
        if report.HasField("nic")
        else None,
        disk_pack_ids=frozenset(report.disk.pack_ids) if report.HasField("disk") else None,
    )


def _copy_from_proto(copy: reports_pb2.PackCopy) -> types.PackCopy:
    return _from_message(
        types.PackCopy,
        copy,
        relay_begin_us=copy.relay_begin_unix_us,
        relay_first_us=copy.relay_first_unix_us,
        relay_end_us=copy.relay_end_unix_us,
        shares=tuple(_from_message(types.SourceShare, share) for share in copy.shares),
    )


def model_from_proto(version: types_pb2.ModelVersion) -> types.Model:
    shape, scaling = version.shape, version.scaling
    return _from_message(
        types.Model,
        version,
        name=version.model,
        kv_bytes_per_token=2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.kv_dtype_bytes,
        **_fields_of(scaling, types.Model)
        | {"num_devices": scaling.num_devices or 1, "kv_share": scaling.kv_share or 1.0},
        hosts=frozenset(scaling.hosts),
        scheduled=tuple(
            types.ScheduledMinimum(float(each.begin_unix_s), float(each.end_unix_s), each.num_instances, each.entry)
            for each in scaling.scheduled
        ),
        targets=_from_message(types.LatencyTargets, version.targets),
    )


def key_from_proto(key: types_pb2.AttemptKey) -> types.AttemptKey:
    if not key.request_id:
        raise InvalidRequest("request id must not be empty", field="key.request_id")
    return types.AttemptKey(key.request_id, key.attempt)


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
    prefill, decode = (_from_message(types.WorkerRef, ref) for ref in (placement.prefill, placement.decode))
    return types.Placement(key, prefill, decode, placement.cold)


def phases_from_proto(phases: Iterable[types_pb2.Phase]) -> list[TimedPhase]:
    return [
        TimedPhase(phase.name, phase.begin_unix_us, phase.end_unix_us, phase.where, phase.detail) for phase in phases
    ]


def phase_to_proto(phase: TimedPhase) -> types_pb2.Phase:
    return to_message(types_pb2.Phase, phase, begin_unix_us=phase.begin_us, end_unix_us=phase.end_us)


def decision_to_proto(event: SchedulerEvent) -> scheduler_pb2.Decision:
    return to_message(scheduler_pb2.Decision, event, at_unix_us=unix_us(event.at))
