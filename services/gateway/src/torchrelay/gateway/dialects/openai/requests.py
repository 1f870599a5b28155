"""Request bodies of ``/v1/chat/completions`` and ``/v1/completions``, decoded and validated."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.bodies.body_decoder import OtherFields, decode
from torchrelay.gateway.bodies.contents import remark
from torchrelay.gateway.bodies.shared_body import (
    IGNORED,
    REASONS,
    REFUSED,
    BaseBody,
    Count,
    check_stream_options,
    format_of,
    require,
    shared_params,
)
from torchrelay.gateway.bodies.tools import CalledTool, called_tools, chosen_tools, declared_tools
from torchrelay.gateway.inference.core import ChatMessage, GenerateParams
from torchrelay.gateway.inference.parameter_ranges import (
    MAX_COMPLETION_LOGPROBS,
    MAX_PROMPTS,
    check_continued,
    check_num_messages,
    check_role,
    check_template_kwargs,
    check_top_logprobs,
)

NumTokens = Annotated[int, Meta(ge=0)]  # 0 only where the prompt's tokens are shown


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessageBody(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatBody(BaseBody, kw_only=True):
    messages: list[ChatMessageBody]
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(BaseBody, kw_only=True):
    max_tokens: NumTokens | None = None
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: Count | None = None
    echo: bool | None = None


CHAT_FIELDS: Final = OtherFields(
    IGNORED, REFUSED | {"chat_template": None, "documents": [], "functions": [], "function_call": "none"}, REASONS
)
COMPLETION_FIELDS: Final = OtherFields(
    IGNORED,
    REFUSED | {"suffix": ""},
    {
        **REASONS,
        "suffix": "suffix is not supported yet: only models with fill-in-the-middle tokens can write what precedes it;"
        " for such a model, put these tokens into the prompt",
    },
)

_CHAT: msgspec.json.Decoder[ChatBody] = msgspec.json.Decoder(ChatBody)
_COMPLETION: msgspec.json.Decoder[CompletionBody] = msgspec.json.Decoder(CompletionBody)


def decode_chat(encoded: bytes | bytearray) -> ChatBody:
    """Raises ``InvalidRequest`` naming the faulty field."""
    body = decode(_CHAT, encoded, CHAT_FIELDS)
    if not body.tools:
        require(
            "tools", tool_choice=body.tool_choice not in (None, "none"), parallel_tool_calls=body.parallel_tool_calls
        )
    if body.continue_final_message and body.add_generation_prompt:
        message = "add_generation_prompt must be false where continue_final_message is true"
        raise InvalidRequest(message, field="add_generation_prompt")
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise InvalidRequest("add_generation_prompt is not supported yet", field="add_generation_prompt")
    check_stream_options(body)
    return body


def decode_completion(encoded: bytes | bytearray) -> CompletionBody:
    """Raises ``InvalidRequest`` naming the faulty field."""
    body = decode(_COMPLETION, encoded, COMPLETION_FIELDS)
    check_stream_options(body)
    if body.max_tokens == 0 and not body.echo:
        _require_scores(body, "max_tokens", "echo or prompt_logprobs")
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise InvalidRequest(f"best_of must be at least n ({body.n or 1}), not {body.best_of}", field="best_of")
    if body.stream and chooses_best(body):
        raise InvalidRequest("best_of above n is not possible in a stream", field="best_of")
    return body


def chooses_best(body: CompletionBody) -> bool:
    """Whether more choices are computed than returned."""
    return (body.best_of or 1) > (body.n or 1)


def params_of_chat(body: ChatBody) -> GenerateParams:
    """Raises ``InvalidRequest``."""
    check_num_messages(len(body.messages))
    max_tokens, field = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        max_tokens, field = body.max_completion_tokens, "max_completion_tokens"
    if max_tokens == 0:
        _require_scores(body, field, "prompt_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs requires logprobs to be true", field="logprobs")
    left_out: set[str] = set()
    messages = tuple(_message(message, index, left_out) for index, message in enumerate(body.messages))
    format_ = format_of(body)
    if body.continue_final_message:
        check_continued(messages[-1], format_)
    tools, format_ = chosen_tools(declared_tools(body.tools or []), body.tool_choice, body.parallel_tool_calls, format_)
    return shared_params(
        body,
        messages=messages,
        continues_last=bool(body.continue_final_message),
        left_out=tuple(sorted(left_out)),
        tools=tools,
        template_kwargs=check_template_kwargs(body.chat_template_kwargs or {}),
        answer_format=format_,
        max_tokens=max_tokens,
        max_tokens_field=field,
        top_logprobs=check_top_logprobs(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=_prompt_logprobs(body),
    )


def _require_scores(body: ChatBody | CompletionBody, field: str, what: str) -> None:
    """Raises ``InvalidRequest`` for an answer without tokens that shows nothing of its prompt."""
    if body.prompt_logprobs is None:
        raise InvalidRequest(f"{field} must be at least 1, not 0, without {what}", field=field)


def _prompt_logprobs(body: ChatBody | CompletionBody) -> int | None:
    if body.prompt_logprobs is None:
        return None
    if body.stream:
        raise InvalidRequest("prompt_logprobs are not possible in a stream", field="prompt_logprobs")
    return check_top_logprobs(body.prompt_logprobs, field="prompt_logprobs")


def one_per_prompt(body: CompletionBody) -> list[CompletionBody]:
    """The body itself, or one for each of its prompts. Raises ``InvalidRequest``."""
    prompts = body.prompt
    if isinstance(prompts, str) or len(prompts) < 2 or isinstance(prompts[0], int):
        return [body]
    if len(prompts) > MAX_PROMPTS:
        message = f"prompt has {len(prompts):,} prompts; at most {MAX_PROMPTS} are allowed"
        raise InvalidRequest(message, field="prompt")
    if len(set(map(type, prompts))) > 1:
        raise _malformed_prompt()
    return [msgspec.structs.replace(body, prompt=each) for each in prompts]


def _malformed_prompt() -> InvalidRequest:
    return InvalidRequest("prompt must be a text, a list of token ids, or a list of either", field="prompt")


def params_of_completion(body: CompletionBody) -> GenerateParams:
    """The parameters of a body with one prompt. Raises ``InvalidRequest``."""
    fields: dict[str, Any] = {"max_tokens": body.max_tokens, "echo": bool(body.echo), "answer_format": format_of(body)}
    fields["prompt_logprobs"] = _prompt_logprobs(body)
    if chooses_best(body):  # by their logprobs
        fields |= {"num_choices": body.best_of, "num_choices_field": "best_of", "top_logprobs": 0}
    if body.logprobs is not None:
        fields["top_logprobs"] = check_top_logprobs(body.logprobs, MAX_COMPLETION_LOGPROBS, "logprobs")
        if body.echo:
            if body.stream:
                raise InvalidRequest("logprobs of an echoed prompt are not possible in a stream", field="logprobs")
            fields["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    prompt: Any = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return shared_params(body, text=prompt, **fields)
    if not set(map(type, prompt)) <= {int}:
        raise _malformed_prompt()
    if prompt and not 0 <= min(prompt) <= max(prompt) < 1 << 32:
        raise InvalidRequest("token ids must be non-negative and below 2**32", field="prompt")
    return shared_params(body, token_ids=prompt, **fields)


def _message(message: ChatMessageBody, index: int, left_out: set[str]) -> ChatMessage:
    check_role(message.role, index)
    content = message.content
    if content in (None, []) and message.role not in ("assistant", "tool", "function"):
        raise InvalidRequest(f"messages[{index}] of role {message.role} must have content", field="messages")
    if isinstance(content, list):
        content = "\n".join(_part_text(part, left_out) for part in content)
    plain: ChatMessage = {"role": message.role, "content": content or ""}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = called_tools(message.tool_calls)
    if reasoning := message.reasoning_content or message.reasoning:
        plain["reasoning_content"] = reasoning  # as templates that take it call it
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _part_text(part: ContentPart, left_out: set[str]) -> str:
    text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
    if text is None and (text := remark(part.type, left_out)) is None:
        raise InvalidRequest(f"content of type {part.type[:40]!r} is not supported yet", field="messages")
    return text
