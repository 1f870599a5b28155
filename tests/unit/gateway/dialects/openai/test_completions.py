"""Completions: token ids, choices, prompts, ends, ``echo``, ``best_of``, text after its prompt; logprobs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.cpu_steps import shortest_of_five
from tests.support.echo_worker import token_logprobs
from tests.support.gateway_ports import PRINCIPAL
from tests.support.sample_tokenizers import EOS, byte_fallback_tokenizer
from tests.support.token_decoders import decoder_of
from tests.support.wait import eventually
from tests.unit.gateway.dialects.all_dialects import METADATA, inference_stub
from tests.unit.gateway.token_path_rig import PROMPT, MakeRig, TokenPathRig
from torchrelay.common.errors import QuotaExceeded, RateLimited
from torchrelay.common.tokens.text_stream import TextStream
from torchrelay.common.tokens.token_bytes import TokenBytes
from torchrelay.control.v1 import generation_pb2
from torchrelay.gateway.core import FinishCause
from torchrelay.gateway.dialects.openai.replies import Answer, ReplyFormat, whole_reply
from torchrelay.gateway.exchange.logprobs import LogprobFormatter
from torchrelay.gateway.exchange.whole_answer import ChoiceBuffer
from torchrelay.gateway.inference.choice_reader import ScoredToken
from torchrelay.gateway.inference.core import GenerateParams, TokenLogprobs, Usage
from torchrelay.gateway.inference.text.detokenizer import PlacedToken
from torchrelay.gateway.settings import GatewaySettings
from torchrelay.inference.v1 import inference_pb2 as pb

PROMPTS = [PROMPT, [50, 51, 52], [60, 61, 62, 63, 64]]
OF_IDS: dict[str, Any] = {"model": "echo", "prompt": PROMPT, "max_tokens": 9, "return_token_ids": True}
OF_TEXT: dict[str, Any] = {"model": "echo", "prompt": "hello  Hello ", "max_tokens": 4}


def events_of(body: str) -> list[dict[str, Any]]:
    """The JSON events of a stream that ended properly."""
    lines = [line for line in body.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def posted(rig: TokenPathRig, body: dict[str, Any], **fields: Any) -> Any:
    response = await rig.http.post("/v1/completions", json={**body, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(rig: TokenPathRig, body: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The events, all of which have the id of the request."""
    response = await rig.http.post("/v1/completions", json={**body, "stream": True, **fields})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert {event["id"] for event in events} == {response.headers["x-request-id"]}
    return events


def choice_of(events: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """The events of a choice."""
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_choices_of_each_prompt_follow_each_other(rig: TokenPathRig, num_choices: int) -> None:
    """In a reply and in a stream; the token ids of the prompt are where vLLM has them, within each choice."""
    whole = await posted(rig, OF_IDS, prompt=PROMPTS, max_tokens=6, n=num_choices)
    answers = [rig.echoed(prompt, 6, choice) for prompt in PROMPTS for choice in range(num_choices)]
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(answers)))
    assert [choice["text"] for choice in whole["choices"]] == [rig.text(answer) for answer in answers]
    assert [choice["token_ids"] for choice in whole["choices"]] == answers
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (15, 6 * len(answers))
    assert "prompt_token_ids" not in whole
    ids = [whole["id"], f"{whole['id']}-1", f"{whole['id']}-2"]
    assert sorted(rig.ports.settled) == ids and not rig.ports.reserved
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        billed = [
            (usage.choice, usage.num_prompt_tokens, usage.num_output_tokens, usage.cause)
            for usage in rig.ports.settled[request_id]
        ]
        assert billed == [(choice, len(prompt), 6, FinishCause.LENGTH) for choice in range(num_choices)]

    fields: dict[str, Any] = {"prompt": PROMPTS, "max_tokens": 6, "n": num_choices}
    events = await streamed(rig, OF_IDS, **fields, stream_options={"include_usage": True})
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        listed = choice_of(events, choice["index"])
        assert "".join(each["text"] for each in listed) == choice["text"]
        assert [token for each in listed for token in each["token_ids"]] == choice["token_ids"]
        assert choice["prompt_token_ids"] == PROMPTS[choice["index"] // num_choices]
        shown = [each.get("prompt_token_ids") for each in listed]
        assert shown == [choice["prompt_token_ids"]] + [None] * 6, "with the first event"
        assert listed[-1]["finish_reason"] == "length"


async def test_texts_are_answered_as_each_alone(rig: TokenPathRig) -> None:
    texts = ["one two", "three", "größer 🔥"]
    whole = await posted(rig, OF_TEXT, prompt=texts, logprobs=1)
    for index, text in enumerate(texts):
        [alone] = (await posted(rig, OF_TEXT, prompt=text, logprobs=1))["choices"]
        assert whole["choices"][index] == {**alone, "index": index}


async def test_each_prompt_counts_in_the_limits(make_rig: MakeRig) -> None:
    rig = await make_rig(max_open_requests_per_tenant=2)
    body = {"model": "echo", "max_tokens": 2}
    refused = await rig.http.post("/v1/completions", json={**body, "prompt": PROMPTS})
    assert (refused.status_code, "max_open_requests_per_tenant" in refused.text) == (429, True)
    await posted(rig, body, prompt=PROMPTS[:2])
    assert [num_prompt for num_prompt, _ in rig.ports.admitted] == [7, 3]
    assert rig.shares.requests.num_held == 0
    assert rig.ports.admitted_requests == [1, 0], "one request of the rate"


async def test_nothing_runs_unless_all_prompts_can(rig: TokenPathRig) -> None:
    """The budget is too small for the last of them, or the last is too long."""
    body = {"model": "echo", "max_tokens": 2}
    rig.ports.num_until_refusal, rig.ports.refusal = 2, QuotaExceeded("the budget is spent")
    assert (await rig.http.post("/v1/completions", json={**body, "prompt": PROMPTS})).status_code == 403
    rig.ports.refusal = None
    assert (await rig.http.post("/v1/completions", json={**body, "prompt": [*PROMPTS, [1] * 512]})).status_code == 400
    assert len(rig.ports.admitted) == 2 and not rig.ports.reserved
    assert not rig.ports.opened and not rig.scheduler.admits
    # Reserved by the prompts before it, and so at each repetition.
    rig.ports.num_until_refusal, rig.ports.refusal = 3, RateLimited("running requests reserve the budget")
    spent = await rig.http.post("/v1/completions", json={**body, "prompt": PROMPTS[:2]})
    assert spent.status_code == 403 and "together need more than the limits leave" in spent.text


async def test_prompts_without_a_limit_share_the_default(make_rig: MakeRig) -> None:
    """A budget has space for them together as for one of them alone."""
    rig = await make_rig(default_max_tokens=40)
    await posted(rig, {"model": "echo"}, prompt=PROMPTS[:2])
    await posted(rig, {"model": "echo"}, prompt=PROMPTS[0])
    assert [most for _, most in rig.ports.admitted] == [20, 20, 40]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_left", [True, False])
async def test_end_of_one_prompt_ends_all(rig: TokenPathRig, stream: bool, is_left: bool) -> None:
    """The client leaves, or the answer to one of them fails."""
    for worker in rig.workers:
        worker.pause_at = 5
    body = {"model": "echo", "prompt": PROMPTS, "max_tokens": 100, "stream": stream}
    asking = asyncio.ensure_future(rig.http.post("/v1/completions", json=body))
    await eventually(lambda: rig.num_accepted() == [5, 5, 5])
    if is_left:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    else:
        next(iter(rig.token_path.pipeline.requests)).stop(QuotaExceeded("a cause"))
        response = await asking
        assert response.status_code == (200 if stream else 403)
        assert response.text.count("a cause") == 1 and "[DONE]" not in response.text
    await eventually(lambda: len(rig.ports.settled) == 3 and not rig.ports.reserved)
    billed = [usage for usages in rig.ports.settled.values() for usage in usages]
    assert [usage.num_output_tokens for usage in billed] == [5, 5, 5]
    assert not is_left or {usage.cause for usage in billed} == {FinishCause.CANCELLED}
    await eventually(lambda: rig.token_path.admissions.num_open == 0)


async def test_stop_tokens_leave_no_text(rig: TokenPathRig) -> None:
    """The end of a sequence, unless it is ignored, and those of the request in any case."""
    eos = rig.ports.published["acme/echo"].version.eos_token_ids[0]
    with_end: dict[str, Any] = {"prompt": [*PROMPT[:3], eos]}
    own: dict[str, Any] = {"stop_token_ids": [PROMPT[4], 3]}
    for fields, tokens in (
        (with_end, [*PROMPT[:3], eos]),
        (own, PROMPT[:5]),
        ({**own, "ignore_eos": True}, PROMPT[:5]),
    ):
        [choice] = (await posted(rig, OF_IDS, **fields))["choices"]
        assert (choice["finish_reason"], choice["token_ids"]) == ("stop", tokens)
        assert choice["text"] == rig.text(tokens[:-1])
    [choice] = (await posted(rig, OF_IDS, **with_end, ignore_eos=True))["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 9)


async def test_answer_without_limit_ends_with_budget(rig: TokenPathRig) -> None:
    rig.ports.max_output_tokens = 7
    body = {"model": "echo", "prompt": PROMPT}
    for num_choices, num_tokens in ((1, 7), (3, 2)):
        reply = await posted(rig, body, n=num_choices)
        assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
        assert reply["usage"]["completion_tokens"] == num_choices * num_tokens
    reply = await posted(rig, body, n=3, max_tokens=9)
    assert reply["usage"]["completion_tokens"] == 27  # a limit of its own is refused by the limiter, or kept


async def test_text_with_a_token_beyond_the_vocabulary_is_refused(rig: TokenPathRig) -> None:
    model = rig.ports.published["acme/echo"]
    version = replace(model.version, shape=replace(model.version.shape, vocab_size=40))
    rig.ports.published["acme/echo"] = replace(model, version=version)
    response = await rig.http.post("/v1/completions", json={"model": "echo", "prompt": "torch"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt")
    assert "the model's token ids are 0 to 39" in error["message"]


@pytest.mark.parametrize("ids", [False, True])
async def test_echo_begins_with_the_prompt(rig: TokenPathRig, ids: bool) -> None:
    prompt = rig.tokenizer.encode(OF_TEXT["prompt"]).ids if ids else OF_TEXT["prompt"]
    plain = await posted(rig, OF_TEXT, n=2)
    fields: dict[str, Any] = {"prompt": prompt, "n": 2, "echo": True}
    reply, events = await posted(rig, OF_TEXT, **fields), await streamed(rig, OF_TEXT, **fields)
    texts = [OF_TEXT["prompt"] + choice["text"] for choice in plain["choices"]]
    assert [choice["text"] for choice in reply["choices"]] == texts
    assert reply["usage"] == plain["usage"]
    for index, text in enumerate(texts):
        pieces = [choice["text"] for choice in choice_of(events, index)]
        assert pieces[0] == OF_TEXT["prompt"] and "".join(pieces) == text
    several = await posted(rig, OF_TEXT, prompt=["one", "Two "], echo=True)
    assert [choice["text"][:4] for choice in several["choices"]] == ["oneo", "Two "]


async def test_best_of_returns_the_likeliest_and_bills_all(rig: TokenPathRig) -> None:
    """The choices have 2, 1 and 3 tokens, each token less likely than the one before."""
    body = {**OF_TEXT, "prompt": "hello ", "max_tokens": 9, "stop": "llo"}
    every = await posted(rig, body, n=3)
    assert [choice["text"] for choice in every["choices"]] == ["he", "", " he"]
    best = await posted(rig, body, n=2, best_of=3)
    shown = [(choice["index"], choice["text"], choice["logprobs"]) for choice in best["choices"]]
    assert shown == [(0, "", None), (1, "he", None)]
    assert best["usage"] == every["usage"] and best["usage"]["completion_tokens"] == 6
    assert [usage.num_output_tokens for usage in rig.ports.settled[best["id"]]] == [2, 1, 3]
    [choice] = (await posted(rig, body, best_of=3, logprobs=0))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5]
    assert (await posted(rig, body, n=3, best_of=3))["choices"] == every["choices"], "all, in their order"
    assert await streamed(rig, body, n=3, best_of=3)


# With a tokenizer that strips the first space of what it decodes.


@pytest.fixture
async def stripping(make_rig: MakeRig) -> TokenPathRig:
    tokenizer = Tokenizer.from_str(byte_fallback_tokenizer().decode())
    tokenizer.add_special_tokens([EOS])
    return await make_rig(tokenizer=tokenizer.to_str().encode())


HELLO = {"model": "echo", "prompt": "hello hello", "max_tokens": 4}


async def test_answer_continues_the_text_of_its_prompt(stripping: TokenPathRig) -> None:
    rig, answer = stripping, " hello hello"
    whole = await posted(rig, HELLO, n=2)
    assert [choice["text"] for choice in whole["choices"]] == [answer, "llo hello he"]
    assert "".join(choice["text"] for choice in choice_of(await streamed(rig, HELLO), 0)) == answer
    async with inference_stub(rig) as stub:
        events = [event async for event in stub.Generate(pb.GenerateRequest(**HELLO), metadata=METADATA)]  # type: ignore[arg-type]
    assert "".join(delta.text for event in events for delta in event.choices) == answer
    messages: Any = [{"role": "user", "content": "hello"}]
    reply = await rig.client.chat.completions.create(model="echo", messages=messages, max_tokens=8)
    prompt = rig.tokenizer.encode("user: hello\n\nassistant: ", add_special_tokens=False).ids
    assert reply.choices[0].message.content == rig.text([*prompt, *prompt[:8]]).removeprefix(rig.text(prompt))


async def test_echo_joins_a_character_that_the_answer_completes(stripping: TokenPathRig) -> None:
    """The prompt ends within a character."""
    rig, vocab = stripping, stripping.tokenizer.get_vocab()
    hello = rig.tokenizer.encode("hello", add_special_tokens=False).ids
    prompt = [vocab["<0xA9>"], *hello, vocab["<0xC3>"]]
    [choice] = (await posted(rig, HELLO, prompt=prompt, echo=True))["choices"]
    text = rig.tokenizer.decode([*prompt, *rig.echoed(prompt, 4)])
    assert "helloé" in text and choice["text"] == text


async def test_stop_string_that_begins_with_space_ends_answer(stripping: TokenPathRig) -> None:
    """The worker stops computing at the same token as the gateway stops showing text."""
    reply = await posted(stripping, HELLO, stop=[" he"])
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", "stop")
    assert reply["usage"]["completion_tokens"] == 1


async def test_text_is_the_same_after_its_worker_died(stripping: TokenPathRig) -> None:
    """The second attempt ends at a stop string that began in the first."""
    rig = stripping
    first, second = rig.workers
    first.pause_at = 2
    posting = asyncio.ensure_future(posted(rig, HELLO, stop=[" hello he"]))
    await eventually(lambda: rig.num_accepted() == [2])
    await first.kill()
    reply = await posting
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", "stop")
    assert reply["usage"]["completion_tokens"] == 3
    again = [start for _, start in (*first.starts, *second.starts) if start.key.attempt == 2]
    assert {len(start.choices[0].forced_output) for start in again} == {2}


MESSAGES: Any = [{"role": "user", "content": "größer 🚀🚀"}]


LONG_ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "max_tokens": 100}),
    ("completions", {"prompt": PROMPT, "logprobs": 5, "max_tokens": 400}),
    ("completions", {"prompt": "word " * 100, "echo": True, "n": 16, "max_tokens": 1}),
    ("responses", {"input": "a", "top_logprobs": 20, "max_output_tokens": 100}),
    ("responses", {"input": "a", "top_logprobs": 20, "max_output_tokens": 100, "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), LONG_ANSWERS)
async def test_answer_counts_in_the_share_as_it_grows(make_rig: MakeRig, path: str, body: dict[str, Any]) -> None:
    rig = await make_rig(max_held_answer_bytes_per_tenant=6_000)
    refused = await rig.http.post(f"/v1/{path}", json={"model": "echo", **body})
    assert "max_held_answer_bytes_per_tenant" in refused.text
    assert refused.status_code == (200 if body.get("stream") else 429)
    await eventually(lambda: not rig.shares.answer_bytes.num_held and not rig.ports.reserved)
    few = {name: 3 for name in ("max_tokens", "max_output_tokens", "n") if name in body}
    answered = await rig.http.post(f"/v1/{path}", json={"model": "echo", **body, **few})
    assert answered.status_code == 200 and "max_held_answer_bytes_per_tenant" not in answered.text
    assert not rig.shares.answer_bytes.num_held


async def test_logprobs_of_a_prompt_count_in_the_share_before_they_come(make_rig: MakeRig) -> None:
    """A prompt may have as many tokens as the context, and a request many prompts."""
    rig = await make_rig(max_held_answer_bytes_per_tenant=900)
    body = {"model": "echo", "prompt": PROMPT, "prompt_logprobs": 20, "max_tokens": 1}
    refused = await rig.http.post("/v1/completions", json=body)
    assert refused.status_code == 429 and "max_held_answer_bytes_per_tenant" in refused.text
    await eventually(lambda: not rig.shares.answer_bytes.num_held and not rig.ports.reserved)
    assert [usage.num_prompt_tokens for usages in rig.ports.settled.values() for usage in usages] == [0]


@pytest.mark.parametrize("is_chat", [True, False])
async def test_reply_with_the_most_logprobs_is_made_in_a_short_step(rig: TokenPathRig, is_chat: bool) -> None:
    """They fill a tenant's share."""
    formatter = LogprobFormatter(TokenBytes(decoder_of(rig.tokenizer)), is_chat)
    logprobs = TokenLogprobs(-0.5, tuple((2 + place, -0.25) for place in range(20)))
    token = formatter.encoded(ScoredToken(2, logprobs, PlacedToken("a", b"a", 0)))
    num_tokens = GatewaySettings().max_held_answer_bytes_per_tenant // sum(map(len, token)) // 16
    choice = ChoiceBuffer(parts=["a"] * num_tokens, finish=FinishCause.LENGTH, logprobs=[token] * num_tokens)
    params = GenerateParams("echo", token_ids=tuple(PROMPT), max_tokens=1)
    async with rig.token_path.pipeline.session(PRINCIPAL, params, "req-1", 0) as session:
        resolved = session.request.resolved
    answer = Answer(resolved, [choice] * 16, Usage(1, 0, num_tokens), formatter)
    assert len(shortest_of_five(lambda: whole_reply(ReplyFormat(is_chat), [answer]))) > 60 << 20


async def test_offsets_count_characters_not_bytes_or_tokens(rig: TokenPathRig) -> None:
    prompt = rig.tokenizer.encode("é🚀 größer", add_special_tokens=False).ids
    reply = await rig.client.completions.create(model="echo", prompt=prompt, max_tokens=len(prompt), logprobs=0)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.text_offset is not None
    stream, shown, expected = TextStream(decoder_of(rig.tokenizer)), "", []
    for token in prompt:
        expected.append(len(shown))
        shown += stream.step(token)
    assert logprobs.text_offset == expected
    assert len(set(expected)) < len(expected)  # tokens of the same emoji share an offset


async def test_logprobs_of_a_worker_may_be_infinite_or_missing(
    rig: TokenPathRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hopeless(token: int, position: int, num_top: int) -> Any:
        made = token_logprobs(token, position, num_top)
        made.chosen = made.top_logprobs[-1] = float("-inf")
        return made

    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 2}
    plain = (await rig.http.post("/v1/completions", json=body)).json()
    assert plain["choices"][0]["logprobs"] is None
    assert not any(start.sampling.HasField("top_logprobs") for _, start in rig.workers[0].starts)
    monkeypatch.setattr("tests.support.echo_worker.token_logprobs", hopeless)
    infinite = (await rig.http.post("/v1/completions", json={**body, "logprobs": 2})).json()["choices"][0]["logprobs"]
    assert infinite["token_logprobs"] == [-9999.0, -9999.0]
    assert -9999.0 in infinite["top_logprobs"][0].values()

    def without(choice: Any, model: Any, prompt: Any) -> generation_pb2.ChoiceOutput:
        return generation_pb2.ChoiceOutput(key=choice.start.key, choice=choice.choice, token_ids=[prompt[0]])

    monkeypatch.setattr("tests.support.echo_worker._Choice.step", without)
    missing = await rig.http.post("/v1/completions", json={**body, "logprobs": 2})
    assert missing.status_code == 500 and "returned no logprobs" in missing.json()["error"]["message"]


async def test_first_token_without_its_space_is_once_among_alternatives(make_rig: MakeRig) -> None:
    tokenizer = Tokenizer.from_str(byte_fallback_tokenizer().decode())
    tokenizer.add_special_tokens([EOS])
    rig = await make_rig(tokenizer=tokenizer.to_str().encode())
    begin, hello = rig.tokenizer.token_to_id("<s>"), rig.tokenizer.token_to_id("▁he")
    assert begin is not None and hello is not None
    rig.model.answer = lambda prompt, seed, choice, position: hello
    body = {"model": "echo", "prompt": [begin], "max_tokens": 2, "logprobs": 0}
    choice = (await rig.http.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["text"] == "he he"
    assert choice["logprobs"]["tokens"] == ["he", " he"]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [["he"], [" he"]]
    assert choice["logprobs"]["text_offset"] == [0, 2]
