"""The policy at large scale without processes: the CPU time of its single calls while models wait for slots, and while
stores with disks report.

The policy runs in this process in virtual time, with the calls of the service: a turn every 20 ms, a round every 100
ms, and each peer's report twice a second. Times are CPU times of this thread, so other processes do not change them.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

from torchrelay.scheduler.policy.autoscaling.actions import Action
from torchrelay.scheduler.policy.autoscaling.auction import auction
from torchrelay.scheduler.policy.autoscaling.view import View
from torchrelay.scheduler.policy.config import ROUND_S, TURN_S, PolicyConfig
from torchrelay.scheduler.policy.effects import CopyCommand
from torchrelay.scheduler.policy.inputs import (
    Admit,
    CommandEnded,
    CommandOutcome,
    Copy,
    FirstToken,
    GatewayChanged,
    Input,
    Release,
    StoreReported,
    Tick,
    WorkerReported,
)
from torchrelay.scheduler.policy.policy import Policy
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.scheduler.policy.types import (
    BOTH,
    Admission,
    AttemptKey,
    InstancePhase,
    Model,
    PackCopy,
    SlotStatus,
    StoreStatus,
    WorkerStatus,
)

GB = 1 << 30
WORKERS_PER_HOST = 8
NUM_STARVING = 5
REQUEST_S = 2.0  # between a model's requests, each of which runs until the next comes
REPORT_S = 0.5
SETTLE_S = 6
PACKS_PER_DISK = 100
NUM_CHUNKS = 256


@dataclass(frozen=True, slots=True)
class CallTimes:
    """CPU times of the policy's calls in milliseconds. ``decide_ms``: median of the rounds' decisions."""

    decide_ms: float
    longest_ms: float
    longest: str  # the kind of that call
    longest_tick_ms: float
    ticks_fraction: float  # share of a core that all ticks take


class _OwnDecisions(Strategies):
    """The scheduler's own strategies, with a decision that is timed."""

    @property
    def decides_in_turns(self) -> bool:
        return True


@dataclass
class _PolicyRun:
    """A policy in virtual time, and the CPU time of each of its calls."""

    config: PolicyConfig
    peers: Sequence[StoreStatus | WorkerStatus]
    now: float = 1000.0
    policy: Policy = field(init=False)
    calls: list[tuple[float, str]] = field(default_factory=list)  # milliseconds and kind of each call
    decisions: list[float] = field(default_factory=list)  # milliseconds of each round's decision
    num_rounds: int = 0

    def __post_init__(self) -> None:
        ids = count()
        self.policy = Policy(self.config, lambda: f"instance {next(ids)}", self.now, _OwnDecisions(decide=self._decide))
        self.apply(GatewayChanged("gateway", True))
        self._report(self.peers)

    def _decide(self, view: View) -> tuple[Action, ...]:
        begin = time.thread_time()
        actions = auction(view)
        if view.waited_for:
            self.decisions.append((time.thread_time() - begin) * 1e3)
        return actions

    def apply(self, input_: Input) -> None:
        begin = time.thread_time()
        effects = self.policy.apply(input_, self.now)
        self.calls.append(((time.thread_time() - begin) * 1e3, type(input_).__name__))
        for command in effects.commands:
            if isinstance(command, CopyCommand):
                self.apply(CommandEnded(Copy(command.model.pack_id, command.hop.store_id), CommandOutcome.ACCEPTED))

    def _report(self, peers: Iterable[StoreStatus | WorkerStatus]) -> None:
        for peer in peers:
            report = replace(peer, seen_at=self.now)
            self.apply(StoreReported(report, True) if isinstance(report, StoreStatus) else WorkerReported(report, True))
        self._tick()

    def _tick(self) -> None:
        """Does everything that is due."""
        while self.policy.next_due() <= self.now:
            self.apply(Tick())

    def admit(self, model: Model, request_id: str) -> None:
        key = AttemptKey(request_id, 1)
        admission = Admission(key, "gateway", model.version_id, 256, 0, 128, 1, admitted_at=self.now, model=model.name)
        self.apply(Admit(admission, model))

    def prepare(self, seconds: int, requests: _Requests | None = None) -> None:
        """Passes time with a report of each peer, and a round, every second."""
        for _ in range(seconds):
            self.now += 1.0
            self._report(self.peers)
            if requests is not None:
                requests.send(self, 1.0)
            self._tick()

    def advance(self, seconds: float, requests: _Requests | None = None) -> None:
        """Each round, a part of the peers report."""
        num_parts = round(REPORT_S / ROUND_S)
        for _ in range(round(seconds / ROUND_S)):
            for _ in range(round(ROUND_S / TURN_S)):
                self.now += TURN_S
                if requests is not None:
                    requests.send(self, TURN_S)
                self._tick()
            self._report(self.peers[self.num_rounds % num_parts :: num_parts])
            self.num_rounds += 1

    def measure(self, seconds: float, requests: _Requests | None = None) -> CallTimes:
        self.calls.clear()
        self.decisions.clear()
        with _no_collections():
            self.advance(seconds, requests)
        longest_ms, kind = max(self.calls)
        ticks = [ms for ms, name in self.calls if name == "Tick"]
        return CallTimes(
            decide_ms=statistics.median(self.decisions or [0.0]),
            longest_ms=longest_ms,
            longest=kind,
            longest_tick_ms=max(ticks),
            ticks_fraction=sum(ticks) / 1e3 / seconds,
        )


class _Requests:
    """Requests of the models in turn, each model's every ``REQUEST_S``; a model's last request ends when one comes."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._left = deque(models)
        self._ids = count()
        self._open: dict[str, AttemptKey] = {}

    def send(self, run: _PolicyRun, seconds: float) -> None:
        for _ in range(math.ceil(len(self._left) * seconds / REQUEST_S)):
            model, number = self._left[0], next(self._ids)
            self._left.rotate(-1)
            run.admit(model, f"request {number}")
            key = AttemptKey(f"request {number}", 1)
            run.apply(FirstToken(key))
            if (last := self._open.get(model.version_id)) is not None:
                run.apply(Release(last, True))
            self._open[model.version_id] = key


@contextmanager
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _model(number: int) -> Model:
    return Model(f"tenant-{number % 50}/model-{number}", f"version-{number}", f"pack-{number}", 16 * GB, 1 << 17)


def _store(number: int, packs: Sequence[Model], num_pins: int, on_disk: Iterable[str] | None = None) -> StoreStatus:
    copies = [PackCopy(pack.pack_id, pack.pack_bytes, NUM_CHUNKS, NUM_CHUNKS, num_pins) for pack in packs]
    return StoreStatus(
        store_id=f"store-{number}",
        incarnation=f"store-{number} first",
        host_id=f"host-{number}",
        grpc_address=f"host-{number}:1",
        data_address=f"host-{number}:2",
        seen_at=0.0,
        arena_target_bytes=256 * GB,
        copies={copy.pack_id: copy for copy in copies},
        failure_domain=f"rack-{number % 32}",
        disk_pack_ids=None if on_disk is None else frozenset(on_disk),
    )


def _worker(name: str, host: int, model: Model) -> WorkerStatus:
    """A worker that serves the model."""
    slot = SlotStatus(
        InstancePhase.READY, f"instance of {name}", model.name, model.version_id, model.pack_id, BOTH, 32, 32
    )
    return WorkerStatus(name, f"{name} first", f"host-{host}", f"{name}:1", BOTH, 0.0, slot=slot, kv_pool_bytes=40 * GB)


def overload_times(num_workers: int, seconds: float) -> CallTimes:
    """The calls while each slot serves a model in use, and ``NUM_STARVING`` other models wait. A third of the models in
    use have two instances.
    """
    models = [_model(number) for number in range(num_workers)]
    served = [model for number, model in enumerate(models) for _ in range(1 + (number % 3 == 0))][:num_workers]
    peers: list[StoreStatus | WorkerStatus] = []
    for host in range(num_workers // WORKERS_PER_HOST):
        packs = served[host * WORKERS_PER_HOST : (host + 1) * WORKERS_PER_HOST]
        peers.append(_store(host, packs, num_pins=1))
        peers += [_worker(f"worker-{host}-{place}", host, model) for place, model in enumerate(packs)]
    run = _PolicyRun(PolicyConfig(replicate=False), peers)
    requests = _Requests(list(dict.fromkeys(served)))
    run.prepare(SETTLE_S + math.ceil(run.config.time_slice_s), requests)
    for number in range(NUM_STARVING):
        for each in range(4):
            run.admit(_model(num_workers + number), f"starving {number} {each}")
    run.advance(2 * run.config.preempt_spare_after_s, requests)
    times = run.measure(seconds, requests)
    assert len(run.policy.state.queues.versions) >= NUM_STARVING, "a model that should wait has a slot"
    return times


def repair_times(num_stores: int, num_packs: int, seconds: float) -> CallTimes:
    """The calls while the stores have two copies of each pack in RAM, and some packs on disk; no request comes."""
    models = [_model(number) for number in range(num_packs)]
    names = [model.pack_id for model in models]
    peers = [
        _store(
            number,
            [models[place % num_packs] for place in range(number, 2 * num_packs, num_stores)],
            0,
            [names[(number * 7 + place * 13) % num_packs] for place in range(PACKS_PER_DISK)],
        )
        for number in range(num_stores)
    ]
    run = _PolicyRun(PolicyConfig(), peers)
    for model in models:
        run.policy.state.copies.use(model, run.now)
    run.prepare(SETTLE_S)
    times = run.measure(seconds)
    assert not run.policy.state.copies.num_short, "a pack lacks copies"
    return times
