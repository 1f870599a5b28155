"""Asks the glossary model the ten held-out questions, greedily; exits with 1 when fewer than seven are right.

From the root of the repository: ``python -m examples.glossary.evaluate``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from examples.glossary.decoder import Decoder, load_decoder
from examples.glossary.terms import FOLDER, Glossary, HeldOut, load_glossary, load_held_out
from examples.glossary.vocabulary import encode_prompt, end_id

LEAST_RIGHT = 7


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer; ``right`` when it equals the explanation of the word exactly."""

    asked: HeldOut
    text: str
    right: bool


def answer_question(decoder: Decoder, tokenizer: Tokenizer, question: str, system: str | None = None) -> str:
    """The greedy answer to one question, up to the end token."""
    ids = decoder.greedy(encode_prompt(tokenizer, question, system), stop_id=end_id(tokenizer))
    text: str = tokenizer.decode(ids)
    return text


def ask_all(
    decoder: Decoder, tokenizer: Tokenizer, glossary: Glossary, questions: Iterable[HeldOut]
) -> tuple[Answer, ...]:
    texts = ((asked, answer_question(decoder, tokenizer, asked.question)) for asked in questions)
    return tuple(Answer(asked, text, text == glossary.explanation_of(asked.term)) for asked, text in texts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask the glossary model what it was not trained on.")
    parser.add_argument("--model", type=Path, default=FOLDER / "model", help="its folder (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    decoder = load_decoder(arguments.model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    answers = ask_all(decoder, tokenizer, load_glossary(), load_held_out())
    for answer in answers:
        print(f"Q      {answer.asked.question}\nA      {answer.text}")
        print(f"{'right' if answer.right else 'WRONG'}  ({answer.asked.term})\n")
    num_right = sum(answer.right for answer in answers)
    print(f"{num_right} of {len(answers)}")
    return 0 if num_right >= LEAST_RIGHT else 1


if __name__ == "__main__":
    sys.exit(main())
