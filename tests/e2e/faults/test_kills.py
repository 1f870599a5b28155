"""Killed processes come back and nothing committed is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.faults.conftest import stopped
from tests.e2e.tenants import SMALL, Tenant
from tests.support.completions import Streamed, complete, headers, stream
from tests.support.http import http
from tests.support.platform import Platform, running_platform
from tests.support.wait import HANG_S, wait_until
from torchrelay.cli.up.plan import STORE_ID
from torchrelay.control.v1.param_store_pb2 import WatchCopiesRequest
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.control.v1.worker_pb2 import WatchSlotRequest
from torchrelay.control.v1.worker_pb2_grpc import WorkerStub

pytestmark = pytest.mark.e2e
PROMPT = list(range(30, 60))
NUM_TOKENS = 400
NUM_STREAMS = 8
SERVICES = ["gateway", "scheduler", "param-store", "prefill-0", "decode-0"]


def test_stream_survives_a_killed_decode_worker(shaken: Tenant) -> None:
    platform, model = shaken.platform, shaken.model()
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 5}
    expected = complete(platform, shaken.key, model, PROMPT, **options)["choices"][0]["token_ids"]
    before = shaken.usage()
    killed = 0
    for state in stream(platform, shaken.key, model, PROMPT, **options):
        if not killed and len(state.token_ids) >= 20:
            killed = platform.kill("decode-0")
            num_seen = len(state.token_ids)
    assert num_seen < NUM_TOKENS
    assert state.error is None and state.done
    assert state.token_ids == expected
    after = shaken.usage()
    assert after["completion_tokens"] - before["completion_tokens"] == NUM_TOKENS
    assert after["prompt_tokens"] - before["prompt_tokens"] == len(PROMPT)
    platform.await_restart("decode-0", killed)


def test_answer_in_a_format_survives_a_killed_decode_worker(shaken: Tenant) -> None:
    """The grammar goes on where the lost worker left it."""
    platform, model = shaken.platform, shaken.model()
    options: dict[str, Any] = {
        "max_tokens": 480,
        "temperature": 1.0,
        "seed": 5,
        "guided_regex": "([a-z]{5} [0-9]{2}-){50}",
    }
    expected = complete(platform, shaken.key, model, PROMPT, **options)["choices"][0]
    assert expected["finish_reason"] == "stop" and len(expected["token_ids"]) == 450
    killed = 0
    for state in stream(platform, shaken.key, model, PROMPT, **options):
        if not killed and len(state.token_ids) >= 20:
            killed = platform.kill("decode-0")
            num_seen = len(state.token_ids)
    assert num_seen < 450
    assert state.error is None and state.done and state.token_ids == expected["token_ids"]
    platform.await_restart("decode-0", killed)


def test_workers_compute_while_their_store_restarts(shaken: Tenant) -> None:
    platform, model = shaken.platform, shaken.model()
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    expected = complete(platform, shaken.key, model, PROMPT, **options)["choices"][0]["token_ids"]
    workers = {name: platform.pid(name) for name in ("prefill-0", "decode-0")}
    killed = num_seen = num_back = 0
    for state in stream(platform, shaken.key, model, PROMPT, **options):
        if not killed and len(state.token_ids) >= 20:
            killed, num_seen = platform.kill("param-store"), len(state.token_ids)
            platform.await_restart("param-store", killed)  # meanwhile tokens are computed, and wait to be read
        num_back = num_back or (len(state.token_ids) if killed else 0)
    assert 20 <= num_seen <= num_back <= NUM_TOKENS
    assert state.error is None and state.done and state.token_ids == expected
    # The new store has found the pack in the arena, pinned by workers that have held it all along.
    assert {name: platform.pid(name) for name in workers} == workers
    _await_pins(platform)
    answer = complete(platform, shaken.key, model, PROMPT, **options)
    assert answer["choices"][0]["token_ids"] == expected


def test_store_killed_during_a_load_delays_its_requests(shaken: Tenant) -> None:
    platform, model = shaken.platform, shaken.model("mistral")
    options = {"max_tokens": 8, "ignore_eos": True}
    with ThreadPoolExecutor(3) as pool:
        cold = [pool.submit(complete, platform, shaken.key, model, PROMPT, **options) for _ in range(3)]
        for view in platform.views():
            if any(instance.model == model for instance in view.instances):
                platform.await_restart("param-store", platform.kill("param-store"))
                break
        answers = [waiting.result(60)["choices"][0]["token_ids"] for waiting in cold]
    answers.append(complete(platform, shaken.key, model, PROMPT, **options)["choices"][0]["token_ids"])
    assert answers == [answers[0]] * 4 and len(answers[0]) == 8


def _await_pins(platform: Platform) -> None:
    with platform.channel(platform.endpoints["store"], STORE_ID) as channel:
        for report in ParamStoreStub(channel).WatchCopies(WatchCopiesRequest(), timeout=20):
            if any(copy.num_pins and copy.num_chunks_verified == copy.num_chunks for copy in report.copies):
                return
    raise AssertionError("no worker has held its pack again")


def listed_models(tenant: Tenant) -> list[str]:
    listed = http.get(f"{tenant.platform.http}/v1/models", headers=headers(tenant.key)).json()["data"]
    return [model["id"] for model in listed]


@pytest.mark.parametrize("service", SERVICES)
def test_request_succeeds_after_an_idle_service_restarts(shaken: Tenant, service: str) -> None:
    platform, model = shaken.platform, shaken.model()
    options = {"max_tokens": 8, "ignore_eos": True}
    expected = complete(platform, shaken.key, model, PROMPT, **options)["choices"][0]["token_ids"]
    before, listed = shaken.usage(), listed_models(shaken)
    platform.await_restart(service, platform.kill(service))
    answer = complete(platform, shaken.key, model, PROMPT, **options)
    assert answer["choices"][0]["token_ids"] == expected
    assert model in listed and listed_models(shaken) == listed
    assert shaken.usage()["completion_tokens"] == before["completion_tokens"] + 8


@pytest.mark.parametrize("broker", ["redis", "nats"])
def test_killed_broker_restarts(shaken: Tenant, broker: str) -> None:
    platform, model = shaken.platform, shaken.model()
    expected = complete(platform, shaken.key, model, PROMPT, max_tokens=8)["choices"][0]["token_ids"]
    platform.await_restart(broker, platform.kill(broker))
    answer = complete(platform, shaken.key, model, PROMPT, max_tokens=8)
    assert answer["choices"][0]["token_ids"] == expected


OPTIONS: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
PROMPTS = [[token + number for token in PROMPT] for number in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def expected(shaken: Tenant) -> list[list[int]]:
    """The answers to ``PROMPTS`` while nothing leaves."""
    answers = (complete(shaken.platform, shaken.key, shaken.model(), prompt, **OPTIONS) for prompt in PROMPTS)
    return [answer["choices"][0]["token_ids"] for answer in answers]


@pytest.mark.parametrize("service", SERVICES)
def test_streams_end_unchanged_while_a_service_leaves(shaken: Tenant, expected: list[list[int]], service: str) -> None:
    """Eight answers are open when the service gets SIGTERM."""
    platform, model = shaken.platform, shaken.model()
    complete(platform, shaken.key, model, PROMPT, max_tokens=1)  # the model is loaded
    before, pid = shaken.usage(), platform.pid(service)
    all_begun = threading.Barrier(NUM_STREAMS, lambda: os.kill(pid, signal.SIGTERM))

    def answer(prompt: list[int]) -> Streamed:
        is_begun = False
        for state in stream(platform, shaken.key, model, prompt, **OPTIONS):
            if not is_begun and state.token_ids:
                is_begun = True
                all_begun.wait(HANG_S)
        return state

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = list(pool.map(answer, PROMPTS))
    platform.await_restart(service, pid)
    said = [line.split(maxsplit=1) for line in (platform.home.path / "up.log").read_text().splitlines()]
    ends = [line[1] for line in said if line[:1] == [service] and line[1].startswith("ended")]
    assert ends[-1].startswith("ended with status 0"), "within its grace"
    assert [(state.error, state.done) for state in answers] == [(None, True)] * NUM_STREAMS
    assert [state.token_ids for state in answers] == expected
    after = shaken.usage()
    assert after["completion_tokens"] - before["completion_tokens"] == NUM_STREAMS * NUM_TOKENS
    assert after["prompt_tokens"] - before["prompt_tokens"] == NUM_STREAMS * len(PROMPT)


def test_second_sigterm_ends_the_grace_of_a_gateway(shaken: Tenant) -> None:
    platform, model = shaken.platform, shaken.model()
    before, pid = shaken.usage()["completion_tokens"], platform.pid("gateway")
    ready_file = platform.home.run / "gateway.json"
    answer = stream(platform, shaken.key, model, PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
    state = next(answer)
    with stopped(platform.pid("decode-0"), platform.pid("prefill-0")):  # else the answer may end before
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not ready_file.exists(), "the departure of the gateway")
        os.kill(pid, signal.SIGTERM)
        for _ in answer:  # to its end
            pass
    assert state.error is not None and "shutting down" in state.error["message"]
    platform.await_restart("gateway", pid)
    num_billed = shaken.usage()["completion_tokens"] - before
    assert len(state.token_ids) <= num_billed < NUM_TOKENS, "what was sent is billed, without a sweep"


def num_decoded(platform: Platform, *worker_ids: str) -> int:
    """Positions that these workers (all, if none is named) report to have decoded."""
    total = 0
    for worker in next(platform.views()).workers:
        if worker_ids and worker.worker_id not in worker_ids:
            continue
        with platform.channel(worker.grpc_address, worker.worker_id) as channel:
            total += next(iter(WorkerStub(channel).WatchSlot(WatchSlotRequest(), timeout=20))).num_positions_decoded
    return total


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_requests_of_a_killed_gateway_are_settled_fairly(shaken: Tenant) -> None:
    platform, model = shaken.platform, shaken.model()
    before, num_decoded_before = shaken.usage()["completion_tokens"], num_decoded(platform)
    killed = num_seen = num_at_kill = 0
    with pytest.raises(httpx.TransportError):
        for state in stream(platform, shaken.key, model, PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True):
            num_seen = len(state.token_ids)
            if num_seen >= 30 and not killed:
                # A busy machine may take longer to end a process, and to close its sockets, than the answer takes.
                with stopped(platform.pid("decode-0")):
                    killed = platform.kill("gateway")
                    wait_until(partial(has_ended, killed), "the end of the gateway")
                num_at_kill = num_decoded(platform) - num_decoded_before
    platform.await_restart("gateway", killed)
    wait_until(lambda: shaken.usage()["completion_tokens"] > before, "the sweep of the killed gateway's request")
    billed = shaken.usage()["completion_tokens"] - before
    # Nothing was sent that was not computed: a token by prefill, the others by decode until it found the gateway gone.
    num_computed = 1 + num_decoded(platform) - num_decoded_before
    assert num_seen <= billed <= num_computed
    # On a busy machine they may have computed all before the kill.
    assert num_computed < NUM_TOKENS or num_at_kill >= NUM_TOKENS - 1, "the workers went on for nobody"
    with platform.admin() as admin:
        report = admin.call("GET", "/v1/reconcile")
    assert report["ok"], report


def test_damaged_parameters_are_never_served(shaken: Tenant) -> None:
    platform = shaken.platform
    model = shaken.model("qwen2")
    packs = sorted((platform.home.path / "remote" / "packs").glob("*[!t]"), key=lambda path: path.stat().st_mtime_ns)
    pack = packs[-1]
    with pack.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 1]))
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4}
    refused = http.post(f"{platform.http}/v1/completions", json=body, headers=headers(shaken.key), timeout=60)
    assert refused.status_code == 503, refused.text
    assert "damaged" in refused.json()["error"]["message"]
    with pack.open("r+b") as file:
        file.seek(5000)
        file.write(byte)
    assert complete(platform, shaken.key, model, PROMPT, max_tokens=4)["usage"]["completion_tokens"] >= 1


def test_two_installs_share_a_machine_and_leave_nothing(tmp_path: Path) -> None:
    options = (*SMALL, "--workers", "0..1")
    with (
        running_platform(tmp_path / "first", options) as first,
        running_platform(tmp_path / "second", options) as second,
    ):
        assert first.http != second.http
        keys = [platform.tenant("acme") for platform in (first, second)]
        for platform, key in zip((first, second), keys, strict=True):
            assert http.get(f"{platform.http}/v1/models", headers=headers(key)).status_code == 200
        assert http.get(f"{second.http}/v1/models", headers=headers(keys[0])).status_code == 401
        homes = [str(platform.home.path) for platform in (first, second)]
        maps = Path(f"/proc/{first.pid('param-store')}/maps").read_text()
        arena = next(line.split()[-1] for line in maps.splitlines() if "/dev/shm/torchrelay" in line)
        assert Path(arena).exists()
    assert not Path(arena).exists()
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not any(home in line for home in homes for line in listing.splitlines())
