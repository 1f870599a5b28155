"""Outputs that follow a grammar: valid, and the same in any batch, after a resume and after a hand-over."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.engine.harness import ModelOf, assert_idle, group_of, hand_over, outputs, prompt_of, run
from torchrelay.common.tokens.grammar import Grammar, GrammarCompiler
from torchrelay.common.tokens.token_decoder import TokenDecoder
from torchrelay.engine.core import Finish, SamplingParams

_END = 257
_SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["relay", "torch"]}, "laps": {"type": "array", "items": {"type": "integer"}}},
    "required": ["kind", "laps"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """A token per byte; the model has more tokens than the tokenizer."""
    return GrammarCompiler(TokenDecoder([(chr(byte), byte) for byte in range(128)], {}, set(), None))


@pytest.fixture(scope="module")
def grammar(compiler: GrammarCompiler) -> Grammar:
    return compiler.compile(f"start: %json {json.dumps({**_SCHEMA, 'x-guidance': {'whitespace_flexible': False}})}")


def _sampling(grammar: Grammar, **settings: Any) -> SamplingParams:
    fields = {"temperature": 1.0, "max_tokens": 100, "stop_token_ids": frozenset({_END}), **settings}
    return SamplingParams(**fields, grammar=grammar)


def _text(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_follows_grammar(model_of: ModelOf, grammar: Grammar, temperature: float) -> None:
    """Digits are the likeliest of few tokens, so numbers end by a bias to what may follow them."""
    instance = model_of("qwen2").instance()
    bias = ((ord(","), 3.0), (ord("]"), 4.0))
    for seed in range(8):
        sampling = _sampling(grammar, temperature=temperature, seed=seed, logit_bias=bias)
        instance.prefill(group_of(prompt_of(9 + seed, seed), f"{seed}/0", sampling))
    steps = run(instance)
    ends = [token for step in steps for token in step.tokens if token.finish is not None]
    assert {token.finish for token in ends} <= {Finish.STOP, Finish.LENGTH}
    finished = {token.group_id for token in ends if token.finish is Finish.STOP}
    assert finished
    for (group_id, _), tokens in outputs(steps).items():
        assert _text(tokens).startswith('{"kind":"')
        if group_id in finished:
            value = json.loads(_text(tokens))
            assert value.keys() == {"kind", "laps"} and value["kind"] in ("relay", "torch")
            assert all(isinstance(lap, int) for lap in value["laps"])
    assert_idle(instance)


def test_same_tokens_in_a_batch_resumed_and_handed_over(model_of: ModelOf, grammar: Grammar) -> None:
    model = model_of("qwen2")
    sampling = _sampling(grammar, seed=5, max_tokens=40, presence_penalty=0.4)
    group = group_of(prompt_of(30), "a/0", sampling)
    alone = model.instance()
    alone.prefill(group)
    expected = outputs(run(alone))["a/0", 0]
    crowd = model.instance(token_budget=32)
    for number in range(7):
        other = _sampling(grammar, seed=number) if number % 2 else SamplingParams(seed=number, max_tokens=30)
        crowd.prefill(group_of(prompt_of(5 + number, salt=number), f"{number}/0", other))
    crowd.prefill(group)
    assert outputs(run(crowd))["a/0", 0] == expected
    for num_forced in (1, 12, len(expected) - 1):
        forced = [expected[:num_forced]]
        resumed = model.instance()
        resumed.prefill(group_of(prompt_of(30), "a/1", sampling, forced=forced))
        assert outputs(run(resumed))["a/1", 0] == expected[num_forced:]
        last, steps = hand_over(model.instance(), model.instance(), group_of(prompt_of(30), "a/2", sampling, forced))
        assert [last.tokens[0].token_id, *outputs(steps).get(("a/2", 0), [])] == expected[num_forced:]


def test_choice_ends_with_the_grammar_or_by_a_stop_token_where_it_may(
    model_of: ModelOf, compiler: GrammarCompiler
) -> None:
    model = model_of("qwen2")

    def ended(source: str, **settings: Any) -> tuple[str, Finish | None]:
        instance = model.instance()
        sampling = _sampling(compiler.compile(source), temperature=0.0, **settings)
        instance.prefill(group_of(prompt_of(8), "a/0", sampling))
        tokens = [token for step in run(instance) for token in step.tokens]
        return _text([token.token_id for token in tokens if 0 <= token.token_id < 128]), tokens[-1].finish

    assert ended('start: "yes"', stop_token_ids=frozenset()) == ("yes", Finish.STOP)
    assert ended("start: /a+/", logit_bias=((_END, 100.0),)) == ("a", Finish.STOP)
    assert ended("start: /a+/", stop_token_ids=frozenset(), max_tokens=4) == ("aaaa", Finish.LENGTH)
    assert ended('start: "é"') == ("", Finish.NO_TOKEN_ALLOWED)  # no token has its bytes
    assert ended('start: "yes"', max_tokens=3) == ("yes", Finish.STOP)


def test_choices_and_a_preempted_group_follow_the_grammar(model_of: ModelOf, grammar: Grammar) -> None:
    model = model_of("qwen2")
    group = group_of(prompt_of(20), "a/0", _sampling(grammar, seed=3, max_tokens=30), forced=[[], []])
    undisturbed = model.instance()
    undisturbed.prefill(group)
    expected = outputs(run(undisturbed))
    assert expected["a/0", 0] != expected["a/0", 1]
    instance = model.instance()
    instance.prefill(replace(group))
    steps = [instance.step() for _ in range(12)]
    instance.preempt("a/0")
    assert outputs([*steps, *run(instance)]) == expected
