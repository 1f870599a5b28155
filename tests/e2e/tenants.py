"""Tenants of small platforms, and what their answers are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import make_checkpoint, reference_model
from tests.support.completions import headers
from tests.support.http import http
from tests.support.platform import Platform

NO_WORKERS = ("--prefill-workers", "0", "--decode-workers", "0")
ONE_WORKER = (*NO_WORKERS, "--both-workers", "1")
SMALL = ("--arena-mb", "256", "--kv-pool-mb", "32", "--threads", "1")


@dataclass(slots=True)
class Tenant:
    """A tenant with a key, and models that are published once."""

    platform: Platform
    name: str
    key: str
    folder: Path
    _models: dict[str, str] = field(default_factory=dict)

    def checkpoint(self, family: str, tied: bool = False) -> Path:
        path = self.folder / f"{family}{'-tied' if tied else ''}"
        return path if path.exists() else make_checkpoint(path, family, tied=tied)

    def model(self, family: str = "llama", tied: bool = False) -> str:
        """The full name of a published tiny model of this family."""
        path = self.checkpoint(family, tied)
        if path.name not in self._models:
            self._models[path.name] = self.platform.upload(self.key, path, path.name)
        return self._models[path.name]

    def usage(self) -> dict[str, Any]:
        """Tokens and cost so far."""
        total: dict[str, Any] = http.get(f"{self.platform.http}/v1/usage", headers=headers(self.key)).json()["total"]
        return total


def reference(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """The greedy continuation that transformers computes."""
    generated = reference_model(folder).generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    return tokens
