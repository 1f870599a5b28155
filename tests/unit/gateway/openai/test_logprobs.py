"""Logprobs of chats and completions."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.echo_worker import token_logprobs
from tests.support.sample_tokenizers import EOS, byte_fallback_tokenizer
from tests.support.token_decoders import decoder_of
from tests.unit.gateway.dialects import METADATA, inference_stub
from tests.unit.gateway.openai.test_completions import events_of
from tests.unit.gateway.token_path_rig import PROMPT, MakeRig, TokenPathRig
from torchrelay.common.tokens.text_stream import TextStream
from torchrelay.common.tokens.token_bytes import TokenBytes
from torchrelay.control.v1 import generation_pb2
from torchrelay.inference.v1 import inference_pb2 as pb

MESSAGES: Any = [{"role": "user", "content": "größer 🚀🚀"}]


async def test_openai_client_reads_chat_logprobs(rig: TokenPathRig) -> None:
    reply = await rig.client.chat.completions.create(
        model="echo", messages=MESSAGES, max_tokens=25, logprobs=True, top_logprobs=3, n=2, seed=1
    )
    tokens = TokenBytes(decoder_of(rig.tokenizer))
    prompt = rig.tokenizer.encode("user: größer 🚀🚀\n\nassistant: ", add_special_tokens=False).ids
    for choice in reply.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        ids = rig.echoed(prompt, 25, choice.index)
        assert [bytes(entry.bytes or []) for entry in choice.logprobs.content] == [tokens.of(token) for token in ids]
        assert [entry.logprob for entry in choice.logprobs.content] == [-position - 0.5 for position in range(25)]
        whole = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
        assert whole.decode(errors="replace") == choice.message.content
        for entry in choice.logprobs.content:
            assert [(bytes(top.bytes or []), top.logprob) for top in entry.top_logprobs] == [
                (tokens.of(2 + place), -0.25 * (place + 1)) for place in range(3)
            ]
    shown = [entry.token for choice in reply.choices for entry in (choice.logprobs and choice.logprobs.content) or []]
    assert any(text.startswith("\\x") for text in shown)  # the emoji is several tokens
    assert " größer" in shown


async def test_streamed_logprobs_are_those_of_the_whole_reply(rig: TokenPathRig) -> None:
    wishes: dict[str, Any] = {"model": "echo", "max_tokens": 25, "logprobs": True, "top_logprobs": 2, "stop": ["never"]}
    whole = await rig.client.chat.completions.create(messages=MESSAGES, **wishes)
    stream = await rig.client.chat.completions.create(messages=MESSAGES, stream=True, **wishes)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert whole.choices[0].logprobs is not None
    streamed = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content or []]
    assert streamed == whole.choices[0].logprobs.content
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert all(len(chunk.logprobs.content or []) == 1 for chunk in chunks if chunk.logprobs)


@pytest.mark.parametrize("num_top", [0, 3])
async def test_completion_logprobs_have_the_older_shape(rig: TokenPathRig, num_top: int) -> None:
    reply = await rig.client.completions.create(model="echo", prompt=PROMPT, max_tokens=15, logprobs=num_top)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    ids, tokens = rig.echoed(PROMPT, 15), TokenBytes(decoder_of(rig.tokenizer))
    assert logprobs.tokens == [tokens.of(token).decode(errors="backslashreplace") for token in ids]
    assert logprobs.token_logprobs == [-position - 0.5 for position in range(15)]
    assert logprobs.top_logprobs is not None
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top.get(token) == value or token in list(top)[:num_top]
        assert len(top) in (num_top, num_top + 1)
        assert list(top.values())[:num_top] == [-0.25 * (place + 1) for place in range(num_top)]
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("\\x") or reply.choices[0].text[offset:].startswith(token)
    body = {"model": "echo", "prompt": PROMPT, "max_tokens": 15, "logprobs": num_top, "stream": True}
    events = events_of((await rig.http.post("/v1/completions", json=body)).text)
    parts = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    assert [part["text_offset"][0] for part in parts] == logprobs.text_offset
    assert [part["tokens"][0] for part in parts] == logprobs.tokens


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


async def test_bytes_join_to_text_without_token_that_ends_it(rig: TokenPathRig) -> None:
    answer = rig.tokenizer.encode(f" größer 🚀{EOS}").ids
    rig.model.answer = lambda prompt, seed, choice, position: answer[position]
    reply = await rig.client.chat.completions.create(model="echo", messages=MESSAGES, logprobs=True)
    choice = reply.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content).decode() == " größer 🚀"
    assert (choice.message.content, choice.finish_reason) == (" größer 🚀", "stop")
    assert (choice.logprobs.content[-1].token, choice.logprobs.content[-1].bytes) == (EOS, None)
    request = pb.GenerateRequest(model="echo", prompt_token_ids=pb.TokenIds(ids=PROMPT), top_logprobs=0)
    async with inference_stub(rig) as stub:
        deltas = [delta async for event in stub.Generate(request, metadata=METADATA) for delta in event.choices]
    assert b"".join(entry.token for delta in deltas for entry in delta.logprobs).decode() == " größer 🚀"


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
