"""Names of what holds an instance back, and what its operator can do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# By the names of ``EngineProfile.bottleneck``.
ADVICE: Final[Mapping[str, str]] = {
    "compute": "Arithmetic takes the time: use a faster device, or more instances.",
    "memory": "Decode steps take as long as reading the weights: send more requests at once, or use int8.",
    "kv_transfer": "Keys and values move between workers: let one worker play both roles, or use a faster link.",
    "io_wait": "Prompts wait for layers that still arrive: keep a copy in more hosts' memory, or set a minimum.",
    "scheduling": "The engine's own work takes the time: its model is small; penalties and logprobs add to it.",
    "loading": "No layer has arrived yet: keep a copy in more hosts' memory, or set a minimum of instances.",
}
