"""Request bodies of ``/v1/responses``, decoded and validated.

The fields that chat completions have too, and OpenAI's Responses API does not, have the meaning that they have there
(``seed``, ``stop``, ``top_k`` and others). Unknown fields are ignored, except likely typos.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.bodies.answer_formats import JsonSchemaFormat, ResponseFormat, of_response_format
from torchrelay.gateway.bodies.body_decoder import OtherFields, decode
from torchrelay.gateway.bodies.shared_body import (
    IGNORED,
    REFUSED,
    BaseBody,
    Count,
    check_stream_options,
    format_of,
    shared_params,
)
from torchrelay.gateway.bodies.tools import chosen_tools
from torchrelay.gateway.dialects.responses.input_items import Item, messages_of
from torchrelay.gateway.dialects.responses.tools import Tools, chat_choice, tools_of
from torchrelay.gateway.inference.answers.answer_format import AnswerFormat
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.inference.parameter_ranges import check_template_kwargs, check_top_logprobs

_MAX_PAIRS: Final = 16  # of metadata, as OpenAI
_MAX_KEY_CHARS: Final = 64
_MAX_VALUE_CHARS: Final = 512
_LOGPROBS: Final = "message.output_text.logprobs"
_EMPTY: Final[tuple[Any, ...]] = (False, 0, "", [], {})


class TextFormat(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseBody(BaseBody, kw_only=True):
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    max_tool_calls: Count | None = None
    truncation: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_REASONS: Final = {
    "background": "background responses are not supported, since none are stored; use stream: true",
    "conversation": "conversation is not supported, since none are stored; send all of its items as input",
    "previous_response_id": "previous_response_id is not supported, since responses are not stored; send the items of "
    "the conversation so far as input",
    "prompt": "prompt is not supported, since none are stored; send instructions and input",
    "context_management": "context_management is not supported; shorten the input",
    "moderation": "moderation is not supported",
    "max_tokens": "max_tokens is named max_output_tokens here",
    "max_completion_tokens": "max_completion_tokens is named max_output_tokens here",
    "response_format": "response_format is named text.format here",
    "functions": "functions are named tools here",
    "logprobs": f'logprobs are requested by include: ["{_LOGPROBS}"] here',
}

FIELDS: Final = OtherFields(
    IGNORED,
    {
        **REFUSED,
        **dict.fromkeys((*_REASONS, "chat_template", "documents"), _EMPTY),
        **{"n": 1, "return_token_ids": False, "prompt_logprobs": None},
        **{"continue_final_message": False, "add_generation_prompt": True},
    },
    _REASONS,
)
_DECODER: msgspec.json.Decoder[ResponseBody] = msgspec.json.Decoder(ResponseBody)


def decode_body(encoded: bytes | bytearray) -> ResponseBody:
    """Raises ``InvalidRequest`` naming the faulty field."""
    body = decode(_DECODER, encoded, FIELDS)
    if body.truncation not in (None, "auto", "disabled"):
        message = f"truncation must be auto or disabled, not {body.truncation[:40]!r}"
        raise InvalidRequest(message, field="truncation")
    check_stream_options(body)
    _check_metadata(body.metadata or {})
    return body


def params_of(body: ResponseBody) -> tuple[GenerateParams, Tools]:
    """Raises ``InvalidRequest``."""
    tools = tools_of(body.tools or [])
    shown, format_ = chosen_tools(
        tuple(tools.functions), chat_choice(body.tool_choice, tools), body.parallel_tool_calls, _format(body)
    )
    wants_logprobs = bool(body.top_logprobs) or _LOGPROBS in (body.include or ())
    messages, left_out = messages_of(body.input, body.instructions)
    params = shared_params(
        body,
        messages=messages,
        left_out=left_out,
        messages_field="input",
        tools=shown,
        answer_format=format_,
        template_kwargs=check_template_kwargs(body.chat_template_kwargs or {}),
        max_tokens=body.max_output_tokens,
        max_tokens_field="max_output_tokens",
        top_logprobs=check_top_logprobs(body.top_logprobs or 0) if wants_logprobs else None,
    )
    return params, tools


def _format(body: ResponseBody) -> AnswerFormat | None:
    asked = format_of(body)
    if body.text is None or (declared := body.text.format) is None:
        return asked
    schema = None
    if declared.schema is not None:
        schema = JsonSchemaFormat(declared.name or "", declared.schema, declared.strict)
    for format_ in of_response_format(ResponseFormat(declared.type, schema, declared.schema), "text.format"):
        if asked is not None:
            message = f"an answer has one format: text.format and {asked.field} are given together"
            raise InvalidRequest(message, field=asked.field)
        return format_
    return asked


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > _MAX_PAIRS:
        message = f"metadata has {len(metadata)} entries; at most {_MAX_PAIRS} are allowed"
        raise InvalidRequest(message, field="metadata")
    for key, value in metadata.items():
        if len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS:
            message = (
                f"metadata may have keys of {_MAX_KEY_CHARS} and values of {_MAX_VALUE_CHARS} characters at most; "
                f"those of {key[:40]!r} are longer"
            )
            raise InvalidRequest(message, field="metadata")
