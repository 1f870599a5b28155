"""`torchrelay join`: workers of other machines, which share a store on each machine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL
from tests.e2e.test_exactness import reference
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete
from tests.support.joining import await_workers, joined
from tests.support.platform import SCRIPTS, Platform, running_platform
from tests.support.wait import wait_until

pytestmark = pytest.mark.e2e
PROMPT = list(range(30, 42))
NUM_TOKENS = 8
NO_WORKERS = ("--prefill-workers", "0", "--decode-workers", "0")


@pytest.fixture
def joinable(tmp_path: Path) -> Iterator[Platform]:
    """A platform without workers that machines may join."""
    options = (*SMALL, *NO_WORKERS, "--cluster-host", "127.0.0.1", "--idle-timeout-s", "600")
    with running_platform(tmp_path / "home", options) as platform:
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
        assert stores(joinable) == {"store-local", "node-a"}
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
