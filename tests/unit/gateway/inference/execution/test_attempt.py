"""The block hashes of a prompt sent to the scheduler are the engine's page keys."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.support.gateway_ports import PRINCIPAL, published_model
from tests.unit.gateway.token_path_rig import TokenPathRig
from torchrelay.common.tokens.prefix_hashes import page_hashes
from torchrelay.control.v1 import scheduler_pb2
from torchrelay.gateway.core import LatencyTargets, ServiceClass
from torchrelay.gateway.inference.execution.attempt import model_version


async def test_routing_keys_are_page_keys_of_the_tenant(rig: TokenPathRig) -> None:
    prompt = [40 + number % 50 for number in range(150)]
    body = {"model": "echo", "prompt": prompt, "max_tokens": 1}
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
    [admit] = rig.scheduler.admits
    assert list(admit.block_hashes) == list(page_hashes(PRINCIPAL.tenant_id, prompt))[3::4]
    assert len(admit.block_hashes) == 2


async def test_admission_carries_the_age_of_its_request(rig: TokenPathRig) -> None:
    begin = time.monotonic()
    body = {"model": "echo", "prompt": "hello", "max_tokens": 1}
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
    [admit] = rig.scheduler.admits
    assert admit.age_ms <= (time.monotonic() - begin) * 1000


def test_model_version_carries_the_latency_targets() -> None:
    model = published_model("acme/m", file_digests={})
    assert not model_version(model).targets.ListFields()
    targets = model_version(replace(model, targets=LatencyTargets(0.2, 0.5, 60.0, 0.05))).targets
    assert (targets.interactive_ttft_s, targets.standard_ttft_s, targets.batch_ttft_s) == (0.2, 0.5, 60.0)
    assert targets.tbt_target_s == 0.05


@pytest.mark.parametrize(
    ("engine", "changes", "needed"),
    [
        ("auto", {}, ("", 1)),
        ("vllm", {}, ("vllm", 1)),
        ("vllm:2", {}, ("vllm", 2)),
        ("auto", {"dtype": "I8"}, ("torchrelay", 1)),
        ("vllm:2", {"base_version_id": "v-base"}, ("torchrelay", 1)),
        ("torchrelay", {"dtype": "I8", "engine": "vllm"}, ("vllm", 1)),
        ("vllm:2", {"dtype": "I4", "engine": "vllm"}, ("vllm", 2)),
    ],
)
def test_the_engine_that_a_version_needs_comes_first(
    engine: str, changes: dict[str, str], needed: tuple[str, int]
) -> None:
    model = published_model("acme/m", file_digests={})
    version = replace(model.version, **changes)  # type: ignore[arg-type]
    scaling = model_version(replace(model, engine=engine, version=version)).scaling
    assert (scaling.engine, scaling.num_devices) == needed


def test_service_class_numbers_match_the_protocol() -> None:
    assert {f"SERVICE_CLASS_{kind.name}": kind.value for kind in ServiceClass} == dict(
        scheduler_pb2.ServiceClass.items()
    )
