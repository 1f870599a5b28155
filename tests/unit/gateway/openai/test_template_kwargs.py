"""``chat_template_kwargs`` on their way to the model's chat template."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.token_path_rig import MakeRig

TEMPLATE = "{% if enable_thinking is defined and not enable_thinking %}plain{% else %}thought{% endif %}{{ bos_token }}"
HUGE = 1 << 70


@pytest.mark.parametrize(
    ("kwargs", "prompt"),
    [
        (None, "thought"),
        ({"enable_thinking": False}, "plain"),
        ({"enable_thinking": True, "unknown": [1]}, "thought"),
        ({"enable_thinking": False, "bos_token": " x"}, "plain x"),
    ],
)
async def test_template_gets_its_variables(make_rig: MakeRig, kwargs: dict[str, Any] | None, prompt: str) -> None:
    rig = await make_rig(template=TEMPLATE)
    body = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "return_token_ids": True}
    reply = (await rig.http.post("/v1/chat/completions", json={**body, "chat_template_kwargs": kwargs})).json()
    assert reply["prompt_token_ids"] == rig.tokenizer.encode(prompt, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template_kwargs", {"x": HUGE}),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"maximum": HUGE}}}]),
    ],
)
async def test_integers_beyond_64_bits_are_refused(make_rig: MakeRig, field: str, value: Any) -> None:
    rig = await make_rig(template="tools")
    body = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, field: value}
    response = await rig.http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert "an integer below -2**63 or above 2**64 - 1" in response.json()["error"]["message"]
