"""The simulated gateway: tenants' requests and their attempts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from torchrelay.scheduler.policy import effects, inputs
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.types import Admission, AttemptKey, Model, Placement, ServiceClass
from torchrelay.sim.engine import Decoding, Prompt
from torchrelay.sim.events import Event, EventQueue
from torchrelay.sim.scenario import Fleet, Request, RequestOutcome, ServedModel
from torchrelay.sim.scheduler import RPC_S, SimulatedScheduler
from torchrelay.sim.workers import SimulatedWorkers

_GATEWAY = "gateway"
_KV_FIXED_S = 0.002  # offer, reservation and the last layer's KV
_KV_LEFT = 0.05  # of the KV is unsent when the prompt is computed: each layer's is sent during the later layers


@dataclass(eq=False)
class _Attempt:
    """A placed attempt at a request."""

    outcome: RequestOutcome
    key: AttemptKey
    placement: Placement
    placed_at: float
    num_forced: int = 0  # tokens from earlier attempts
    job: Prompt | Decoding | None = None  # running in an engine
    kv_event: Event | None = None
    computed_at: float = 0.0
    num_cached: int = 0  # positions of the prompt that its worker had

    @property
    def is_whole(self) -> bool:
        return not self.placement.needs_kv_transfer


class SimulatedGateway:
    def __init__(
        self,
        events: EventQueue,
        fleet: Fleet,
        served: Mapping[str, ServedModel],
        models: Mapping[str, Model],
        scheduler: SimulatedScheduler,
        workers: SimulatedWorkers,
    ) -> None:
        self._events, self._fleet, self._served, self._models = events, fleet, served, models
        self._scheduler, self._workers = scheduler, workers
        self.outcomes: list[RequestOutcome] = []
        self._open: dict[AttemptKey, RequestOutcome] = {}
        self._forced: dict[AttemptKey, int] = {}
        self._running: dict[AttemptKey, _Attempt] = {}
        self.num_waiting = 0  # requests without a first token

    @property
    def is_busy(self) -> bool:
        return bool(self._open or self._running)

    @property
    def num_decoding(self) -> int:
        """Requests with a first token and without a last one."""
        return len(self._open) + len(self._running) - self.num_waiting

    def connect(self) -> None:
        self._scheduler.apply(inputs.GatewayChanged(_GATEWAY, True))
        if minimums := tuple(model for model in self._models.values() if model.min_instances):
            self._scheduler.apply(inputs.MinimumsSet(minimums))

    def arrive(self, request: Request) -> None:
        outcome = RequestOutcome(request, self._events.now)
        self.outcomes.append(outcome)
        self.num_waiting += 1
        self._admit(outcome, AttemptKey(request.request_id, 1), 0)

    def _admit(self, outcome: RequestOutcome, key: AttemptKey, num_forced: int) -> None:
        request, model = outcome.request, self._models[outcome.request.model]
        name = f"{request.tenant}/{model.name.partition('/')[2]}" if request.tenant else model.name
        is_batch = request.service_class is ServiceClass.BATCH
        served = self._served[model.name]
        admission = Admission(
            key=key,
            gateway_id=_GATEWAY,
            version_id=model.version_id,
            num_prompt_tokens=request.num_prompt_tokens,
            num_forced_tokens=num_forced,
            max_tokens=request.max_tokens,
            num_choices=1,
            admitted_at=self._events.now,
            age_s=self._events.now - outcome.arrived_at,
            model=name,
            service_class=request.service_class,
            ttft_target_s=0.0 if is_batch else served.ttft_target_s(request.num_prompt_tokens),
            tbt_target_s=served.tpot_target_s,
            block_hashes=request.block_hashes,
        )
        self._open[key], self._forced[key] = outcome, num_forced
        self._scheduler.apply(inputs.Admit(admission, replace(model, name=name) if request.tenant else model))

    def answered(self, answer: effects.Answer) -> None:
        match answer:
            case effects.Placed():
                self._events.after(RPC_S, partial(self._start, answer.placement))
            case effects.AdmissionRefused():
                outcome = self._open.pop(answer.key, None)
                self._forced.pop(answer.key, None)
                if outcome is not None:
                    outcome.is_refused = True
                    self.num_waiting -= not outcome.first_token_at
            case effects.Recall():
                self._events.after(RPC_S, partial(self._recall, answer))

    def _start(self, placement: Placement) -> None:
        """Opens the placed attempt at its workers."""
        key = placement.key
        outcome = self._open.pop(key, None)
        if outcome is None:
            return
        now, num_forced = self._events.now, self._forced.pop(key)
        attempt = _Attempt(outcome, key, placement, now, num_forced)
        self._running[key] = attempt
        refs = (placement.prefill, placement.decode)
        if not all(self._workers.of[ref.worker_id].takes(ref.instance_id) for ref in refs):
            self._fail(attempt)
            return
        for ref in refs:
            self._workers.of[ref.worker_id].attempts[key] = partial(self._fail, attempt)
        prefill = self._workers.of[placement.prefill.worker_id]
        assert prefill.engine is not None
        request = outcome.request
        num_tokens = max(request.num_prompt_tokens + attempt.num_forced, 1)
        if request.prefix in prefill.prefixes:
            attempt.num_cached = min(request.num_prefix_tokens, num_tokens - 1)
        attempt.job = Prompt(num_tokens, partial(self._computed, attempt), attempt.num_cached)
        prefill.engine.prefill(attempt.job)

    def _computed(self, attempt: _Attempt) -> None:
        """Handles the first token: the attempt ends, decodes here, or sends its KV to the decode worker."""
        outcome, now = attempt.outcome, self._events.now
        if not outcome.first_token_at:
            outcome.first_token_at = now + RPC_S
            self.num_waiting -= 1
        attempt.job, attempt.computed_at = None, now
        if outcome.request.prefix:
            self._workers.of[attempt.placement.prefill.worker_id].prefixes.add(outcome.request.prefix)
        self._scheduler.soon(inputs.FirstToken(attempt.key))
        if outcome.request.num_output_tokens - attempt.num_forced <= 1:
            self._end(attempt)
            return
        if attempt.is_whole:
            self._decode(attempt)
            return
        num_tokens = outcome.request.num_prompt_tokens + attempt.num_forced
        kv_bytes = num_tokens * self._served[outcome.request.model].kv_bytes_per_token
        source = self._workers.of[attempt.placement.prefill.worker_id].store
        target = self._workers.of[attempt.placement.decode.worker_id].store
        rate = self._fleet.device_bytes_per_s if source is target else self._fleet.nic_bytes_per_s
        attempt.kv_event = self._events.after(_KV_FIXED_S + _KV_LEFT * kv_bytes / rate, partial(self._decode, attempt))

    def _decode(self, attempt: _Attempt) -> None:
        attempt.kv_event = None
        request, worker = attempt.outcome.request, self._workers.of[attempt.placement.decode.worker_id]
        if not attempt.is_whole:
            self._workers.leave(attempt.placement.prefill.worker_id, attempt.key)
        assert worker.engine is not None
        left = request.num_output_tokens - attempt.num_forced - 1
        attempt.job = Decoding(request.num_prompt_tokens + attempt.num_forced + 1, left, partial(self._end, attempt))
        worker.engine.decode(attempt.job)

    def _end(self, attempt: _Attempt) -> None:
        now, placement = self._events.now, attempt.placement
        attempt.outcome.ended_at = now + RPC_S
        self._running.pop(attempt.key, None)
        for ref in (placement.prefill, placement.decode):
            self._workers.leave(ref.worker_id, attempt.key)
        num_steps = attempt.outcome.request.num_output_tokens - attempt.num_forced - 1
        decode_s = now - attempt.computed_at
        outcome = Outcome(
            ttft_s=attempt.computed_at - attempt.placed_at,
            tbt_s=decode_s / num_steps if num_steps > 0 else None,
            ended_at=now,
            num_output_tokens=attempt.outcome.request.num_output_tokens - attempt.num_forced,
        )
        self._scheduler.soon(inputs.Release(attempt.key, True, outcome))

    def _recall(self, recall: effects.Recall) -> None:
        """Asks for a new attempt if this one has not begun. The layers that a loading worker has computed are lost."""
        attempt = self._running.get(recall.key)
        if attempt is None or not isinstance(attempt.job, Prompt):
            return
        if recall.keeps_prompt or attempt.job.num_done == attempt.num_cached:
            self._fail(attempt, is_recalled=True)

    def _fail(self, attempt: _Attempt, *, is_recalled: bool = False) -> None:
        """Ends the attempt before its last token and asks for another that continues it."""
        given = self._num_given(attempt)
        self._leave(attempt)
        self._scheduler.apply(inputs.Release(attempt.key, given > attempt.num_forced, is_recalled=is_recalled))
        attempt.outcome.num_attempts += 1
        key = AttemptKey(attempt.key.request_id, attempt.outcome.num_attempts)
        self._admit(attempt.outcome, key, given)

    def _num_given(self, attempt: _Attempt) -> int:
        """Tokens that the request has by now, without its last token."""
        worker = self._workers.of[attempt.placement.decode.worker_id]
        given = attempt.num_forced + (attempt.computed_at > 0)
        if isinstance(attempt.job, Decoding) and attempt.key in worker.attempts and worker.engine is not None:
            given += worker.engine.num_tokens_done(attempt.job)
        return min(given, attempt.outcome.request.num_output_tokens - 1)

    def _leave(self, attempt: _Attempt) -> None:
        """Removes the attempt from its workers."""
        self._running.pop(attempt.key, None)
        if attempt.kv_event is not None:
            attempt.kv_event.cancel()
        for ref in (attempt.placement.prefill, attempt.placement.decode):
            worker = self._workers.of[ref.worker_id]
            if attempt.key in worker.attempts and worker.engine is not None and attempt.job is not None:
                worker.engine.cancel(attempt.job)
            self._workers.leave(ref.worker_id, attempt.key)
