"""The log of inputs: a replay repeats every decision, in any process, whatever its hash seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import BinaryIO, get_args

import msgspec
import pytest

from tests.unit.scheduler.policy.paper_cluster import MB, PaperCluster, a_model, a_pair, a_store, a_worker
from tests.unit.scheduler.service.scripted_cluster import GatewayClient, scripted_cluster
from torchrelay.common.liveness import EngineProgress
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import (
    CopyCommand,
    Hop,
    LoadCommand,
    RetainCommand,
    SetRolesCommand,
    UnloadCommand,
)
from torchrelay.scheduler.policy.explain import unix_us
from torchrelay.scheduler.policy.inputs import (
    CopyFailed,
    Due,
    FirstToken,
    GatewayConnected,
    GatewayDisconnected,
    Input,
    LoadUnanswered,
    MinimumsSet,
    ModelDeleted,
    Release,
    RetainFailed,
    RolesFailed,
    StoreBeat,
    StoreGone,
    UnloadFailed,
    Withdraw,
    WorkerBeat,
    WorkerStopped,
    WorkerStreamClosed,
)
from torchrelay.scheduler.policy.prediction import Outcome
from torchrelay.scheduler.policy.types import (
    AttemptKey,
    InstancePhase,
    Model,
    ScheduledMinimum,
    SourceShare,
    StoreStatus,
)
from torchrelay.scheduler.service.input_log import encode_effects, replay

NUM_STEPS = 140
HASH_SEEDS = ("1", "2")
MODELS = [a_model(f"acme/m{number}", idle_timeout_s=4.0, routing_block_tokens=16) for number in range(7)]
# Another tenant has uploaded the files of the first model.
MODELS.append(replace(MODELS[0], name="beta/m0"))


class Life:
    """A cluster to which all sorts of things happen, drawn from a seed."""

    def __init__(self, log: BinaryIO) -> None:
        config = PolicyConfig(recent_s=60.0, load_tries=2, time_slice_s=2.0, gateway_grace_s=1.0)
        self.scene = PaperCluster(config, log=log)
        self.random = Random(7)
        self.num_requests = 0
        self.open: list[AttemptKey] = []
        for number, letters in enumerate(("abcde", "abcd", "a", "a"), 1):
            host_id = f"host-{number}"
            stores = [
                replace(a_store(f"store-{number}{letter}", host_id), failure_domain="xy"[number % 2])
                for letter in letters
            ]
            pair = a_pair(f"w-{number}a", f"w-{number}b", host_id)
            workers = [replace(worker, has_prefix_cache=True) for worker in pair]
            self.scene.settle(*stores, *workers)
            # Workers load from the first store of their host: any of the others can feed that one.
            for store in stores[1:]:
                for model in MODELS[:3]:
                    self.scene.hold(store.store_id, model)
        self.all_workers, self.all_stores = dict(self.scene.workers), dict(self.scene.stores)

    def run(self) -> None:
        steps = [self.admit, self.admit, self.admit, self.end, self.end, self.load, self.pass_time, self.withdraw]
        steps.append(self.compute)
        self.share()
        self.admit()
        self.slow_down()
        rare = [self.lose_worker, self.lose_stores, self.return_peers, self.break_worker, self.reconnect, self.fail]
        rare.append(self.hang)
        for _ in range(NUM_STEPS):
            self.random.choice(rare if self.random.random() < 0.2 else steps)()
        self.fail()
        self.scene.check()

    def share(self) -> None:
        """Every slot is taken, by pairs of busy models, when one more model is called."""
        called = [*MODELS[:4], MODELS[6]]
        for number, model in enumerate(called):
            self.scene.admit(model, f"s{number}", max_tokens=30)
            self.scene.finish_loads()
        self.scene.pass_time(1.5, step_s=0.25)
        assert "preempt_spare" in self.scene.kinds()
        self.open += [AttemptKey(f"s{number}", 1) for number in range(len(called))]

    def admit(self) -> None:
        for _ in range(self.random.randint(1, 12)):
            self.num_requests += 1
            num_tokens = self.random.randint(1, 500)
            lost = tuple(self.random.sample(sorted(self.scene.workers), 1)) if self.random.random() < 0.1 else ()
            admission = self.scene.admit(
                self.random.choice(MODELS),
                f"r{self.num_requests}",
                num_prompt_tokens=num_tokens,
                max_tokens=30,
                num_choices=self.random.randint(1, 2),
                lost_workers=lost,
                block_hashes=tuple(bytes([block]) for block in range(num_tokens // 16)),
            )
            self.open.append(admission.key)

    def end(self) -> None:
        for _ in range(min(len(self.open), 10)):
            key = self.open.pop(self.random.randrange(len(self.open)))
            outcome = Outcome(0.1, 0.02, self.random.uniform(0.001, 0.1), self.scene.now)
            self.scene.apply(Release(key, self.random.random() < 0.9, outcome))

    def compute(self) -> None:
        """Some prompts are computed; then the time comes at which another may be dispatched."""
        for key in self.random.sample(self.open, min(len(self.open), 5)):
            self.scene.apply(FirstToken(key))
        self.scene.apply(Due())

    def withdraw(self) -> None:
        if self.open:
            self.scene.apply(Withdraw(self.open.pop()))

    def load(self) -> None:
        """The woken pack arrives, and its instance becomes ready."""
        for hop, model in self.relays():
            self.scene.hold(hop.store_id, model, relay_begin_us=unix_us(self.scene.now))
        self.scene.report_all()
        self.scene.finish_loads()

    def relays(self) -> list[tuple[Hop, Model]]:
        """Relays ordered for wakes whose store has nothing yet."""
        stores, pairs = self.scene.stores, [(hop, wake.model) for wake in self.scene.loads() for hop in wake.hops]
        return [
            (hop, model)
            for hop, model in pairs
            if hop.store_id in stores and model.pack_id not in stores[hop.store_id].copies
        ]

    def pass_time(self) -> None:
        self.scene.pass_time(self.random.choice([0.3, 1.0, 2.5]), step_s=0.25)

    def lose_worker(self) -> None:
        if len(self.scene.workers) > 4:
            worker_id = self.random.choice(sorted(self.scene.workers))
            match self.random.randrange(3):
                case 0:
                    self.scene.kill(worker_id)
                case 1:
                    del self.scene.workers[worker_id]
                    self.scene.apply(WorkerStreamClosed(worker_id))
                    self.scene.apply(WorkerStopped(worker_id))
                case 2:
                    del self.scene.workers[worker_id]
                    self.scene.pass_time(4.0, step_s=0.5)

    def lose_stores(self) -> None:
        for store_id in self.random.sample(sorted(self.scene.stores), min(len(self.scene.stores), 4)):
            del self.scene.stores[store_id]
            self.scene.apply(StoreGone(store_id))
        self.scene.pass_time(3.0, step_s=0.5)

    def hang(self) -> None:
        """A worker only says that it lives, and its engine stands still."""
        if len(self.scene.workers) > 4:
            worker = self.scene.workers.pop(self.random.choice(sorted(self.scene.workers)))
            for _ in range(7):
                self.scene.apply(WorkerBeat(worker.worker_id, worker.incarnation, EngineProgress(3, True)))
                for store in self.scene.stores.values():
                    self.scene.apply(StoreBeat(store.store_id, store.incarnation))
                self.scene.pass_time(0.5, step_s=0.25)

    def return_peers(self) -> None:
        for store_id, store in self.all_stores.items():
            self.scene.stores.setdefault(store_id, self._restarted(store))
        for worker_id, worker in self.all_workers.items():
            self.scene.workers.setdefault(worker_id, replace(worker, incarnation=f"{worker_id} {self.scene.now}"))
        self.scene.failing_workers.clear()
        self.scene.report_all()

    def _restarted(self, store: StoreStatus) -> StoreStatus:
        return replace(store, incarnation=f"{store.store_id} {self.scene.now}", copies={})

    def break_worker(self) -> None:
        worker_id = self.random.choice(sorted(self.scene.workers))
        self.scene.failing_workers.add(worker_id)
        if self.scene.workers[worker_id].slot.phase is InstancePhase.LOADING:
            self.scene.workers[worker_id] = replace(
                self.scene.workers[worker_id], slot=replace(a_worker("x").slot, error="chunk 7 is corrupt")
            )

    def reconnect(self) -> None:
        """The gateway comes back, and forgets some of what it had asked for."""
        self.scene.apply(GatewayDisconnected("gateway-1"))
        self.scene.apply(GatewayConnected("gateway-1"))
        begin = self.scene.now + 5.0
        timed = replace(MODELS[1], scheduled=(ScheduledMinimum(begin, begin + 10.0, 1, "daily 08:00-18:00 UTC = 1"),))
        self.scene.apply(MinimumsSet((replace(MODELS[0], min_instances=1), timed)))
        self.scene.apply(ModelDeleted(MODELS[2].name))
        self.open = self.open[: len(self.open) // 2]
        self.scene.pass_time(1.5, step_s=0.5)

    def fail(self) -> None:
        """Late word that the last command of each kind could not be carried out."""
        for command in {type(command): command for command in self.scene.commands}.values():
            match command:
                case SetRolesCommand():
                    self.scene.apply(RolesFailed(command.instance_id, "no answer"))
                case UnloadCommand():
                    self.scene.apply(UnloadFailed(command.instance_id, "no answer"))
                case CopyCommand():
                    self.scene.apply(CopyFailed(command.model.pack_id, command.hop.store_id, "no answer"))
                case RetainCommand():
                    self.scene.apply(RetainFailed(command.store_id))
                case LoadCommand():
                    self.scene.apply(LoadUnanswered(command.hops[0].loads[0].instance_id))

    def slow_down(self) -> None:
        """Relays run far below their planned rates."""
        begin_us, relays = unix_us(self.scene.now), self.relays()
        for hop, model in relays:
            share = SourceShare(hop.sources[0], 5 * MB, 1e6, following=True)
            self.scene.hold(
                hop.store_id, model, num_chunks_verified=3, relay_begin_us=begin_us, shares=(share,), error=""
            )
        self.scene.pass_time(2.5, step_s=0.25)
        for hop, model in relays:
            self.scene.hold(hop.store_id, model, relay_begin_us=begin_us)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PaperCluster]:
    path = tmp_path_factory.mktemp("log") / "inputs.jsonl"
    with path.open("wb") as log:
        life = Life(log)
        life.run()
    return path, life.scene


def test_recorded_log_has_every_kind_of_input(life: tuple[Path, PaperCluster]) -> None:
    path, scene = life
    for kind in (
        "load",
        "evict",
        "preempt_spare",
        "idle",
        "replicate",
        "rebuild",
        "copied",
        "load_failed",
        "lost",
        "stopped",
        "relay_slow",
    ):
        assert kind in scene.kinds(), kind
    recorded = path.read_text()
    assert [kind for kind in get_args(Input) if f'"kind":"{kind.__name__}"' not in recorded] == []


def test_replay_gives_recorded_effects(life: tuple[Path, PaperCluster]) -> None:
    path, scene = life
    assert list(replay(path)) == [encode_effects(effects) for effects in scene.effects]


def test_replay_is_independent_of_hash_seed(life: tuple[Path, PaperCluster]) -> None:
    code = "from torchrelay.scheduler.main import main; main()"
    command = [sys.executable, "-c", code, "--replay", str(life[0])]
    recorded = [encode_effects(effects) for effects in life[1].effects]
    for seed in HASH_SEEDS:
        environment = os.environ | {"PYTHONHASHSEED": seed}
        printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=120, check=True).stdout
        assert printed.splitlines() == recorded


def test_replay_of_other_file_fails_with_message(tmp_path: Path) -> None:
    path = tmp_path / "inputs.jsonl"
    path.write_text("not a log")
    code = "from torchrelay.scheduler.main import main; main()"
    ended = subprocess.run([sys.executable, "-c", code, "--replay", str(path)], capture_output=True, timeout=120)
    assert ended.returncode == 1 and not ended.stdout
    assert ended.stderr.decode().startswith(f"torchrelay-scheduler: {path}: ") and b"Traceback" not in ended.stderr


def test_log_with_settings_of_another_release_is_refused(life: tuple[Path, PaperCluster], tmp_path: Path) -> None:
    """They were ignored, and the replay diverged without a word."""
    first, *others = life[0].read_bytes().splitlines(keepends=True)
    path = tmp_path / "inputs.jsonl"
    path.write_bytes(first.replace(b'"time_slice_s":', b'"turn_s":') + b"".join(others))
    with pytest.raises(msgspec.ValidationError, match="config has turn_s: use the release of Torchrelay that recorded"):
        next(replay(path))


async def test_recording_of_service_can_be_replayed(nats_url: str, tmp_path: Path) -> None:
    path = tmp_path / "inputs.jsonl"
    async with scripted_cluster(nats_url) as it:
        await it.host(1)
        async with it.scheduler(2, record=path) as address, GatewayClient(address) as gateway:
            await gateway.admit("r1")
            placement = await gateway.placement()
    placed = [json.loads(line)["answers"] for line in replay(path) if b'"placement"' in line]
    assert [answer["placement"]["prefill"]["instance_id"] for (answer,) in placed] == [placement.prefill.instance_id]
