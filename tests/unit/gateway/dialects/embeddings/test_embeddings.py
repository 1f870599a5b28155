"""``/v1/embeddings`` by OpenAI's client and by plain HTTP: vectors, bills, limits and ends."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.echo_worker import NUM_DIMENSIONS, embedding_of
from tests.support.gateway_ports import PRINCIPAL
from tests.support.wait import eventually
from tests.unit.gateway.token_path_rig import PROMPT, MakeRig, TokenPathRig
from torchrelay.common.errors import QuotaExceeded
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.control.v1 import types_pb2
from torchrelay.gateway.core import FinishCause
from torchrelay.gateway.dialects.embeddings.asgi_app import MAX_RUNNING
from torchrelay.gateway.dialects.embeddings.vectors import encoded, reply_parts
from torchrelay.gateway.inference.text.prompt_encoder import EncodedPrompt

INPUTS = [PROMPT, [50, 51, 52], [60, 61, 62, 63, 64]]


def unit(prompt: list[int], size: int = NUM_DIMENSIONS) -> list[float]:
    vector = embedding_of(prompt)[:size]
    return [value / math.hypot(*vector) for value in vector]


async def test_official_client_gets_a_vector_per_input(rig: TokenPathRig) -> None:
    """It decodes base64 by itself unless it asked for it; both formats have the same floats."""
    vectors: dict[str, list[list[float]]] = {}
    for encoding_format in ("float", "base64", ""):
        wishes: dict[str, Any] = {"encoding_format": encoding_format} if encoding_format else {}
        reply = await rig.client.embeddings.create(model="embed", input=INPUTS, **wishes)
        assert (reply.object, reply.model, [each.index for each in reply.data]) == ("list", "acme/embed", [0, 1, 2])
        assert reply.usage.model_dump() == {"prompt_tokens": 15, "total_tokens": 15}
        given: list[Any] = [each.embedding for each in reply.data]
        if encoding_format == "base64":
            given = [list(struct.unpack(f"<{NUM_DIMENSIONS}f", base64.b64decode(each))) for each in given]
        vectors[encoding_format] = given
    assert vectors["float"] == vectors["base64"] == vectors[""]
    for prompt, vector in zip(INPUTS, vectors["float"], strict=True):
        assert vector == pytest.approx(unit(prompt), rel=1e-6)
    text = await rig.client.embeddings.create(model="embed", input="one two")
    assert text.data[0].embedding == pytest.approx(unit(rig.tokenizer.encode("one two").ids), rel=1e-6)


async def test_dimensions_shorten_and_normalize_again(rig: TokenPathRig) -> None:
    reply = await rig.client.embeddings.create(model="embed", input=PROMPT, dimensions=3, encoding_format="float")
    assert reply.data[0].embedding == pytest.approx(unit(PROMPT, 3), rel=1e-6)
    raw = await rig.client.embeddings.create(model="embed-raw", input=PROMPT, dimensions=3, encoding_format="float")
    assert raw.data[0].embedding == embedding_of(PROMPT)[:3]


async def test_call_is_admitted_and_billed_as_one_request(rig: TokenPathRig) -> None:
    for worker in rig.workers:
        worker.num_cached = 2
    response = await rig.http.post("/v1/embeddings", json={"model": "embed", "input": INPUTS})
    ((request_id, (usage,)),) = rig.ports.settled.items()
    assert request_id == response.headers["x-request-id"]
    assert (usage.request_id, usage.num_prompt_tokens, usage.num_cached_prompt_tokens) == (request_id, 15, 6)
    assert (usage.num_output_tokens, usage.cause) == (0, FinishCause.STOP)
    (opened,) = rig.ports.opened
    assert (opened.num_prompt_tokens, opened.max_tokens, opened.num_choices) == (15, 0, 1)
    assert rig.ports.admitted == [(15, 0)] and not rig.ports.reserved
    assert list(rig.ports.released_tokens.values()) == [15]
    await eventually(lambda: rig.token_path.admissions.num_open == 0)


async def test_only_a_prefill_worker_gets_the_attempt(rig: TokenPathRig) -> None:
    """The input may fill the context."""
    reply = await rig.client.embeddings.create(model="embed", input=[list(range(1, 65))])
    assert reply.usage.prompt_tokens == 64
    ((role, start),) = [start for worker in rig.workers for start in worker.starts]
    assert (role, start.pooling, start.sampling.max_tokens) == ("prefill", types_pb2.POOLING_LAST_TOKEN, 0)


async def test_many_inputs_run_a_limited_number_at_once(make_rig: MakeRig) -> None:
    rig = await make_rig(max_open_requests_per_tenant=MAX_RUNNING)
    for worker in rig.workers:
        worker.may_embed.clear()
    inputs = [[1 + number % 100, 2 + number // 100] for number in range(150)]
    asking = asyncio.ensure_future(rig.client.embeddings.create(model="embed", input=inputs, encoding_format="float"))
    await eventually(lambda: len(rig.token_path.pipeline.requests) == MAX_RUNNING)
    assert rig.shares.requests.num_held == MAX_RUNNING
    for worker in rig.workers:
        worker.may_embed.set()
    reply = await asking
    assert [each.index for each in reply.data] == list(range(150))
    for prompt, each in zip(inputs, reply.data, strict=True):
        assert each.embedding == pytest.approx(unit(prompt), rel=1e-6)
    assert len(rig.ports.opened) == len(rig.ports.settled) == len(rig.ports.admitted) == 1
    assert rig.shares.requests.num_held == 0


async def test_request_counts_once_in_the_rate_of_its_key(rig: TokenPathRig) -> None:
    await rig.http.post("/v1/embeddings", json={"model": "embed", "input": INPUTS})
    assert rig.ports.admitted_requests == [1]


@pytest.mark.parametrize("is_left", [True, False])
async def test_call_that_ends_early_is_billed_for_a_client_that_left_alone(rig: TokenPathRig, is_left: bool) -> None:
    """Two inputs have been computed, and of the third, elsewhere, 2 tokens, of which 1 was cached."""
    (first, slow), requests = rig.workers, rig.token_path.pipeline.requests
    first.errors["prefill"] = [pb.RunError(code=pb.RunError.CODE_PREFILL_LOST, lost_worker=first.worker_id)]
    slow.prompt_progress, slow.num_cached = (2,), 1
    asking = asyncio.ensure_future(rig.http.post("/v1/embeddings", json={"model": "embed", "input": INPUTS}))
    await eventually(lambda: [request.usage.num_cached_prompt_tokens for request in requests] == [1])
    if is_left:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    else:
        next(iter(requests)).stop(QuotaExceeded("a cause"))
        response = await asking
        assert (response.status_code, response.json()["error"]["message"]) == (403, "a cause")
    await eventually(lambda: rig.ports.settled and not rig.ports.reserved)
    ((usage,),) = rig.ports.settled.values()
    assert (usage.num_output_tokens, usage.cause) == (0, FinishCause.CANCELLED if is_left else FinishCause.ERROR)
    ((_, start),) = slow.starts
    computed = 15 - len(start.prompt) + 2
    assert usage.num_prompt_tokens == (computed if is_left else 0)
    await eventually(lambda: rig.token_path.admissions.num_open == 0)


async def test_call_whose_vectors_exceed_the_share_computes_no_input(make_rig: MakeRig) -> None:
    rig = await make_rig(max_held_answer_bytes_per_tenant=2 * 4 * NUM_DIMENSIONS)
    response = await rig.http.post("/v1/embeddings", json={"model": "embed", "input": INPUTS})
    assert response.status_code == 429
    assert "max_held_answer_bytes_per_tenant" in response.json()["error"]["message"]
    assert not rig.ports.admitted and not rig.shares.answer_bytes.num_held
    for fewer in ({"input": INPUTS[:2]}, {"input": INPUTS, "dimensions": 5}):
        assert (await rig.http.post("/v1/embeddings", json={"model": "embed", **fewer})).status_code == 200
    assert not rig.shares.answer_bytes.num_held


@pytest.mark.parametrize("as_base64", [True, False])
def test_long_reply_is_made_a_vector_at_a_time(as_base64: bool) -> None:
    values = struct.pack("<4096f", *range(4096))
    made: list[int] = []

    def vectors() -> Iterator[bytes]:
        for index in range(2048):
            made.append(index)
            yield encoded(values, is_normalized=True, as_base64=as_base64)

    for number, part in enumerate(reply_parts("acme/embed", vectors(), 7), 1):
        assert len(made) == min(number, 2048) and len(part) < 128 << 10


async def test_call_that_begins_no_input_keeps_no_reservation(rig: TokenPathRig) -> None:
    model = rig.ports.published["acme/embed"]
    prompts = [EncodedPrompt(each) for each in INPUTS]
    async with rig.token_path.pipeline.embeddings(PRINCIPAL, model, prompts, "req-1", 0):
        assert rig.ports.reserved
    assert not rig.ports.reserved and not rig.ports.opened


async def test_lost_worker_is_replaced(rig: TokenPathRig) -> None:
    for worker in rig.workers:
        worker.errors["prefill"] = [pb.RunError(code=pb.RunError.CODE_WRONG_INSTANCE, message="gone")]
    reply = await rig.client.embeddings.create(model="embed", input=PROMPT, encoding_format="float")
    assert reply.data[0].embedding == pytest.approx(unit(PROMPT), rel=1e-6)
    ((usage,),) = rig.ports.settled.values()
    assert usage.num_prompt_tokens == len(PROMPT)
    assert len([start for worker in rig.workers for start in worker.starts]) > 1


async def test_worker_without_embeddings_is_an_error(rig: TokenPathRig) -> None:
    for worker in rig.workers:
        worker.errors["prefill"] = [pb.RunError(code=pb.RunError.CODE_INTERNAL, message="not finite")]
    response = await rig.http.post("/v1/embeddings", json={"model": "embed", "input": PROMPT})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "not finite")
    await eventually(lambda: len(rig.ports.settled) == 1)
    ((usage,),) = rig.ports.settled.values()
    assert (usage.num_prompt_tokens, usage.cause) == (0, FinishCause.ERROR)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_model_without_a_head_gives_embeddings_alone(rig: TokenPathRig, path: str) -> None:
    body = {"model": "headless", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    refused = await rig.http.post(f"/v1/{path}", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "acme/headless has no head for tokens" in refused.text
    assert (await rig.client.embeddings.create(model="headless", input="a")).data
