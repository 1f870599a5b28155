"""Torchrelay's sampler in vLLM's step: vLLM computes the logits, and takes the token that was sampled from them.

So the random number of a token is the same as with Torchrelay's own engine, a resumed answer continues exactly, and
penalties and grammars count the output of earlier attempts.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSampling
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from torchrelay.engine.core import NO_TOKEN, ChoiceSpec, GrammarState, GroupSpec, NewToken, grammar_state
from torchrelay.engine.sampling.sampler import TokenDraw, sample_tokens


@dataclass(slots=True)
class Choice:
    """A choice that vLLM computes; its forced output is part of vLLM's prompt."""

    group: GroupSpec
    spec: ChoiceSpec
    new: list[int] = field(default_factory=list)  # tokens since the forced output
    counts: Counter[int] | None = None  # of the output's tokens, if penalties need them
    drawn: NewToken | None = None  # in the running step
    _grammar: GrammarState | None = None  # after the output; None: to be built from it

    def __post_init__(self) -> None:
        if self.group.sampling.penalised:
            self.counts = Counter(self.spec.forced_output)

    @property
    def request_id(self) -> str:
        return f"{self.group.group_id}#{self.spec.choice}"

    @property
    def prompt(self) -> list[int]:
        return [*self.group.prompt, *self.spec.forced_output]

    @property
    def position(self) -> int:
        return len(self.spec.forced_output) + len(self.new)

    def draw_of(self, row: int) -> TokenDraw:
        """The draw of the next token from a row of the logits."""
        if self._grammar is None:
            self._grammar = grammar_state(self.group.sampling, (*self.spec.forced_output, *self.new))
        return TokenDraw(row, self.group, self.spec.choice, self.position, self.counts, grammar=self._grammar)

    def accept(self) -> NewToken:
        """The token drawn in this step, which becomes part of the output."""
        token, self.drawn = self.drawn, None
        assert token is not None, "vLLM samples only what was drawn"
        if token.token_id != NO_TOKEN:
            self.new.append(token.token_id)
            if self.counts is not None:
                self.counts[token.token_id] += 1
        return token

    def discard(self) -> None:
        """Forgets a token that was drawn in the middle of a prompt, where vLLM samples and keeps nothing."""
        if self.drawn is not None:
            self.drawn = self._grammar = None  # the draw has advanced the grammar


class SlotChoices(dict[str, Choice]):
    """The choices that vLLM computes, or will once it has started, by its request ids.

    A part of its configuration, of which it makes copies.
    """

    def __deepcopy__(self, memo: object) -> SlotChoices:
        return self


class SlotSampler(LogitsProcessor):
    """A logits processor of vLLM that samples with Torchrelay's sampler."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        # None: not of the first rank, which sends the others what it has drawn.
        self._choices: SlotChoices | None = vllm_config.load_config.model_loader_extra_config.get("choices")
        self._request_ids: dict[int, str] = {}  # by row

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the rows of the batch."""
        process_dict_updates(self._request_ids, batch_update, _request_id_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Draws a token for each row in the first rank, and makes it the most likely one in all ranks."""
        drawn = torch.full((logits.shape[0],), NO_TOKEN)
        if self._choices is not None:
            self._draw(logits, self._choices, drawn)
        drawn = get_tp_group().broadcast(drawn.to(logits.device))
        (rows,) = torch.where(drawn != NO_TOKEN)
        logits[rows, drawn[rows]] = math.inf
        return logits

    def _draw(self, logits: torch.Tensor, choices: SlotChoices, drawn: torch.Tensor) -> None:
        rows = [(row, choices[id_]) for row, id_ in self._request_ids.items() if id_ in choices]
        draws = [choice.draw_of(row) for row, choice in rows]
        for (row, choice), token in zip(rows, sample_tokens(logits, draws), strict=True):
            choice.drawn = token
            drawn[row] = token.token_id


def _request_id_of(params: VllmSampling, prompt: Any, output: Any) -> str | None:
    return (params.extra_args or {}).get("request_id")


def vllm_sampling(choice: Choice) -> VllmSampling:
    """The parameters for vLLM, which takes the token that was drawn, and ends the choice."""
    params = choice.group.sampling
    return VllmSampling(
        temperature=0.0,
        max_tokens=params.max_tokens - len(choice.spec.forced_output),
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=True,  # the gateway names every token that ends an answer
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"request_id": choice.request_id},
    )
