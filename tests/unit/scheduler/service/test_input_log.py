"""The log of inputs: a replay repeats every decision, in any process, whatever its hash seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, BinaryIO, get_args

import msgspec
import pytest

from tests.unit.scheduler.policy.paper_cluster import MB, PaperCluster, a_model, a_pair, a_store
from tests.unit.scheduler.policy.running_cluster import Fault, RunningCluster
from tests.unit.scheduler.service.scripted_cluster import GatewayClient, ScriptedCluster
from torchrelay.common.liveness import EngineProgress
from torchrelay.scheduler.policy.config import PolicyConfig
from torchrelay.scheduler.policy.effects import CopyCommand, LoadCommand, RetainCommand, SetRolesCommand, UnloadCommand
from torchrelay.scheduler.policy.explain import unix_us
from torchrelay.scheduler.policy.inputs import (
    Beat,
    CommandEnded,
    CommandId,
    CommandOutcome,
    Copy,
    Input,
    LauncherReported,
    Load,
    MinimumsSet,
    ModelDeleted,
    PeerGone,
    Retention,
    RoleChange,
    StreamClosed,
    Unload,
)
from torchrelay.scheduler.policy.types import Peer, ScheduledMinimum, SourceShare
from torchrelay.scheduler.service.input_log import PolicyStart, encode_effects, replay

CONFIG = PolicyConfig(recent_s=60.0, load_tries=2, time_slice_s=2.0, gateway_grace_s=1.0, load_stall_s=4.0)
MODELS = [a_model(f"acme/m{number}", idle_timeout_s=4.0, routing_block_tokens=16) for number in range(7)]
# Another tenant has uploaded the files of the first model.
MODELS.append(replace(MODELS[0], name="beta/m0"))


def a_cluster(log: BinaryIO) -> RunningCluster:
    """Hosts with several stores: workers load from the first of their host, which any of the others can feed."""
    cluster = RunningCluster(CONFIG, log=log, load_s=0.5)
    for number, letters in enumerate(("abcde", "abcd", "a", "a"), 1):
        host_id, domain = f"host-{number}", "xy"[number % 2]
        stores = [replace(a_store(f"store-{number}{each}", host_id), failure_domain=domain) for each in letters]
        pair = a_pair(f"w-{number}a", f"w-{number}b", host_id)
        cluster.settle(*stores, *(replace(worker, has_prefix_cache=True) for worker in pair))
        for store in stores[1:]:
            for model in MODELS[:3]:
                cluster.hold(store.store_id, model)
    return cluster


def share(cluster: RunningCluster) -> None:
    """Every slot is taken, by pairs whose requests do not end, when more models are called than there are pairs."""
    cluster.faults = dict.fromkeys(cluster.workers, Fault.IDLE_LIAR)
    for number, model in enumerate([*MODELS[:4], MODELS[6]]):
        cluster.call(f"s{number}", model)
        cluster.pass_time(0.6)
    cluster.pass_time(1.5)
    cluster.faults.clear()
    assert "preempt_spare" in cluster.kinds()


def slow_down(cluster: RunningCluster) -> None:
    """Relays run far below their planned rates."""
    hops = [(hop, load.model) for load in cluster.loads() for hop in load.hops]
    hops = [(hop, model) for hop, model in hops if model.pack_id not in cluster.stores[hop.store_id].copies]
    begin_us = unix_us(cluster.now)
    for hop, model in hops:
        share = SourceShare(hop.sources[0], 5 * MB, 1e6, following=True)
        cluster.hold(hop.store_id, model, num_chunks_verified=3, relay_begin_us=begin_us, shares=(share,))
    cluster.pass_time(2.5)
    for hop, model in hops:
        cluster.hold(hop.store_id, model, relay_begin_us=begin_us)
    assert "relay_slow" in cluster.kinds()


def live(cluster: RunningCluster) -> None:
    """All sorts of things happen, drawn from a seed."""
    random, workers, stores = Random(7), dict(cluster.workers), dict(cluster.stores)
    for step in range(60):
        for number in range(random.randint(0, 6)):
            num_tokens = random.randint(1, 500)
            hashes = tuple(bytes([block]) for block in range(num_tokens // 16))
            options: dict[str, Any] = {"num_choices": random.randint(1, 2), "block_hashes": hashes}
            cluster.call(f"r{step}-{number}", random.choice(MODELS), num_tokens, random.uniform(0.0, 3.0), **options)
        if random.random() < 0.3 and (calls := cluster.open_calls):
            cluster.leave(random.choice(calls))
        worker_id = random.choice(sorted(workers))
        cluster.faults = {each: random.choice([*Fault]) for each in random.sample(sorted(workers), 3)}
        if random.random() < 0.2 and worker_id in cluster.workers:
            cluster.kill(worker_id)
        if step % 20 == 10:
            for store_id in random.sample(sorted(stores), 4):
                cluster.stores.pop(store_id, None)
                cluster.apply(PeerGone(Peer(store_id, True)))
        if step % 10 == 9:
            for worker_id, worker in workers.items():
                if worker_id not in cluster.workers:
                    cluster.restart(worker, step)
            for store_id, store in stores.items():
                cluster.stores.setdefault(store_id, replace(store, incarnation=f"{store_id} {step}", copies={}))
        cluster.pass_time(random.choice([0.3, 1.0]))
    cluster.disconnect()
    cluster.reconnect()
    cluster.check_calls()


def fail(cluster: RunningCluster) -> None:
    """Late word that the last command of each kind could not be carried out, and rare words of peers and operators."""
    for command in {type(command): command for command in cluster.commands}.values():
        ended: CommandId
        match command:
            case SetRolesCommand(instance_id):
                ended = RoleChange(instance_id)
            case UnloadCommand(instance_id):
                ended = Unload(instance_id)
            case CopyCommand(model, hop):
                ended = Copy(model.pack_id, hop.store_id)
            case RetainCommand(store_id):
                ended = Retention(store_id)
            case LoadCommand(_, hops):
                ended = Load(hops[0].loads[0].instance_id)
            case _:
                continue
        outcome = CommandOutcome.UNANSWERED if isinstance(ended, Load) else CommandOutcome.REFUSED
        cluster.apply(CommandEnded(ended, outcome, "no answer"))
    begin = cluster.now + 5.0
    timed = replace(MODELS[1], scheduled=(ScheduledMinimum(begin, begin + 10.0, 1, "daily 08:00-18:00 UTC = 1"),))
    cluster.models[MODELS[0].version_id] = MODELS[0]
    cluster.apply(MinimumsSet((replace(MODELS[0], min_instances=1), timed)))
    cluster.apply(ModelDeleted(MODELS[2].name))
    cluster.apply(LauncherReported("1 worker waiting: Resources"))
    cluster.tick()
    for worker in list(cluster.workers.values())[:2]:
        cluster.apply(Beat(Peer(worker.worker_id), worker.incarnation, EngineProgress(3, True)))
        cluster.apply(StreamClosed(worker.worker_id))
    cluster.apply(PeerGone(Peer(next(iter(cluster.workers))), is_stopped=True))
    cluster.apply(Beat(Peer("store-2a", True), cluster.stores["store-2a"].incarnation))
    PaperCluster.pass_time(cluster, 1.0)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PaperCluster]:
    path = tmp_path_factory.mktemp("log") / "inputs.jsonl"
    with path.open("wb") as log:
        cluster = a_cluster(log)
        for happen in (share, slow_down, live, fail):
            happen(cluster)
    return path, cluster


def test_recorded_log_has_every_kind_of_input(life: tuple[Path, PaperCluster]) -> None:
    path, scene = life
    decisions = {"load", "evict", "preempt_spare", "idle", "replicate", "rebuild", "copied"}
    assert decisions | {"load_failed", "lost", "stopped", "relay_slow"} <= set(scene.kinds())
    recorded = path.read_text()
    assert [kind for kind in get_args(Input) if f'"kind":"{kind.__name__}"' not in recorded] == []


def replayed(path: Path, hash_seed: str = "0") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", "from torchrelay.scheduler.main import main; main()", "--replay", str(path)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, env=environment, capture_output=True, timeout=120)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_replay_gives_recorded_effects_whatever_the_hash_seed(life: tuple[Path, PaperCluster], hash_seed: str) -> None:
    path, scene = life
    done = replayed(path, hash_seed)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [encode_effects(effects) for effects in scene.effects]


def test_replay_of_other_file_fails_with_message(tmp_path: Path) -> None:
    path = tmp_path / "inputs.jsonl"
    path.write_text("not a log")
    ended = replayed(path)
    assert ended.returncode == 1 and not ended.stdout
    assert ended.stderr.decode().startswith(f"torchrelay-scheduler: {path}: ") and b"Traceback" not in ended.stderr


def test_log_with_settings_of_another_release_is_refused(life: tuple[Path, PaperCluster], tmp_path: Path) -> None:
    """They were ignored, and the replay diverged without a word."""
    first, *others = life[0].read_bytes().splitlines(keepends=True)
    path = tmp_path / "inputs.jsonl"
    path.write_bytes(first.replace(b'"time_slice_s":', b'"turn_s":') + b"".join(others))
    with pytest.raises(msgspec.ValidationError, match="config has turn_s: use the release of Torchrelay that recorded"):
        next(replay(path))


def test_log_with_inputs_of_another_release_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "inputs.jsonl"
    start = msgspec.json.encode(PolicyStart(PolicyConfig(), 0.0, "i"))
    path.write_bytes(start + b"\n" + b'{"now":1.0,"input":{"kind":"LoadAccepted","instance_id":"i-1"}}\n')
    with pytest.raises(msgspec.ValidationError, match=r"'LoadAccepted'.*: use the release of Torchrelay that recorded"):
        list(replay(path))


async def test_recording_of_service_can_be_replayed(it: ScriptedCluster, tmp_path: Path) -> None:
    path = tmp_path / "inputs.jsonl"
    await it.host(1)
    async with it.scheduler(record=path) as address, GatewayClient(address) as gateway:
        placement = await gateway.place("r1")
    placed = [json.loads(line)["answers"] for line in replay(path) if b'"placement"' in line]
    assert [answer["placement"]["prefill"]["instance_id"] for (answer,) in placed] == [placement.prefill.instance_id]
