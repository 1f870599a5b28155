"""The fields that the bodies of several dialects share, and the parameters of a request that they give.

Unknown fields are ignored, except those that would change the answer and likely typos (``max_token``), which are
rejected by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.sampling import shared_sampling
from torchrelay.gateway.bodies.answer_formats import ResponseFormat, StructuredOutputs, answer_format
from torchrelay.gateway.inference.answers.answer_format import AnswerFormat
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.inference.parameter_ranges import bias_tokens, check_sampling

Count = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class BaseBody(msgspec.Struct, kw_only=True):
    """The fields that completions, chats, Responses and the Open Inference Protocol share."""

    model: str
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    logit_bias: dict[str, float] | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    service_tier: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


# Fields that would change the answer and are not supported, and the values, besides null, that leave it unchanged.
REFUSED: Final[dict[str, Any]] = {
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "truncate_prompt_tokens": None,
    "allowed_token_ids": [],
    "bad_words": [],
    "use_beam_search": False,
    "top_a": 0,
    "typical_p": 1,
    "tfs_z": 1,
    "mirostat": 0,
    "dry_multiplier": 0,
    "xtc_probability": 0,
    "no_repeat_ngram_size": 0,
    "length_penalty": 1,
    "early_stopping": False,
    "regex": None,
    "ebnf": None,
    "grammar": None,
    "json_schema": None,
    "logits_processors": [],
    "custom_logit_processor": None,
    "lora_path": None,
    "plugins": [],
    "web_search_options": None,
    "modalities": ["text"],
    "audio": None,
    "moderation": None,
}

# What to use instead of some of them.
REASONS: Final = {
    **{name: f"{name} is not supported yet: use structured_outputs.{name}" for name in ("grammar", "regex")},
    "json_schema": "json_schema is not supported yet: use response_format",
}

# Fields that other servers and routers know and that leave the answer of a single platform as it is: they name the
# caller or its application, or are hints for caches, thinking models and a choice between providers.
IGNORED: Final = frozenset(
    (
        *("user", "metadata", "store", "safety_identifier", "client_metadata", "session_id", "trace", "request_id"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_salt", "cache_prompt"),
        *("id_slot", "priority"),
        *("prediction", "reasoning_effort", "reasoning", "verbosity", "usage"),
        *("provider", "models", "route", "transforms", "preset"),
    )
)


def format_of(body: BaseBody) -> AnswerFormat | None:
    """The format that the answer must follow. Raises ``InvalidRequest``."""
    guided = StructuredOutputs(body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    return answer_format(body.response_format, body.structured_outputs, guided)


def shared_params(body: BaseBody, **fields: Any) -> GenerateParams:
    """The parameters of a body: ``fields``, and those that all paths share. Raises ``InvalidRequest``."""
    if body.seed is not None and not -(1 << 63) <= body.seed < 1 << 63:
        raise InvalidRequest(f"seed must be between -2**63 and 2**63 - 1, not {body.seed}", field="seed")
    sampling = shared_sampling(body)
    fields |= check_sampling(
        sampling,
        bias_tokens(body.logit_bias or {}),
        [body.stop] if isinstance(body.stop, str) else body.stop or [],
        body.stop_token_ids or [],
        "auto" if body.service_tier is None else body.service_tier,
    )
    return GenerateParams(
        model=body.model,
        **{**sampling, "top_k": max(body.top_k or 0, 0)},  # -1: off, as in vLLM
        seed=None if body.seed is None else body.seed % (1 << 64),
        ignore_eos=bool(body.ignore_eos),
        add_special_tokens=body.add_special_tokens,
        **{"num_choices": body.n or 1, **fields},
    )


def require(name: str, **others: object) -> None:
    """Raises ``InvalidRequest`` for the first of ``others``, which are allowed only with the field ``name``."""
    for other, is_given in others.items():
        if is_given:
            raise InvalidRequest(f"{other} is allowed only with {name}", field=other)


def check_stream_options(body: BaseBody) -> None:
    """Raises ``InvalidRequest`` for options of a stream without a stream."""
    if not body.stream:
        require("stream: true", stream_options=body.stream_options is not None)
