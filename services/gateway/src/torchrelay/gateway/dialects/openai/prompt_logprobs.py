"""The logprobs of a prompt in a reply: the beginning of an echoing completion's, and vLLM's ``prompt_logprobs``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from torchrelay.gateway.exchange.logprobs import EncodedLogprobs, LogprobFormatter, token_text
from torchrelay.gateway.inference.choice_reader import ScoredToken
from torchrelay.gateway.inference.core import TokenLogprobs
from torchrelay.gateway.inference.execution.prompt_scores import PromptScores
from torchrelay.gateway.inference.pipeline import RequestSession
from torchrelay.gateway.inference.text.decoder_cache import ModelDecoder
from torchrelay.gateway.inference.text.detokenizer import ChoiceDetokenizer
from torchrelay.gateway.limits.shares import ShareAccount

_NUM_AT_ONCE: Final = 128  # tokens: a prompt may have as many as the context, and other requests go on meanwhile


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The JSON of a prompt's logprobs."""

    echoed: EncodedLogprobs  # the items of each list of a completion's ``logprobs``; empty if nothing is echoed
    listed: msgspec.Raw | None  # ``prompt_logprobs``, if requested


async def prompt_logprobs(
    session: RequestSession, num_echoed: int | None, num_listed: int | None, held: ShareAccount
) -> PromptLogprobs:
    """The logprobs of the prompt of a request that has its first token.

    ``num_echoed``, ``num_listed``: the likely tokens to show beside each token; None: that form is not requested.
    ``held`` counts them, once for each choice. Raises ``TorchrelayError`` if workers have left them out.
    """
    scores, decoder, prompt = session.request.prompt_scores, session.scored_by, session.request.resolved.prompt
    assert scores is not None and decoder is not None, "only for requests with logprobs of the prompt"
    scores.check()
    text = ChoiceDetokenizer(decoder.tokens, (), (), ())
    formatter = LogprobFormatter(decoder.token_bytes, is_chat=False)
    echoed: list[EncodedLogprobs] = []
    listed: list[bytes] = []
    for begin in range(0, len(prompt), _NUM_AT_ONCE):
        positions = range(begin, min(begin + _NUM_AT_ONCE, len(prompt)))
        if num_echoed is not None:
            entries = _entries(scores, decoder, text, prompt, positions, num_echoed)
            part = list(map(formatter.encoded, entries))
            if not begin:
                part[0] = part[0][0], b"null", b"null", part[0][3]
            echoed.append(tuple(map(b",".join, zip(*part, strict=True))))
            held.take(sum(map(len, echoed[-1])) * len(session.texts))
        if num_listed is not None:
            listed.append(_items([_described(scores, decoder, prompt, each, num_listed) for each in positions]))
            held.take(len(listed[-1]) * len(session.texts))
        await asyncio.sleep(0)
    joined = tuple(map(b",".join, zip(*echoed, strict=True)))
    return PromptLogprobs(joined, None if num_listed is None else _list(listed))


def _entries(
    scores: PromptScores,
    decoder: ModelDecoder,
    text: ChoiceDetokenizer,
    prompt: Sequence[int],
    positions: range,
    num_top: int,
) -> Iterator[ScoredToken]:
    for position in positions:
        token_id = prompt[position]
        placed = text.step_placed(token_id, decoder.token_bytes.in_text(token_id))
        logprobs = scores.of(position, num_top) if position else TokenLogprobs(0.0, ())
        yield ScoredToken(token_id, logprobs, placed)


def _described(
    scores: PromptScores, decoder: ModelDecoder, prompt: Sequence[int], position: int, num_top: int
) -> dict[str, dict[str, Any]] | None:
    """A token and the likely ones by their ids, as vLLM describes them; None for the first token."""
    if not position:
        return None
    logprobs = scores.of(position, num_top)
    ranked = [(prompt[position], logprobs.chosen, scores.rank(position))]
    ranked += [(token_id, value, rank) for rank, (token_id, value) in enumerate(logprobs.top, 1)]
    described: dict[str, dict[str, Any]] = {}
    for token_id, value, rank in ranked:
        shown = token_text(decoder.token_bytes.of(token_id))
        described.setdefault(str(token_id), {"logprob": value, "rank": rank, "decoded_token": shown})
    return described


def _items(values: Sequence[Any]) -> bytes:
    """The JSON of a list's items, without its brackets."""
    return msgspec.json.encode(values)[1:-1]


def _list(items: Sequence[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[%s]" % b",".join(filter(None, items)))
