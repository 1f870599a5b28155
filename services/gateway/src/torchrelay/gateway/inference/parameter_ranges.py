"""Ranges of request parameters, for REST and gRPC alike: OpenAI's, and those of our extensions.

Every check raises ``InvalidRequest`` naming the field and its range. NaN is in no range.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import msgspec

from torchrelay.common.errors import InvalidRequest
from torchrelay.common.sampling import RANGES
from torchrelay.gateway.core import ServiceClass
from torchrelay.gateway.inference.answers.answer_format import AnswerFormat

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES: Final = 32_768  # each costs microseconds on the event loop
MAX_PROMPTS: Final = 32  # of one request; clients that send batches send 20 by default
MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 512
MAX_STOP_TOKENS: Final = 64
MAX_BIASES: Final = 1024
MAX_TOP_LOGPROBS: Final = 20
MAX_COMPLETION_LOGPROBS: Final = 5
MAX_TEMPLATE_KWARGS: Final = 32
MAX_TEMPLATE_KWARGS_BYTES: Final = 16 << 10
# Variables that chat templates get from the rest of the request, and arguments of those who render them.
_RESERVED_KWARGS: Final = frozenset(
    ("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message")
) | frozenset(("chat_template", "tokenize"))
_BIAS: Final = (-100.0, 100.0)
_SERVICE_CLASSES: Final = {
    "auto": None,
    "default": ServiceClass.STANDARD,
    "flex": ServiceClass.BATCH,
    "priority": ServiceClass.INTERACTIVE,
    "scale": ServiceClass.STANDARD,  # capacity bought in advance, which nobody has here
}


def check_num_messages(count: int) -> None:
    if not 0 < count <= MAX_MESSAGES:
        wrong = "must not be empty" if not count else f"has {count:,} entries; at most {MAX_MESSAGES:,} are allowed"
        raise InvalidRequest(f"messages {wrong}", field="messages")


def is_continuable(message: Mapping[str, Any]) -> bool:
    """Whether an answer can continue the message."""
    return bool(message["role"] == "assistant" and message["content"].strip() and "tool_calls" not in message)


def check_continued(message: Mapping[str, Any], format_: AnswerFormat | None) -> None:
    """Raises ``InvalidRequest`` unless an answer in this format can continue the last message."""
    if format_ is not None and (format_.content or format_.grammar):
        wrong = f"{format_.field} is the format of a whole answer; it cannot be combined with an answer's beginning"
        raise InvalidRequest(wrong, field=format_.field)
    if not is_continuable(message):
        wrong = (
            "the last of messages must be the assistant's, with text and without calls, for an answer to continue it"
        )
        raise InvalidRequest(wrong, field="messages")


def check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    field = "chat_template_kwargs"
    if len(kwargs) > MAX_TEMPLATE_KWARGS or len(msgspec.json.encode(kwargs)) > MAX_TEMPLATE_KWARGS_BYTES:
        message = f"{field} may have at most {MAX_TEMPLATE_KWARGS} entries, and {MAX_TEMPLATE_KWARGS_BYTES:,} bytes"
        raise InvalidRequest(message, field=field)
    if reserved := sorted(_RESERVED_KWARGS & kwargs.keys()):
        raise InvalidRequest(f"{field} must not contain {reserved[0]}, which is set otherwise", field=field)
    return kwargs


def check_role(role: str, index: int) -> None:
    """Rejects unknown roles, which most chat templates would treat as the user's."""
    if role not in ROLES:
        message = f"messages[{index}].role must be one of {', '.join(ROLES)}, not {role[:40]!r}"
        raise InvalidRequest(message, field="messages")


def check_sampling(
    sampling: Mapping[str, Any],
    biases: Mapping[int, float],
    stops: Collection[str],
    stop_tokens: Collection[int],
    service_tier: str,
    stop_field: str = "stop",
) -> dict[str, Any]:
    """Checks the parameters that both APIs share. Returns all except ``sampling``, as ``GenerateParams`` has them."""
    _check_ranges(sampling)
    return {
        "logit_bias": _check_biases(biases),
        "stop": _check_stops(stops, stop_field),
        "stop_token_ids": _check_stop_tokens(stop_tokens),
        "service_class": _class_of(service_tier),
    }


def _check_ranges(values: Mapping[str, Any]) -> None:
    """Checks those of a request's parameters that have a range in the table of sampling parameters."""
    for name, (low, high) in RANGES.items():
        value = values.get(name)
        if value is not None and not low <= value <= high:
            raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, not {value:g}", field=name)


def _check_biases(biases: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    """The biases, sorted by token."""
    _check_num_biases(len(biases))
    low, high = _BIAS
    for token, bias in biases.items():
        if not low <= bias <= high:
            message = f"logit_bias of token {token} must be between {low:g} and {high:g}, not {bias:g}"
            raise InvalidRequest(message, field="logit_bias")
    return tuple(sorted(biases.items()))


def bias_tokens(biases: Mapping[str, float]) -> dict[int, float]:
    """A JSON logit_bias, keyed by token id."""
    _check_num_biases(len(biases))
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise InvalidRequest(f"logit_bias: {name[:40]!r} is not a token id", field="logit_bias")
    return {int(name): bias for name, bias in biases.items()}


def _check_num_biases(count: int) -> None:
    if count > MAX_BIASES:
        raise InvalidRequest(f"logit_bias has {count} entries; at most {MAX_BIASES} are allowed", field="logit_bias")


def check_top_logprobs(count: int, most: int = MAX_TOP_LOGPROBS, field: str = "top_logprobs") -> int:
    if not 0 <= count <= most:
        raise InvalidRequest(f"{field} must be between 0 and {most}, not {count}", field=field)
    return count


def _check_stops(stops: Collection[str], field: str) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"{field} has {len(stops)} strings; at most {MAX_STOPS} are allowed", field=field)
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise InvalidRequest(f"strings of {field} must have 1 to {MAX_STOP_CHARS} characters", field=field)
    return tuple(stops)


def _check_stop_tokens(tokens: Collection[int]) -> tuple[int, ...]:
    if len(tokens) > MAX_STOP_TOKENS:
        message = f"stop_token_ids has {len(tokens)} tokens; at most {MAX_STOP_TOKENS} are allowed"
        raise InvalidRequest(message, field="stop_token_ids")
    return tuple(dict.fromkeys(tokens))


def _class_of(tier: str) -> ServiceClass | None:
    """The class that OpenAI's ``service_tier`` names; ``None`` for "auto": that of the caller."""
    if tier not in _SERVICE_CLASSES:
        message = f"service_tier must be one of {', '.join(_SERVICE_CLASSES)}, not {tier[:40]!r}"
        raise InvalidRequest(message, field="service_tier")
    return _SERVICE_CLASSES[tier]


def check_vocabulary(tokens: Iterable[int], vocab_size: int, field: str) -> None:
    """Checks that the model has every token."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            message = f"{field} contains token {token}; the model's token ids are 0 to {vocab_size - 1}"
            raise InvalidRequest(message, field=field)
