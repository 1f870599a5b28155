"""The model of the echo workers of `bench/gateway.py`: a vocabulary of real size, prompts and answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from tests.support.sample_tokenizers import large_tokenizer

VOCAB_SIZE = 128_000
PROMPT_WORDS = 64
_STRIDE = 7_919  # consecutive positions have ids far apart


@dataclass(frozen=True, slots=True)
class EchoVocabulary:
    """A vocabulary. Answers consist of ``whole_ids``, tokens that are complete text, so every token is an event with
    text as in nearly all real answers.
    """

    tokenizer_json: bytes
    tokenizer: Tokenizer
    whole_ids: tuple[int, ...]
    words: tuple[str, ...]  # each with a leading space, of one or two tokens

    @classmethod
    def make(cls) -> EchoVocabulary:
        """The same vocabulary in every process."""
        encoded = large_tokenizer(VOCAB_SIZE)
        tokenizer = Tokenizer.from_str(encoded.decode())
        texts = tokenizer.decode_batch([[token_id] for token_id in range(VOCAB_SIZE)])
        whole = tuple(token_id for token_id, text in enumerate(texts) if text and "\ufffd" not in text)
        letters = (texts[token_id] for token_id in whole)
        candidates = [" " + text.strip() for text in letters if text.strip().isascii() and text.strip().isalpha()]
        encodings = tokenizer.encode_batch(candidates)
        words = tuple(word for word, coded in zip(candidates, encodings, strict=True) if len(coded.ids) <= 2)
        return cls(encoded, tokenizer, whole, words)

    def answer(self, prompt: Sequence[int], seed: int, choice: int, position: int) -> int:
        """The token at a position, which depends on the prompt."""
        return self.whole_ids[(prompt[0] * 31 + prompt[-1] + (position + choice) * _STRIDE) % len(self.whole_ids)]

    def prompts(self, count: int) -> list[str]:
        """Different prompts of ``PROMPT_WORDS`` words."""
        rng = random.Random(0)
        return ["".join(rng.choices(self.words, k=PROMPT_WORDS)).strip() for _ in range(count)]
