"""An attempt at a request, from its admission to its release."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from torchrelay.common.clock import now_unix_us
from torchrelay.common.tokens.prefix_hashes import ROUTING_TOKENS, prefix_salt, routing_hashes
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import scheduler_pb2, types_pb2
from torchrelay.gateway.core import PublishedModel, Version
from torchrelay.gateway.inference.core import ResolvedRequest
from torchrelay.gateway.inference.execution.admission_stream import AdmissionStream, Listener
from torchrelay.gateway.inference.execution.generation import FIRST_ATTEMPT, AttemptPlan
from torchrelay.gateway.inference.execution.worker_streams import RoleName, RunStream, WorkerStreams

# What the phases are that do not name themselves.
_DETAILS = {"prepare": "key, chat template, tokenization, limits", "first_token": "from the placement on"}


@dataclass(frozen=True, slots=True)
class Upstreams:
    """The streams that an attempt uses: to the scheduler and to the workers."""

    admissions: AdmissionStream
    workers: WorkerStreams
    gateway_id: str


def model_version(model: PublishedModel) -> types_pb2.ModelVersion:
    """The scheduler's description of a model's version. To the scheduler an adapter is another name of its base."""
    version = model.version
    return types_pb2.ModelVersion(
        version_id=version.served_version_id,
        model=model.name,
        tenant_id=model.tenant_id,
        pack_id=version.pack_id,
        pack_bytes=version.pack_bytes,
        shape=types_pb2.ModelShape(**msgspec.to_builtins(version.shape)),
        tokenizer_digest=version.file_digests.get("tokenizer.json", ""),
        routing_block_tokens=version.routing_block_tokens,
        scaling=types_pb2.ScalingSettings(
            idle_timeout_s=model.idle_timeout_s,
            max_instances=model.max_instances,
            engine=model.needed_engine,
            num_devices=model.num_devices,
            **msgspec.to_builtins(model.resources),
        ),
        targets=types_pb2.LatencyTargets(**msgspec.to_builtins(model.targets)),
    )


def admit_request(
    resolved: ResolvedRequest, plan: AttemptPlan, lost_workers: Sequence[str], traceparent: str
) -> scheduler_pb2.AdmitRequest:
    """The admission of an attempt; a resumed attempt also has forced tokens."""
    has_routing_keys = resolved.model.version.routing_block_tokens == ROUTING_TOKENS
    salt = prefix_salt(resolved.principal.tenant_id, resolved.model.version.adapter_id)
    return scheduler_pb2.AdmitRequest(
        key=types_pb2.AttemptKey(request_id=resolved.request_id, attempt=plan.attempt),
        version=model_version(resolved.model),
        num_prompt_tokens=len(resolved.prompt),
        num_forced_tokens=plan.num_forced_tokens,
        max_tokens=plan.max_tokens,
        num_choices=len(plan.forced),
        block_hashes=routing_hashes(salt, resolved.prompt) if has_routing_keys else (),
        lost_workers=lost_workers,
        traceparent=traceparent,
        service_class=scheduler_pb2.ServiceClass.ValueType(resolved.service_class),
        age_ms=max(now_unix_us() - resolved.arrived_unix_us, 0) // 1000,
    )


def _adapter(version: Version) -> types_pb2.Adapter | None:
    if not version.adapter_id:
        return None
    return types_pb2.Adapter(
        adapter_id=version.adapter_id,
        config_digest=version.file_digests["adapter_config.json"],
        weights_digest=version.file_digests["adapter_model.safetensors"],
    )


@dataclass(slots=True)
class Attempt:
    """``admit`` -> ``place`` -> ``end``. A failed attempt ends too, and another attempt takes over."""

    resolved: ResolvedRequest
    plan: AttemptPlan
    upstreams: Upstreams
    traceparent: str
    placement: scheduler_pb2.Placement | None = None
    has_left_prefill: bool = False  # the prefill worker sent all its tokens; it may still report a failed hand-over
    is_prompt_begun: bool = False  # its worker has reported progress of a long prompt
    admitted_unix_us: int = 0
    placed_unix_us: int = 0
    first_token_unix_us: int = 0
    ended_unix_us: int = 0
    num_output_tokens: int = 0
    measured: list[types_pb2.Phase] = field(default_factory=list)
    error: str = ""  # why it failed
    _streams: dict[str, RunStream] = field(default_factory=dict)

    @property
    def key(self) -> types_pb2.AttemptKey:
        return types_pb2.AttemptKey(request_id=self.resolved.request_id, attempt=self.plan.attempt)

    def admit(self, lost_workers: Sequence[str], listener: Listener) -> None:
        self.admitted_unix_us = now_unix_us()
        self.upstreams.admissions.admit(
            admit_request(self.resolved, self.plan, lost_workers, self.traceparent), listener
        )

    def place(self, placement: scheduler_pb2.Placement, listener: Listener) -> None:
        """Starts the attempt on both its workers; one with an embedding on the prefill worker alone."""
        self.placement, self.placed_unix_us = placement, now_unix_us()
        if not self.resolved.pooling:
            self._start("decode", placement, placement.decode, listener)
        self._start("prefill", placement, placement.prefill, listener)

    def _start(
        self, role: RoleName, placement: scheduler_pb2.Placement, worker: types_pb2.WorkerRef, listener: Listener
    ) -> None:
        start = pb.AttemptStart(
            key=placement.key,
            instance_id=worker.instance_id,
            tenant_id=self.resolved.principal.tenant_id,
            num_prompt_tokens=len(self.resolved.prompt),
            sampling=self.resolved.sampling,
            choices=[pb.ChoiceStart(choice=c, forced_output=forced) for c, forced in self.plan.forced.items()],
            deadline_unix_ms=self.resolved.deadline_unix_us // 1000,
            traceparent=self.traceparent,
            prompt_end=self.resolved.prompt_end,
            distinct_prompt_tokens=self.resolved.distinct_prompt_tokens,
            pooling=types_pb2.Pooling.ValueType(self.resolved.pooling),
            second_text=self.resolved.second_text,
            adapter=_adapter(self.resolved.model.version),
        )
        start.sampling.max_tokens = self.plan.max_tokens
        if role == "prefill":
            start.prompt.extend(self.resolved.prompt)
            start.decode.CopyFrom(placement.decode)
            if placement.HasField("kv_ticket"):
                start.kv_ticket.CopyFrom(placement.kv_ticket)
            if placement.HasField("prompt_source"):
                start.prompt_source.CopyFrom(placement.prompt_source)
        stream = self._streams[role] = self.upstreams.workers.stream(role, worker)
        stream.start(start, listener)

    def note(self, output: pb.ChoiceOutput, num_tokens: int) -> None:
        """Records the timing of an accepted output."""
        self.num_output_tokens += num_tokens
        if not self.first_token_unix_us:
            self.first_token_unix_us = now_unix_us()
        if output.phases:
            where = self._worker_of(output)
            self.measured += [
                types_pb2.Phase(
                    name=p.name,
                    begin_unix_us=p.begin_unix_us,
                    end_unix_us=p.end_unix_us,
                    where=where,
                    detail=p.detail,
                )
                for p in output.phases
            ]

    def leave_prefill(self) -> None:
        """Notes that the prefill worker has sent all its tokens, so it can take another prompt."""
        self.has_left_prefill = True
        self.upstreams.admissions.first_token(self.key)

    def _worker_of(self, output: pb.ChoiceOutput) -> str:
        """The sender: the prefill worker sends each choice's first new token, the decode worker the others."""
        if self.placement is None:
            return ""
        is_first = output.first_position == len(self.plan.forced[output.choice])
        return (self.placement.prefill if is_first else self.placement.decode).worker_id

    def survives_loss_of(self, worker_id: str) -> bool:
        """Whether the attempt can continue without this worker.

        True for the prefill worker once it has delivered: the decode worker has the KV, or will report it missing.
        """
        placement = self.placement
        if placement is None or not self.has_left_prefill:
            return False
        return worker_id == placement.prefill.worker_id != placement.decode.worker_id

    @property
    def may_be_recalled(self) -> bool:
        """Whether it is placed and has neither a token nor reported progress."""
        return self.placement is not None and not self.is_prompt_begun and not self.first_token_unix_us

    def end(
        self,
        *,
        is_running: bool,
        is_recalled: bool = False,
        keeps_prompt: bool = False,
        goes_on: bool = False,
        error: str = "",
    ) -> None:
        """Leaves the workers and releases the placement.

        There the attempt is recalled with ``keeps_prompt``, otherwise cancelled if it ``is_running``. ``goes_on``: its
        answer continues in another attempt.
        """
        self.error = error
        key = self.key
        # The prefill worker first: the decode worker refuses the KV once it has been told.
        for stream in reversed(self._streams.values()):
            if keeps_prompt:
                stream.recall(key)
            elif is_running:
                stream.cancel(key)
            else:
                stream.forget(key)
        self._streams.clear()
        began, self.ended_unix_us = self.first_token_unix_us, now_unix_us()
        self.upstreams.admissions.release(
            scheduler_pb2.Release(
                key=key,
                ttft_s=(began - self.admitted_unix_us) / 1e6 if began else 0.0,
                num_output_tokens=self.num_output_tokens,
                phases=self.phases(),
                is_recalled=is_recalled,
                goes_on=goes_on,
            )
        )

    def phases(self) -> list[types_pb2.Phase]:
        """The attempt's timeline, as far as the gateway knows it.

        ``prepare``: authentication, chat template, tokenization and limits, before admission. ``decode``: from the
        first token to the attempt's end. ``error``: the moment of a failure, whose detail is the message.
        """
        where = self.upstreams.gateway_id
        phases = []
        if self.plan.attempt == FIRST_ATTEMPT:
            phases.append(("prepare", self.resolved.arrived_unix_us, self.admitted_unix_us))
        if self.placed_unix_us:
            phases.append(("queue", self.admitted_unix_us, self.placed_unix_us))
        if self.first_token_unix_us:
            phases.append(("first_token", self.placed_unix_us, self.first_token_unix_us))
            if not self.resolved.pooling:
                phases.append(("decode", self.first_token_unix_us, self.ended_unix_us))
        own = [
            types_pb2.Phase(name=name, begin_unix_us=begin, end_unix_us=end, where=where, detail=_DETAILS.get(name, ""))
            for name, begin, end in phases
        ]
        if self.error:
            at = self.ended_unix_us
            own.append(types_pb2.Phase(name="error", begin_unix_us=at, end_unix_us=at, where=where, detail=self.error))
        return own + self.measured
