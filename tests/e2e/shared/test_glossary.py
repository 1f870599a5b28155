"""The glossary model on the platform: it answers held-out questions exactly as it does alone."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from examples.glossary.decoder import load_decoder
from examples.glossary.evaluate import LEAST_RIGHT, answer_question
from examples.glossary.terms import FOLDER, load_glossary, load_held_out
from tests.support.completions import headers
from tests.support.http import http
from tests.support.platform import Platform

pytestmark = pytest.mark.e2e
MODEL = FOLDER / "model"


def test_held_out_answers_equal_local_answers(platform: Platform) -> None:
    key = platform.tenant("reader")
    model = platform.upload(key, MODEL, "glossary")
    decoder, tokenizer = load_decoder(MODEL), Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    held_out, glossary = load_held_out(), load_glossary()
    assert len(held_out) == 10
    answers = []
    for asked in held_out:
        body = {"model": model, "messages": [{"role": "user", "content": asked.question}], "temperature": 0}
        response = http.post(f"{platform.http}/v1/chat/completions", json=body, headers=headers(key), timeout=60)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "stop", asked.question
        answers.append(choice["message"]["content"])
    assert answers == [answer_question(decoder, tokenizer, asked.question) for asked in held_out]
    right = [glossary.explanation_of(asked.term) for asked in held_out]
    wrong = [answer for answer, explanation in zip(answers, right, strict=True) if answer != explanation]
    assert len(held_out) - len(wrong) >= LEAST_RIGHT, wrong
