"""A cluster in virtual time whose workers compute prompts and answers, and whose gateway retries as the real one."""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass, field, replace

from tests.unit.scheduler.policy.invariants import placements_of, waiting_of
from tests.unit.scheduler.policy.paper_cluster import PaperCluster, a_slot, an_admission
from torchrelay.common.liveness import SILENT_S, EngineProgress
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import (
    AdmissionRefused,
    Command,
    DisconnectCommand,
    Placed,
    Recall,
    RefusalReason,
    UnloadCommand,
)
from torchrelay.scheduler.policy.explain import ExplainLog
from torchrelay.scheduler.policy.inputs import (
    Admit,
    CommandEnded,
    CommandOutcome,
    FirstToken,
    GatewayChanged,
    Load,
    PeerGone,
    Release,
    Withdraw,
)
from torchrelay.scheduler.policy.types import (
    Admission,
    AttemptKey,
    InstancePhase,
    Model,
    Peer,
    Placement,
    Role,
    Roles,
    SlotStatus,
    WorkerStatus,
)

TICK_S = 0.1
REPORT_EVERY_S = 0.5
CLIENT_DEADLINE_S = 60.0
MAX_ATTEMPTS = 5  # of the gateway
SERVED, LEFT = "served", "its client left"
CONFIG = PolicyConfig(
    queue_limit=12,
    queue_limit_total=24,
    max_open_per_instance=8,
    max_instances=2,
    idle_timeout_s=5.0,
    time_slice_s=3.0,
    drain_s=3.0,
    drain_grace_s=1.0,
    load_stall_s=4.0,
    replicate=False,
)


class Fault(enum.Enum):
    """Fault of a worker, until it is healed or restarted."""

    NEVER_LOADS = "it takes loads, and no layer arrives"
    REFUSES_LOADS = "it refuses loads"
    LOADS_BREAK = "its loads end with an error"
    NEVER_DRAINS = "it does not free its slot"
    SLOW = "it computes twenty times slower than it says"
    IDLE_LIAR = "it computes nothing, and its engine says that it has no work"
    HUNG = "its engine has work, and does not advance"


@dataclass(eq=False, repr=False)
class Call:
    """A client's request. ``end``: how it ended; empty: not yet."""

    name: str
    model: Model
    num_tokens: int
    decode_s: float
    arrived_at: float
    changes: dict[str, object] = field(default_factory=dict)
    attempt: int = 1
    num_attempts: int = 1
    num_recalled: int = 0
    has_token: bool = False
    placement: Placement | None = None
    tokens_left: float = 0.0
    decoded_at: float = math.inf
    first_placed_at: float | None = None
    first_token_at: float | None = None
    admit_at: float | None = None  # of the next attempt
    lost_workers: tuple[str, ...] = ()
    prefill_workers: list[str] = field(default_factory=list)  # of all attempts
    end: str = ""
    ended_at: float = 0.0

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.name, self.attempt)

    @property
    def first_token_s(self) -> float:
        """After its arrival; infinite: there is none."""
        return self.first_token_at - self.arrived_at if self.first_token_at is not None else math.inf

    def was_at(self, worker_id: str) -> bool:
        """Whether any attempt was to be prefilled there."""
        return worker_id in self.prefill_workers

    def __repr__(self) -> str:
        where = self.placement and (self.placement.prefill.worker_id, self.placement.decode.worker_id)
        from_ = f"attempt {self.attempt}, from {self.arrived_at:.1f}"
        return f"{self.name} of {self.model.name}, {from_}, at {where}, {self.end!r}"


@dataclass
class RunningCluster(PaperCluster):
    """``step`` lets a tick pass. Answers reach the gateway, and its words the scheduler, at the end of a tick."""

    config: PolicyConfig = field(default_factory=lambda: CONFIG)
    calls: dict[str, Call] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    load_s: float = 1.0
    tokens_per_s: float = 2000.0
    explain: ExplainLog = field(default_factory=ExplainLog)
    is_gateway_here: bool = True
    _queues: dict[str, deque[Call]] = field(default_factory=dict)  # by instance
    _loads: dict[str, float] = field(default_factory=dict)  # when they began, by instance
    _drains: dict[str, float] = field(default_factory=dict)  # when they must be over, by instance
    _unsent: list[Release | FirstToken | Withdraw] = field(default_factory=list)
    _hung_since: dict[str, float] = field(default_factory=dict)  # by worker
    _num_read: int = 0  # answers
    _num_noted: int = 0  # events
    _reported_at: float = 0.0

    # Clients

    def call(self, name: str, model: Model, num_tokens: int = 100, decode_s: float = 0.5, **changes: object) -> Call:
        self.models[model.version_id] = model
        call = self.calls[name] = Call(name, model, num_tokens, decode_s, self.now, changes)
        self._ask(call)
        return call

    def leave(self, call: Call) -> None:
        """The client hangs up."""
        self._end(call, LEFT)
        self._leave_workers(call)
        if call.placement is None:
            self.tell(Withdraw(call.key))
        else:
            self.tell(Release(call.key, call.has_token))

    def disconnect(self) -> None:
        self.is_gateway_here = False
        self.apply(GatewayChanged("gateway-1", False))

    def reconnect(self) -> None:
        """Everything open is asked for again."""
        self.is_gateway_here = True
        self.apply(GatewayChanged("gateway-1", True))
        for call in self.open_calls:
            if call.admit_at is None:
                self.apply(Admit(self._admission(call), call.model, call.placement, call.first_token_at is not None))
        unsent, self._unsent = self._unsent, []
        for word in unsent:
            self.apply(word)

    def tell(self, word: Release | FirstToken | Withdraw) -> None:
        if self.is_gateway_here:
            self.apply(word)
        else:
            self._unsent.append(word)

    @property
    def open_calls(self) -> list[Call]:
        return [call for call in self.calls.values() if not call.end]

    def _ask(self, call: Call) -> None:
        call.admit_at = None
        if self.is_gateway_here:
            self.apply(Admit(self._admission(call), call.model))

    def _admission(self, call: Call) -> Admission:
        changes = {"num_forced_tokens": int(call.has_token), "lost_workers": call.lost_workers, **call.changes}
        return an_admission(call.model, call.name, call.attempt, self.now, num_prompt_tokens=call.num_tokens, **changes)

    def _end(self, call: Call, why: str) -> None:
        call.end, call.ended_at = why, self.now

    def _retry(self, call: Call, lost_worker: str = "", *, is_recalled: bool = False) -> None:
        """The attempt is over without its end."""
        self._leave_workers(call)
        self.tell(Release(call.key, call.first_token_at is not None, is_recalled=is_recalled))
        if lost_worker:
            call.lost_workers = (*call.lost_workers, lost_worker)
        if call.first_token_at is not None:  # the answer goes on from its last token
            call.has_token, call.decode_s = True, max(call.decoded_at - self.now, 0.0)
        call.placement, call.first_token_at, call.decoded_at = None, None, math.inf
        call.attempt += 1
        call.num_attempts += not is_recalled
        if call.num_attempts > MAX_ATTEMPTS:
            self._end(call, "ATTEMPTS: its workers failed it again and again")
            return
        delay_s = 0.0 if call.num_attempts <= 2 else min(0.1 * 4 ** (call.num_attempts - 3), 2.0)
        call.admit_at = self.now + delay_s

    def _leave_workers(self, call: Call) -> None:
        if call.placement is not None:
            queue = self._queues.get(call.placement.prefill.instance_id)
            if queue is not None and call in queue:
                queue.remove(call)

    # Time

    def pass_time(self, seconds: float, step_s: float = TICK_S) -> None:
        end = self.now + seconds - 1e-9
        while self.now < end:
            self.step(step_s)

    def step(self, step_s: float = TICK_S) -> None:
        self.now += step_s
        self._load()
        self._compute(step_s)
        self._drain()
        if self.now >= self._reported_at + REPORT_EVERY_S:
            self._reported_at = self.now
            self.report_all()
        self.tick()
        self._watch()
        self.hear()

    def _watch(self) -> None:
        """The gateway leaves a worker whose engine has work and does not advance, and who waits too long gives up."""
        for call in self.open_calls:
            if self.now - call.arrived_at > CLIENT_DEADLINE_S:
                self._end(call, "DEADLINE: the request exceeded its deadline")
                self._leave_workers(call)
                self.tell(Release(call.key, call.has_token) if call.placement else Withdraw(call.key))
        for worker_id in list(self.workers):
            is_hung = self.faults.get(worker_id) is Fault.HUNG
            running = self._running_at(self.workers[worker_id].slot.instance_id) if is_hung else []
            if not running:
                self._hung_since.pop(worker_id, None)
            elif self.now - self._hung_since.setdefault(worker_id, self.now) > SILENT_S:
                for call in running:
                    self._retry(call, worker_id)

    def hear(self) -> None:
        """The gateway reads its answers."""
        for call in self.open_calls:
            if call.admit_at is not None and call.admit_at <= self.now and self.is_gateway_here:
                self._ask(call)
        while self._num_read < len(self.answers):
            answer = self.answers[self._num_read]
            self._num_read += 1
            if isinstance(answer, Placed):
                self._start(answer.placement)
            elif isinstance(answer, AdmissionRefused):
                self._refused(answer)
            elif isinstance(answer, Recall):
                self._recall(answer.key)
        while self._num_noted < len(self.events):
            self.explain.note(self.events[self._num_noted])
            self._num_noted += 1

    def _call_of(self, key: AttemptKey) -> Call | None:
        call = self.calls.get(key.request_id)
        return call if call is not None and not call.end and call.key == key else None

    def _refused(self, refusal: AdmissionRefused) -> None:
        call = self._call_of(refusal.key)
        if call is None or not self.is_gateway_here:
            return
        assert refusal.reason is not RefusalReason.QUEUE_FULL or refusal.retry_after_s >= 1.0
        if call.placement is not None:
            self._retry(call)
        else:
            self._end(call, f"{refusal.reason.name}: {refusal.message}")

    def _recall(self, key: AttemptKey) -> None:
        call = self._call_of(key)
        if call is None or call.placement is None or call.first_token_at is not None or not self.is_gateway_here:
            return
        call.num_recalled += 1
        self._retry(call, is_recalled=True)

    def _start(self, placement: Placement) -> None:
        if not self.is_gateway_here:
            return  # it asks again
        call = self._call_of(placement.key)
        if call is None:
            self.tell(Release(placement.key, False))
            return
        if call.placement is not None:
            return
        call.placement = placement
        call.prefill_workers.append(placement.prefill.worker_id)
        if call.first_placed_at is None:
            call.first_placed_at = self.now
        for role, ref in ((Role.PREFILL, placement.prefill), (Role.DECODE, placement.decode)):
            worker = self.workers.get(ref.worker_id)
            if worker is None:
                self._retry(call, ref.worker_id)
                return
            if (
                worker.slot.instance_id != ref.instance_id
                or worker.slot.phase is InstancePhase.DRAINING
                or role not in worker.slot.roles
            ):
                self._retry(call)
                return
        call.tokens_left = float(call.num_tokens)
        self._queues.setdefault(placement.prefill.instance_id, deque()).append(call)

    # Workers

    def _running_at(self, instance_id: str) -> list[Call]:
        def runs_there(call: Call) -> bool:
            if (placement := call.placement) is None:
                return False
            is_computed_there = placement.prefill.instance_id == instance_id and call.first_token_at is None
            return placement.decode.instance_id == instance_id or is_computed_there

        return [call for call in self.open_calls if runs_there(call)]

    def _compute(self, step_s: float) -> None:
        for worker in list(self.workers.values()):
            fault, slot = self.faults.get(worker.worker_id), worker.slot
            if slot.num_layers_ready < 4 or fault in (Fault.IDLE_LIAR, Fault.HUNG):
                continue
            left = step_s * self.tokens_per_s / (20.0 if fault is Fault.SLOW else 1.0)
            queue = self._queues.get(slot.instance_id, deque())
            while queue and left > 0:
                done = min(left, queue[0].tokens_left)
                left -= done
                queue[0].tokens_left -= done
                if queue[0].tokens_left <= 0:
                    call = queue.popleft()
                    call.first_token_at = self.now
                    call.decoded_at = self.now + call.decode_s
                    self.tell(FirstToken(call.key))
        for call in self.open_calls:
            if call.placement is None or call.first_token_at is None or call.decoded_at > self.now:
                continue
            if self.faults.get(call.placement.decode.worker_id) in (Fault.IDLE_LIAR, Fault.HUNG):
                continue
            self._end(call, SERVED)
            self.tell(Release(call.key, True))

    def load(self, instance_id: str, worker_id: str, roles: Roles, model: Model) -> None:
        if worker_id not in self.workers or self.faults.get(worker_id) is Fault.REFUSES_LOADS:
            self.apply(CommandEnded(Load(instance_id), CommandOutcome.REFUSED, f"{worker_id} is broken"))
            return
        if self.workers[worker_id].slot.phase is not InstancePhase.FREE:
            self.apply(CommandEnded(Load(instance_id), CommandOutcome.REFUSED, f"the slot of {worker_id} is taken"))
            return
        slot = a_slot(model, instance_id, roles, InstancePhase.LOADING, 0)
        self.workers[worker_id] = replace(self.workers[worker_id], slot=slot)
        self._loads[instance_id] = self.now
        self.apply(CommandEnded(Load(instance_id), CommandOutcome.ACCEPTED))
        self.report(worker_id)

    def _load(self) -> None:
        for worker in list(self.workers.values()):
            slot, fault = worker.slot, self.faults.get(worker.worker_id)
            if slot.phase is not InstancePhase.LOADING or fault is Fault.NEVER_LOADS:
                continue
            part = (self.now - self._loads[slot.instance_id]) / self.load_s
            if fault is Fault.LOADS_BREAK and part >= 0.5:
                self._free(worker.worker_id, error="bytes were lost")
                continue
            num_layers = min(int(part * 4), 4)
            if num_layers == 4:
                self.set_slot(worker.worker_id, phase=InstancePhase.READY, num_layers_ready=4)
            elif num_layers != slot.num_layers_ready:
                self.set_slot(worker.worker_id, num_layers_ready=num_layers)
            else:
                continue
            self.report(worker.worker_id)

    def obey(self, command: Command) -> None:
        if isinstance(command, UnloadCommand) and (worker := self.workers.get(command.worker_id)):
            if worker.slot.instance_id != command.instance_id:
                return
            if self.faults.get(worker.worker_id) is not Fault.NEVER_DRAINS:
                end = self._drains.get(command.instance_id, math.inf)  # a later order may shorten it
                self._drains[command.instance_id] = min(end, self.now + command.drain_s)
                self.set_slot(command.worker_id, phase=InstancePhase.DRAINING)
                self.report(command.worker_id)
        elif isinstance(command, DisconnectCommand):
            pass
        else:
            super().obey(command)

    def _drain(self) -> None:
        for worker in list(self.workers.values()):
            instance_id = worker.slot.instance_id
            if instance_id not in self._drains:
                continue
            running = self._running_at(instance_id)
            if not running or self.now >= self._drains[instance_id]:
                self._free(worker.worker_id)

    def _free(self, worker_id: str, error: str = "") -> None:
        worker = self.workers[worker_id]
        running = self._running_at(worker.slot.instance_id)
        self._drains.pop(worker.slot.instance_id, None)
        self.workers[worker_id] = replace(worker, slot=SlotStatus(error=error))
        self._queues.pop(worker.slot.instance_id, None)
        for call in running:
            self._retry(call)
        self.report(worker_id)

    def report(self, worker_id: str) -> None:
        worker, instance_id = self.workers[worker_id], self.workers[worker_id].slot.instance_id
        fault, running = self.faults.get(worker_id), self._running_at(instance_id) if instance_id else []
        progress = EngineProgress(worker.progress.num_advances + 1, bool(running))
        if fault is Fault.HUNG:
            progress = EngineProgress(worker.progress.num_advances, bool(running))
        if fault is Fault.IDLE_LIAR:
            progress, running = EngineProgress(worker.progress.num_advances + 1, False), []
        self.workers[worker_id] = replace(
            worker, num_running=len(running), prefill_tokens_per_s=self.tokens_per_s, progress=progress
        )
        super().report(worker_id)

    def kill(self, worker_id: str) -> None:
        worker = self.workers.pop(worker_id)
        for call in self._running_at(worker.slot.instance_id) if worker.slot.instance_id else []:
            self._retry(call, worker_id)
        self._queues.pop(worker.slot.instance_id, None)
        self.faults.pop(worker_id, None)
        self.apply(PeerGone(Peer(worker_id)))

    def restart(self, worker: WorkerStatus, number: int) -> None:
        self.workers[worker.worker_id] = replace(worker, incarnation=f"{worker.worker_id} {number}")
        self.report(worker.worker_id)

    # What must hold

    def check_calls(self) -> None:
        """Nobody is lost, and what has ended says why."""
        self.check()
        waiting, opened = waiting_of(self.policy.state).keys(), placements_of(self.policy.state).keys()
        if not self.is_gateway_here:
            return
        for call in self.open_calls:
            if call.placement is not None:
                assert call.key in opened, call
            elif call.admit_at is None:
                assert call.key in waiting | opened, call
        assert waiting | opened <= {call.key for call in self.open_calls} | self._unread(), "somebody left, and is kept"
        for call in self.calls.values():
            if call.end not in ("", SERVED, LEFT):
                assert call.end.partition(": ")[2], call

    def _unread(self) -> set[AttemptKey]:
        unread = self.answers[self._num_read :]
        return {answer.placement.key for answer in unread if isinstance(answer, Placed)}
