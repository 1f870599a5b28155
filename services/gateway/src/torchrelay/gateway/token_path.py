"""The token path: wires the inference packages and the dialects, and owns their lifetime."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.metrics import Meter

from torchrelay.common.net.rpc.health import Faults, no_fault
from torchrelay.control.v1.param_store_pb2_grpc import ParamStoreStub
from torchrelay.control.v1.scheduler_pb2_grpc import SchedulerStub
from torchrelay.gateway.background import background
from torchrelay.gateway.clients.file_reader import StoreFileReader
from torchrelay.gateway.dialects.anthropic.dialect import COUNT_PATH, AnthropicDialect, CountTokensApp
from torchrelay.gateway.dialects.anthropic.dialect import PATH as MESSAGES_PATH
from torchrelay.gateway.dialects.embeddings.asgi_app import PATH as EMBEDDINGS_PATH
from torchrelay.gateway.dialects.embeddings.asgi_app import EmbeddingsApp
from torchrelay.gateway.dialects.embeddings.rerank import PATH as RERANK_PATH
from torchrelay.gateway.dialects.embeddings.rerank import RerankApp
from torchrelay.gateway.dialects.inference_v1.servicer import GatewayServicer
from torchrelay.gateway.dialects.open_inference.servicer import OpenInferenceServicer
from torchrelay.gateway.dialects.openai.dialect import PATHS as COMPLETION_PATHS
from torchrelay.gateway.dialects.openai.dialect import OpenAiDialect
from torchrelay.gateway.dialects.responses.dialect import PATH as RESPONSES_PATH
from torchrelay.gateway.dialects.responses.dialect import ResponsesDialect
from torchrelay.gateway.exchange.asgi_app import WRITE_GAP_S, AnswersApp, TokenPathApp
from torchrelay.gateway.grpc.public_calls import PublicCalls
from torchrelay.gateway.grpc.reflection import ReflectionServicer
from torchrelay.gateway.inference.execution.admission_stream import AdmissionStream
from torchrelay.gateway.inference.execution.attempt import Upstreams
from torchrelay.gateway.inference.execution.ledger_writer import LedgerWriter
from torchrelay.gateway.inference.execution.worker_streams import WorkerStreams
from torchrelay.gateway.inference.interfaces import Authenticator, ModelCatalog, RequestLedger, RequestLimiter
from torchrelay.gateway.inference.pipeline import RequestPipeline
from torchrelay.gateway.inference.sampling import GenerationBounds
from torchrelay.gateway.inference.text.decoder_cache import DecoderCache
from torchrelay.gateway.inference.text.model_files import ModelFiles
from torchrelay.gateway.inference.text.processes.frames import TextLimits
from torchrelay.gateway.inference.text.processes.text_pool import PoolSettings
from torchrelay.gateway.inference.text.processes.text_processes import TextProcesses, default_num_processes
from torchrelay.gateway.inference.text.prompt_encoder import PromptEncoder
from torchrelay.gateway.limits.connection_shares import ConnectionShares
from torchrelay.gateway.settings import GatewaySettings

CLOSE_S = 5.0  # for requests that were ended to close, and then for the ledger to write them
FLUSH_TIMEOUT_S = 0.5  # for the last releases to reach the scheduler


@dataclass(frozen=True, slots=True)
class TokenPath:
    """``apps`` serve HTTP, by path; ``servicers`` gRPC."""

    apps: Mapping[str, TokenPathApp]
    servicers: Sequence[GatewayServicer | OpenInferenceServicer | ReflectionServicer]
    pipeline: RequestPipeline
    admissions: AdmissionStream


@asynccontextmanager
async def open_token_path(
    settings: GatewaySettings,
    gateway_id: str,
    *,
    keys: Authenticator,
    catalog: ModelCatalog,
    ledger: RequestLedger,
    limits: RequestLimiter,
    shares: ConnectionShares,
    scheduler: grpc.aio.Channel,
    store: grpc.aio.Channel,
    fault: Faults = no_fault,
    write_gap_s: float = WRITE_GAP_S,
    meter: Meter | None = None,
) -> AsyncIterator[TokenPath]:
    """Serves inside the block. On exit, requests still running end with an error, are released and settled. A fault in
    the stream to the scheduler ends the block.
    """
    async with AsyncExitStack() as stack:
        prompts = await _open_prompts(
            settings, StoreFileReader(ParamStoreStub(store), settings.store_address), stack, meter
        )
        admissions = AdmissionStream(SchedulerStub(scheduler), gateway_id, settings.scheduler_address)
        await stack.enter_async_context(background(admissions.run()))
        stack.push_async_callback(admissions.flush, FLUSH_TIMEOUT_S)
        workers = await stack.enter_async_context(WorkerStreams(gateway_id, tls=settings.tls))
        pipeline = RequestPipeline(
            catalog,
            limits,
            prompts,
            Upstreams(admissions, workers, gateway_id),
            await stack.enter_async_context(LedgerWriter(ledger, limits, CLOSE_S)),
            GenerationBounds(settings.default_max_tokens, settings.max_choices),
            max_attempts=settings.max_attempts,
            keep_alive_s=settings.keep_alive_s,
            request_timeout_s=settings.request_timeout_s,
            meter=meter,
        )
        stack.push_async_callback(pipeline.stop_all, CLOSE_S)
        parts = keys, pipeline, shares, settings.max_body_bytes
        openai, anthropic = OpenAiDialect(), AnthropicDialect()
        apps: dict[str, TokenPathApp] = {
            **dict.fromkeys(COMPLETION_PATHS, AnswersApp(openai, *parts, write_gap_s)),
            RESPONSES_PATH: AnswersApp(ResponsesDialect(), *parts, write_gap_s),
            MESSAGES_PATH: AnswersApp(anthropic, *parts, write_gap_s),
            COUNT_PATH: CountTokensApp(anthropic, *parts),
            EMBEDDINGS_PATH: EmbeddingsApp(openai, *parts),
            RERANK_PATH: RerankApp(openai, *parts),
        }
        calls = PublicCalls(keys, shares, settings.message_timeout_s, settings.answer_silence_s)
        servicers = (
            GatewayServicer(calls, catalog, pipeline),
            OpenInferenceServicer(calls, catalog, pipeline, fault),
            ReflectionServicer(calls),
        )
        yield TokenPath(apps, servicers, pipeline, admissions)


async def _open_prompts(
    settings: GatewaySettings, reader: StoreFileReader, stack: AsyncExitStack, meter: Meter | None
) -> PromptEncoder:
    limits = TextLimits(prompt_cpu_s=settings.prompt_cpu_s, max_memory_bytes=settings.text_process_bytes)
    files = await stack.enter_async_context(ModelFiles(reader))
    decoders = DecoderCache(settings.tokenizer_cache_bytes)
    stack.callback(decoders.close)
    pool = PoolSettings(settings.text_processes or default_num_processes(), settings.tokenizer_cache_bytes)
    processes = TextProcesses(limits, pool, meter)
    return PromptEncoder(files, decoders, await stack.enter_async_context(processes), limits)
