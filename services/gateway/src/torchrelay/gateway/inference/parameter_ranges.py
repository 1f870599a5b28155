"""What a request may ask of the sampler, whichever door it comes by: OpenAI's ranges, and those of our extensions.

Every check raises ``InvalidRequest``, which names the field and says what it may be. NaN is in no range.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from torchrelay.common.errors import InvalidRequest

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 512
MAX_STOP_TOKENS: Final = 64
MAX_BIASES: Final = 1024
MAX_TOP_LOGPROBS: Final = 20
MAX_COMPLETION_LOGPROBS: Final = 5
_RANGES: Final = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_BIAS: Final = (-100.0, 100.0)


def check_role(role: str, place: int) -> None:
    """Raises ``InvalidRequest`` for a message by nobody: most templates would take it for a user's."""
    if role not in ROLES:
        said = f"messages[{place}].role is {role[:40]!r}: it is one of {', '.join(ROLES)}"
        raise InvalidRequest(said, field="messages")


def check_ranges(values: Mapping[str, float | None]) -> None:
    """Of the numbers that shape the distribution, by name; None is one that was not given."""
    for name, value in values.items():
        low, high = _RANGES[name]
        if value is None or (low <= value <= high and (value > 0 or name != "top_p")):
            continue
        wanted = f"more than 0 and at most {high:g}" if name == "top_p" else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{name} is {value:g}: it must be {wanted}", field=name)


def check_biases(biases: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    """In the order of the tokens."""
    _check_num_biases(len(biases))
    low, high = _BIAS
    for token, bias in biases.items():
        if not low <= bias <= high:
            said = f"logit_bias of token {token} is {bias:g}: it must be from {low:g} to {high:g}"
            raise InvalidRequest(said, field="logit_bias")
    return tuple(sorted(biases.items()))


def bias_tokens(biases: Mapping[str, float]) -> dict[int, float]:
    """By the token that each key of a JSON logit_bias means."""
    _check_num_biases(len(biases))
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise InvalidRequest(f"logit_bias: {name[:40]!r} is not a token id", field="logit_bias")
    return {int(name): bias for name, bias in biases.items()}


def _check_num_biases(count: int) -> None:
    if count > MAX_BIASES:
        raise InvalidRequest(f"logit_bias has {count} tokens: at most {MAX_BIASES}", field="logit_bias")


def check_top_logprobs(count: int, most: int = MAX_TOP_LOGPROBS, field: str = "top_logprobs") -> int:
    if not 0 <= count <= most:
        raise InvalidRequest(f"{field} is {count}: it must be from 0 to {most}", field=field)
    return count


def check_stops(stops: Collection[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings: at most {MAX_STOPS}", field="stop")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise InvalidRequest(f"a stop string has 1 to {MAX_STOP_CHARS} characters", field="stop")
    return tuple(stops)


def check_stop_tokens(tokens: Collection[int]) -> tuple[int, ...]:
    if len(tokens) > MAX_STOP_TOKENS:
        said = f"stop_token_ids has {len(tokens)} tokens: at most {MAX_STOP_TOKENS}"
        raise InvalidRequest(said, field="stop_token_ids")
    return tuple(dict.fromkeys(tokens))


def check_vocabulary(tokens: Iterable[int], vocab_size: int, field: str) -> None:
    """Every token must be one of the model's."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{field} names token {token}: the model's are 0 to {vocab_size - 1}", field=field)
