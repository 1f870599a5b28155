"""A checkpoint for embeddings, and the vectors that transformers computes with it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import torch

from tests.support.checkpoints import declare_embeddings, make_checkpoint, make_headless
from tests.support.platform import Platform


def make_embedder(folder: Path) -> tuple[Path, Path]:
    """A model as sentence-transformers saves it, without its head, and the whole model for the reference."""
    whole = make_checkpoint(folder / "whole", "qwen3")
    return declare_embeddings(make_headless(shutil.copytree(whole, folder / "embedder"))), whole


@torch.no_grad()
def vector(model: Any, prompt: Sequence[int]) -> list[float]:
    states = model.model(torch.tensor([list(prompt)])).last_hidden_state[0, -1]
    elements: list[float] = (states / states.norm()).tolist()
    return elements


def client_of(platform: Platform, key: str) -> openai.OpenAI:
    return openai.OpenAI(api_key=key, base_url=f"{platform.http}/v1", max_retries=0, timeout=60)
