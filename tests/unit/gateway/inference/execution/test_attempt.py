"""The block hashes of a prompt sent to the scheduler are the engine's page keys."""

from __future__ import annotations

from tests.support.gateway_ports import PRINCIPAL
from tests.unit.gateway.token_path_rig import TokenPathRig
from torchrelay.common.tokens.prefix_hashes import page_hashes
from torchrelay.control.v1 import scheduler_pb2
from torchrelay.gateway.core import ServiceClass


async def test_the_routing_keys_of_a_prompt_are_page_keys_of_its_tenant(rig: TokenPathRig) -> None:
    prompt = [40 + number % 50 for number in range(150)]
    body = {"model": "echo", "prompt": prompt, "max_tokens": 1}
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
    [admit] = rig.scheduler.admits
    assert list(admit.block_hashes) == list(page_hashes(PRINCIPAL.tenant_id, prompt))[3::4]
    assert len(admit.block_hashes) == 2


def test_the_numbers_of_classes_are_those_of_the_protocol() -> None:
    assert {f"SERVICE_CLASS_{one.name}": one.value for one in ServiceClass} == dict(scheduler_pb2.ServiceClass.items())
