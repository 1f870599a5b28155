"""`torchrelay join`: workers of other machines, which share a store on each machine."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tenants import NO_WORKERS, SMALL, reference
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import Streamed, complete, headers, stream
from tests.support.http import http
from tests.support.joining import await_workers, joined
from tests.support.platform import SCRIPTS, Platform, running_platform
from tests.support.wait import HANG_S, wait_until

pytestmark = pytest.mark.e2e
PROMPT = list(range(30, 42))
NUM_TOKENS = 8
NUM_STREAMS, NUM_LONG = 4, 400


@pytest.fixture(scope="module")
def joinable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform without workers that machines may join."""
    options = (*SMALL, *NO_WORKERS, "--cluster-host", "127.0.0.1", "--idle-timeout-s", "600")
    with running_platform(tmp_path_factory.mktemp("joinable") / "home", options) as platform:
        yield platform


def stores(platform: Platform) -> set[str]:
    return {store.store_id for store in next(platform.views()).stores}


def test_machines_answer_take_over_their_store_and_leave(joinable: Platform, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "llama", "llama")
    expected = reference(checkpoint, PROMPT, NUM_TOKENS)
    key = joinable.tenant("acme")
    model = joinable.upload(key, checkpoint, "llama")

    def answer() -> list[int]:
        completion = complete(joinable, key, model, PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
        tokens: list[int] = completion["choices"][0]["token_ids"]
        return tokens

    machine = tmp_path / "machine"
    with joined(joinable, machine, "node-a") as first:
        await_workers(joinable, "node-a_0")
        wait_until(lambda: stores(joinable) == {"store-local", "node-a"}, "the store of the machine")
        assert answer() == expected
        with joined(joinable, machine, "node-a", "--worker-id", "node-a_1") as second:
            await_workers(joinable, "node-a_0", "node-a_1")
            assert "param-store" not in second.log.read_text(), "it uses that of the first"
            first.process.kill()
            await_workers(joinable, "node-a_1")
            assert answer() == expected, "by the program that is left"
            wait_until(lambda: "param-store" in second.log.read_text(), "the store that took over")
            with joined(joinable, tmp_path / "other", "node-b"):
                await_workers(joinable, "node-a_1", "node-b_0")
                assert second.leave() == 0
                await_workers(joinable, "node-b_0")
                assert answer() == expected, "by another machine"
    await_workers(joinable)
    assert not list(Path("/dev/shm").glob("torchrelay-node-[ab]-*")), "arenas go with their stores"


def test_answers_that_outlast_grace_resume_on_another_machine(joinable: Platform, tmp_path: Path) -> None:
    key = joinable.tenant("patient")
    model = joinable.upload(key, make_checkpoint(tmp_path / "llama", "llama"), "llama")
    prompts = [[token + number for token in PROMPT] for number in range(NUM_STREAMS)]
    options: dict[str, Any] = {"max_tokens": NUM_LONG, "ignore_eos": True}
    with joined(joinable, tmp_path / "a", "node-a", grace_s=0.1) as first:
        await_workers(joinable, "node-a_0")
        wait_until(lambda: "node-a" in stores(joinable), "the store of the machine")
        expected = [complete(joinable, key, model, prompt, **options)["choices"][0]["token_ids"] for prompt in prompts]
        with joined(joinable, tmp_path / "b", "node-b"):
            await_workers(joinable, "node-a_0", "node-b_0")
            statuses: list[int] = []
            all_begun = threading.Barrier(NUM_STREAMS, lambda: statuses.append(first.leave()))

            def answer(prompt: list[int]) -> Streamed:
                is_begun = False
                for state in stream(joinable, key, model, prompt, **options):
                    if not is_begun and state.token_ids:
                        is_begun = True
                        all_begun.wait(HANG_S)
                return state

            with ThreadPoolExecutor(NUM_STREAMS) as pool:
                answers = list(pool.map(answer, prompts))
    assert statuses == [0]
    assert [(state.error, state.done) for state in answers] == [(None, True)] * NUM_STREAMS
    assert [state.token_ids for state in answers] == expected
    billed = http.get(f"{joinable.http}/v1/usage", headers=headers(key)).json()["total"]
    assert billed["completion_tokens"] == 2 * NUM_STREAMS * NUM_LONG
    assert billed["prompt_tokens"] == 2 * NUM_STREAMS * len(PROMPT)


@pytest.mark.parametrize(
    ("edit", "options", "message"),
    [
        (('token = "node-.1', 'token = "node-.2'), (), "is not one of this cluster"),
        (("", ""), ("--host-id", "prefill-0"), "begin --host-id with node-"),
        (("nats_url", "other"), (), "lacks 'nats_url'"),
    ],
)
def test_machine_that_may_not_join_is_told_why(
    joinable: Platform, tmp_path: Path, edit: tuple[str, str], options: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "join.toml"
    text = (joinable.home.path / "join.toml").read_text()
    file.write_text(text.replace(*edit))
    command = [str(SCRIPTS / "torchrelay"), "join", str(file), "--home", str(tmp_path / "machine"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, message in ended.stderr) == (1, True), ended.stderr
