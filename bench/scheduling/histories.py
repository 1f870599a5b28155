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
    GatewayConnected,
    GatewayDisconnected,
    LauncherReported,
    MinimumsSet,
    ModelDeleted,
    StoreGone,
    WorkerStopped,
    WorkerStreamClosed,
)
from torchrelay.scheduler.policy.strategies import Strategies
from torchrelay.scheduler.policy.types import Model, Role, ScheduledMinimum, ServiceClass, StoreStatus, WorkerStatus
from torchrelay.scheduler.service.input_log import PolicyStart
from torchrelay.sim.policies.setup import Knobs

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


class History:
    """A cluster with random requests. ``gateways``: each request comes by one of them; the first is the cluster's."""

    def __init__(self, name: str, cluster: RunningCluster, gateways: Sequence[str] = ("gateway-1",)) -> None:
        self.random, self.cluster, self.gateways = random.Random(name), cluster, gateways
        self.num_takeovers = 0
        for gateway in gateways[1:]:
            cluster.apply(GatewayConnected(gateway))

    def live(
        self,
        seconds: float,
        models: Sequence[Model] = MODELS,
        per_s: float = 2.0,
        num_tokens: Sequence[int] = (20, 100, 400, 1500),
        decode_s: Sequence[float] = (0.1, 0.5, 4.0),
    ) -> None:
        """Passes the time while requests come, few of whose clients leave."""
        end = self.cluster.now + seconds
        while self.cluster.now < end:
            for _ in range(int(per_s * 0.1 + self.random.random())):
                self._call(models, self.random.choice(num_tokens), self.random.choice(decode_s))
            calls = self.cluster.open_calls
            if calls and self.random.random() < 0.02:
                self.cluster.leave(self.random.choice(calls))
            self.cluster.step()

    def _call(self, models: Sequence[Model], num_tokens: int, decode_s: float) -> None:
        place = min(int(self.random.expovariate(1.0)), len(models) - 1)
        changes = {"gateway_id": self.random.choice(self.gateways), **self.random.choice(REQUESTS)}
        self.cluster.call(f"r{len(self.cluster.calls)}", models[place], num_tokens, decode_s, **changes)

    def take_over(self) -> None:
        """Another scheduler begins without knowledge; peers report to it, and gateways ask for all open requests."""
        cluster = self.cluster
        self.num_takeovers += 1
        cluster.disconnect()
        cluster.policy = PolicyStart(cluster.config, cluster.now, f"takeover-{self.num_takeovers}").policy()
        for gateway in self.gateways[1:]:
            cluster.apply(GatewayConnected(gateway))
        cluster.report_all()
        cluster.reconnect()


def _peers(num_hosts: int, **store: object) -> list[WorkerStatus | StoreStatus]:
    """Hosts with a worker for each role, and for both."""
    peers: list[WorkerStatus | StoreStatus] = []
    for number in range(num_hosts):
        host = f"host-{number}"
        copies = [a_copy(model) for model in MODELS[number::num_hosts]]
        peers.append(replace(a_store(f"store-{number}", host, copies), **store))  # type: ignore[arg-type]
        peers += [*a_pair(f"p-{number}", f"d-{number}", host), a_worker(f"w-{number}", host)]
    return peers


def _failures(seed: int, config: PolicyConfig = CONFIG, num_takeovers: int = 0) -> None:
    """Every few seconds a node fails, or all return."""
    cluster = RunningCluster(config)
    cluster.settle(*_peers(3))
    history = History(f"failures {seed}", cluster)
    workers, stores = dict(cluster.workers), dict(cluster.stores)
    mishaps: list[Callable[[], None]] = [
        lambda: cluster.faults.__setitem__(history.random.choice(sorted(workers)), history.random.choice(list(Fault))),
        lambda: cluster.kill(history.random.choice(sorted(cluster.workers))) if cluster.workers else None,
        lambda: _lose_store(cluster, history.random.choice(sorted(stores))),
        lambda: cluster.apply(WorkerStopped(history.random.choice(sorted(workers)))),
        lambda: cluster.apply(WorkerStreamClosed(history.random.choice(sorted(workers)))),
        cluster.disconnect if seed % 2 else history.take_over,
        lambda: cluster.apply(ModelDeleted(history.random.choice(MODELS).name)),
    ]
    for number in range(24):
        history.random.choice(mishaps)()
        history.live(history.random.uniform(1.0, 6.0), per_s=history.random.choice((0.5, 3.0, 8.0)))
        if number % 3 == 2:
            _heal(cluster, workers, stores, number)
    history.live(20.0, per_s=0.0)


def _lose_store(cluster: RunningCluster, store_id: str) -> None:
    if cluster.stores.pop(store_id, None) is not None:
        cluster.apply(StoreGone(store_id))


def _heal(
    cluster: RunningCluster, workers: Mapping[str, WorkerStatus], stores: Mapping[str, StoreStatus], number: int
) -> None:
    """Everything that has failed returns, in new processes."""
    cluster.faults.clear()
    for store_id, store in stores.items():
        if store_id not in cluster.stores:
            cluster.stores[store_id] = replace(store, incarnation=f"{store_id} {number}", copies={})
    for worker_id, worker in workers.items():
        if worker_id not in cluster.workers:
            cluster.restart(worker, number)
    if not cluster.is_gateway_here:
        cluster.reconnect()


def _gateways() -> None:
    """Three gateways, the last of which leaves for good, while the first returns and asks again."""
    cluster = RunningCluster(replace(CONFIG, gateway_grace_s=4.0))
    cluster.settle(*_peers(2))
    history = History("gateways", cluster, ["gateway-1", "gateway-2", "gateway-3"])
    history.live(15.0, per_s=6.0)
    cluster.apply(GatewayDisconnected("gateway-3"))
    history.gateways = history.gateways[:2]
    for away_s in (1.0, 3.0, 8.0):
        cluster.disconnect()
        history.live(away_s, per_s=4.0)
        cluster.reconnect()
        history.live(6.0, per_s=6.0)
    history.live(20.0, per_s=0.0)


def _takeovers() -> None:
    """A scheduler takes over every few seconds: under load, while loads run, and while slots drain."""
    cluster = RunningCluster(replace(CONFIG, replicate=True), load_s=2.0)
    cluster.settle(*_peers(3))
    history = History("takeovers", cluster, ["gateway-1", "gateway-2"])
    for seconds in (12.0, 1.0, 5.0, 9.0, 3.0, 14.0):
        history.live(seconds, per_s=5.0)
        history.take_over()
    history.live(40.0, per_s=1.0)


def _minimums() -> None:
    """Minimums come, grow, follow a schedule and go, while other models wait for their slots."""
    cluster = RunningCluster(CONFIG)
    cluster.settle(*_peers(2))
    history = History("minimums", cluster)
    kept = [replace(MODELS[1], min_instances=1), replace(MODELS[3], min_instances=1)]
    scheduled = ScheduledMinimum(cluster.now + 30.0, cluster.now + 45.0, 3, "daily")
    for models in (kept[:1], kept, [replace(kept[0], scheduled=(scheduled,)), kept[1]], [], kept[1:]):
        cluster.models |= {model.version_id: model for model in models}
        cluster.apply(MinimumsSet(tuple(models)))
        history.live(12.0, per_s=5.0)
    cluster.kill("w-0")
    history.live(10.0, per_s=1.0)


def _roles() -> None:
    """Workers of one role each, beside some with another engine or two devices, under prompts and answers in turn."""
    cluster = RunningCluster(CONFIG)
    peers = _peers(3)
    peers += [a_worker(f"only-{role.name}-{n}", f"host-{n}", frozenset((role,))) for n in range(2) for role in Role]
    peers += [a_worker("vllm", "host-2", engine="vllm", hands_over=False), a_worker("pair", "host-2", num_devices=2)]
    cluster.settle(*peers)
    history = History("roles", cluster)
    models = [MODELS[0], MODELS[2], replace(MODELS[3], engine="vllm"), replace(MODELS[4], num_devices=2)]
    for turn in range(6):
        num_tokens, decode_s, per_s = ([3000], [0.1], 3.0) if turn % 2 else ([20], [6.0], 12.0)
        history.live(12.0, models, per_s, num_tokens=num_tokens, decode_s=decode_s)
    history.live(15.0, models, per_s=0.3)


def _pools(mode: PoolMode, scaling: ScalingMode) -> None:
    """The targets of pools, and scaling that only advises."""
    config = replace(CONFIG, pool_mode=mode, scaling=scaling, pool_max_slots=6, pool_spare_slots=1)
    cluster = RunningCluster(config)
    cluster.settle(*_peers(1))
    history = History("pools", cluster)
    cluster.apply(MinimumsSet((replace(MODELS[0], min_instances=1),)))
    for per_s in (0.3, 8.0, 0.0, 3.0):
        cluster.apply(LauncherReported("no node" if per_s > 5 else ""))
        history.live(12.0, per_s=per_s)


def _copies() -> None:
    """Copies are made, lost with their hosts, and do not fit."""
    cluster = RunningCluster(replace(CONFIG, replicate=True, recent_s=60.0))
    cluster.settle(*_peers(4, arena_target_bytes=160 * MB))
    history = History("copies", cluster)
    stores, workers = dict(cluster.stores), dict(cluster.workers)
    for number in range(5):
        history.live(10.0, per_s=2.0)
        _lose_store(cluster, f"store-{number % 4}")
        history.live(6.0, per_s=2.0)
        _heal(cluster, workers, stores, number)
    history.live(70.0, per_s=0.05)


def _scenario(name: str) -> None:
    SCENARIOS[name](1).run(Strategies())


def _case(traces: Path, trace: str, fleet: str, seed: int) -> None:
    run(case_of(trace, read_traces(traces)[trace], fleet, seed, CASE_S), "ours", Knobs(60.0))


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
    pools = {
        "pools": partial(_pools, PoolMode.FOLLOW, ScalingMode.ACT),
        "advice": partial(_pools, PoolMode.ADVISE, ScalingMode.ADVISE),
    }
    others = {"gateways": _gateways, "takeovers": _takeovers, "minimums": _minimums, "roles": _roles, "copies": _copies}
    return {**cases, **scenarios, **failures, **pools, **others}
