"""The log-probabilities of a prompt's own tokens, as workers report them."""

from __future__ import annotations

from array import array

from torchrelay.common.errors import TorchrelayError
from torchrelay.control.v1 import generation_pb2 as pb
from torchrelay.gateway.inference.core import TokenLogprobs
from torchrelay.gateway.inference.execution.generation import LEAST_LOGPROB


class PromptScores:
    """The logprobs of the tokens of a prompt, of which the first has none.

    Parts arrive in their order; an attempt that takes over from another reports them from the beginning. Held as
    arrays: a prompt may have as many tokens as the context.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_expected = num_prompt_tokens - 1
        self._num_top = 0  # of each position
        self._chosen, self._ranks = array("f"), array("I")
        self._top_ids, self._top = array("I"), array("f")

    def num_bytes(self, num_top: int) -> int:
        """The bytes of all positions, with ``num_top`` likely tokens each."""
        return self._num_expected * (1 + num_top) * (self._chosen.itemsize + self._ranks.itemsize)

    def add(self, part: pb.PromptLogprobs) -> None:
        """Adds what ``part`` has beyond the known positions. Raises ``TorchrelayError`` if it leaves a gap."""
        num_known = len(self._chosen)
        num_repeated = num_known + 1 - part.first_position
        if num_repeated < 0:
            raise TorchrelayError("the worker left out logprobs of the prompt")
        if num_repeated >= len(part.chosen):
            return
        self._num_top = len(part.top_logprobs) // len(part.chosen)
        self._chosen.extend(part.chosen[num_repeated:])
        self._ranks.extend(part.ranks[num_repeated:])
        self._top_ids.extend(part.top_token_ids[num_repeated * self._num_top :])
        self._top.extend(part.top_logprobs[num_repeated * self._num_top :])

    def check(self) -> None:
        """Raises ``TorchrelayError`` if a token has no logprobs although the prompt is computed."""
        if len(self._chosen) < self._num_expected:
            raise TorchrelayError("the worker returned no logprobs of the prompt although they were requested")

    def of(self, position: int, num_top: int) -> TokenLogprobs:
        """The logprobs at a position from 1 on, with at most ``num_top`` likely tokens."""
        begin = (position - 1) * self._num_top
        end = begin + min(num_top, self._num_top)
        top = zip(self._top_ids[begin:end], self._top[begin:end], strict=True)
        return TokenLogprobs(
            max(self._chosen[position - 1], LEAST_LOGPROB),
            tuple((token, max(value, LEAST_LOGPROB)) for token, value in top),
        )

    def rank(self, position: int) -> int:
        """The rank of the token at a position from 1 on, among all tokens, from 1."""
        return self._ranks[position - 1]
