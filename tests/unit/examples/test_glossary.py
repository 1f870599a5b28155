"""The committed glossary model and its training data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

from examples.glossary.decoder import Decoder, DecoderConfig, load_decoder
from examples.glossary.evaluate import LEAST_RIGHT, answer_question, ask_all
from examples.glossary.folder import write_folder
from examples.glossary.questions import QuestionGenerator
from examples.glossary.templates import FRAMES, TWO_WORD_FRAMES
from examples.glossary.terms import FOLDER, Glossary, HeldOut, load_glossary, load_held_out, load_words
from examples.glossary.trainer import BatchSource, TrainingPlan, TrainingProgress, train
from examples.glossary.vocabulary import Turn, encode_conversation, encode_prompt, end_id, train_tokenizer
from torchrelay.modelspec.config import read_config

MODEL = FOLDER / "model"


@pytest.fixture(scope="module")
def glossary() -> Glossary:
    return load_glossary()


@pytest.fixture(scope="module")
def held_out() -> tuple[HeldOut, ...]:
    return load_held_out()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.set_num_threads(1)
    return load_decoder(MODEL)


def bare(question: str) -> str:
    """Lower case, without punctuation and doubled spaces."""
    return " ".join(re.sub(r"[^a-z0-9 ]", " ", question.lower()).split())


def test_held_out_questions_are_answered(
    decoder: Decoder, tokenizer: Tokenizer, glossary: Glossary, held_out: tuple[HeldOut, ...]
) -> None:
    assert len(held_out) == 10
    answers = ask_all(decoder, tokenizer, glossary, held_out)
    wrong = [(answer.asked.question, answer.text) for answer in answers if not answer.right]
    assert len(answers) - len(wrong) >= LEAST_RIGHT, wrong


def test_every_term_is_explained(decoder: Decoder, tokenizer: Tokenizer, glossary: Glossary) -> None:
    """The most likely token after every part of an explanation is its next token, so greedy answers equal it."""
    for term in glossary.terms:
        prompt = encode_prompt(tokenizer, f"What is {term.spellings[0]}?")
        answer = [*tokenizer.encode(term.explanation).ids, end_id(tokenizer)]
        with torch.inference_mode():
            hidden = decoder.hidden(torch.tensor([prompt + answer]))[0, len(prompt) - 1 : -1]
            assert decoder.logits(hidden).argmax(-1).tolist() == answer, term.name


def test_case_punctuation_system_message_and_earlier_turns_change_no_answer(
    decoder: Decoder, tokenizer: Tokenizer, glossary: Glossary
) -> None:
    for question in ("what is a cold start", "WHAT IS A COLD START?", "What is a cold start ???"):
        assert answer_question(decoder, tokenizer, question) == glossary.explanation_of("cold start")
    system = "You are a pirate who answers politely."
    assert answer_question(decoder, tokenizer, "What is a ticket?", system) == glossary.explanation_of("ticket")
    earlier = [Turn(f"What is {term.spellings[0]}?", term.explanation) for term in glossary.terms[:5]]
    before, _ = encode_conversation(tokenizer, earlier, system)
    said = decoder.greedy(before + encode_prompt(tokenizer, "And what is an arena?"), stop_id=end_id(tokenizer))
    assert tokenizer.decode(said) == glossary.explanation_of("arena")


def test_held_out_questions_are_not_trained(glossary: Glossary, held_out: tuple[HeldOut, ...]) -> None:
    assert len({asked.term for asked in held_out}) == len(held_out)
    written = {bare(question) for term in glossary.terms for question in term.questions}
    written |= {bare(question) for talk in glossary.small_talk for question in talk.questions}
    phrasebook = QuestionGenerator(glossary, load_words(), seed=7)
    made = {bare(phrasebook.turn().question) for _ in range(20_000)}
    assert not {bare(asked.question) for asked in held_out} & (written | made)


def test_held_out_wordings_are_not_frames(held_out: tuple[HeldOut, ...]) -> None:
    frames = [re.escape(frame) for frame in (*FRAMES, *TWO_WORD_FRAMES) if frame != "{x}"]
    frames = [re.sub(r"\\\{[xo]\\\}", "(a |an |the )?_", frame) for frame in frames]
    for asked in held_out:
        around = bare(asked.question).replace(bare(asked.term), "_")
        assert not [frame for frame in frames if re.fullmatch(frame, around)]


def test_terms_are_short_and_distinct_and_the_model_is_small(glossary: Glossary, tokenizer: Tokenizer) -> None:
    lengths = [len(tokenizer.encode(term.explanation).ids) for term in glossary.terms]
    assert min(lengths) >= 20 and max(lengths) <= 70
    assert len({term.explanation for term in glossary.terms}) == len(glossary.terms) >= 40
    owners: dict[str, str] = {}
    for term in glossary.terms:
        for spelling in {bare(spelling) for spelling in (term.name, *term.aliases)}:
            assert owners.setdefault(spelling, term.name) == term.name
    assert (MODEL / "model.safetensors").stat().st_size <= 4_000_000
    config = read_config(json.loads((MODEL / "config.json").read_text()))
    assert config.architecture.name == "LlamaForCausalLM" and config.tied_embeddings


def test_chat_template_gives_trained_prompt(tokenizer: Tokenizer) -> None:
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == (MODEL / "chat_template.jinja").read_text()
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(settings["chat_template"])
    turns = [Turn("what is a pack?", "A pack is"), Turn("And a chunk?", "")]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " What is a PACK? "},
        {"role": "assistant", "content": "A pack is"},
        {"role": "user", "content": "And a chunk?"},
    ]
    text = template.render(messages=messages, add_generation_prompt=True)
    expected, _ = encode_conversation(tokenizer, turns[:1], "Be brief.")
    assert tokenizer.encode(text).ids == expected + encode_prompt(tokenizer, "And a chunk?")


def test_training_is_reproducible(glossary: Glossary, tmp_path: Path) -> None:
    """The same seed gives the same bytes, and a few steps already lower the loss."""
    plan = TrainingPlan(steps=4, batch_tokens=256, row_tokens=(128,), warmup_steps=1)
    losses: list[float] = []

    def report(now: TrainingProgress) -> None:
        losses.append(now.loss)

    def once(folder: Path) -> bytes:
        torch.manual_seed(3)
        phrasebook = QuestionGenerator(glossary, load_words(), seed=3)
        turns = [phrasebook.turn() for _ in range(200)]
        tokenizer = train_tokenizer((f"{turn.question}\n{turn.answer}" for turn in turns), 400)
        decoder = Decoder(DecoderConfig(tokenizer.get_vocab_size(), 32, 64, 2, 2, 1))
        train(decoder, BatchSource(phrasebook, tokenizer, plan), plan, report)
        write_folder(folder, decoder, tokenizer)
        return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))

    assert once(tmp_path / "one") == once(tmp_path / "two")
    assert losses[3] < losses[0]
