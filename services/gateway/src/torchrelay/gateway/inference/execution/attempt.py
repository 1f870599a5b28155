"""One attempt at one request, from its admission to its release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchrelay.common.clock import now_unix_us
from torchrelay.common.tokens.prefix_hashes import ROUTING_TOKENS, routing_hashes
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import scheduler_pb2, types_pb2
from torchrelay.gateway.inference.core import ResolvedRequest
from torchrelay.gateway.inference.execution.admission_stream import AdmissionStream, AttemptId, Listener
from torchrelay.gateway.inference.execution.generation import FIRST_ATTEMPT, AttemptPlan
from torchrelay.gateway.inference.execution.worker_streams import RunStream, WorkerStreams


@dataclass(frozen=True, slots=True)
class Upstreams:
    """The ways out of the gateway that an attempt takes."""

    admissions: AdmissionStream
    workers: WorkerStreams
    gateway_id: str


def model_version(resolved: ResolvedRequest) -> types_pb2.ModelVersion:
    """What the scheduler must know about the version a call goes to."""
    model, version, shape = resolved.model, resolved.model.version, resolved.model.version.shape
    return types_pb2.ModelVersion(
        version_id=version.version_id,
        model=model.name,
        tenant_id=model.tenant_id,
        pack_id=version.pack_id,
        pack_bytes=version.pack_bytes,
        shape=types_pb2.ModelShape(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            kv_dtype_bytes=shape.kv_dtype_bytes,
            max_context_tokens=shape.max_context_tokens,
            vocab_size=shape.vocab_size,
        ),
        tokenizer_digest=version.file_digests.get("tokenizer.json", ""),
        routing_block_tokens=version.routing_block_tokens,
        scaling=types_pb2.ScalingSettings(idle_timeout_s=model.idle_timeout_s, max_instances=model.max_instances),
    )


def admit_request(
    resolved: ResolvedRequest, plan: AttemptPlan, lost_workers: Sequence[str], traceparent: str
) -> scheduler_pb2.AdmitRequest:
    """What the scheduler is asked; resumed attempts ask for the same prompt with tokens to force."""
    has_routing_keys = resolved.model.version.routing_block_tokens == ROUTING_TOKENS
    return scheduler_pb2.AdmitRequest(
        key=types_pb2.AttemptKey(request_id=resolved.request_id, attempt=plan.attempt),
        version=model_version(resolved),
        num_prompt_tokens=len(resolved.prompt),
        num_forced_tokens=plan.num_forced_tokens,
        max_tokens=resolved.sampling.max_tokens,
        num_choices=len(plan.forced),
        block_hashes=routing_hashes(resolved.principal.tenant_id, resolved.prompt) if has_routing_keys else (),
        lost_workers=lost_workers,
        traceparent=traceparent,
    )


@dataclass(slots=True)
class Attempt:
    """``admit`` -> ``place`` -> ``end``; an attempt that fails is ended too, and another one takes over."""

    resolved: ResolvedRequest
    plan: AttemptPlan
    upstreams: Upstreams
    traceparent: str
    placement: scheduler_pb2.Placement | None = None
    has_left_prefill: bool = False
    asked_unix_us: int = 0
    placed_unix_us: int = 0
    first_token_unix_us: int = 0
    ended_unix_us: int = 0
    num_output_tokens: int = 0
    measured: list[types_pb2.Phase] = field(default_factory=list)
    _streams: dict[str, RunStream] = field(default_factory=dict)

    @property
    def key(self) -> AttemptId:
        return self.resolved.request_id, self.plan.attempt

    def admit(self, lost_workers: Sequence[str], listener: Listener) -> None:
        self.asked_unix_us = now_unix_us()
        self.upstreams.admissions.admit(
            admit_request(self.resolved, self.plan, lost_workers, self.traceparent), listener
        )

    def place(self, placement: scheduler_pb2.Placement, listener: Listener) -> None:
        """Starts the attempt at both its workers."""
        self.placement, self.placed_unix_us = placement, now_unix_us()
        for role, worker in (("decode", placement.decode), ("prefill", placement.prefill)):
            stream = self.upstreams.workers.stream("decode" if role == "decode" else "prefill", worker)
            self._streams[role] = stream
            stream.start(self._start_for(role, worker.instance_id), listener)

    def _start_for(self, role: str, instance_id: str) -> pb.AttemptStart:
        assert self.placement is not None
        start = pb.AttemptStart(
            key=self.placement.key,
            instance_id=instance_id,
            tenant_id=self.resolved.principal.tenant_id,
            num_prompt_tokens=len(self.resolved.prompt),
            sampling=self.resolved.sampling,
            choices=[pb.ChoiceStart(choice=c, forced_output=forced) for c, forced in self.plan.forced.items()],
            deadline_unix_ms=self.resolved.deadline_unix_us // 1000,
            traceparent=self.traceparent,
        )
        if role == "prefill":
            decode = self.placement.decode
            start.prompt.extend(self.resolved.prompt)
            start.decode.worker_id = decode.worker_id
            start.decode.grpc_address = decode.grpc_address
            start.decode.instance_id = decode.instance_id
            if self.placement.HasField("kv_ticket"):
                start.kv_ticket.CopyFrom(self.placement.kv_ticket)
        return start

    def note(self, output: pb.ChoiceOutput, num_tokens: int) -> None:
        """Keeps what an accepted output says about time."""
        self.num_output_tokens += num_tokens
        if not self.first_token_unix_us:
            self.first_token_unix_us = now_unix_us()
        if output.phases:
            where = self._worker_of(output)
            self.measured += [
                types_pb2.Phase(
                    name=one.name, begin_unix_us=one.begin_unix_us, end_unix_us=one.end_unix_us, where=where
                )
                for one in output.phases
            ]

    def _worker_of(self, output: pb.ChoiceOutput) -> str:
        """Who sent it: the prefill worker gives each choice its first new token, the decode worker the others."""
        if self.placement is None:
            return ""
        is_first = output.first_position == len(self.plan.forced[output.choice])
        return (self.placement.prefill if is_first else self.placement.decode).worker_id

    def leave_prefill(self) -> None:
        """The prefill worker has delivered all its tokens; it may still say that the hand-over failed."""
        self.has_left_prefill = True

    def survives_loss_of(self, worker_id: str) -> bool:
        """Whether the loss of this worker is no loss: the decode worker has the KV, or will miss it and say so."""
        placement = self.placement
        if placement is None or not self.has_left_prefill:
            return False
        return worker_id == placement.prefill.worker_id != placement.decode.worker_id

    def end(self, *, is_running: bool) -> None:
        """Leaves the workers (``is_running``: they must be told to stop) and releases the placement."""
        for stream in self._streams.values():
            if is_running:
                stream.cancel(self.key)
            else:
                stream.forget(self.key)
        self._streams.clear()
        began, self.ended_unix_us = self.first_token_unix_us, now_unix_us()
        self.upstreams.admissions.release(
            scheduler_pb2.Release(
                key=types_pb2.AttemptKey(request_id=self.resolved.request_id, attempt=self.plan.attempt),
                ttft_s=(began - self.asked_unix_us) / 1e6 if began else 0.0,
                num_output_tokens=self.num_output_tokens,
                phases=self.phases(),
            )
        )

    def phases(self) -> list[types_pb2.Phase]:
        """Where the time went, as far as the gateway knows.

        ``prepare``: key, chat template, tokens and limits, before the scheduler was asked. ``decode``: from the first
        token to the attempt's end.
        """
        where = self.upstreams.gateway_id
        phases = []
        if self.plan.attempt == FIRST_ATTEMPT:
            phases.append(("prepare", self.resolved.arrived_unix_us, self.asked_unix_us))
        if self.placed_unix_us:
            phases.append(("queue", self.asked_unix_us, self.placed_unix_us))
        if self.first_token_unix_us:
            phases.append(("first_token", self.placed_unix_us, self.first_token_unix_us))
            phases.append(("decode", self.first_token_unix_us, self.ended_unix_us))
        own = [
            types_pb2.Phase(name=name, begin_unix_us=begin, end_unix_us=end, where=where) for name, begin, end in phases
        ]
        return own + self.measured
