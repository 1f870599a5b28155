"""A process that hangs (SIGSTOP) is as dead as one that ended: streams go on with the same tokens, and every wait ends.

Whether the stopped process is replaced meanwhile or goes on later makes no difference to what is asserted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.faults.conftest import stopped
from tests.e2e.faults.test_kills import num_decoded
from tests.e2e.tenants import Tenant
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete, headers, stream
from tests.support.http import http
from tests.support.platform import Platform
from tests.support.wait import HANG_S, wait_until
from torchrelay.common.liveness import SILENT_S

pytestmark = pytest.mark.e2e
PROMPT = list(range(30, 60))
NUM_TOKENS = 1000  # enough that the stream still runs when a process is stopped
SAMPLED = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 5}
# bench/hangs.py measures how soon streams resume and requests are answered; here a limit stands against hanging only.
ANSWER_S = 120.0


@pytest.fixture(scope="module")
def model(shaken: Tenant) -> str:
    """A model that streams."""
    folder = make_checkpoint(shaken.folder / "long", "llama", max_position_embeddings=4096)
    return shaken.platform.upload(shaken.key, folder, "long")


@pytest.fixture(scope="module")
def expected(shaken: Tenant, model: str) -> list[int]:
    """The tokens of a stream beside which nothing hangs."""
    token_ids: list[int] = complete(shaken.platform, shaken.key, model, PROMPT, **SAMPLED)["choices"][0]["token_ids"]
    return token_ids


def tokens_while_hung(tenant: Tenant, model: str, child: str) -> list[int]:
    """The tokens of a stream whose worker is stopped after the 20th, and stays so until the stream has ended."""
    for _ in range(3):  # as the official clients do if a busy disk keeps the ledger's row waiting
        states = stream(tenant.platform, tenant.key, model, PROMPT, timeout_s=ANSWER_S, **SAMPLED)
        for state in states:
            if len(state.token_ids) >= 20:
                break
        if state.error is None or state.error["code"] != "unavailable":
            break
    assert not state.done and len(state.token_ids) < NUM_TOKENS
    with stopped(tenant.platform.pid(child)):
        for _ in states:
            pass
    assert state.error is None and state.done
    return state.token_ids


def call(tenant: Tenant, model: str) -> httpx.Response:
    """A short request. Raises ``httpx.TimeoutException`` if it hangs."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    body["temperature"] = 0
    return http.post(f"{tenant.platform.http}/v1/completions", json=body, headers=headers(tenant.key), timeout=ANSWER_S)


def assert_answered_or_refused(response: httpx.Response, *causes: str) -> None:
    if response.status_code != 200:
        assert response.status_code == 503, response.text
        assert any(cause in response.json()["error"]["message"] for cause in causes), response.text


def await_call(tenant: Tenant, model: str) -> list[int]:
    """The tokens of a request once the platform has recovered."""
    tokens: list[int] = []

    def is_answered() -> bool:
        response = call(tenant, model)
        assert response.status_code in (200, 503), response.text
        if response.status_code == 200:
            tokens.extend(response.json()["choices"][0]["token_ids"])
        return bool(tokens)

    wait_until(is_answered, "an answer")
    return tokens


def await_workers(platform: Platform, num_workers: int) -> None:
    """Waits until the scheduler sees so many workers, and the store."""
    deadline = time.monotonic() + HANG_S
    for view in platform.views():
        if len(view.workers) == num_workers and len(view.stores) == 1:
            return
        assert time.monotonic() < deadline, f"the scheduler sees {len(view.workers)} workers"


@pytest.fixture(autouse=True)
def recovered(shaken: Tenant) -> Iterator[None]:
    """Each test begins with all processes well."""
    await_workers(shaken.platform, 2)
    for child in ("prefill-0", "decode-0"):
        shaken.platform.await_restart(child, 0)
    yield


@pytest.mark.parametrize("child", ["decode-0", "prefill-0"])
def test_stream_survives_a_hung_worker_and_is_billed_once(
    shaken: Tenant, model: str, expected: list[int], child: str
) -> None:
    platform = shaken.platform
    before, num_decoded_before = shaken.usage(), num_decoded(platform, "prefill-0")
    assert tokens_while_hung(shaken, model, child) == expected
    if child == "decode-0":
        assert num_decoded(platform, "prefill-0") > num_decoded_before, "no other worker has taken over"
    assert_billed(shaken, before)


def assert_billed(tenant: Tenant, before: dict[str, Any]) -> None:
    """A stream of ``NUM_TOKENS`` was billed once since ``before``. A busy disk may have it wait for its bill."""

    def billed(name: str) -> int:
        return int(tenant.usage()[name] - before[name])

    wait_until(lambda: billed("completion_tokens") >= NUM_TOKENS, "the bill of the stream")
    assert (billed("completion_tokens"), billed("prompt_tokens")) == (NUM_TOKENS, len(PROMPT))


def test_stopped_worker_that_resumes_repeats_no_token(shaken: Tenant, model: str, expected: list[int]) -> None:
    """Both workers hang: nobody can take over before one of them goes on, or is replaced."""
    platform = shaken.platform
    before = shaken.usage()
    with ThreadPoolExecutor(1) as pool:
        states = stream(platform, shaken.key, model, PROMPT, **SAMPLED)
        for state in states:
            if len(state.token_ids) >= 20:
                break
        rest = pool.submit(lambda: [len(state.token_ids) for state in states])
        with stopped(platform.pid("decode-0"), platform.pid("prefill-0")):
            await_workers(platform, 0)
        rest.result(ANSWER_S)
    assert state.error is None and state.done
    assert state.token_ids == expected
    assert_billed(shaken, before)


def test_prompts_leave_a_hung_prefill_worker(shaken: Tenant, model: str) -> None:
    platform = shaken.platform
    expected = await_call(shaken, model)
    with ThreadPoolExecutor(4) as pool, stopped(platform.pid("prefill-0")):
        answers = [pool.submit(call, shaken, model) for _ in range(4)]
        for answer in answers:
            response = answer.result(ANSWER_S)
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["token_ids"] == expected


def test_hung_scheduler_leaves_streams_and_answers_or_refuses(shaken: Tenant, model: str, expected: list[int]) -> None:
    platform = shaken.platform
    short = await_call(shaken, model)
    with ThreadPoolExecutor(1) as pool:
        states = stream(platform, shaken.key, model, PROMPT, **SAMPLED)
        state = next(states)
        assert not state.done and len(state.token_ids) < NUM_TOKENS
        with stopped(platform.pid("scheduler")):
            waiting: Future[httpx.Response] = pool.submit(call, shaken, model)
            for _ in states:
                pass
            assert_answered_or_refused(waiting.result(ANSWER_S), "the scheduler at ")
    assert state.error is None and state.done and state.token_ids == expected
    assert await_call(shaken, model) == short


def test_hung_store_leaves_streams_and_answers_or_refuses(shaken: Tenant, model: str, expected: list[int]) -> None:
    platform, cold = shaken.platform, shaken.model("mistral")
    with ThreadPoolExecutor(1) as pool:
        states = stream(platform, shaken.key, model, PROMPT, **SAMPLED)
        state = next(states)
        assert not state.done and len(state.token_ids) < NUM_TOKENS
        with stopped(platform.pid("param-store")):
            waiting: Future[httpx.Response] = pool.submit(call, shaken, cold)
            for _ in states:
                pass
            assert_answered_or_refused(waiting.result(ANSWER_S), "param-store")
    assert state.error is None and state.done and state.token_ids == expected
    assert len(await_call(shaken, cold)) == 8


def test_store_hung_during_a_load_answers_or_refuses(shaken: Tenant) -> None:
    platform = shaken.platform
    large: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4}  # 200 MB
    cold = platform.upload(shaken.key, make_checkpoint(shaken.folder / "large", "qwen2", **large), "large")
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(call, shaken, cold) for _ in range(3)]
        for view in platform.views():
            if any(instance.model == cold for instance in view.instances):
                break
        with stopped(platform.pid("param-store")):
            answers = [each.result(ANSWER_S) for each in waiting]
    for response in answers:
        assert_answered_or_refused(response, "param-store")
    assert len(await_call(shaken, cold)) == 8


def test_hung_broker_loses_no_peer_and_cold_requests_are_answered(
    shaken: Tenant, model: str, expected: list[int]
) -> None:
    platform, cold = shaken.platform, shaken.model("gemma2")
    workers = {name: platform.pid(name) for name in ("prefill-0", "decode-0", "param-store", "scheduler")}
    with stopped(platform.pid("nats")):
        ends = time.monotonic() + SILENT_S + 2.0  # workers' reports come by the broker
        while time.monotonic() < ends:
            assert complete(platform, shaken.key, model, PROMPT, **SAMPLED)["choices"][0]["token_ids"] == expected
            view = next(platform.views())
            assert len(view.workers) == 2 and len(view.stores) == 1
        response = call(shaken, cold)
        assert response.status_code == 200, response.text
    assert {name: platform.pid(name) for name in workers} == workers
