"""A hostile tenant's templates, tokenizers and messages, beside a neighbour who goes on chatting.

Real HTTP, store and text processes. Each hostile case used to stop the neighbour for seconds, or a minute.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from blake3 import blake3
from tokenizers import Regex, Tokenizer, normalizers

from tests.support.gateway_ports import published_model
from tests.support.sample_tokenizers import tiny_tokenizer
from tests.support.wait import eventually
from tests.unit.gateway.token_path_rig import (  # noqa: F401 -- fixtures
    TEMPLATE,
    MakeRig,
    TokenPathRig,
    make_rig,
    tokenizer_json,
)
from torchrelay.gateway.core import Principal

NEIGHBOUR = Principal(tenant_id="t-2", tenant="beta", key_id="k-2")
NEIGHBOUR_KEY = "tr-neighbour"
NUM_ATTACKERS = 4
NUM_CHATS = 12
HANG_S = (
    20.0  # of a neighbour's chat, which takes some hundredths of a second; an attacker must not stop it for so long
)
SLOW = "{% for a in range(100) %}{% for b in range(99999) %}{% endfor %}{% endfor %}slow"  # a second or less
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOMB = "{% set ns = namespace(x=['y'] * 1000) %}{% for i in range(99999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]


def tokenizer_with_pattern() -> bytes:
    """A tokenizer that takes minutes for a few lines."""
    tokenizer = Tokenizer.from_str(tiny_tokenizer().decode())
    tokenizer.normalizer = normalizers.Replace(Regex("a*a*a*[bd]e"), "x")
    return tokenizer.to_str().encode()


def tokenizer_of_special_tokens() -> bytes:
    """A tokenizer that takes long to load."""
    fields = json.loads(tiny_tokenizer())
    highest = max(fields["model"]["vocab"].values())
    fields["added_tokens"] += [
        {**fields["added_tokens"][0], "id": highest + 1 + number, "content": f"<a{number}>", "special": number % 2 == 0}
        for number in range(12_000)
    ]
    return json.dumps(fields).encode()


@dataclass(frozen=True)
class Attack:
    """A hostile model, and the body that calls it."""

    template: str = TEMPLATE
    tokenizer: bytes = b""
    context: int = 4096
    messages: list[dict[str, str]] = field(default_factory=lambda: HELLO)
    statuses: tuple[int, ...] = (400, 429)  # of its answers
    why: str = ""


ATTACKS = {
    "pattern": Attack(
        tokenizer=tokenizer_with_pattern(),
        messages=[{"role": "user", "content": ("a" * 600 + "d ") * 20}],
        why="tokenizer took longer",
    ),
    "slow template": Attack(SLOW, statuses=(200, 429)),
    "endless template": Attack(LOOP, why="chat template failed: it took longer"),
    "allocation": Attack(BOMB, why="chat template failed"),
    "messages": Attack(messages=HELLO * 230_000, why="messages has 230,000 entries"),
    "messages within the limit": Attack(messages=HELLO * 30_000, why="characters, too many for the context"),
    "special tokens": Attack(tokenizer=tokenizer_of_special_tokens(), statuses=(200, 400, 429)),
}


def publish(rig: TokenPathRig, name: str, template: str, tokenizer: bytes, context: int) -> None:
    config = json.dumps({"chat_template": template}).encode()
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    digests = {file: blake3(data).hexdigest() for file, data in files.items()}
    rig.store.files |= {digests[file]: data for file, data in files.items()}
    rig.ports.published[name] = published_model(name, file_digests=digests, context=context)


@asynccontextmanager
async def attacked(rig: TokenPathRig, attack: Attack) -> AsyncIterator[list[httpx.Response]]:
    """The hostile tenant's calls, one after the other from several clients, inside the block; yields the answers."""
    answers: list[httpx.Response] = []
    body = json.dumps({"model": "acme/hostile", "messages": attack.messages, "max_tokens": 1}).encode()

    async def call() -> None:
        while True:
            answer = await rig.http.post("/v1/chat/completions", content=body, timeout=120)
            answers.append(answer)

    calls = [asyncio.ensure_future(call()) for _ in range(NUM_ATTACKERS)]
    try:
        yield answers
    finally:
        for task in calls:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*calls, return_exceptions=True)


async def chat(rig: TokenPathRig, model: str) -> None:
    """A chat of the neighbour, which is answered in time."""
    headers = {"authorization": f"Bearer {NEIGHBOUR_KEY}"}
    body: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 2}
    async with asyncio.timeout(HANG_S):
        answer = await rig.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", ATTACKS)
async def test_neighbour_is_answered_during_an_attack(make_rig: MakeRig, name: str) -> None:  # noqa: F811
    attack = ATTACKS[name]
    rig = await make_rig(max_body_bytes=32 << 20)
    rig.ports.principals[NEIGHBOUR_KEY] = NEIGHBOUR
    publish(rig, "acme/hostile", attack.template, attack.tokenizer or tiny_tokenizer(), attack.context)
    models = [f"beta/{number}" for number in range(3)]
    for number, model in enumerate(models):
        publish(rig, model, TEMPLATE, tiny_tokenizer(300 + number), 4096)
    await chat(rig, models[0])
    async with attacked(rig, attack) as answers:
        await eventually(lambda: answers, "the attack's first answer")
        for number in range(NUM_CHATS):  # with tokenizers that were not loaded yet among them
            await chat(rig, models[number % len(models)])
    for answer in answers:
        assert answer.status_code in attack.statuses, answer.text
        if answer.status_code == 400:
            assert attack.why in answer.json()["error"]["message"]
