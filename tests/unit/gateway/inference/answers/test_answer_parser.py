"""Reasoning at the beginning of answers."""

from __future__ import annotations

import pytest

from torchrelay.gateway.inference.answers.answer_parser import AnswerParser
from torchrelay.gateway.inference.answers.parts import Reasoning, joined
from torchrelay.gateway.inference.answers.syntax import HERMES, AnswerSyntax

THINKS = ("<think>", "</think>")
CALL = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "begins_thinking", "reasoning", "content", "num_calls"),
    [
        ("<think>\nI see.\n\nSo.\n</think>\n\nYes.\n", False, "I see.\n\nSo.", "Yes.\n", 0),
        ("\nI see.\n</think>\n\nYes.", True, "I see.", "Yes.", 0),
        ("<think>I see.</think>Yes.", True, "I see.", "Yes.", 0),
        ("I see. ", True, "I see.", "", 0),
        (" Yes. <think>no</think>", False, "", " Yes. <think>no</think>", 0),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes.", 0),
        ("</think>Yes.", True, "", "Yes.", 0),
        ("<thin", False, "", "<thin", 0),
        ("<think>a</thin", False, "a</thin", "", 0),
        (f"<think>Not {CALL}</think>\n{CALL}", False, f"Not {CALL}", "", 1),
        (f"{CALL}", False, "", "", 1),
        (" \n", False, "", " \n", 0),
        ("", True, "", "", 0),
    ],
)
def test_reasoning_precedes_content_and_calls(
    text: str, begins_thinking: bool, reasoning: str, content: str, num_calls: int
) -> None:
    for pieces in ([text], list(text)):
        parser = AnswerParser(AnswerSyntax(HERMES, THINKS, begins_thinking), {"time": {}})
        answer = joined([part for piece in pieces for part in parser.push(piece)] + parser.flush())
        assert (answer.reasoning, answer.content, len(answer.calls)) == (reasoning, content, num_calls)
        assert parser.num_calls == num_calls


def test_reasoning_is_shown_at_once_and_its_tokens_are_counted() -> None:
    parser = AnswerParser(AnswerSyntax(thoughts=THINKS), None)
    assert [
        parser.push(token) for token in ("<think>", "\n", "I ", "see", "", ".\n", "</think>", "\n\n", "Yes", ".")
    ] == [
        [],
        [],
        [Reasoning("I")],
        [Reasoning(" see")],
        [],
        [Reasoning(".")],
        [],
        [],
        ["Yes"],
        ["."],
    ]
    assert parser.num_reasoning_tokens == 7, "with both markers"


def test_tokens_of_a_split_opening_count() -> None:
    parser = AnswerParser(AnswerSyntax(thoughts=THINKS), None)
    assert [parser.push(token) for token in ("<", "think", ">a", "</think>", "\n", "b")][-1] == ["b"]
    assert parser.num_reasoning_tokens == 4


def test_answer_without_reasoning_has_no_reasoning_tokens() -> None:
    parser = AnswerParser(AnswerSyntax(thoughts=THINKS), None)
    assert [parser.push(token) for token in ("Y", "es")] == [["Y"], ["es"]] and not parser.num_reasoning_tokens


def test_calls_are_content_if_the_request_has_no_tools() -> None:
    assert AnswerParser(AnswerSyntax(HERMES), None).push(CALL) == [CALL]
