"""What the scheduler is told of a prompt: keys of its beginnings, the same that an engine finds its pages by."""

from __future__ import annotations

from tests.support.doors import PRINCIPAL
from tests.unit.gateway.inference.conftest import World
from torchrelay.common.prefixes import page_keys


async def test_the_routing_keys_of_a_prompt_are_page_keys_of_its_tenant(world: World) -> None:
    prompt = [40 + number % 50 for number in range(150)]
    body = {"model": "echo", "prompt": prompt, "max_tokens": 1}
    assert (await world.http.post("/v1/completions", json=body)).status_code == 200
    [admit] = world.scheduler.admits
    assert list(admit.block_hashes) == list(page_keys(PRINCIPAL.tenant_id, prompt))[3::4]
    assert len(admit.block_hashes) == 2
