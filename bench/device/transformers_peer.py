"""The peer of the GPU bench: transformers on the same device with a model of the same shape."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from bench.device.limits import synchronize


class Peer:
    """A model with random weights, and transformers' own attention (SDPA) and growing cache."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        import transformers

        numbers = {key: value for key, value in config.items() if key != "architectures"}
        settings = transformers.LlamaConfig(**numbers)
        kind: Any = transformers.LlamaForCausalLM
        with torch.device(device):
            self._model: Any = kind._from_config(settings, dtype=dtype, attn_implementation="sdpa").eval()
        self._device = device

    @torch.inference_mode()
    def decode_step_s(self, batch: int, num_prompt_tokens: int, num_steps: int) -> float:
        """Median time of a decode step of ``batch`` sequences."""
        tokens = torch.ones(batch, num_prompt_tokens, dtype=torch.int64, device=self._device)
        # Only the last logits, as in the engine, because all logits of 256 prompts would not fit.
        out = self._model(tokens, use_cache=True, logits_to_keep=1)
        times = []
        for _ in range(num_steps + 2):
            begin = time.perf_counter()
            chosen = out.logits[:, -1:].argmax(-1)
            chosen.tolist()
            out = self._model(chosen, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
            synchronize(self._device)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[2:])

    @torch.inference_mode()
    def prefill_s(self, num_tokens: int, num_runs: int = 3) -> float:
        tokens = torch.ones(1, num_tokens, dtype=torch.int64, device=self._device)
        times = []
        for _ in range(num_runs + 1):
            synchronize(self._device)
            begin = time.perf_counter()
            self._model(tokens, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
            times.append(time.perf_counter() - begin)
        return min(times[1:])
