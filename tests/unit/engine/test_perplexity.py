"""A bf16 model that has learnt a text has the same perplexity on it as with transformers.

The text is the opening of Lewis Carroll's Alice's Adventures in Wonderland (1865), byte by byte; the model is the tiny
Llama of these tests after a few steps of training on it, so that its predictions mean something.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.checkpoints import make_checkpoint, reference_model
from tests.unit.engine.harness import Model, last_logits
from torchrelay.engine.weights.reorderer import OneDnnMatrix, Reorderer

TEXT = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, 'and "
    "what is the use of a book,' thought Alice 'without pictures or conversations?'"
)
NUM_STEPS = 12  # with more it would know the text by heart, and no difference would show
KINDS = {"arena": torch.Tensor, "reordered": OneDnnMatrix}
ON_THIS_CPU = ["arena", *(["reordered"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return list(TEXT.encode())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tokens: list[int]) -> Model:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("alice"), "llama")
    model, ids = reference_model(folder).train(), torch.tensor([tokens])
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(NUM_STEPS):
        optimiser.zero_grad()
        F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    model.bfloat16().save_pretrained(folder)
    return Model(folder)


@pytest.mark.parametrize("kind", ON_THIS_CPU)
def test_bf16_perplexity_equals_transformers(trained: Model, tokens: list[int], kind: str) -> None:
    """With the weights in the arena, and with reordered copies."""
    at_once = partial(Reorderer, delay_s=0.0, gains=lambda dtype: True)
    instance = trained.instance(cpu_reorder=kind != "arena", reorderer=at_once)
    if instance.model.reorderer is not None:
        instance.model.reorderer.join()
    assert isinstance(instance.model.weights.layer(0).qkv, KINDS[kind])
    with torch.no_grad():
        expected = _perplexity(trained.reference(torch.tensor([tokens])).logits[0].float(), tokens)
    ends = range(1, len(tokens))
    actual = _perplexity(torch.stack([last_logits(instance, tokens[:end]) for end in ends]), tokens)
    instance.close()
    assert 3 < expected < 10  # of 256 possible bytes
    assert abs(actual / expected - 1) < 0.005


def _perplexity(logits: torch.Tensor, tokens: list[int]) -> float:
    """The perplexity of all tokens but the first; row i of the logits predicts token i + 1."""
    targets = torch.tensor(tokens[1:])
    return math.exp(float(F.cross_entropy(logits[: len(targets)], targets)))
