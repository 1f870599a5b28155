"""The sampling parameters that pass unchanged from the public APIs through the gateway to the workers' engines."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final


def _ranged(default: float, low: float, high: float) -> float:
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSampling:
    """The table of these parameters: name, default and the range that the public APIs accept.

    Requests of both APIs, the workers' ``Sampling`` message and the engine's parameters have fields of the same names.
    """

    temperature: float = _ranged(1.0, 0.0, 2.0)  # (nearly) 0: greedy
    top_p: float = _ranged(1.0, 0.0, 1.0)  # 1: off; 0: the most likely token
    top_k: int = 0  # 0: off
    min_p: float = _ranged(0.0, 0.0, 1.0)  # 0: off
    presence_penalty: float = _ranged(0.0, -2.0, 2.0)  # subtracted from the logit of every token in the output so far
    frequency_penalty: float = _ranged(0.0, -2.0, 2.0)  # the same, per occurrence
    # Divides the positive logits, and multiplies the negative ones, of every token in the prompt and the output so far.
    repetition_penalty: float = _ranged(1.0, 0.01, 10.0)  # 1: off
    min_tokens: int = 0  # no token or stop string ends the output before it has so many tokens


RANGES: Final[dict[str, tuple[float, float]]] = {
    each.name: each.metadata["range"] for each in fields(SharedSampling) if each.metadata
}
SHARED_NAMES: Final = tuple(each.name for each in fields(SharedSampling))


def shared_sampling(source: object) -> dict[str, Any]:
    """The parameters of a request, a message or a ``SharedSampling``, without those that are None."""
    return {name: value for name in SHARED_NAMES if (value := getattr(source, name)) is not None}
