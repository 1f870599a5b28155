"""The dialects of the token path: the same request in each of them, and the answer as its official client reads it."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import anthropic
import grpc
import openai

from tests.support.gateway_ports import KEY
from tests.support.sample_tokenizers import EOS
from tests.support.token_decoders import decoder_of
from tests.unit.gateway.token_path_rig import TokenPathRig
from torchrelay.common.net.rpc.channels import open_channel
from torchrelay.common.net.rpc.errors import error_from_rpc
from torchrelay.common.tokens.token_bytes import TokenBytes
from torchrelay.inference.v1 import inference_pb2
from torchrelay.inference.v1.inference_pb2_grpc import InferenceStub
from torchrelay.inference.v2 import open_inference_pb2
from torchrelay.inference.v2.open_inference_pb2_grpc import GRPCInferenceServiceStub

# Of a model that repeats its prompt: the answer is the prompt up to its end token.
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: dict[str, Any] = {"name": "weather", "description": "The weather in a city.", "parameters": PARAMETERS}
ARGUMENTS = '{"city": "Köln 🔥"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
METADATA = (("authorization", f"Bearer {KEY}"),)


@dataclass(frozen=True)
class Wish:
    """A request that is answered by ``answer``."""

    answer: str
    model: str = "echo"
    key: str = KEY
    max_tokens: int = 150
    stop: Sequence[str] = ()
    has_tool: bool = False
    tool_choice: str = "auto"
    top_logprobs: int | None = None
    tier: str | None = None

    @property
    def prompt(self) -> str:
        return self.answer + EOS


@dataclass(frozen=True)
class Logprob:
    """Of a token of an answer; ``top``: the likeliest, by name."""

    token: str
    value: float
    top: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Reply:
    """What a client reads. ``end``: the cause of the end, in the dialect's words."""

    request_id: str
    text: str
    end: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    reasoning: str = ""
    calls: Sequence[tuple[str, str]] = ()  # names and arguments
    call_ids: Sequence[str] = field(default=(), compare=False)
    logprobs: Sequence[Logprob] = ()

    @property
    def content(self) -> tuple[str, str, Sequence[tuple[str, str]], str]:
        return self.text, self.reasoning, self.calls, self.end


class Failure(Exception):
    """An answer that is refused, or that breaks off."""

    def __init__(self, code: str, message: str, param: str | None = None, retry_after: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param, self.retry_after = code, message, param, retry_after


class Dialect(ABC):
    """``ends``: its words for an end by itself, at the limit, at a stop string, after calls."""

    name: ClassVar[str]
    ends: ClassVar[tuple[str, ...]] = ("stop", "length", "stop", "tool_calls")
    has_parts: ClassVar[bool] = True  # reasoning and calls apart from the text
    has_cached_tokens: ClassVar[bool] = True
    has_logprobs: ClassVar[bool] = True
    codes: ClassVar[Mapping[str, str]] = {}  # its words for our codes of errors, where they differ

    @abstractmethod
    async def ask(self, rig: TokenPathRig, wish: Wish, *, is_streamed: bool) -> Reply:
        """Raises ``Failure``."""


class Chat(Dialect):
    name = "chat"

    async def ask(self, rig: TokenPathRig, wish: Wish, *, is_streamed: bool) -> Reply:
        body: dict[str, Any] = {"model": wish.model, "messages": [{"role": "user", "content": wish.prompt}]}
        body |= {"max_tokens": wish.max_tokens, "stop": [*wish.stop], "service_tier": wish.tier}
        if wish.has_tool:
            body |= {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": wish.tool_choice}
        if wish.top_logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": wish.top_logprobs}
        create = rig.client.with_options(api_key=wish.key).chat.completions.create
        with _failures():
            if not is_streamed:
                reply = await create(**body)
                return self._reply(reply.id, reply.usage, reply.choices, [reply.choices[0].message])
            stream = await create(**body, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
        choices = [chunk.choices[0] for chunk in chunks[:-1]]
        assert choices[0].delta.role == "assistant" and not chunks[-1].choices
        assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert all(len(choice.logprobs.content) == 1 for choice in choices if choice.logprobs)
        return self._reply(chunks[0].id, chunks[-1].usage, choices, [choice.delta for choice in choices])

    def _reply(self, request_id: str, usage: Any, choices: Sequence[Any], messages: Sequence[Any]) -> Reply:
        """The reply by the choice and its message, of which a streamed one has many: each adds to the ones before."""
        calls: dict[int, list[str]] = {}
        for message in messages:
            for place, call in enumerate(message.tool_calls or ()):
                joined = calls.setdefault(getattr(call, "index", place), ["", "", ""])
                for number, text in enumerate((call.id, call.function.name, call.function.arguments)):
                    joined[number] += text or ""
        return Reply(
            request_id,
            "".join(message.content or "" for message in messages),
            choices[-1].finish_reason,
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens,
            usage.completion_tokens,
            "".join(message.model_extra.get("reasoning_content", "") for message in messages),
            tuple((name, arguments) for _, name, arguments in calls.values()),
            tuple(call_id for call_id, _, _ in calls.values()),
            [_logprob(entry) for choice in choices if choice.logprobs for entry in choice.logprobs.content],
        )


class Completions(Dialect):
    name = "completions"
    has_parts = False

    async def ask(self, rig: TokenPathRig, wish: Wish, *, is_streamed: bool) -> Reply:
        body: dict[str, Any] = {"model": wish.model, "prompt": wish.prompt, "max_tokens": wish.max_tokens}
        body |= {"stop": [*wish.stop], "logprobs": wish.top_logprobs, "extra_body": {"service_tier": wish.tier}}
        create = rig.client.with_options(api_key=wish.key).completions.create
        with _failures():
            if is_streamed:
                stream = await create(**body, stream=True, stream_options={"include_usage": True})
                *chunks, last = [chunk async for chunk in stream]
            else:
                chunks = [last := await create(**body)]
        text = "".join(chunk.choices[0].text for chunk in chunks)
        usage, end = last.usage, chunks[-1].choices[0].finish_reason
        counts = (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)
        logprobs: list[Logprob] = []
        for each in (chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs):
            columns = (each.tokens, each.token_logprobs, each.top_logprobs, each.text_offset)
            for token, value, top, offset in zip(*columns, strict=True):
                assert token.startswith("\\x") or text[offset:].startswith(token) or token == EOS
                likeliest, others = [*top.items()][: wish.top_logprobs], [*top][wish.top_logprobs :]
                assert token in dict(likeliest) or (others == [token] and top[token] == value)
                logprobs.append(Logprob(token, value, likeliest))
        return Reply(last.id, text, end, *counts, logprobs=logprobs)


class Responses(Dialect):
    name = "responses"
    ends = ("completed", "incomplete", "completed", "completed")

    async def ask(self, rig: TokenPathRig, wish: Wish, *, is_streamed: bool) -> Reply:
        body: dict[str, Any] = {"model": wish.model, "input": wish.prompt, "max_output_tokens": wish.max_tokens}
        body |= {"service_tier": wish.tier, "extra_body": {"stop": [*wish.stop]}}
        if wish.top_logprobs is not None:
            body |= {"top_logprobs": wish.top_logprobs, "include": ["message.output_text.logprobs"]}
        if wish.has_tool:
            body |= {"tools": [{"type": "function", **FUNCTION}], "tool_choice": wish.tool_choice}
        create = rig.client.with_options(api_key=wish.key).responses.create
        with _failures():
            if is_streamed:
                events = [event async for event in await create(**body, stream=True)]
                if events[-1].type == "response.failed":
                    raise Failure(events[-2].code, events[-2].message)
                assert [event.sequence_number for event in events] == list(range(len(events)))
                response = events[-1].response
                deltas = [event for event in events if event.type == "response.output_text.delta"]
                assert "".join(event.delta for event in deltas) == response.output_text
                streamed = [entry.logprob for event in deltas for entry in event.logprobs]
            else:
                response, streamed = await create(**body), None
        parts = [part for item in response.output if item.type == "message" for part in item.content]
        logprobs = [_logprob(entry) for part in parts for entry in part.logprobs or ()]
        assert streamed in (None, [entry.value for entry in logprobs])
        thoughts = [item for item in response.output if item.type == "reasoning"]
        calls = [item for item in response.output if item.type == "function_call"]
        usage = response.usage
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert response.top_logprobs == (wish.top_logprobs or 0)
        return Reply(
            response.id,
            response.output_text,
            response.status,
            usage.input_tokens,
            usage.input_tokens_details.cached_tokens,
            usage.output_tokens,
            "".join(part.text for item in thoughts for part in item.content),
            tuple((call.name, call.arguments) for call in calls),
            tuple(call.call_id for call in calls),
            logprobs,
        )


class Messages(Dialect):
    name = "messages"
    has_logprobs = False
    ends = ("end_turn", "max_tokens", "stop_sequence", "tool_use")
    codes: ClassVar[Mapping[str, str]] = {
        "invalid_api_key": "authentication_error",
        "permission_denied": "permission_error",
        "quota_exceeded": "permission_error",
        "model_not_found": "not_found_error",
        "context_length_exceeded": "invalid_request_error",
        "rate_limited": "rate_limit_error",
        "queue_full": "rate_limit_error",
        "overloaded": "rate_limit_error",
        "unavailable": "overloaded_error",
        "internal": "api_error",
    }

    async def ask(self, rig: TokenPathRig, wish: Wish, *, is_streamed: bool) -> Reply:
        body: dict[str, Any] = {"model": wish.model, "messages": [{"role": "user", "content": wish.prompt}]}
        body |= {"max_tokens": wish.max_tokens, "stop_sequences": [*wish.stop], "thinking": {"type": "adaptive"}}
        if wish.has_tool:
            tool = {name: value for name, value in FUNCTION.items() if name != "parameters"}
            body |= {"tools": [{**tool, "input_schema": PARAMETERS}], "tool_choice": {"type": wish.tool_choice}}
        quick = anthropic.DefaultAsyncHttpxClient(verify=False)  # as in the rig
        made = anthropic.AsyncAnthropic(api_key=wish.key, base_url=rig.url, max_retries=0, http_client=quick)
        async with made as client:
            with _failures():
                if is_streamed:
                    async with client.messages.stream(**body) as stream:
                        message: Any = await stream.get_final_message()
                else:
                    message = await client.messages.create(**body)
        assert (message.role, message.model) == ("assistant", "acme/echo")
        assert message.stop_sequence in (wish.stop if message.stop_reason == "stop_sequence" else (None,))
        calls = [block for block in message.content if block.type == "tool_use"]
        cached = message.usage.cache_read_input_tokens
        return Reply(
            message.id,
            "".join(block.text for block in message.content if block.type == "text"),
            message.stop_reason,
            message.usage.input_tokens + cached,
            cached,
            message.usage.output_tokens,
            "".join(block.thinking for block in message.content if block.type == "thinking"),
            tuple((call.name, json.dumps(call.input, ensure_ascii=False)) for call in calls),
            tuple(call.id for call in calls),
        )


class Generate(Dialect):
    name = "generate"
    has_parts = False

    async def ask(self, rig: TokenPathRig, wish: Wish, *, is_streamed: bool) -> Reply:
        fields: dict[str, Any] = {"model": wish.model, "prompt": wish.prompt, "max_tokens": wish.max_tokens}
        fields |= {"stop": wish.stop, "service_tier": wish.tier or "", "top_logprobs": wish.top_logprobs}
        request = inference_pb2.GenerateRequest(**fields)
        async with inference_stub(rig) as stub:
            with _failures():
                call = stub.Generate(request, metadata=_metadata(wish))
                *events, last = [event async for event in call]
        deltas = [delta for event in events for delta in event.choices]
        text, usage = "".join(delta.text for delta in deltas), last.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        end, counts = deltas[-1].finish_reason, (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        tokens, logprobs = TokenBytes(decoder_of(rig.tokenizer)), []
        for entry in (entry for delta in deltas for entry in delta.logprobs):
            top = [(token_text(each.token), each.logprob) for each in entry.top]
            assert [each.token for each in entry.top] == [tokens.of(each.token_id) for each in entry.top]
            logprobs.append(Logprob(token_text(entry.token or tokens.of(entry.token_id)), entry.logprob, top))
        return Reply(last.request_id, text, end, *counts, logprobs=logprobs)


class OpenInference(Dialect):
    name = "open_inference"
    has_parts = False
    has_cached_tokens = False
    has_logprobs = False

    async def ask(self, rig: TokenPathRig, wish: Wish, *, is_streamed: bool) -> Reply:
        given: dict[str, Any] = {"max_tokens": wish.max_tokens, "stop": json.dumps([*wish.stop]), "stream": is_streamed}
        given |= {} if wish.tier is None else {"service_tier": wish.tier}
        request = infer_request(wish.prompt, wish.model, **given)
        async with open_inference_stub(rig) as stub:
            with _failures():
                if is_streamed:
                    call = stub.ModelStreamInfer(iter([request]), metadata=_metadata(wish))
                    streamed = [response async for response in call]
                    if message := streamed[-1].error_message:
                        raise Failure(*message.split(": ", 1))
                    responses = [response.infer_response for response in streamed]
                else:
                    responses = [await stub.ModelInfer(request, metadata=_metadata(wish))]
        assert [each.parameters["triton_final_response"].bool_param for each in responses][-2:] in (
            [True],
            [False, True],
        )
        listed = [outputs_of(response) for response in responses]
        text = "".join(each["text_output"][0] for each in listed)
        [num_prompt], [num_output] = listed[-1]["num_input_tokens"], listed[-1]["num_output_tokens"]
        [request_id] = [opened.request_id for opened in rig.ports.opened[-1:]]  # the reply has the client's own id
        return Reply(request_id, text, listed[-1]["finish_reason"][0], num_prompt, 0, num_output)


DIALECTS: tuple[Dialect, ...] = (Chat(), Completions(), Responses(), Messages(), Generate(), OpenInference())


def _logprob(entry: Any) -> Logprob:
    """Of an entry of chats and of Responses."""
    assert bytes(entry.bytes or []).decode(errors="backslashreplace") == ("" if entry.token == EOS else entry.token)
    return Logprob(entry.token, entry.logprob, [(top.token, top.logprob) for top in entry.top_logprobs])


def token_text(token: bytes) -> str:
    """A token as the dialects of JSON show it, which escape a part of a character."""
    return token.decode(errors="backslashreplace")


def infer_request(text: str, model: str = "echo", inputs: Sequence[Any] = (), **given: Any) -> Any:
    """A request of the Open Inference Protocol; ``given``: its parameters."""
    return open_inference_pb2.ModelInferRequest(
        model_name=model,
        id="a1",
        inputs=[infer_tensor("text_input", text), *inputs],
        parameters={name: _parameter(value) for name, value in given.items()},
    )


def infer_tensor(name: str, value: str | bool) -> Any:
    is_bool = isinstance(value, bool)
    content = {"bool_contents": [value]} if isinstance(value, bool) else {"bytes_contents": [value.encode()]}
    contents = open_inference_pb2.InferTensorContents(**content)
    return open_inference_pb2.ModelInferRequest.InferInputTensor(
        name=name, datatype="BOOL" if is_bool else "BYTES", shape=[1], contents=contents
    )


def _parameter(value: Any) -> Any:
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    return open_inference_pb2.InferParameter(**{kinds[type(value)]: value})


def outputs_of(response: Any) -> dict[str, Any]:
    return {
        output.name: [element.decode() for element in output.contents.bytes_contents]
        or list(output.contents.uint_contents)
        for output in response.outputs
    }


@asynccontextmanager
async def inference_stub(rig: TokenPathRig) -> AsyncIterator[Any]:
    async with open_channel(rig.grpc_address) as channel:
        yield InferenceStub(channel)


@asynccontextmanager
async def open_inference_stub(rig: TokenPathRig) -> AsyncIterator[Any]:
    async with open_channel(rig.grpc_address) as channel:
        yield GRPCInferenceServiceStub(channel)


def _metadata(wish: Wish) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {wish.key}"),)


@contextmanager
def _failures() -> Iterator[None]:
    """Errors of the clients as ``Failure``."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        ours = error_from_rpc(error)
        retry = None if ours.retry_after_s is None else str(math.ceil(ours.retry_after_s))
        raise Failure(ours.code, ours.message, ours.field, retry) from error
    except (openai.APIError, anthropic.APIError) as error:
        body: Any = error.body
        body = body.get("error", body)  # Anthropic's client shows all of it
        response = getattr(error, "response", None)
        retry = None if response is None else response.headers.get("retry-after")
        raise Failure(body.get("code", body["type"]), body["message"], body.get("param"), retry) from error
