"""What is the same on every engine: models come from zero on its machines, outlive a machine, and go to zero."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.fleet.machines import Fleet, programs
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete, headers, stream
from tests.support.http import http
from tests.support.platform import Platform, running_platform
from tests.support.wait import wait_until

PROMPT = list(range(30, 42))
NUM_TOKENS, NUM_LONG = 8, 400
SIZES = ("--arena-mb", "256", "--kv-pool-mb", "32", "--threads", "1", "--idle-timeout-s", "4")


@contextmanager
def platform_on(fleet: Fleet, folder: Path) -> Iterator[Platform]:
    """A platform whose workers, two at most, are the fleet's; checks that all have left after it."""
    options = ("--workers", "0..2", "--on", fleet.engine, "--cluster-host", "127.0.0.1", *SIZES)
    try:
        with running_platform(folder, options, dict(fleet.environment)) as platform:
            yield platform
            left = workers(platform)
    finally:
        print((folder / "up.log").read_text())
    assert not [pid for worker_id in left for pid in programs(worker_id)], "`up` ends when its jobs have ended"


def workers(platform: Platform) -> list[str]:
    return [worker.worker_id for worker in next(platform.views()).workers]


def worker_of(platform: Platform, model: str) -> str:
    return next(each.worker_id for each in next(platform.views()).instances if each.model == model)


def models_come_from_zero_outlive_a_machine_and_go_to_zero(fleet: Fleet, tmp_path: Path) -> None:
    with platform_on(fleet, tmp_path / "home") as platform:
        key = platform.tenant("acme")
        models = [
            platform.upload(key, make_checkpoint(tmp_path / name, "llama", seed=seed), name)
            for seed, name in enumerate(("first", "second"))
        ]
        assert workers(platform) == []

        def answer(model: str) -> list[int]:
            reply = complete(platform, key, model, PROMPT, max_tokens=NUM_LONG, ignore_eos=True)
            tokens: list[int] = reply["choices"][0]["token_ids"]
            return tokens

        with ThreadPoolExecutor(2) as pool:
            expected = list(pool.map(answer, models))

            def are_both_used() -> bool:
                assert list(pool.map(answer, models)) == expected
                num_answers.append(len(models))
                return len({fleet.machine_of(worker_id) for worker_id in workers(platform)}) == 2

            # On a fast machine, the first worker answers for both models before the second has started.
            num_answers = [len(models)]
            wait_until(are_both_used, "a worker on each machine")

        lost = ""
        for state in stream(platform, key, models[0], PROMPT, max_tokens=NUM_LONG, ignore_eos=True):
            if not lost and state.token_ids:
                lost = worker_of(platform, models[0])
                fleet.kill(fleet.machine_of(lost))
        assert (state.error, state.done, state.token_ids) == (None, True, expected[0])
        assert lost and not programs(lost)
        billed = http.get(f"{platform.http}/v1/usage", headers=headers(key)).json()["total"]
        assert billed["completion_tokens"] == (sum(num_answers) + 1) * NUM_LONG
        wait_until(lambda: workers(platform) == [], "zero workers")
