"""``/v1/embeddings`` as a bare ASGI application like that of the completions.

A call is admitted and billed as a whole; a limited number of its inputs run at once, each as a request to a worker.
All inputs are encoded before the call is admitted, so that a faulty input costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.core import Principal, PublishedModel
from torchrelay.gateway.dialects.embeddings.requests import (
    EmbeddingsBody,
    decode_embeddings,
    num_dimensions,
    params_of,
)
from torchrelay.gateway.dialects.embeddings.vectors import FLOAT_BYTES, encoded, reply_parts
from torchrelay.gateway.exchange.asgi_app import TokenPathApp
from torchrelay.gateway.exchange.concurrent import run_all
from torchrelay.gateway.exchange.http_exchange import HttpExchange
from torchrelay.gateway.inference.core import EmbeddingDelta, GenerateParams
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.gateway.inference.text.prompt_encoder import EncodedPrompt
from torchrelay.gateway.limits.shares import ShareAccount

PATH: Final = "/v1/embeddings"
MAX_RUNNING: Final = 32  # inputs of one request at once


class VectorsApp(TokenPathApp):
    """An application whose answer is made of a vector for each of its inputs."""

    async def encode(
        self, principal: Principal, model: PublishedModel, params: list[GenerateParams], held: ShareAccount
    ) -> list[EncodedPrompt]:
        """The tokens of each input, which are taken out of the list."""
        num_inputs = len(params)
        held.take(min(num_inputs, MAX_RUNNING) - 1)

        async def prompt_of(index: int) -> EncodedPrompt:
            try:
                return await self.pipeline.embedding_prompt(principal, model, params[index])
            except InvalidRequest as error:
                field = params[index].text_field
                if num_inputs > 1 and error.field == field:
                    error.message = f"{field}[{index}]: {error.message}"
                raise

        prompts = await run_all(range(num_inputs), prompt_of, MAX_RUNNING)
        params.clear()
        return prompts

    async def vectors(
        self,
        exchange: HttpExchange,
        principal: Principal,
        model: PublishedModel,
        prompts: list[EncodedPrompt],
        size: int,
    ) -> list[bytes]:
        """The first ``size`` numbers of each input's vector, in fp32."""
        exchange.answer_bytes.take(len(prompts) * size * FLOAT_BYTES)
        call = self.pipeline.embeddings(principal, model, prompts, exchange.request_id, exchange.arrived_unix_us)
        async with call as start:

            async def values_of(index: int) -> bytes:
                session = start(index)
                exchange.rates = session.rates
                values = await _values(session)
                self.pipeline.leave(session.request)
                return values[: size * FLOAT_BYTES]

            return await run_all(range(len(prompts)), values_of, MAX_RUNNING)


class EmbeddingsApp(VectorsApp):
    """The ASGI application, for the requests that the router sends it: HTTP, and ``PATH``."""

    async def complete(self, exchange: HttpExchange, path: str, principal: Principal, held: ShareAccount) -> None:
        with self.shares.body_bytes.account(principal.tenant_id) as body_bytes:
            body = decode_embeddings(await self.read(exchange, body_bytes))
            async with exchange.request.until_disconnect():
                reply = await self._reply(exchange, principal, body, held, body_bytes)
                await exchange.reply_in_parts(reply)

    async def _reply(
        self,
        exchange: HttpExchange,
        principal: Principal,
        body: EmbeddingsBody,
        held: ShareAccount,
        body_bytes: ShareAccount,
    ) -> Iterator[bytes]:
        params = params_of(body)
        body.input = ""  # the texts are in ``params`` now, which are dropped once they are encoded
        model, embedding = await self.pipeline.embedding_model(principal, body.model)
        size = num_dimensions(body, embedding)
        prompts = await self.encode(principal, model, params, held)
        body_bytes.release()
        vectors = await self.vectors(exchange, principal, model, prompts, size)
        encode = partial(encoded, is_normalized=embedding.is_normalized, as_base64=body.encoding_format == "base64")
        return reply_parts(model.name, map(encode, vectors), sum(map(len, prompts)))


async def _values(session: RequestSession) -> bytes:
    request, values = session.request, b""
    while not request.is_finished:
        for delta in await request.next():
            assert isinstance(delta, EmbeddingDelta), "the only delta of such a request"
            values = delta.values
    return values
