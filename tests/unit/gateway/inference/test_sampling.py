"""Defaults and limits of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.gateway_ports import published_model
from tests.unit.gateway.token_path_rig import TokenPathRig
from torchrelay.common.errors import ContextLengthExceeded, InvalidRequest
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.inference.sampling import GenerationBounds, sampling_of

MODEL = published_model(file_digests={}, context=100, eos_token_ids=(2, 3))
BOUNDS = GenerationBounds(default_max_tokens=40, max_choices=4)


BEYOND = "token 1048576; the model's token ids are 0 to 1048575"
TEXT = GenerateParams("m", text="x")
EXCEEDED = ContextLengthExceeded


@pytest.mark.parametrize(
    ("params", "num_prompt", "error", "field", "said"),
    [
        (TEXT, 100, EXCEEDED, "prompt", "100 tokens > 100 maximum"),
        (GenerateParams("m", messages=()), 100, EXCEEDED, "messages", "model's maximum context length is 100 tokens"),
        (replace(TEXT, min_tokens=9, max_tokens=8), 10, InvalidRequest, "min_tokens", "be at most max_tokens .8., "),
        (replace(TEXT, min_tokens=91), 10, InvalidRequest, "min_tokens", "10 prompt and 91 output tokens .min_tokens."),
        (replace(TEXT, logit_bias=((1 << 20, 1.0),)), 1, InvalidRequest, "logit_bias", BEYOND),
        (replace(TEXT, stop_token_ids=(1 << 20,)), 1, InvalidRequest, "stop_token_ids", BEYOND),
        (replace(TEXT, num_choices=5), 1, InvalidRequest, "n", "must be at most 4, not 5"),
    ],
)
def test_request_beyond_a_limit_is_refused(
    params: GenerateParams, num_prompt: int, error: type[InvalidRequest], field: str, said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        sampling_of(params, MODEL, num_prompt, BOUNDS)
    assert caught.value.field == field


def test_max_tokens_is_given_or_default() -> None:
    for params, num_prompt, max_tokens in (
        (TEXT, 10, 40),  # the default
        (TEXT, 90, 10),  # what the context leaves
        (TEXT, 99, 1),
        (replace(TEXT, max_tokens=32_000), 90, 10),
        *((replace(TEXT, max_tokens=given), 100 - given, given) for given in (90, 99, 1)),
        (replace(TEXT, min_tokens=60), 10, 60),
        (replace(TEXT, min_tokens=8, max_tokens=8), 10, 8),
    ):
        assert sampling_of(params, MODEL, num_prompt, BOUNDS).max_tokens == max_tokens


def test_seeds_are_kept_or_drawn() -> None:
    assert sampling_of(replace(TEXT, seed=7), MODEL, 1, BOUNDS).seed == 7
    assert sampling_of(replace(TEXT, seed=0), MODEL, 1, BOUNDS).seed == 0
    drawn = {sampling_of(TEXT, MODEL, 1, BOUNDS).seed for _ in range(8)}
    assert len(drawn) == 8


def test_stops_are_those_of_model_and_request() -> None:
    sampling = sampling_of(replace(TEXT, stop=("a", "b")), MODEL, 1, BOUNDS)
    assert (list(sampling.stop_token_ids), list(sampling.stop_strings)) == ([2, 3], ["a", "b"])
    ignoring = sampling_of(replace(TEXT, ignore_eos=True), MODEL, 1, BOUNDS)
    assert (list(ignoring.stop_token_ids), ignoring.ignore_eos) == ([], True)


def test_sampling_parameters_reach_the_workers() -> None:
    same: dict[str, Any] = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "min_tokens": 3}
    same |= {"repetition_penalty": 1.2}
    params = replace(TEXT, logit_bias=((5, -100.0),), top_logprobs=0, stop_token_ids=(9,), **same)
    sampling = sampling_of(params, MODEL, 1, BOUNDS)
    assert {name: getattr(sampling, name) for name in same} == same
    assert dict(sampling.logit_bias) == {5: -100.0}
    assert sampling.HasField("top_logprobs") and sampling.top_logprobs == 0
    assert list(sampling.stop_token_ids) == [2, 3, 9]
    assert list(sampling_of(replace(params, ignore_eos=True), MODEL, 1, BOUNDS).stop_token_ids) == [9]
    assert not sampling_of(TEXT, MODEL, 1, BOUNDS).HasField("top_logprobs")


PROMPT = [44, 41, 44, 50, 41, 41]


@pytest.mark.parametrize("penalty", [None, 1.0, 1.3])
async def test_distinct_prompt_tokens_are_sent_only_for_the_penalty(rig: TokenPathRig, penalty: float | None) -> None:
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 3, "min_tokens": 2, "repetition_penalty": penalty}
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
    starts = dict(start for worker in rig.workers for start in worker.starts)
    assert starts.keys() == {"prefill", "decode"} and not starts["decode"].prompt
    for start in starts.values():
        assert (start.sampling.repetition_penalty, start.sampling.min_tokens) == (penalty or 1.0, 2)
        assert list(start.distinct_prompt_tokens) == ([41, 44, 50] if penalty == 1.3 else [])


@pytest.mark.parametrize(("min_tokens", "answer"), [(0, ""), (11, "hello hello hello hello ")])
async def test_stop_strings_are_searched_after_min_tokens(rig: TokenPathRig, min_tokens: int, answer: str) -> None:
    body = {"model": "echo", "prompt": "hello ", "max_tokens": 40, "stop": "hello ", "min_tokens": min_tokens}
    reply = (await rig.http.post("/v1/completions", json=body)).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == (answer, "stop")
