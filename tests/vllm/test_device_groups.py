"""A slot of two devices: its processes compute a model together, fail together and end together."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.integration.roles_testbed import DECODE, PREFILL, RolesTestbed, model_version, running_test_worker
from tests.support.checkpoints import make_checkpoint
from tests.support.wait import HANG_S, eventually, wait_until
from tests.unit.engine.harness import Model
from tests.unit.param_store.running_store import REMOTE, publish, running_store
from tests.vllm import test_worker_contract as contract
from torchrelay.engine.core import LoadFailed
from torchrelay.vllm import device_group
from torchrelay.vllm.device_group import DeviceGroup
from torchrelay.worker.slot.slot import FREE

model = contract.model  # a fixture


@pytest.mark.timeout(900)  # two imports of vLLM and four loads, on a busy machine
async def test_two_devices_answer_as_one_does(
    tmp_path: Path, model: Model, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "not-used")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "not-used")
    # Attention on a CPU has no heads of 16 dimensions: each rank finds out when it computes the first token.
    refused = make_checkpoint(tmp_path / "refused", "llama", head_dim=16)
    async with running_store(tmp_path / "store") as store:
        description, of_refused = await publish(store, model.folder), await publish(store, refused)
        for each in (description, of_refused):
            await store.relay(each.pack_id, REMOTE)
        async with running_test_worker(nats_url, store, engine="vllm", devices=2, kv_pool_bytes=8 << 20) as worker:
            slot = worker.worker.slot
            (rank,) = ranks_of(os.getpid())
            limits = resource.prlimit(rank, resource.RLIMIT_NOFILE)
            resource.prlimit(rank, resource.RLIMIT_NOFILE, (3, limits[1]))
            await worker.load(model_version(description), [PREFILL, DECODE])
            await eventually(lambda: slot.state == FREE and slot.error, "the end of the load")
            assert "device 1 of the slot: " in slot.error and "Too many open files" in slot.error
            resource.prlimit(rank, resource.RLIMIT_NOFILE, limits)
            await worker.load(model_version(of_refused), [PREFILL, DECODE])
            await eventually(lambda: slot.state == FREE and slot.error, "the end of the load")
            assert "vLLM does not serve this model in this slot: " in slot.error and "16" in slot.error
            scene = RolesTestbed(worker, worker, model_version(description))
            await worker.load(scene.version, [PREFILL, DECODE])
            await worker.until_ready()
            scene.streams = await scene.connect()
            await contract.test_greedy_tokens_equal_the_reference_also_when_resumed(scene, model)
            listening = [*listening_addresses(os.getpid()), *(of_rank := listening_addresses(rank))]
            assert of_rank and set(listening) <= {"127.0.0.1", "[::ffff:127.0.0.1]"}
            await contract.test_sampled_tokens_equal_the_reference_also_when_resumed(scene, model)
            await contract.test_grammar_bounds_the_answer_also_when_resumed(scene, model)
            await contract.test_stop_tokens_logprobs_and_limits(scene, model)
            await contract.test_cancel_and_deadline_leave_nothing(scene)
            await contract.test_drain_lets_answers_end_and_the_slot_serves_again(scene, model)
        assert not is_running(rank)


@pytest.fixture
def lost() -> SimpleQueue[str]:
    return SimpleQueue()


@pytest.fixture
def group(lost: SimpleQueue[str]) -> Iterator[DeviceGroup]:
    group = DeviceGroup(2, on_lost=lambda: lost.put("lost"))
    group.start(num_threads=1)
    yield group
    group.stop()


def test_a_rank_fails_with_its_reason_and_goes_on_until_it_is_killed(
    group: DeviceGroup, lost: SimpleQueue[str]
) -> None:
    failures: list[str] = []
    group.watch(failures.append)
    group.begin_call("no_such_method", (), {}, True)
    with pytest.raises(LoadFailed, match=r"device 1 of the slot: .*no_such_method"):
        group.results()
    assert failures == [group.failure] and "no_such_method" in group.failure
    group.close()
    group.watch(failures.append)
    assert (group.failure, lost.empty()) == ("", True)
    (pid,) = group.pids
    os.kill(pid, signal.SIGKILL)
    assert lost.get(timeout=HANG_S) == "lost"


def test_a_rank_that_neither_answers_nor_parts_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch, lost: SimpleQueue[str]
) -> None:
    monkeypatch.setattr(device_group, "_PARTING_S", 1.0)
    group = DeviceGroup(3, on_lost=lambda: lost.put("lost"))
    group.start(num_threads=1)
    first, second = group.pids
    try:
        os.kill(second, signal.SIGSTOP)
        group.begin_call("no_such_method", (), {}, True)
        with ThreadPoolExecutor(1) as engine:
            results = engine.submit(group.results)
            try:
                assert lost.get(timeout=HANG_S) == "lost"
            finally:
                os.kill(second, signal.SIGCONT)
            with pytest.raises(LoadFailed, match="no_such_method"):
                results.result(HANG_S)
        os.kill(first, signal.SIGSTOP)
        group.begin_close()  # the engine's thread has a part of its own to end, which may wait for the others
        assert lost.get(timeout=HANG_S) == "lost"
        os.kill(first, signal.SIGCONT)
        group.close()
    finally:
        group.stop()


def ranks_of(worker: int) -> list[int]:
    """The processes of further devices that the worker has started."""
    children = Path(f"/proc/{worker}/task").glob("*/children")
    pids = [int(pid) for of_thread in children for pid in of_thread.read_text().split()]
    return [pid for pid in pids if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def listening_addresses(pid: int) -> list[str]:
    sockets = subprocess.check_output(("ss", "-Hltnp"), text=True).splitlines()
    return [line.split()[3].rpartition(":")[0] for line in sockets if f"pid={pid}," in line]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


PROGRAM = """
import signal, sys
from pathlib import Path
from torchrelay.vllm.device_group import DeviceGroup

DeviceGroup(2).start(num_threads=1)
Path(sys.argv[1]).touch()
signal.pause()
"""


@pytest.mark.parametrize(("victim", "status"), [("rank", 1), ("worker", -signal.SIGKILL)])
def test_the_processes_of_a_slot_end_together(tmp_path: Path, victim: str, status: int) -> None:
    started = tmp_path / "started"
    with subprocess.Popen((sys.executable, "-c", PROGRAM, str(started))) as process:
        try:
            wait_until(lambda: started.exists() or process.poll() is not None, "the start", 2 * HANG_S)
            (rank,) = ranks_of(process.pid)
            os.kill(rank if victim == "rank" else process.pid, signal.SIGKILL)
            assert process.wait(HANG_S) == status
            wait_until(lambda: not is_running(rank), "the end of the rank")
        finally:
            process.kill()
