"""Decoders of tokenizers that are already loaded."""

from __future__ import annotations

from tokenizers import Tokenizer

from torchrelay.common.tokens.token_decoder import TokenDecoder


def decoder_of(tokenizer: Tokenizer) -> TokenDecoder:
    declared = tokenizer.get_added_tokens_decoder()
    ids = {*range(tokenizer.get_vocab_size()), *tokenizer.get_vocab().values(), *declared}
    named = ((tokenizer.id_to_token(token_id), token_id) for token_id in ids)
    return TokenDecoder(
        [(token, token_id) for token, token_id in named if token is not None],
        {token_id: token.content for token_id, token in declared.items()},
        {token.content for token in declared.values() if token.special},
        tokenizer.decoder,
    )
