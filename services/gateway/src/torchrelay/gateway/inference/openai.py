"""What OpenAI clients send: request bodies of ``/v1/chat/completions`` and ``/v1/completions``, decoded and checked.

Fields this version does not know are ignored, except those that would change the answer and those that look like a slip
of the pen (``max_token``): they are refused by name rather than passed over.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.inference.core import Ask, ChatMessage
from torchrelay.gateway.inference.misspelt import misspelt

MAX_STOPS = 4
MAX_STOP_CHARS = 512
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Count = Annotated[int, Meta(ge=1)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Part(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None


class Body(msgspec.Struct, kw_only=True):
    """The fields both paths share."""

    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    # Refused unless they ask for nothing.
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(Body, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Count | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(Body, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


B = TypeVar("B", bound=Body)
_CHAT: msgspec.json.Decoder[ChatBody] = msgspec.json.Decoder(ChatBody)
_COMPLETION: msgspec.json.Decoder[CompletionBody] = msgspec.json.Decoder(CompletionBody)
_NAMES: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PATH = re.compile(r" - at `\$\.?(\w*)[^`]*`$")
_FIELD = re.compile(r"required field `(\w+)`")


def decode_chat(encoded: bytes) -> ChatBody:
    """Raises ``InvalidRequest`` naming the field that is wrong."""
    body = _decode(_CHAT, encoded)
    response_format = body.response_format or {}
    _refuse(
        _shared_refusals(body)
        | {
            "tools": bool(body.tools),
            "tool_choice": body.tool_choice not in (None, "none", "auto"),
            "functions": bool(body.functions),
            "response_format": response_format.get("type", "text") != "text",
            "logprobs": bool(body.logprobs),
            "top_logprobs": bool(body.top_logprobs),
        }
    )
    return body


def decode_completion(encoded: bytes) -> CompletionBody:
    """Raises ``InvalidRequest`` naming the field that is wrong."""
    body = _decode(_COMPLETION, encoded)
    _refuse(
        _shared_refusals(body)
        | {
            "logprobs": body.logprobs is not None,
            "best_of": body.best_of is not None and body.best_of > 1,
            "echo": bool(body.echo),
            "suffix": bool(body.suffix),
        }
    )
    return body


def ask_of_chat(body: ChatBody) -> Ask:
    """Raises ``InvalidRequest``."""
    if not body.messages:
        raise InvalidRequest("there is no message", field="messages")
    max_tokens, field = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        max_tokens, field = body.max_completion_tokens, "max_completion_tokens"
    messages = tuple(_message(message, place) for place, message in enumerate(body.messages))
    return _ask(body, messages=messages, max_tokens=max_tokens, max_tokens_field=field)


def ask_of_completion(body: CompletionBody) -> Ask:
    """Raises ``InvalidRequest``."""
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = list(prompt[0]) if isinstance(prompt[0], list) else prompt[0]
    if isinstance(prompt, str):
        return _ask(body, text=prompt, max_tokens=body.max_tokens)
    token_ids = tuple(token for token in prompt if isinstance(token, int))
    if len(token_ids) != len(prompt):
        raise InvalidRequest("one prompt per request: more are not supported yet", field="prompt")
    if not all(0 <= token < 1 << 32 for token in token_ids):
        raise InvalidRequest("a token id is a number from 0", field="prompt")
    return _ask(body, token_ids=token_ids, max_tokens=body.max_tokens)


def _ask(body: Body, **fields: Any) -> Ask:
    if body.seed is not None and not -(1 << 63) <= body.seed < 1 << 64:
        raise InvalidRequest("a seed has 64 bits", field="seed")
    return Ask(
        model=body.model,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        seed=None if body.seed is None else body.seed % (1 << 64),
        num_choices=body.n or 1,
        stop=check_stops([body.stop] if isinstance(body.stop, str) else body.stop or []),
        ignore_eos=bool(body.ignore_eos),
        **fields,
    )


def check_stops(stops: list[str]) -> tuple[str, ...]:
    """Raises ``InvalidRequest``."""
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings", field="stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise InvalidRequest(f"a stop string has 1 to {MAX_STOP_CHARS} characters", field="stop")
    return tuple(stops)


def check_role(role: str, place: int) -> None:
    """Raises ``InvalidRequest`` for a message by nobody: most templates would take it for a user's."""
    if role not in ROLES:
        said = f"messages[{place}].role is {role[:40]!r}: it is one of {', '.join(ROLES)}"
        raise InvalidRequest(said, field="messages")


def _message(message: Message, place: int) -> ChatMessage:
    check_role(message.role, place)
    content = message.content
    if content in (None, []) and message.role != "assistant":
        raise InvalidRequest(f"messages[{place}] of role {message.role} has no content", field="messages")
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise InvalidRequest(f"content of type {part.type!r} is not supported yet", field="messages")
        content = "".join(part.text or "" for part in content)
    plain = {"role": message.role, "content": content or ""}
    return plain if message.name is None else {**plain, "name": message.name}


def _shared_refusals(body: Body) -> dict[str, bool]:
    return {
        "logit_bias": bool(body.logit_bias),
        "presence_penalty": bool(body.presence_penalty),
        "frequency_penalty": bool(body.frequency_penalty),
    }


def _refuse(refusals: dict[str, bool]) -> None:
    for name, is_asked in refusals.items():
        if is_asked:
            raise InvalidRequest(f"{name} is not supported yet", field=name)


def _decode(decoder: msgspec.json.Decoder[B], encoded: bytes) -> B:
    try:
        body = decoder.decode(encoded)
        if slip := misspelt(_NAMES.decode(encoded).keys(), type(body).__struct_fields__):
            raise InvalidRequest(f"{slip[0]} is not known: is {slip[1]} meant?", field=slip[0])
        return body
    except msgspec.ValidationError as error:
        message = str(error)
        path, field = _PATH.search(message), _FIELD.search(message)
        name = path[1] if path and path[1] else field[1] if field else None
        raise InvalidRequest(f"{name}: {_PATH.sub('', message)}" if name else message, field=name) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
