"""The model's tokenizer: byte-level BPE over our own texts, and the tokens that delimit a conversation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END, SYSTEM, USER, ASSISTANT = "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"
MARKS = (END, SYSTEM, USER, ASSISTANT)

# Questions are folded to lower case, so "KV cache", "kv cache" and "KV CACHE" are learned once instead of three times.
CHAT_TEMPLATE = f"""\
{{%- for message in messages -%}}
{{%- if message['role'] in ('system', 'developer') -%}}{SYSTEM}{{{{ message['content'] | trim }}}}
{{%- elif message['role'] == 'assistant' -%}}{ASSISTANT}{{{{ message['content'] | trim }}}}{END}
{{%- else -%}}{USER}{{{{ message['content'] | trim | lower }}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{ASSISTANT}{{%- endif -%}}
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer."""

    question: str
    answer: str


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most ``vocab_size`` entries; the special tokens come first, END has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(mark, special=True, normalized=False) for mark in MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_id(tokenizer: Tokenizer) -> int:
    """The end token. Raises ``ValueError`` for a tokenizer without one."""
    token_id: int | None = tokenizer.token_to_id(END)
    if token_id is None:
        raise ValueError(f"the tokenizer does not know {END}")
    return token_id


def fold(question: str) -> str:
    """A question as rendered by the chat template."""
    return question.strip().lower()


def encode_prompt(tokenizer: Tokenizer, question: str, system: str | None = None) -> list[int]:
    """Token ids of one question through the chat template."""
    before = f"{SYSTEM}{system.strip()}" if system else ""
    ids: list[int] = tokenizer.encode(f"{before}{USER}{fold(question)}{ASSISTANT}").ids
    return ids


def encode_conversation(
    tokenizer: Tokenizer, turns: Iterable[Turn], system: str | None
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and whether each is to be learned (answers and their END)."""
    ids: list[int] = []
    spoken: list[bool] = []
    for number, turn in enumerate(turns):
        prompt = encode_prompt(tokenizer, turn.question, system if number == 0 else None)
        answer = tokenizer.encode(f"{turn.answer}{END}").ids
        ids += prompt + answer
        spoken += [False] * len(prompt) + [True] * len(answer)
    return ids, spoken
