"""Bodies of the requests of a load."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

_FIRST_TOKEN = 256  # tokens below it are often special, or single bytes


def completion_body(model: str, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """A streamed completion of exactly ``num_tokens``, with an event for each."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


@dataclass(slots=True)
class Prompts:
    """Random prompts of a model that have ``num_shared`` first tokens in common, and no others: a cache of prefixes
    helps by these alone, also in the next run.
    """

    vocab_size: int
    num_shared: int = 0
    random_: random.Random = field(default_factory=random.Random)
    _shared: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._shared = self._drawn(self.num_shared)

    def prompt(self, num_tokens: int) -> list[int]:
        shared = self._shared[:num_tokens]
        return shared + self._drawn(num_tokens - len(shared))

    def _drawn(self, num_tokens: int) -> list[int]:
        return self.random_.choices(range(min(_FIRST_TOKEN, self.vocab_size // 2), self.vocab_size), k=num_tokens)
