"""A model whose answers wait for places to decode: an instance that only prefills decodes instead, without a load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tenants import SMALL
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete
from tests.support.platform import Platform, running_platform
from tests.support.wait import HANG_S
from tests.unit.engine.harness import Model
from torchrelay.control.v1.scheduler_pb2 import ClusterView
from torchrelay.control.v1.types_pb2 import ROLE_DECODE, ROLE_PREFILL, ModelVersion
from torchrelay.control.v1.worker_pb2 import LoadRequest
from torchrelay.control.v1.worker_pb2_grpc import WorkerStub
from torchrelay.scheduler.policy.config import PolicyConfig

pytestmark = pytest.mark.e2e
NUM_TOKENS = 100
NUM_CLIENTS = 32


def prompt_of(number: int) -> list[int]:
    return list(range(30 + number, 42 + number))  # less than a page: nothing of it is cached


def roles(view: ClusterView) -> dict[str, list[int]]:
    """The roles of the model's instances, by worker."""
    return {worker.worker_id: sorted(worker.slot.roles) for worker in view.workers if worker.slot.instance_id}


def load_second_prefill(platform: Platform) -> None:
    """Loads the model on the free prefill worker, as a scheduler did that has ended: the present one finds it there."""
    view = next(platform.views())
    worker = next(worker for worker in view.workers if not worker.slot.instance_id)
    (version,), (model,) = view.versions, {instance.model for instance in view.instances}
    with platform.channel(worker.grpc_address, worker.worker_id) as channel:
        named = ModelVersion(version_id=version.version_id, model=model, pack_id=version.pack_id)
        request = LoadRequest(epoch=view.epoch, instance_id="i-2", version=named, roles=[ROLE_PREFILL])
        WorkerStub(channel).Load(request, timeout=HANG_S)
    next(view for view in platform.views() if [instance.state for instance in view.instances] == ["ready"] * 3)


def changed(platform: Platform) -> ClusterView:
    """The first view in which a prefill instance decodes instead."""
    deadline = time.monotonic() + HANG_S
    for view in platform.views():
        if sorted(roles(view).values()) == [[ROLE_PREFILL], [ROLE_DECODE], [ROLE_DECODE]]:
            return view
        assert time.monotonic() < deadline, f"no instance changed its role: {view.instances}"
    raise AssertionError("the scheduler ended its view")


def answers_until(
    change: Future[ClusterView], numbers: Iterator[int], answer: Callable[[int], dict[str, Any]]
) -> list[tuple[int, dict[str, Any]]]:
    """Asks one request after the other until the change is seen; a burst of fixed length may be over before, or last
    until the roles change back.
    """
    answers = []
    while not change.done():
        number = next(numbers)
        answers.append((number, answer(number)))
    return answers


def test_prefill_instance_decodes_under_load_and_no_answer_differs(tmp_path: Path) -> None:
    workers = ("--prefill-workers", "2", "--decode-workers", "1", "--kv-pool-mb", "4")  # room for few answers
    checkpoint = make_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=32)
    reference = Model(checkpoint)
    expected = [reference.expected(prompt_of(number), NUM_TOKENS) for number in range(8)]
    with running_platform(tmp_path / "home", (*SMALL, *workers, "--idle-timeout-s", "120")) as platform:
        key = platform.tenant("acme")
        model = platform.upload(key, checkpoint, "llama")

        def answer(number: int) -> dict[str, Any]:
            return complete(platform, key, model, prompt_of(number % 8), max_tokens=NUM_TOKENS, ignore_eos=True)

        answer(0)
        load_second_prefill(platform)
        loaded_at = time.monotonic()
        before = roles(next(platform.views()))
        assert sorted(before.values()) == [[ROLE_PREFILL], [ROLE_PREFILL], [ROLE_DECODE]]
        for number in range(8):  # the scheduler learns how long answers are
            assert answer(number)["choices"][0]["token_ids"] == expected[number]
        time.sleep(max(loaded_at + PolicyConfig.time_slice_s - time.monotonic(), 0.0))
        with ThreadPoolExecutor(NUM_CLIENTS + 1) as threads:
            change = threads.submit(changed, platform)
            numbers = count()
            clients = [threads.submit(answers_until, change, numbers, answer) for _ in range(NUM_CLIENTS)]
            answers = [each for client in clients for each in client.result()]
        for number, each in answers:
            assert each["choices"][0]["token_ids"] == expected[number % 8]
        view = change.result()
        assert roles(view).keys() == before.keys()
        (reason,) = {instance.roles_reason for instance in view.instances if instance.roles_reason}
        assert "decode needs this instance more than prefill" in reason
        told = platform.cli("explain", model)
        assert "set_roles" in told and "decode needs this instance more than prefill" in told
        assert "drain" not in told
