"""``/v1/rerank`` in the form that Jina, Cohere and vLLM share. A document's score is computed as an embedding is."""

from __future__ import annotations

import struct
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.bodies.body_decoder import OtherFields, decode
from torchrelay.gateway.bodies.shared_body import IGNORED
from torchrelay.gateway.core import Principal
from torchrelay.gateway.dialects.embeddings.asgi_app import VectorsApp
from torchrelay.gateway.dialects.embeddings.requests import MAX_INPUTS
from torchrelay.gateway.exchange.http_exchange import HttpExchange
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.limits.shares import ShareAccount

PATH: Final = "/v1/rerank"


class Document(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class RerankBody(msgspec.Struct, kw_only=True):
    model: str
    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None


FIELDS: Final = OtherFields(
    IGNORED,
    {
        **dict.fromkeys(("instruction", "chat_template"), ""),
        **dict.fromkeys(("max_chunks_per_doc", "max_tokens_per_doc", "overlap_tokens", "rank_fields")),
        **dict.fromkeys(("truncate", "truncate_prompt_tokens", "max_tokens_per_query")),
        "truncation": False,
        "use_activation": True,
    },
)
_DECODER: msgspec.json.Decoder[RerankBody] = msgspec.json.Decoder(RerankBody)


def decode_rerank(encoded: bytes | bytearray, max_chars: int) -> RerankBody:
    """``max_chars``: of all pairs, each of which has the query. Raises ``InvalidRequest`` naming the faulty field."""
    body = decode(_DECODER, encoded, FIELDS)
    if not body.documents:
        raise InvalidRequest("documents must not be empty", field="documents")
    if len(body.documents) > MAX_INPUTS:
        message = f"documents has {len(body.documents):,} entries; at most {MAX_INPUTS:,} are allowed"
        raise InvalidRequest(message, field="documents")
    num_chars = len(body.query) * len(body.documents) + sum(map(len, _texts(body)))
    if num_chars > max_chars:
        message = (
            f"the query with each of the documents has {num_chars:,} characters; at most {max_chars:,} are allowed "
            "(max_body_bytes): send fewer documents at once, or a shorter query"
        )
        raise InvalidRequest(message, field="documents")
    return body


def _texts(body: RerankBody) -> list[str]:
    return [each if isinstance(each, str) else each.text for each in body.documents]


class RerankApp(VectorsApp):
    """The ASGI application, for the requests that the router sends it: HTTP, and ``PATH``."""

    async def complete(self, exchange: HttpExchange, path: str, principal: Principal, held: ShareAccount) -> None:
        with self.shares.body_bytes.account(principal.tenant_id) as body_bytes:
            body = decode_rerank(await self.read(exchange, body_bytes), self._max_body_bytes)
            async with exchange.request.until_disconnect():
                await exchange.reply(msgspec.json.encode(await self._reply(exchange, principal, body, held)))

    async def _reply(
        self, exchange: HttpExchange, principal: Principal, body: RerankBody, held: ShareAccount
    ) -> dict[str, Any]:
        model = await self.pipeline.reranker(principal, body.model)
        if body.query:  # a query that is too long is refused once and by its name
            query = GenerateParams(body.model, text=body.query, text_field="query")
            await self.pipeline.embedding_prompt(principal, model, query)
        texts = _texts(body)
        pairs = [
            GenerateParams(body.model, text=body.query, second_text=text, text_field="documents") for text in texts
        ]
        prompts = await self.encode(principal, model, pairs, held)
        vectors = await self.vectors(exchange, principal, model, prompts, 1)
        scores: list[float] = [struct.unpack("<f", vector)[0] for vector in vectors]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        num_tokens = sum(map(len, prompts))
        return {
            "id": exchange.request_id,
            "model": model.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "results": [
                {"index": index, "relevance_score": scores[index]}
                | ({"document": {"text": texts[index]}} if body.return_documents else {})
                for index in best
            ],
        }
