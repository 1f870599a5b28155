"""``/v1/rerank`` by plain HTTP: scores, their order, bills, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.support.echo_worker import embedding_of
from tests.unit.gateway.token_path_rig import MakeRig, TokenPathRig
from torchrelay.control.v1 import types_pb2

QUERY, DOCUMENTS = "two words", ["one", "three more words", "", "one again"]


def score(rig: TokenPathRig, document: str) -> float:
    """The echo worker's: the first number of its vector of the pair."""
    return embedding_of(rig.tokenizer.encode(QUERY, document).ids)[0]


async def rerank(rig: TokenPathRig, **fields: Any) -> dict[str, Any]:
    body = {"model": "rerank", "query": QUERY, "documents": DOCUMENTS} | fields
    response = await rig.http.post("/v1/rerank", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["id"] == response.headers["x-request-id"]
    reply: dict[str, Any] = response.json()
    return reply


async def test_documents_come_by_their_scores(rig: TokenPathRig) -> None:
    reply = await rerank(rig)
    num_tokens = sum(len(rig.tokenizer.encode(QUERY, each).ids) for each in DOCUMENTS)
    assert reply["model"] == "acme/rerank"
    assert reply["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    scores = [score(rig, each) for each in DOCUMENTS]
    best = sorted(range(len(DOCUMENTS)), key=lambda index: -scores[index])
    assert reply["results"] == [{"index": index, "relevance_score": scores[index]} for index in best]
    assert (await rerank(rig, top_n=2))["results"] == reply["results"][:2]
    assert (await rerank(rig, top_n=9))["results"] == reply["results"]
    objects = await rerank(rig, documents=[{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]], return_documents=True)
    assert objects["results"] == [
        {**result, "document": {"text": DOCUMENTS[result["index"]]}} for result in reply["results"]
    ]


async def test_each_document_is_a_pair_for_a_prefill_worker_and_the_call_one_request(
    make_rig: MakeRig, tokenizer_json: bytes
) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    rig = await make_rig(tokenizer=tokenizer.to_str().encode())
    reply = await rerank(rig, documents=DOCUMENTS[:2])
    starts = [start for worker in rig.workers for role, start in worker.starts if role == "prefill"]
    assert len(starts) == sum(len(worker.starts) for worker in rig.workers) == 2
    for start in starts:
        assert (start.pooling, start.second_text) == (types_pb2.POOLING_SCORE, len(rig.tokenizer.encode(QUERY).ids))
    ((request_id, (usage,)),) = rig.ports.settled.items()
    assert (request_id, usage.num_output_tokens) == (reply["id"], 0)
    assert usage.num_prompt_tokens == reply["usage"]["prompt_tokens"]
    assert len(rig.ports.opened) == len(rig.ports.admitted) == 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("completions", {"prompt": "a"}),
        ("embeddings", {"input": "a"}),
    ],
)
async def test_a_reranker_gives_scores_alone(rig: TokenPathRig, path: str, fields: dict[str, Any]) -> None:
    refused = await rig.http.post(f"/v1/{path}", json={"model": "rerank", **fields})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert refused.json()["error"]["message"].endswith("it gives scores alone, by /v1/rerank")
