"""A model that vLLM serves in a slot, inside the worker's process: one vLLM step is one step of the slot."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from vllm import EngineArgs
from vllm.config import PoolerConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams as VllmSampling
from vllm.v1.engine.llm_engine import LLMEngine

from torchrelay.common.errors import Conflict, InvalidRequest
from torchrelay.common.latency.latency_model import NO_WORK, StepWork, attended_positions
from torchrelay.common.process.telemetry import get_logger
from torchrelay.engine.batching.validation import check_lengths, check_tokens
from torchrelay.engine.core import (
    EMPTY_STEP,
    Embedding,
    GroupSpec,
    LoadFailed,
    NewToken,
    Pooling,
    StepResult,
)
from torchrelay.engine.kv.layout import KvShape
from torchrelay.engine.model.pooling import embedding_of
from torchrelay.modelspec.config import ModelConfig
from torchrelay.modelspec.opaque import OpaqueModel, known_models, read_model, takes_token_types
from torchrelay.transfer.arena.mapped_slab import MappedSlab
from torchrelay.vllm.adapter_folder import VllmAdapter, VllmAdapterReader
from torchrelay.vllm.arriving_pack import ArrivingPack
from torchrelay.vllm.compile_folder import compile_into, name_of
from torchrelay.vllm.computed_time import ComputedTime
from torchrelay.vllm.device_group import DeviceGroup
from torchrelay.vllm.failure_reason import failure_reason
from torchrelay.vllm.group_executor import GroupExecutor
from torchrelay.vllm.model_document import model_document
from torchrelay.vllm.rank_process import end_group
from torchrelay.vllm.slot_sampler import Choice, SlotChoices, SlotSampler, vllm_sampling
from torchrelay.vllm.weight_loader import LOAD_FORMAT
from torchrelay.worker.settings import WorkerSettings
from torchrelay.worker.slot.engine import EngineHooks

log = get_logger(__name__)
_BLOCK_TOKENS = 128  # of vLLM's KV cache on a CPU; smaller on a GPU
# Of the memory of a GPU: vLLM compares it with what is free, though ``kv_cache_memory_bytes`` decides what it takes.
_GPU_SHARE = 0.01
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_TOKEN_TYPES = "compressed_token_type_ids"  # vLLM's name of where those of type 1 begin
_POOLINGS = {Pooling.LAST_TOKEN: "LAST", Pooling.FIRST_TOKEN: "CLS", Pooling.MEAN: "MEAN"}


def _max_kv_tokens(model: ModelConfig | OpaqueModel, dtype: str, pool_bytes: int, num_devices: int) -> int:
    """Tokens of one choice that the pool holds. Raises ``LoadFailed`` if it has no block for them."""
    shape = KvShape.of(model, dtype)
    # Each device has some of the heads, and at least one.
    num_kv_heads = num_devices * max(shape.num_kv_heads // num_devices, 1)
    block_bytes = _BLOCK_TOKENS * replace(shape, num_kv_heads=num_kv_heads).bytes_per_token
    num_blocks = pool_bytes // block_bytes - 1  # vLLM keeps the first
    if num_blocks < 1:
        raise LoadFailed(f"vLLM needs a KV pool of at least {2 * block_bytes} bytes for this model, not {pool_bytes}")
    return num_blocks * _BLOCK_TOKENS


def _compute_a_token(vllm: LLMEngine, pooling: PoolingParams | None, num_values: int) -> None:
    """Computes a token, or a vector that must have ``num_values``, because vLLM accepts models that its kernels for
    this device refuse.
    """
    params = pooling or VllmSampling(max_tokens=1, detokenize=False)
    vllm.add_request("first", {"prompt_token_ids": [0]}, params)
    while vllm.has_unfinished_requests():
        for output in vllm.step():
            if isinstance(output, PoolingRequestOutput) and output.outputs.data.numel() != num_values:
                raise LoadFailed(f"its vectors have {output.outputs.data.numel()} numbers, not {num_values}")


def _pooling_params(pooling: Pooling, second_text: int = 0) -> PoolingParams:
    """The parameters of embeddings as the model gives them, because the gateway normalizes, or of scores.
    ``second_text``: the first token of type 1; 0: there is none.
    """
    if pooling is not Pooling.SCORE:
        return PoolingParams(task="embed", use_activation=False)
    return PoolingParams(task="classify", extra_kwargs={_TOKEN_TYPES: second_text} if second_text else None)


def _discard(vllm: LLMEngine | None) -> None:
    """Ends what a failed start has left in this process, with which no later start would succeed."""
    if vllm is None:
        cleanup_dist_env_and_memory()
    else:
        vllm.engine_core.shutdown()


class VllmModel:
    """A ``ServedModel``. The first step builds vLLM, which takes each weight as soon as it has arrived."""

    def __init__(self, slab: MappedSlab, settings: WorkerSettings, hooks: EngineHooks, group: DeviceGroup) -> None:
        manifest = slab.manifest
        self._settings, self._manifest, self._hooks = settings, manifest, hooks
        self._model = read_model(manifest.config, is_opaque=manifest.is_opaque)
        pooling = self._model.pooling if isinstance(self._model, OpaqueModel) else ""
        self._pooling = Pooling(pooling) if pooling else None
        self._max_kv_tokens = _max_kv_tokens(self._model, manifest.dtype, settings.kv_pool_bytes, group.num_devices)
        self._compiled = str(hooks.compiled or "")
        self._advances, self._computed = 0, ComputedTime()
        self._pack = ArrivingPack(manifest, slab.data, self._advance)
        self._group = group
        group.watch(self._pack.fail)
        group.open(slab, self._compiled)
        self._vllm: LLMEngine | None = None
        self._is_broken = self._is_ended = False
        self._choices = SlotChoices()
        self._cancels: deque[tuple[str, int | None]] = deque()
        self._work = NO_WORK

    def _advance(self) -> None:
        self._advances += 1

    # Loading

    def segment_ready(self, segment: int) -> None:
        self._pack.segment_ready(segment)
        self._group.segment_ready(segment)

    def fail(self, reason: str) -> None:
        self._is_ended = True
        self._pack.fail(reason)
        self._group.fail(reason)

    @property
    def is_ready(self) -> bool:
        return self._vllm is not None

    def _build(self) -> LLMEngine:
        """Starts vLLM. Raises ``LoadFailed`` with vLLM's reason where it refuses the model or the settings."""
        vllm: LLMEngine | None = None
        compile_into(self._compiled)
        try:
            with tempfile.TemporaryDirectory(prefix="torchrelay-vllm-") as folder:
                document = model_document(self._manifest)
                Path(folder, "config.json").write_text(json.dumps(document))
                times_s = [time.monotonic()]
                config = self._engine_args(folder).create_engine_config()
                config.model_config.model = name_of(document)
                if (vocab_size := config.model_config.get_vocab_size()) < self._model.vocab_size:
                    raise LoadFailed(f"it has a vocabulary of {vocab_size} tokens, not {self._model.vocab_size}")
                times_s.append(time.monotonic())
                vllm = LLMEngine(config, GroupExecutor, log_stats=False, multiprocess_mode=False)
                times_s.append(time.monotonic())
                first = _pooling_params(self._pooling) if self._pooling else None
                _compute_a_token(vllm, first, 1 if self._pooling is Pooling.SCORE else self._model.hidden_size)
                times_s.append(time.monotonic())
        except Exception as error:  # vLLM documents none: of pydantic, of torch, of its own
            self._group.begin_close()
            _discard(vllm)
            if isinstance(error, LoadFailed) and (self._is_ended or not self._group.failure):
                raise
            log.error("vllm_start_failed", exc_info=True)
            reason = self._group.failure or failure_reason(error)
            raise LoadFailed(f"vLLM does not serve this model in this slot: {reason}") from error
        config_s, engine_s, first_token_s = (round(end - begin, 3) for begin, end in pairwise(times_s))
        # The weights arrive and are copied within engine_s.
        log.info("vllm_started", config_s=config_s, engine_s=engine_s, first_token_s=first_token_s)
        return vllm

    def _engine_args(self, folder: str) -> EngineArgs:
        settings, pooling = self._settings, self._pooling
        context, budget = min(self._model.max_context_tokens, self._max_kv_tokens), max(settings.token_budget, 512)
        args = EngineArgs(
            model=folder,
            hf_config_path=folder,
            runner="pooling" if pooling else "generate",
            pooler_config=PoolerConfig(seq_pooling_type=_POOLINGS.get(pooling)) if pooling else None,
            language_model_only=isinstance(self._model, OpaqueModel) and self._model.takes_images,
            skip_tokenizer_init=True,
            generation_config="vllm",
            load_format=LOAD_FORMAT,
            model_loader_extra_config={"pack": self._pack, "choices": self._choices, "group": self._group},
            logits_processors=None if pooling else [SlotSampler],
            dtype=_DTYPES[self._manifest.dtype],
            max_model_len=context,
            tensor_parallel_size=self._group.num_devices,
            kv_cache_memory_bytes=settings.kv_pool_bytes // self._group.num_devices,
            # Of a model that pools, vLLM knows whether prompts can be cached.
            enable_prefix_caching=None if pooling and settings.prefix_cache else settings.prefix_cache,
            max_num_batched_tokens=budget,
            enforce_eager=not settings.vllm_graphs,  # compilation takes a minute
            gpu_memory_utilization=EngineArgs.gpu_memory_utilization if settings.device == "cpu" else _GPU_SHARE,
            async_scheduling=False,
            enable_lora=self._takes_adapters,
            max_lora_rank=settings.max_adapter_rank or 1,
            max_loras=settings.max_adapters,
            distributed_executor_backend=GroupExecutor,
            disable_log_stats=True,
        )
        if pooling and not args.create_model_config().is_chunked_prefill_supported:  # a step computes whole prompts
            args.max_num_batched_tokens = max(budget, context)
        return args

    def close(self) -> None:
        vllm, self._vllm = self._vllm, None
        self._is_broken = True
        self._group.begin_close()
        if vllm is not None:
            vllm.engine_core.shutdown()
        end_group()
        del vllm
        gc.collect()  # its parts refer to each other
        torch.cuda.empty_cache()  # does nothing without a GPU
        self._group.close()

    # Requests

    def prefill(self, group: GroupSpec) -> None:
        if group.pooling is not self._pooling:
            given = self._pooling.value if self._pooling else "no"
            raise InvalidRequest(f"vLLM computes {given} pooling of this model", field="pooling")
        if group.sampling.prompt_logprobs is not None:
            raise InvalidRequest(
                "vLLM reports no logprobs of prompts in this slot; set the model's engine to torchrelay",
                field="prompt_logprobs",
            )
        check_tokens(group, self._model.vocab_size)
        check_lengths(group, self._model.max_context_tokens)
        if (num_tokens := group.num_prompt_tokens + group.num_output_tokens) > self._max_kv_tokens:
            raise InvalidRequest(
                f"the request needs the KV of {num_tokens} tokens, the slot has that of {self._max_kv_tokens}"
            )
        if group.group_id in {each.group_id for each in self._groups()}:
            raise Conflict(f"{group.group_id} is already here")
        for spec in group.choices:
            choice = Choice(group, spec)
            self._choices[choice.request_id] = choice
            if self._vllm is not None:
                self._submit(self._vllm, choice)

    def adapter_reader(self, adapter_id: str, document: bytes, weights: bytes) -> VllmAdapterReader:
        if not self._settings.max_adapter_rank:
            raise InvalidRequest("slots of vLLM serve adapters up to max_adapter_rank, which is 0 here", field="model")
        if self._pooling:
            raise InvalidRequest("vLLM serves no adapters of a model of embeddings or scores", field="model")
        if not self._takes_adapters:
            architecture = self._manifest.architecture
            raise InvalidRequest(f"vLLM serves no adapters of the architecture {architecture}", field="model")
        return VllmAdapterReader(self._started, adapter_id, document, weights)

    @property
    def _takes_adapters(self) -> bool:
        is_on = bool(self._settings.max_adapter_rank) and self._pooling is None
        return is_on and self._manifest.architecture in known_models().adapters

    def _started(self) -> LLMEngine | None:
        if self._is_broken:
            raise Conflict("the instance was unloaded")
        return self._vllm

    def _groups(self) -> Iterator[GroupSpec]:
        return (choice.group for choice in self._choices.values())

    def _submit(self, vllm: LLMEngine, choice: Choice) -> None:
        prompt = {"prompt_token_ids": choice.prompt, "cache_salt": choice.group.tenant_id or "-"}
        adapter = choice.group.adapter
        lora = adapter.request if isinstance(adapter, VllmAdapter) else None
        params: VllmSampling | PoolingParams
        if self._pooling:
            manifest = self._manifest
            is_typed = self._pooling is Pooling.SCORE and takes_token_types(manifest.architecture, manifest.config)
            params = _pooling_params(self._pooling, choice.group.second_text if is_typed else 0)
        else:
            params = vllm_sampling(choice)
        vllm.add_request(choice.request_id, prompt, params, lora_request=lora)  # type: ignore[arg-type]

    def cancel(self, group_id: str, choice: int | None = None) -> None:
        ended = [
            each.request_id
            for each in self._choices.values()
            if each.group.group_id == group_id and choice in (None, each.spec.choice)
        ]
        for request_id in ended:
            del self._choices[request_id]
        if ended and self._vllm is not None:
            self._vllm.abort_request(ended)

    def cancel_soon(self, group_id: str, choice: int | None = None) -> None:
        self._cancels.append((group_id, choice))

    # Steps

    def has_work(self) -> bool:
        return not self._is_broken and (self._vllm is None or bool(self._choices))

    def max_sleep_s(self) -> float | None:
        return 0.0 if self.has_work() else None

    def step(self) -> StepResult:
        if self._vllm is None:
            self._vllm = self._build()
            for choice in self._choices.values():
                self._submit(self._vllm, choice)
            self._hooks.wake()
            return EMPTY_STEP
        while self._cancels:
            self.cancel(*self._cancels.popleft())
        expired = self._expire()
        if not self._choices:
            return StepResult((), (), 0, 0, 0.0, expired=expired)
        began_s = time.monotonic()
        outputs = self._vllm.step()
        result = self._result(outputs, time.monotonic() - began_s, expired)
        self._advance()
        return result

    def _expire(self) -> tuple[str, ...]:
        now = time.monotonic()
        late = {group.group_id for group in self._groups() if group.deadline_s is not None and group.deadline_s <= now}
        for group_id in late:
            self.cancel(group_id)
        return tuple(late)

    def _result(
        self, outputs: Sequence[RequestOutput | PoolingRequestOutput], step_s: float, expired: tuple[str, ...]
    ) -> StepResult:
        tokens: list[NewToken] = []
        embeddings: list[Embedding] = []
        prefilled: dict[str, None] = {}
        ended: list[str] = []  # by the sampler, which vLLM does not know yet
        num_prefilled = num_prefill_attended = num_decoding = num_decode_attended = 0
        for output in outputs:
            choice = self._choices.get(output.request_id)
            if choice is None or not (self._pooling or output.outputs[0].token_ids):
                continue
            context, num_cached, begins = len(choice.prompt), output.num_cached_tokens or 0, not choice.new
            if not begins:
                num_decoding += 1
                num_decode_attended += context + len(choice.new)
            else:
                prefilled[choice.group.group_id] = None
                num_prefilled += context - num_cached
                num_prefill_attended += attended_positions(num_cached, context)
            if isinstance(output, PoolingRequestOutput):
                embeddings.append(embedding_of(choice.group.group_id, output.outputs.data, num_cached))
                del self._choices[output.request_id]
                continue
            token = choice.accept()
            if begins:
                token = replace(token, num_cached=min(num_cached, choice.group.num_prompt_tokens))
            tokens.append(token)
            if token.finish is not None:
                del self._choices[output.request_id]
                if not output.finished:
                    ended.append(output.request_id)
        for choice in self._choices.values():
            choice.discard()
        if ended and self._vllm is not None:
            self._vllm.abort_request(ended)
        self._work = StepWork(num_prefilled, num_prefill_attended, num_decoding, num_decode_attended)
        return StepResult(
            tuple(tokens),
            tuple(prefilled),
            num_prefilled,
            num_decoding,
            step_s,
            self._work,
            embeddings=tuple(embeddings),
            expired=expired,
        )

    # Metrics

    def check_integrity(self) -> None:
        """Does nothing: vLLM owns the pages."""

    @property
    def num_pages(self) -> int:
        return 0 if self._vllm is None else int(self._vllm.vllm_config.cache_config.num_gpu_blocks or 0)

    @property
    def num_free_pages(self) -> int:
        """An estimate by the tokens of running choices; common prefixes count for each."""
        if self._vllm is None:
            return 0
        size = self._vllm.vllm_config.cache_config.block_size
        used = sum(-(-(len(choice.prompt) + len(choice.new)) // size) for choice in self._choices.values())
        return max(self.num_pages - int(used), 0)

    @property
    def running_work(self) -> StepWork:
        return self._work

    @property
    def is_recording(self) -> bool:
        return self._vllm is None

    @property
    def num_advances(self) -> int:
        # A step of vLLM tells nothing until it ends. On a GPU a thread that waits for ever may compute.
        tells_by_cpu = self._vllm is None or self._settings.device == "cpu"
        return self._advances + (self._computed.tenths + self._group.computed_tenths if tells_by_cpu else 0)
