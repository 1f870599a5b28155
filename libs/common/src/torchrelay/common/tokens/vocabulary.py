"""The ids of a tokenizer's tokens, as the tokenizers library gives them, but without that library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torchrelay.common.tokens.tokenizer_document import TokenizerDocument
from torchrelay.common.tokens.tokenizer_limits import TokenizerRefused

MAX_ID: Final = (1 << 32) - 1


def vocabulary_ids(document: TokenizerDocument) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """Ids by token, and the other ids of tokens that come more than once."""
    ids: dict[str, int] = {}
    repeated: list[tuple[str, int]] = []
    is_object = not document.has_scores
    for part in document.vocabulary():
        for token, token_id in part:
            if not 0 <= token_id <= MAX_ID:
                raise TokenizerRefused("model.vocab", f"{token[:40]!r} with the id {token_id} is not a token")
            if token in ids and not is_object:  # of equal keys the last counts
                repeated.append((token, ids[token]))
            ids[token] = token_id
    return ids, repeated


def added_token_ids(document: TokenizerDocument) -> dict[str, int]:
    """The ids that the library gives the added tokens, by their text. Raises ``TokenizerRefused``."""
    ids, repeated = vocabulary_ids(document)
    return added_ids(document, ids, len(ids) + len(repeated))


def added_ids(document: TokenizerDocument, ids: Mapping[str, int], num_tokens: int) -> dict[str, int]:
    """The ids that the library gives the added tokens: those of the vocabulary, otherwise the next from its size on."""
    added: dict[str, int] = {}
    for token in document.added_tokens:
        if token.content and token.content not in added:
            known = ids.get(token.content)
            added[token.content] = num_tokens if known is None else known
            num_tokens += known is None
    return added
