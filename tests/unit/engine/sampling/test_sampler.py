"""Every sampler against its definition in plain numpy, and the tokens of an instance that samples."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.support.checkpoints import make_overflowing_checkpoint, reference_model
from tests.unit.engine.harness import Model, ModelOf, answer, assert_idle, group_of, hand_over, outputs, prompt_of, run
from torchrelay.common.errors import InvalidRequest
from torchrelay.engine.core import NO_TOKEN, ChoiceSpec, Finish, GroupSpec, NewToken, SamplingParams
from torchrelay.engine.sampling import distributions
from torchrelay.engine.sampling.distributions import apply_biases_and_penalties, draw_by_cdf, probabilities
from torchrelay.engine.sampling.sampler import TokenDraw, sample_tokens, uniform

Row = npt.NDArray[np.float64]
LOGITS = [0.3, 2.0, -1.0, 1.2, 2.4, -math.inf, 0.0, 1.9]
COUNTS = {4: 3, 1: 1, 7: 1}
PROMPT = (2, 3, 4)
NUM_DRAWS = 6400


def definition(logits: Sequence[float], params: SamplingParams, counts: dict[int, int]) -> Row:
    """The probability of every token as the API defines it."""
    scores = np.array(logits, np.float64)
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token in {*counts, *PROMPT} if params.penalises_prompt else ():
        scores[token] *= params.repetition_penalty ** (-1 if scores[token] > 0 else 1)
    for token, count in counts.items():
        scores[token] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
    weights: Row = np.exp((scores - scores.max()) / params.temperature)
    if params.min_tokens:
        weights[list(params.stop_token_ids)] = 0
    actual: Row = weights / weights.sum()
    if params.top_k:
        actual[actual < np.sort(actual)[::-1][min(params.top_k, len(actual)) - 1]] = 0
        actual /= actual.sum()
    if params.top_p < 1:
        order = np.argsort(-actual, kind="stable")
        num_kept = int(np.searchsorted(np.cumsum(actual[order]), params.top_p)) + 1
        actual[order[num_kept:]] = 0
        actual /= actual.sum()
    actual[actual < params.min_p * actual.max()] = 0
    actual /= actual.sum()
    return actual


def chi_square_is_likely(actual: Counter[int], wanted: Row, num_draws: int) -> bool:
    """Whether counts like these come by chance more often than once in a thousand; tokens too rare to test are pooled.

    The bound is the 0.999 quantile of chi-square by Wilson and Hilferty's approximation (1931), good to a percent.
    """
    if any(wanted[token] == 0 for token in actual):
        return False
    expected = wanted * num_draws
    cells = [(actual[token], count) for token, count in enumerate(expected) if count >= 5]
    rare = [token for token, count in enumerate(expected) if 0 < count < 5]
    if rare:
        cells.append((sum(actual[token] for token in rare), float(sum(expected[token] for token in rare))))
    freedom = len(cells) - 1
    statistic = sum((seen - count) ** 2 / count for seen, count in cells)
    bound = freedom * (1 - 2 / (9 * freedom) + 3.0902 * math.sqrt(2 / (9 * freedom))) ** 3
    return bool(statistic < bound)


def draw_of(params: SamplingParams, row: int = 0, position: int = 0, counts: dict[int, int] | None = None) -> TokenDraw:
    distinct = array("q", PROMPT if params.penalises_prompt else ())
    sampling = replace(params, max_tokens=10**6)
    group = GroupSpec("r/0", (1,), 1, sampling, (ChoiceSpec(0),), distinct_prompt_tokens=distinct)
    return TokenDraw(row, group, 0, position, counts)


def drawn(logits: Sequence[float], params: SamplingParams, counts: dict[int, int] | None = None) -> Counter[int]:
    """Tokens of ``NUM_DRAWS`` positions of one seed, sampled 64 at once."""
    rows = torch.tensor([logits]).expand(64, -1)
    actual: Counter[int] = Counter()
    for begin in range(0, NUM_DRAWS, 64):
        draws = [draw_of(params, row, begin + row, counts) for row in range(64)]
        actual.update(token.token_id for token in sample_tokens(rows, draws))
    return actual


SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.0},
    {"top_k": 3, "temperature": 1.3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.8, "temperature": 0.9},
    {"top_k": 6, "top_p": 0.95, "min_p": 0.05},
    {"logit_bias": ((0, 2.0), (4, -3.0))},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.0, "frequency_penalty": 2.0, "logit_bias": ((4, 3.0),), "temperature": 0.8},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7, "temperature": 0.9},
    {"repetition_penalty": 2.0, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": ((2, 3.0), (7, -4.0))},
    {"min_tokens": 10**6, "stop_token_ids": frozenset((4, 1))},
    {"presence_penalty": 0.5, "frequency_penalty": 0.22, "logit_bias": ((2, 4.0),), "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("settings", SAMPLERS, ids=lambda settings: "-".join(settings))
def test_frequencies_fit_definition(settings: dict[str, Any]) -> None:
    params = SamplingParams(seed=len(str(settings)), **settings)
    counts = COUNTS if params.penalised else None
    wanted = definition(LOGITS, params, counts or {})
    actual = drawn(LOGITS, params, counts)
    assert chi_square_is_likely(actual, wanted, NUM_DRAWS)


def test_chi_square_test_rejects_wrong_sampler() -> None:
    """Frequencies of one sampler do not fit those of a similar one."""
    actual = drawn(LOGITS, SamplingParams(temperature=1.0, seed=3))
    for other in (SamplingParams(temperature=0.9), SamplingParams(logit_bias=((1, 0.15),)), SamplingParams(top_k=6)):
        assert not chi_square_is_likely(actual, definition(LOGITS, other, {}), NUM_DRAWS)


@pytest.mark.parametrize("top_p", [0.5, 0.93, 0.999])
def test_wide_nucleus_is_complete(top_p: float) -> None:
    """The distribution is nearly flat over 3,000 tokens, more than are sorted at first."""
    logits = np.random.default_rng(4).normal(0, 0.5, 3000)
    params = SamplingParams(top_p=top_p)
    wanted = definition(logits.tolist(), params, {})
    actual = probabilities(torch.tensor(logits, dtype=torch.float32)[None].clone(), [params])[0].double().numpy()
    assert (wanted > 0).sum() > distributions._NUM_ORDERED
    assert abs(int((actual > 0).sum()) - int((wanted > 0).sum())) <= 1  # fp32 sums, at the border
    assert np.allclose(actual / actual.sum(), wanted, atol=1e-5)


def test_rows_of_batch_are_sampled_independently() -> None:
    """Each of fifty rows with different settings has the tokens and the distribution that it has alone."""
    random = np.random.default_rng(9)
    logits = torch.tensor(random.normal(0, 3, (50, 700)), dtype=torch.float32)
    params = [
        SamplingParams(
            temperature=float(random.choice([0.0, 0.5, 1.0, 1.7])),
            top_k=int(random.choice([0, 1, 20, 600, 5000])),
            top_p=float(random.choice([1.0, 0.2, 0.9, 0.999])),
            min_p=float(random.choice([0.0, 0.01, 0.3])),
            presence_penalty=float(random.choice([0.0, 1.0])),
            repetition_penalty=float(random.choice([1.0, 1.3])),
            logit_bias=((3, 5.0),) if row % 3 == 0 else (),
            top_logprobs=row % 4 or None,
            seed=row,
        )
        for row in range(50)
    ]
    draws = [draw_of(own, row, row, {row: 2}) for row, own in enumerate(params)]
    together = sample_tokens(logits, draws)
    assert together == [sample_tokens(logits, [draw])[0] for draw in draws]
    for row, own in enumerate(params):
        if not own.greedy:
            wanted = definition(logits[row].tolist(), own, {row: 2})
            actual = probabilities(_penalised(logits, row, own), [own])[0].double().numpy()
            assert np.allclose(actual / actual.sum(), wanted, atol=1e-5), (row, own)
            assert wanted[together[row].token_id] > 0
        else:
            assert together[row].token_id == int(_penalised(logits, row, own).argmax())


def _penalised(logits: torch.Tensor, row: int, params: SamplingParams) -> torch.Tensor:
    prompt = array("q", PROMPT if params.penalises_prompt else ())
    return apply_biases_and_penalties(logits[row : row + 1].clone(), [params], [{row: 2}], [prompt])


def test_ties_at_cutoff_are_kept() -> None:
    logits = [1.0, 3.0, 3.0, 3.0, 0.0]
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.4), SamplingParams(min_p=1.0)):
        actual = probabilities(torch.tensor([logits]), [params])
        assert actual[0].nonzero().flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("vocab_size", [4, 32, 33, 200])
def test_extreme_random_numbers_draw_possible_tokens(number: float, vocab_size: int) -> None:
    actual = torch.zeros(1, vocab_size)
    actual[0, 1] = actual[0, vocab_size - 2] = 0.5
    assert draw_by_cdf(actual, [number]).tolist() == [1 if number == 0 else vocab_size - 2]


def test_lowest_temperatures_draw_most_likely_token() -> None:
    for temperature in (0.0, 1e-300, 1e-6, 2e-5):
        assert set(drawn(LOGITS, SamplingParams(temperature=temperature))) == {4}


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_non_finite_row_ends_only_its_draws(broken: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([LOGITS, LOGITS, LOGITS], dtype=dtype)
    logits[1, 2] = broken
    settings = (SamplingParams(temperature=0), SamplingParams(top_logprobs=2), SamplingParams(logit_bias=((1, 9.0),)))
    for params in settings:
        first, second, third = sample_tokens(logits, [draw_of(params, row, 5) for row in range(3)])
        assert (second.token_id, second.finish, second.logprobs) == (NO_TOKEN, Finish.NOT_FINITE, None)
        assert first == third and first.token_id >= 0 and first.finish is None


def test_row_of_minus_infinity_is_not_finite() -> None:
    (token,) = sample_tokens(torch.full((1, 8), -torch.inf), [draw_of(SamplingParams())])
    assert token.finish is Finish.NOT_FINITE


def test_end_tokens_are_impossible_before_min_tokens() -> None:
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=frozenset((4, 99)))
    tokens = [sample_tokens(torch.tensor([LOGITS]), [draw_of(params, 0, position)])[0] for position in range(5)]
    assert [token.token_id for token in tokens] == [1, 1, 1, 4, 4]
    assert [token.finish for token in tokens] == [None, None, None, Finish.STOP, Finish.STOP]


@pytest.mark.parametrize("temperature", [0.0, 2e-5, 1.0])
def test_end_token_is_drawn_early_if_no_other_is_possible(temperature: float) -> None:
    logits = torch.full((1, 8), -torch.inf)
    logits[0, 3] = 1.0
    params = SamplingParams(temperature=temperature, min_tokens=3, stop_token_ids=frozenset((3,)))
    (token,) = sample_tokens(logits, [draw_of(params)])
    assert (token.token_id, token.finish) == (3, Finish.STOP)


def test_uniform_is_fixed_function_of_counter() -> None:
    """Golden values: a change would alter resumed requests while workers of two versions run."""
    assert uniform(0, 0, 0) == 0.156742553465558
    assert uniform(2**64 - 1, 3, 1000) == 0.7515824167881524
    numbers = [uniform(5, choice, position) for choice in range(20) for position in range(200)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02


SEEDED: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.2, "min_p": 0.02, "presence_penalty": 0.6, "frequency_penalty": 0.3, "logit_bias": ((9, 3.0),)},
    {"temperature": 0.0, "frequency_penalty": 1.0},
    {"temperature": 0.8, "repetition_penalty": 1.3, "min_tokens": 20, "stop_token_ids": frozenset(range(0, 250, 2))},
]


@pytest.mark.parametrize("settings", SEEDED, ids=["cut", "penalised", "greedy", "repetition"])
def test_seed_gives_same_tokens_in_any_batch(model_of: ModelOf, settings: dict[str, Any]) -> None:
    """Alone, in a batch of 32 that sample in every way, and resumed on another worker, here or handed over."""
    model = model_of("qwen2")
    sampling = SamplingParams(**settings, seed=77, max_tokens=20)
    group = group_of(prompt_of(30), "a/0", sampling)
    alone = model.instance()
    alone.prefill(group)
    expected = outputs(run(alone))["a/0", 0]
    crowd = model.instance(token_budget=32)
    for number in range(31):
        other = SamplingParams(**SEEDED[number % 4], seed=number, max_tokens=24, top_logprobs=number % 2 or None)
        crowd.prefill(group_of(prompt_of(5 + number, salt=number), f"{number}/0", other))
    crowd.prefill(group)
    assert outputs(run(crowd))["a/0", 0] == expected
    for num_forced in (1, 8, 19):
        resumed = model.instance()
        forced = [expected[:num_forced]]
        resumed.prefill(group_of(prompt_of(30), "a/1", sampling, forced=forced))
        assert outputs(run(resumed))["a/1", 0] == expected[num_forced:]
        last, steps = hand_over(model.instance(), model.instance(), group_of(prompt_of(30), "a/2", sampling, forced))
        tokens = [last.tokens[0].token_id, *outputs(steps).get(("a/2", 0), [])]
        assert tokens == expected[num_forced:]
    assert_idle(crowd)


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_overflowing_checkpoint(tmp_path_factory.mktemp("overflowing")))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_overflowing_logits_end_only_their_group(overflowing: Model, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=12)
    groups = [group_of(prompt_of(9 + salt, salt), f"{salt}/0", sampling) for salt in range(16)]
    alone: dict[str, list[NewToken]] = {}
    for group in groups:
        instance = overflowing.instance()
        instance.prefill(group)
        alone[group.group_id] = [token for step in run(instance) for token in step.tokens]
        assert_idle(instance)
    ends = [tokens[-1] for tokens in alone.values()]
    assert {token.finish for token in ends} == {Finish.NOT_FINITE, Finish.LENGTH}
    assert {token.token_id for token in ends if token.finish is Finish.NOT_FINITE} == {NO_TOKEN}
    assert len({token.position for token in ends}) > 2  # with the first token, and later ones
    together = overflowing.instance()
    for group in groups:
        together.prefill(group)
    steps = run(together)
    assert {key[0]: tokens for key, tokens in outputs(steps).items()} == {
        name: [token.token_id for token in tokens] for name, tokens in alone.items()
    }
    assert_idle(together)


def test_overflowing_choice_ends_alone(overflowing: Model) -> None:
    """The engine ends what it cannot sample; the caller decides about the rest."""
    actual = set()
    for salt in range(4):
        instance = overflowing.instance()
        sampling = SamplingParams(temperature=1.5, seed=salt, max_tokens=12)
        instance.prefill(group_of(prompt_of(9, salt + 20), sampling=sampling, forced=[(), (), ()]))
        ends = {token.choice: token for step in run(instance) for token in step.tokens}
        actual.add(frozenset(token.finish for token in ends.values()))
        assert_idle(instance)
    assert frozenset({Finish.NOT_FINITE, Finish.LENGTH}) in actual


def test_logit_bias_forces_and_forbids_tokens(model_of: ModelOf) -> None:
    model = model_of()
    free = model.expected(prompt_of(12))

    def tokens(**settings: object) -> list[int]:
        instance = model.instance()
        sampling = SamplingParams(temperature=0, max_tokens=24, **settings)  # type: ignore[arg-type]
        return answer(instance, prompt_of(12), sampling=sampling)

    assert tokens(logit_bias=((7, 100.0),)) == [7] * 24
    assert not set(tokens(logit_bias=tuple((token, -100.0) for token in set(free)))) & set(free)
    assert tokens(logit_bias=((free[0], 0.0),)) == free
    assert len(set(tokens(presence_penalty=50.0, logit_bias=tuple((t, 90.0) for t in range(30, 60))))) == 24


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_equals_transformers(model_of: ModelOf, penalty: float) -> None:
    model = model_of("qwen3")
    prompt = list(prompt_of(30))
    reference = reference_model(model.folder)
    ids = torch.tensor([prompt])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "repetition_penalty": penalty}
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
    assert expected != model.expected(tuple(prompt))[:20]
    instance = model.instance()
    sampling = SamplingParams(temperature=0, max_tokens=20, repetition_penalty=penalty)
    assert answer(instance, prompt, sampling=sampling) == expected


def test_repetition_penalty_needs_tokens_of_the_vocabulary(model_of: ModelOf) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.3)
    group = replace(group_of(prompt_of(5), sampling=sampling), distinct_prompt_tokens=array("q", [5, 1 << 20]))
    instance = model_of().instance()
    with pytest.raises(InvalidRequest, match="token ids must be between 0 and"):
        instance.prefill(group)
    with pytest.raises(InvalidRequest, match="token ids must be between 0 and"):
        instance.import_kv(replace(group, prompt=()), instance.kv_layout(group))


def test_logprobs_are_unmodified_model_logprobs(model_of: ModelOf) -> None:
    model = model_of()
    prompt = prompt_of(20)
    expected = model.logits(prompt)[0].log_softmax(0)
    for top, sampling in ((3, SamplingParams(temperature=0.7, seed=2, logit_bias=((3, 50.0),))), (0, SamplingParams())):
        instance = model.instance()
        instance.prefill(group_of(prompt, sampling=replace(sampling, top_logprobs=top, max_tokens=3)))
        token = run(instance)[0].tokens[0]
        assert token.logprobs is not None
        assert abs(token.logprobs.chosen - float(expected[token.token_id])) < 1e-3
        assert [each for each, _ in token.logprobs.top] == expected.topk(top).indices.tolist()
        assert all(abs(value - float(expected[each])) < 1e-3 for each, value in token.logprobs.top)


@pytest.mark.parametrize("token", [-1, 320])
def test_logit_bias_beyond_vocabulary_is_refused(model_of: ModelOf, token: int) -> None:
    instance = model_of().instance()
    group = group_of(prompt_of(5), sampling=SamplingParams(logit_bias=((token, 1.0),)))
    with pytest.raises(InvalidRequest) as refused:
        instance.prefill(group)
    assert refused.value.field == "logit_bias"
    with pytest.raises(InvalidRequest):
        instance.import_kv(group, instance.kv_layout(group))
    assert_idle(instance)
