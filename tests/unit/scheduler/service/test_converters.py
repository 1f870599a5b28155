"""Conversions copy fields by their names: no field of a message is dropped because a name changed."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message

from torchrelay.common.latency.latency_model import StepCost
from torchrelay.control.v1 import reports_pb2, scheduler_pb2, types_pb2
from torchrelay.scheduler.policy import effects, types
from torchrelay.scheduler.policy.timed_phase import TimedPhase
from torchrelay.scheduler.service.converters import _same_names

# Of each message, the plain fields that the scheduler's class lacks: read by others, or converted under another name.
OTHER_FIELDS: dict[tuple[type[Message], type], set[str]] = {
    (reports_pb2.WorkerReport, types.WorkerStatus): {
        "data_address", "epoch", "is_beat", "kv_free_bytes", "num_positions_decoded", "num_positions_prefilled",
        "slot_start_s", "device_name",
    },
    (reports_pb2.SlotState, types.SlotStatus): set(),
    (reports_pb2.StepCost, StepCost): set(),
    (reports_pb2.StoreReport, types.StoreStatus): {
        "arena_bytes", "arena_free_bytes", "epoch", "is_beat", "num_running_uploads"
    },
    (reports_pb2.PackCopy, types.PackCopy): {"relay_begin_unix_us", "relay_end_unix_us", "relay_first_unix_us"},
    (reports_pb2.SourceShare, types.SourceShare): set(),
    (types_pb2.ModelVersion, types.Model): {"model", "tenant_id", "tokenizer_digest"},
    (types_pb2.ScalingSettings, types.Model): set(),
    (types_pb2.LatencyTargets, types.LatencyTargets): set(),
    (types_pb2.WorkerRef, types.WorkerRef): {"gateway_token", "worker_token"},
    (scheduler_pb2.Loading, effects.LoadNotice): set(),
    (types_pb2.Phase, TimedPhase): {"begin_unix_us", "end_unix_us"},
    (scheduler_pb2.Decision, effects.SchedulerEvent): {"at_unix_us"},
    (scheduler_pb2.Refusal, effects.AdmissionRefused): set(),
}  # fmt: skip


@pytest.mark.parametrize(("message", "kind"), OTHER_FIELDS, ids=lambda each: each.__name__)
def test_all_plain_fields_of_a_message_have_a_counterpart(message: type[Message], kind: type) -> None:
    plain = {
        field.name
        for field in message.DESCRIPTOR.fields
        if not field.is_repeated and field.message_type is None and field.enum_type is None
    }
    assert plain - set(_same_names(message, kind)) == OTHER_FIELDS[message, kind]
