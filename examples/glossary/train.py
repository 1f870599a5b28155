"""Trains the glossary model and writes it as a Hugging Face folder.

From the root of the repository: ``python -m examples.glossary.train``. The same torch on the same kind of CPU with the
same number of threads gives the same weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from examples.glossary.decoder import Decoder, DecoderConfig
from examples.glossary.evaluate import ask_all
from examples.glossary.folder import write_folder
from examples.glossary.questions import QuestionGenerator
from examples.glossary.terms import FOLDER, load_glossary, load_held_out, load_words
from examples.glossary.trainer import BatchSource, TrainingPlan, TrainingProgress, train
from examples.glossary.vocabulary import fold, train_tokenizer

VOCAB_SIZE = 1280
TOKENIZER_QUESTIONS = 4000


def build(out: Path, plan: TrainingPlan, seed: int, threads: int) -> None:
    """Trains tokenizer and model from scratch and writes them to ``out``."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    glossary, words = load_glossary(), load_words()
    samples = QuestionGenerator(glossary, words, seed + 1)
    texts = [
        text
        for turn in (samples.turn() for _ in range(TOKENIZER_QUESTIONS))
        for text in (fold(turn.question), turn.answer)
    ]
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    decoder = Decoder(DecoderConfig(vocab_size=tokenizer.get_vocab_size()))
    num_weights = sum(weight.numel() for weight in decoder.parameters())
    print(f"{len(glossary.terms)} terms, {tokenizer.get_vocab_size()} tokens, {num_weights:,} weights")
    train(
        decoder,
        BatchSource(QuestionGenerator(glossary, words, seed), tokenizer, plan),
        plan,
        lambda now: _show(now, plan),
    )
    write_folder(out, decoder, tokenizer)
    answers = ask_all(decoder, tokenizer, glossary, load_held_out())
    print(f"written to {out}; {sum(answer.right for answer in answers)} of {len(answers)} held-out questions are right")


def _show(now: TrainingProgress, plan: TrainingPlan) -> None:
    if now.step % 25 and now.step != plan.steps:
        return
    left_s = now.elapsed_s / now.step * (plan.steps - now.step)
    line = (
        f"step {now.step:>5}/{plan.steps}  loss {now.loss:6.3f}  tokens right {now.accuracy:6.1%}  {left_s:4.0f} s left"
    )
    last = now.step == plan.steps
    print(line, end="\r" if sys.stdout.isatty() and not last else "\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the glossary model (a few minutes on two CPU cores).")
    parser.add_argument("--out", type=Path, default=FOLDER / "model", help="the folder to write (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=TrainingPlan().steps, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="of weights and questions (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    arguments = parser.parse_args()
    begin_s = time.monotonic()
    build(arguments.out, TrainingPlan(steps=arguments.steps), arguments.seed, arguments.threads)
    print(f"took {time.monotonic() - begin_s:.0f} s")


if __name__ == "__main__":
    main()
