"""Defaults and limits of a request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.gateway_ports import published_model
from torchrelay.common.errors import ContextLengthExceeded, InvalidRequest
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.inference.sampling import GenerationBounds, sampling_of

MODEL = published_model(file_digests={}, context=100, eos_token_ids=(2, 3))
BOUNDS = GenerationBounds(default_max_tokens=40, max_choices=4)


def test_only_default_max_tokens_is_cut_to_the_context() -> None:
    params = GenerateParams("m", text="x")
    assert sampling_of(params, MODEL, 10, BOUNDS).max_tokens == 40
    assert sampling_of(params, MODEL, 90, BOUNDS).max_tokens == 10
    assert sampling_of(GenerateParams("m", text="x", max_tokens=90), MODEL, 10, BOUNDS).max_tokens == 90
    with pytest.raises(ContextLengthExceeded) as caught:
        sampling_of(GenerateParams("m", text="x", max_tokens=91), MODEL, 10, BOUNDS)
    assert caught.value.field == "max_tokens"


@pytest.mark.parametrize(
    ("params", "field"), [(GenerateParams("m", text="x"), "prompt"), (GenerateParams("m", messages=()), "messages")]
)
def test_prompt_that_fills_the_context_is_refused(params: GenerateParams, field: str) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        sampling_of(params, MODEL, 100, BOUNDS)
    assert caught.value.field == field


def test_seeds_are_kept_or_drawn() -> None:
    assert sampling_of(GenerateParams("m", text="x", seed=7), MODEL, 1, BOUNDS).seed == 7
    assert sampling_of(GenerateParams("m", text="x", seed=0), MODEL, 1, BOUNDS).seed == 0
    drawn = {sampling_of(GenerateParams("m", text="x"), MODEL, 1, BOUNDS).seed for _ in range(8)}
    assert len(drawn) == 8


def test_stops_are_those_of_model_and_request() -> None:
    sampling = sampling_of(GenerateParams("m", text="x", stop=("a", "b")), MODEL, 1, BOUNDS)
    assert (list(sampling.stop_token_ids), list(sampling.stop_strings)) == ([2, 3], ["a", "b"])
    ignoring = sampling_of(GenerateParams("m", text="x", ignore_eos=True), MODEL, 1, BOUNDS)
    assert (list(ignoring.stop_token_ids), ignoring.ignore_eos) == ([], True)


def test_sampling_parameters_reach_the_workers() -> None:
    params = GenerateParams(
        "m",
        text="x",
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((5, -100.0),),
        top_logprobs=0,
        stop_token_ids=(9,),
        repetition_penalty=1.2,
        min_tokens=3,
    )
    sampling = sampling_of(params, MODEL, 1, BOUNDS)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.2, 3)
    assert dict(sampling.logit_bias) == {5: -100.0}
    assert sampling.HasField("top_logprobs") and sampling.top_logprobs == 0
    assert list(sampling.stop_token_ids) == [2, 3, 9]
    assert list(sampling_of(replace(params, ignore_eos=True), MODEL, 1, BOUNDS).stop_token_ids) == [9]
    assert not sampling_of(GenerateParams("m", text="x"), MODEL, 1, BOUNDS).HasField("top_logprobs")


def test_min_tokens_raise_the_default_and_stay_below_max_tokens() -> None:
    assert sampling_of(GenerateParams("m", text="x", min_tokens=60), MODEL, 10, BOUNDS).max_tokens == 60
    assert sampling_of(GenerateParams("m", text="x", min_tokens=8, max_tokens=8), MODEL, 10, BOUNDS).max_tokens == 8
    for params, said in (
        (GenerateParams("m", text="x", min_tokens=9, max_tokens=8), "must be at most max_tokens .8., not 9"),
        (GenerateParams("m", text="x", min_tokens=91), "10 prompt and 91 output tokens .min_tokens. exceed"),
    ):
        with pytest.raises(InvalidRequest, match=said) as caught:
            sampling_of(params, MODEL, 10, BOUNDS)
        assert caught.value.field == "min_tokens"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (GenerateParams("m", text="x", logit_bias=((1 << 20, 1.0),)), "logit_bias"),
        (GenerateParams("m", text="x", stop_token_ids=(1 << 20,)), "stop_token_ids"),
    ],
)
def test_token_ids_beyond_the_vocabulary_are_refused(params: GenerateParams, field: str) -> None:
    with pytest.raises(InvalidRequest, match="token 1048576; the model's token ids are 0 to 1048575") as caught:
        sampling_of(params, MODEL, 1, BOUNDS)
    assert caught.value.field == field


def test_max_tokens_at_the_bounds_of_the_context() -> None:
    assert sampling_of(GenerateParams("m", text="x", max_tokens=99), MODEL, 1, BOUNDS).max_tokens == 99
    assert sampling_of(GenerateParams("m", text="x", max_tokens=1), MODEL, 99, BOUNDS).max_tokens == 1
    assert sampling_of(GenerateParams("m", text="x"), MODEL, 99, BOUNDS).max_tokens == 1
    with pytest.raises(ContextLengthExceeded, match="99 prompt and 2 output tokens exceed the context length of 100"):
        sampling_of(GenerateParams("m", text="x", max_tokens=2), MODEL, 99, BOUNDS)


def test_number_of_choices_is_bounded() -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling_of(GenerateParams("m", text="x", num_choices=5), MODEL, 1, BOUNDS)
    assert caught.value.field == "n"
