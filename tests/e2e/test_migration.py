"""A running answer leaves an instance that drains; its client sees nothing of it."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import SMALL
from tests.support.checkpoints import make_checkpoint
from tests.support.completions import complete, headers, stream
from tests.support.http import http
from tests.support.platform import Platform, running_platform
from tests.support.wait import HANG_S
from torchrelay.control.v1.scheduler_pb2 import ClusterView, InstanceView
from torchrelay.control.v1.types_pb2 import ROLE_DECODE, ROLE_PREFILL, ModelVersion
from torchrelay.control.v1.worker_pb2 import LoadRequest, UnloadRequest
from torchrelay.control.v1.worker_pb2_grpc import WorkerStub

pytestmark = pytest.mark.e2e
PROMPT = list(range(30, 42))  # less than a page: nothing of it is cached
LONG = {"max_tokens": 600, "ignore_eos": True, "temperature": 1.0, "seed": 5}


def usage(platform: Platform, key: str) -> dict[str, Decimal]:
    total: dict[str, Any] = http.get(f"{platform.http}/v1/usage", headers=headers(key)).json()["total"]
    return {name: Decimal(value) for name, value in total.items()}


def ids(view: ClusterView) -> set[str]:
    return {instance.instance_id for instance in view.instances}


def second_instance(platform: Platform) -> ClusterView:
    """Loads the model into the other slot, as a scheduler did that has ended: the present one finds it there."""
    view = next(platform.views())
    worker = next(worker for worker in view.workers if not worker.slot.instance_id)
    (version,), (model,) = view.versions, {instance.model for instance in view.instances}
    with platform.channel(worker.grpc_address, worker.worker_id) as channel:
        named = ModelVersion(version_id=version.version_id, model=model, pack_id=version.pack_id)
        roles = [ROLE_PREFILL, ROLE_DECODE]
        WorkerStub(channel).Load(
            LoadRequest(epoch=view.epoch, instance_id="i-2", version=named, roles=roles), timeout=HANG_S
        )
    return next(view for view in platform.views() if [instance.state for instance in view.instances] == ["ready"] * 2)


def unload(platform: Platform, view: ClusterView, instance: InstanceView) -> None:
    """Unloads the instance, with more time than the answer takes."""
    address = next(worker.grpc_address for worker in view.workers if worker.worker_id == instance.worker_id)
    with platform.channel(address, instance.worker_id) as channel:
        order = UnloadRequest(epoch=view.epoch, instance_id=instance.instance_id, drain_s=60)
        WorkerStub(channel).Unload(order, timeout=HANG_S)


def test_stream_migrates_off_a_draining_instance_unchanged(tmp_path: Path) -> None:
    workers = ("--prefill-workers", "0", "--decode-workers", "0", "--both-workers", "2")
    with running_platform(tmp_path / "home", (*SMALL, *workers, "--idle-timeout-s", "120")) as platform:
        key = platform.tenant("acme")
        # Its answer takes seconds, at few tokens.
        checkpoint = make_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=48, max_position_embeddings=1024)
        model = platform.upload(key, checkpoint, "llama")
        complete(platform, key, model, PROMPT, max_tokens=1)
        before = usage(platform, key)
        unmoved = complete(platform, key, model, PROMPT, **LONG)["choices"][0]["token_ids"]
        second_instance(platform)
        between, gone = usage(platform, key), None
        for state in stream(platform, key, model, PROMPT, **LONG):
            if gone is None and len(state.token_ids) >= 20:
                view = next(platform.views())
                (source,) = (instance for instance in view.instances if instance.num_running)
                unload(platform, view, source)
                gone = next(view for view in platform.views() if source.instance_id not in ids(view))
                assert [demand.num_running for demand in gone.demand] == [1], "the drained answer goes on"
        assert state.error is None and state.done and state.finish_reason == "length"
        assert state.token_ids == unmoved and len(unmoved) == LONG["max_tokens"]
        after = usage(platform, key)
        assert {name: after[name] - between[name] for name in after} == {
            name: between[name] - before[name] for name in before
        }
        with platform.admin() as admin:
            told = admin.call("GET", f"/v1/requests/{state.request_id}/explain")["decisions"]
        assert [decision["subject"] for decision in told if decision["kind"] == "migrate"] == [state.request_id]
