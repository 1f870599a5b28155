"""The training loop: packed conversations, AdamW, a warm-up and a cosine schedule, all seeded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from examples.glossary.decoder import Decoder
from examples.glossary.questions import QuestionGenerator
from examples.glossary.vocabulary import encode_conversation

IGNORED = -100

# The first tokens of an answer decide which term is meant; the rest is soon memorized. So most answers are truncated
# (without learning an END there), and twice as many questions fit into the same time.
CUT_SHARE, CUT_TOKENS = 0.8, 8


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Training schedule. A batch holds ``batch_tokens`` tokens, in rows of one of ``row_tokens``."""

    steps: int = 1200
    batch_tokens: int = 4096
    row_tokens: tuple[int, ...] = (128, 128, 256, 1024)
    peak_rate: float = 4e-3
    warmup_steps: int = 60
    weight_decay: float = 0.05
    dropout: float = 0.05

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, cosine decay to a fiftieth."""
        if step < self.warmup_steps:
            return self.peak_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.peak_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True, slots=True)
class Batch:
    """``token_ids`` and ``targets`` [rows, length]; targets excluded from the loss are ``IGNORED``."""

    token_ids: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    step: int
    loss: float
    accuracy: float  # share of answer tokens predicted correctly
    elapsed_s: float


class BatchSource:
    """Fills rows with conversations: as many turns as fit, cut at the end of the row."""

    def __init__(self, phrasebook: QuestionGenerator, tokenizer: Tokenizer, plan: TrainingPlan) -> None:
        self._phrasebook = phrasebook
        self._tokenizer = tokenizer
        self._plan = plan

    def batch(self, step: int) -> Batch:
        length = self._plan.row_tokens[step % len(self._plan.row_tokens)]
        rows = [self._row(length) for _ in range(self._plan.batch_tokens // length)]
        return Batch(torch.tensor([ids for ids, _ in rows]), torch.tensor([targets for _, targets in rows]))

    def _row(self, length: int) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        spoken: list[bool] = []
        system = self._phrasebook.system_message()
        while len(ids) <= length:
            more_ids, more_spoken = encode_conversation(self._tokenizer, [self._phrasebook.turn()], system)
            if self._phrasebook.chance(CUT_SHARE):
                kept = more_spoken.index(True) + CUT_TOKENS
                more_ids, more_spoken = more_ids[:kept], more_spoken[:kept]
            ids += more_ids
            spoken += more_spoken
            system = None
        targets = [token if said else IGNORED for token, said in zip(ids, spoken, strict=True)]
        return ids[:length], targets[1 : length + 1]


def train(
    decoder: Decoder, source: BatchSource, plan: TrainingPlan, report: Callable[[TrainingProgress], None]
) -> None:
    """Trains ``decoder`` in place; calls ``report`` after every step."""
    matrices = [weight for weight in decoder.parameters() if weight.dim() > 1]
    vectors = [weight for weight in decoder.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.peak_rate, betas=(0.9, 0.98))
    begin_s = time.monotonic()
    decoder.dropout = plan.dropout
    decoder.train()
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(step)
        loss, accuracy = _answer_loss(decoder, source.batch(step))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        report(TrainingProgress(step + 1, loss.item(), accuracy, time.monotonic() - begin_s))
    decoder.eval()


def _answer_loss(decoder: Decoder, batch: Batch) -> tuple[Tensor, float]:
    """Cross entropy over the answers only; only their hidden states go through the head."""
    wanted = batch.targets != IGNORED
    logits = decoder.logits(decoder.hidden(batch.token_ids)[wanted])
    targets = batch.targets[wanted]
    accuracy = (logits.argmax(-1) == targets).float().mean().item()
    return F.cross_entropy(logits, targets), accuracy
