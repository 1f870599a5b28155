"""Deterministic histories of the scheduler's policy: scenarios and cases of the simulator, and small clusters in which
nodes fail, roles change, minimums come and go, gateways leave, and other schedulers take over.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.simulation.cases import case_of, read_traces, run
from bench.simulation.scenarios import SCENARIOS
from tests.unit.scheduler.policy.paper_cluster import MB, a_copy, a_model, a_pair, a_store, a_worker
from tests.unit.scheduler.policy.running_cluster import CONFIG, Fault, RunningCluster
from torchrelay.scheduler.policy.config import PolicyConfig, PoolMode, ScalingMode
from torchrelay.scheduler.policy.inputs import (
    CommandEnded,
    CommandOutcome,
    Copy,
    GatewayChanged,
    LauncherReported,
    Load,
    MinimumsSet,
    ModelDeleted,
    PeerGone,
    Retention,
    StreamClosed,
)
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.scheduler.policy.types import Model, Peer, Role, ScheduledMinimum, ServiceClass, WorkerStatus
from torchrelay.scheduler.service.input_log import PolicyStart
from torchrelay.sim.setup import Knobs

CASE_S = 10.0  # of each trace, after its warm-up
CASE_SEEDS = {"A": (1,), "B": (4, 5)}  # by cluster
MODELS = [
    a_model(f"{tenant}/{size}", pack_bytes=size * MB)
    for tenant, size in (("acme", 32), ("acme", 64), ("birch", 32), ("cedar", 96), ("cedar", 48))
]
REQUESTS: Sequence[Mapping[str, object]] = (
    {},
    {},
    {"service_class": ServiceClass.INTERACTIVE, "ttft_target_s": 0.4},
    {"service_class": ServiceClass.BATCH},
    {"num_choices": 3, "max_tokens": 400},
    {"block_hashes": (b"one", b"two")},
    {"max_tokens": 200_000},  # more KV than any pool holds
)

FAILURES = (
    "fault", "fault", "kill", "kill", "store", "stop", "stream", "broker", "load", "retain", "copy", "gateway",
    "takeover", "deletion",
)  # fmt: skip


class History:
    """A cluster with random requests. Its first gateway is ``RunningCluster``'s own."""

    def __init__(
        self,
        name: str,
        num_hosts: int,
        config: PolicyConfig = CONFIG,
        num_gateways: int = 1,
        more: Sequence[WorkerStatus] = (),
        arena_bytes: int = 1024 * MB,
    ) -> None:
        self.random, self.cluster = random.Random(name), RunningCluster(config)
        self.gateways = [f"gateway-{number + 1}" for number in range(num_gateways)]
        for number in range(num_hosts):
            host, copies = f"host-{number}", [a_copy(model) for model in MODELS[number::num_hosts]]
            pair = a_pair(f"p-{number}", f"d-{number}", host)
            self.cluster.settle(a_store(f"s-{number}", host, copies, arena_bytes), *pair, a_worker(f"w-{number}", host))
        self.cluster.settle(*more)
        self.workers, self.stores = dict(self.cluster.workers), dict(self.cluster.stores)
        self.num_events = 0
        self._connect_others()

    def _connect_others(self) -> None:
        for gateway in self.gateways[1:]:
            self.cluster.apply(GatewayChanged(gateway, True))

    def live(
        self,
        seconds: float,
        per_s: float,
        models: Sequence[Model] = MODELS,
        num_tokens: Sequence[int] = (20, 100, 400, 1500),
        decode_s: Sequence[float] = (0.1, 0.5, 4.0),
    ) -> None:
        """Passes the time while requests come, and now and then a client leaves."""
        cluster, random_ = self.cluster, self.random
        end = cluster.now + seconds
        while cluster.now < end:
            for _ in range(int(per_s * 0.1 + random_.random())):
                model = models[min(int(random_.expovariate(1.0)), len(models) - 1)]
                changes = {"gateway_id": random_.choice(self.gateways), **random_.choice(REQUESTS)}
                tokens, answer_s = random_.choice(num_tokens), random_.choice(decode_s)
                cluster.call(f"r{len(cluster.calls)}", model, tokens, answer_s, **changes)
            if cluster.open_calls and random_.random() < 0.02:
                cluster.leave(random_.choice(cluster.open_calls))
            cluster.step()

    def take_over(self) -> None:
        """Another scheduler begins without knowledge; peers report to it, and gateways ask for all open requests."""
        self.num_events += 1
        self.cluster.disconnect()
        start = PolicyStart(self.cluster.config, self.cluster.now, f"scheduler-{self.num_events}")
        self.cluster.policy = start.policy()
        self._connect_others()
        self.cluster.report_all()
        self.cluster.reconnect()

    def fail(self) -> None:
        """Something random fails."""
        cluster, worker_id, store_id = (
            self.cluster,
            *(self.random.choice(sorted(all_)) for all_ in (self.workers, self.stores)),
        )
        match self.random.choice(FAILURES):
            case "fault":
                cluster.faults[worker_id] = self.random.choice(list(Fault))
            case "kill" if worker_id in cluster.workers:
                cluster.kill(worker_id)
            case "store":
                self.lose_store(store_id)
            case "stop":
                cluster.apply(PeerGone(Peer(worker_id), is_stopped=True))
            case "stream":
                cluster.apply(StreamClosed(worker_id))
            case "broker":
                cluster.pass_time_with_beats(2.0)
            case "load" if worker_id in cluster.workers:
                cluster.apply(
                    CommandEnded(Load(cluster.workers[worker_id].slot.instance_id), CommandOutcome.UNANSWERED)
                )
            case "retain":
                cluster.apply(CommandEnded(Retention(store_id), CommandOutcome.REFUSED))
            case "copy":
                cluster.apply(
                    CommandEnded(Copy(self.random.choice(MODELS).pack_id, store_id), CommandOutcome.REFUSED, "no space")
                )
            case "gateway":
                cluster.disconnect()
            case "takeover":
                self.take_over()
            case "deletion":
                cluster.apply(ModelDeleted(self.random.choice(MODELS).name))

    def lose_store(self, store_id: str) -> None:
        if self.cluster.stores.pop(store_id, None) is not None:
            self.cluster.apply(PeerGone(Peer(store_id, True)))

    def heal(self) -> None:
        """Everything that has failed returns, in new processes."""
        cluster, self.num_events = self.cluster, self.num_events + 1
        cluster.faults.clear()
        for store_id in [store_id for store_id in self.stores if store_id not in cluster.stores]:
            incarnation = f"{store_id} {self.num_events}"
            cluster.stores[store_id] = replace(self.stores[store_id], incarnation=incarnation, copies={})
        for worker_id in [worker_id for worker_id in self.workers if worker_id not in cluster.workers]:
            cluster.restart(self.workers[worker_id], self.num_events)
        if not cluster.is_gateway_here:
            cluster.reconnect()


def _failures(seed: int) -> None:
    """Any failures; with even seeds packs have second copies, which crowd the arenas."""
    config = replace(CONFIG, replicate=seed % 2 == 0, recent_s=60.0)
    history = History(f"failures {seed}", 3, config, num_gateways=2, arena_bytes=(1024 if seed % 2 else 160) * MB)
    for _ in range(8):
        for _ in range(3):
            history.fail()
            history.live(history.random.uniform(1.0, 6.0), history.random.choice((0.5, 3.0, 8.0)))
        history.heal()
    history.live(20.0, 0.0)


def _broken_loads() -> None:
    """Half of the workers refuse loads, break them, never end them, or never end drains."""
    history, faults = History("broken loads", 2), list(Fault)[:4]
    for _ in range(10):
        for worker_id in history.random.sample(sorted(history.workers), 3):
            history.cluster.faults[worker_id] = history.random.choice(faults)
        history.live(7.0, 4.0)
        history.heal()
        history.live(3.0, 1.0)


def _takeovers() -> None:
    """Schedulers take over under load, while loads run, and while slots drain. Of three gateways the last leaves for
    good, and the first returns and asks again.
    """
    history = History("takeovers", 3, replace(CONFIG, replicate=True, gateway_grace_s=4.0), num_gateways=3)
    history.cluster.load_s = 2.0
    for seconds in (12.0, 1.0, 5.0, 9.0, 3.0):
        history.live(seconds, 5.0)
        history.take_over()
    history.live(5.0, 6.0)
    history.cluster.apply(GatewayChanged(history.gateways.pop(), False))
    for away_s in (1.0, 3.0, 8.0):
        history.cluster.disconnect()
        history.live(away_s, 4.0)
        history.cluster.reconnect()
        history.live(6.0, 6.0)
    history.live(20.0, 0.0)


def _minimums() -> None:
    """Minimums come, grow, follow a schedule and go, while other models wait for their slots."""
    history = History("minimums", 2)
    kept = [replace(MODELS[1], min_instances=1), replace(MODELS[3], min_instances=1)]
    scheduled = ScheduledMinimum(history.cluster.now + 30.0, history.cluster.now + 45.0, 3, "daily")
    for models in (kept[:1], kept, [replace(kept[0], scheduled=(scheduled,)), kept[1]], [], kept[1:]):
        history.cluster.models |= {model.version_id: model for model in models}
        history.cluster.apply(MinimumsSet(tuple(models)))
        history.live(12.0, 5.0)
    history.cluster.kill("w-0")
    history.live(10.0, 1.0)


def _roles() -> None:
    """Workers of one role each, beside some with another engine or two devices, under prompts and answers in turn."""
    more = [a_worker(f"{role.name}-{n}", f"host-{n}", frozenset((role,))) for n in range(2) for role in Role]
    more += [a_worker("vllm", "host-2", engine="vllm", hands_over=False), a_worker("pair", "host-2", num_devices=2)]
    history = History("roles", 3, more=more)
    models = [MODELS[0], MODELS[2], replace(MODELS[3], engine="vllm"), replace(MODELS[4], num_devices=2)]
    for turn in range(6):
        num_tokens, decode_s, per_s = ([3000], [0.1], 3.0) if turn % 2 else ([20], [6.0], 12.0)
        history.live(12.0, per_s, models, num_tokens, decode_s)
    history.live(15.0, 0.3, models)


def _pools(mode: PoolMode, scaling: ScalingMode) -> None:
    """The targets of pools, and scaling that only advises."""
    config = replace(CONFIG, pool_mode=mode, scaling=scaling, pool_max_slots=6, pool_spare_slots=1)
    history = History("pools", 1, config)
    history.cluster.apply(MinimumsSet((replace(MODELS[0], min_instances=1),)))
    for per_s in (0.3, 8.0, 0.0, 3.0):
        history.cluster.apply(LauncherReported("no node" if per_s > 5 else ""))
        history.live(12.0, per_s)


def _many_instances() -> None:
    """A model with so many instances that placements look at some of them only."""
    config = replace(CONFIG, max_instances=48, queue_limit=1000, queue_limit_total=1000)
    history = History("many instances", 16, config)
    history.live(15.0, 60.0, MODELS[:1], [1500], [4.0])
    history.live(10.0, 2.0)


def _scenario(name: str) -> None:
    SCENARIOS[name](1).run(Strategies())


def _case(traces: Path, trace: str, fleet: str, seed: int) -> None:
    run(case_of(trace, read_traces(traces)[trace], fleet, seed, CASE_S), "ours", Knobs())


def histories(traces: Path) -> dict[str, Callable[[], None]]:
    """All histories by name, the longest first; cases are those of the traces in this folder."""
    cases = {
        f"case_{trace}_{fleet}_{seed}": partial(_case, traces, trace, fleet, seed)
        for fleet, seeds in CASE_SEEDS.items()
        for trace in read_traces(traces)
        for seed in seeds
    }
    scenarios = {f"scenario_{name}": partial(_scenario, name) for name in SCENARIOS}
    failures = {f"failures_{seed}": partial(_failures, seed) for seed in range(1, 7)}
    others: dict[str, Callable[[], None]] = {
        "broken_loads": _broken_loads,
        "takeovers": _takeovers,
        "minimums": _minimums,
        "roles": _roles,
        "many_instances": _many_instances,
        "pools": partial(_pools, PoolMode.FOLLOW, ScalingMode.ACT),
        "advice": partial(_pools, PoolMode.ADVISE, ScalingMode.ADVISE),
    }
    return {**cases, **scenarios, **failures, **others}
