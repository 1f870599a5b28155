"""The parameters that a request has in each dialect, the values that are refused, and the fields without effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.dialects.all_dialects import FUNCTION, infer_request
from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.bodies.shared_body import IGNORED
from torchrelay.gateway.core import ServiceClass
from torchrelay.gateway.dialects.anthropic import requests as anthropic
from torchrelay.gateway.dialects.inference_v1.messages import params_of_request
from torchrelay.gateway.dialects.open_inference.parameters import params_of as params_of_infer
from torchrelay.gateway.dialects.open_inference.tensors import inputs_of
from torchrelay.gateway.dialects.openai import requests as openai
from torchrelay.gateway.dialects.responses import requests as responses
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.inference.v1 import inference_pb2 as pb

Params = Callable[[bytes], GenerateParams]
HUGE = 1 << 63
PROMPTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "c"}]},
    "completions": {"prompt": "p"},
    "responses": {"input": "i"},
    "messages": {"messages": [{"role": "user", "content": "c"}], "max_tokens": 9},
    **{name: {"prompt": "p"} for name in ("generate", "open_inference")},
}
DECODED: dict[str, Params] = {
    "chat": lambda body: openai.params_of_chat(openai.decode_chat(body)),
    "completions": lambda body: openai.params_of_completion(openai.decode_completion(body)),
    "responses": lambda body: responses.params_of(responses.decode_body(body))[0],
    "messages": lambda body: anthropic.params_of(anthropic.decode_body(body)),
}
# By dialect, its names of the fields that others have too.
NAMES: dict[str, dict[str, str]] = {
    "chat": {"functions": "tools"},
    "responses": {"functions": "tools", "max_tokens": "max_output_tokens", "messages": "input"},
    "messages": {"functions": "tools", "stop": "stop_sequences"},
}

# Groups of dialects: with a JSON body, with the fields of completions, all, with tools.
JSON = "chat completions responses messages"
BODIES = "chat completions responses"
SHARED = "chat completions responses open_inference"
ALL = f"{JSON} generate open_inference"
WITH_TOOLS = "chat responses messages"


def params_of(dialect: str, **fields: Any) -> GenerateParams:
    """The parameters of a request with ``fields``. ``functions``: its tools, as ``FUNCTION``."""
    if "functions" in fields:
        fields["functions"] = [declared(dialect, function) for function in fields["functions"]]
    fields = {NAMES.get(dialect, {}).get(name, name): value for name, value in fields.items()}
    body = {name: value for name, value in {"model": "m", **PROMPTS[dialect], **fields}.items() if value is not ...}
    match dialect:
        case "generate":
            if (messages := body.pop("messages", None)) is not None:
                body["chat"] = pb.Messages(messages=messages)
                del body["prompt"]
            return params_of_request(pb.GenerateRequest(**body))
        case "open_inference":
            texts = {name: json.dumps(value) for name, value in body.items() if isinstance(value, (list, dict))}
            request = infer_request(body.pop("prompt"), body.pop("model"), **body | texts)
            return params_of_infer(request, inputs_of(request))[0]
    return DECODED[dialect](json.dumps(body).encode())


def declared(dialect: str, function: dict[str, Any]) -> dict[str, Any]:
    """A tool of the dialect."""
    if dialect == "messages":
        return {"input_schema" if name == "parameters" else name: value for name, value in function.items()}
    return {"type": "function", **({"function": function} if dialect == "chat" else function)}


def test_sampling_is_as_given_or_default() -> None:
    same: dict[str, Any] = {"min_p": 0.1, "presence_penalty": -2.0, "frequency_penalty": 2.0, "temperature": 0.0}
    same |= {"top_p": 0.5, "ignore_eos": True, "add_special_tokens": False, "top_k": 3, "min_tokens": 2}
    same |= {"repetition_penalty": 1.3}
    tokens = {"stop_token_ids": [4, 9, 4], "stop": ["x"], "max_tokens": 5, "seed": 7}
    for dialect in ALL.split():
        plain = params_of(dialect)
        assert (plain.temperature, plain.top_p, plain.top_k, plain.num_choices, plain.stop) == (1.0, 1.0, 0, 1, ())
        assert plain.top_logprobs is plain.prompt_logprobs is plain.add_special_tokens is None
        own = {"temperature": 0.5, "top_p": 0.9, "top_k": 3} if dialect == "messages" else same
        params = params_of(dialect, **own)
        assert {name: getattr(params, name) for name in own} == own
        if dialect != "messages":
            bias: dict[Any, float] = {7: -100, 3: 5.5} if dialect == "generate" else {"7": -100, "3": 5.5}
            params = params_of(dialect, **tokens, logit_bias=bias)
            assert (params.logit_bias, params.stop_token_ids) == (((3, 5.5), (7, -100.0)), (4, 9))
            assert (params.stop, params.max_tokens, params.seed) == (("x",), 5, 7)
    for dialect in SHARED.split():
        assert params_of(dialect, stop="x", top_k=-1) == params_of(dialect, stop=["x"])
        seeds = (-HUGE, -1, 0, HUGE - 1)
        assert [params_of(dialect, seed=seed).seed for seed in seeds] == [seed % (1 << 64) for seed in seeds]
        assert dialect == "responses" or params_of(dialect, n=2).num_choices == 2


def test_logprobs_are_as_asked_for() -> None:
    asked: list[tuple[str, dict[str, Any], int]] = [
        *(("completions", {"logprobs": number}, number) for number in (0, 5)),
        *(("chat", {"logprobs": True, **top}, most) for top, most in (({}, 0), ({"top_logprobs": 20}, 20))),
        ("responses", {"top_logprobs": 2}, 2),
        ("responses", {"include": ["message.output_text.logprobs"]}, 0),
        ("generate", {"top_logprobs": 0}, 0),
    ]
    for dialect, fields, most in asked:
        assert params_of(dialect, **fields).top_logprobs == most
    for dialect in ("chat", "completions"):
        assert params_of(dialect, prompt_logprobs=0, logprobs=None).prompt_logprobs == 0
        assert params_of(dialect, prompt_logprobs=0, max_tokens=0).max_tokens == 0
    assert params_of("chat", prompt_logprobs=0, max_completion_tokens=0).max_tokens == 0
    assert params_of("completions", max_tokens=0, echo=True).max_tokens == 0
    echoed = [params_of("completions", echo=True, logprobs=2, prompt_logprobs=most) for most in (None, 1, 9)]
    assert [params.prompt_logprobs for params in echoed] == [2, 2, 9]


def test_templates_get_their_variables_as_given() -> None:
    kwargs = {"enable_thinking": False, "thinking_budget": 4, "style": {"tone": ["plain"]}}
    for dialect in ("chat", "responses"):
        assert params_of(dialect, chat_template_kwargs=kwargs).template_kwargs == kwargs


def test_whole_numbers_may_have_a_decimal_point() -> None:
    for dialect in ("chat", "completions", "responses"):
        given: dict[str, Any] = {"max_tokens": 4.0, "seed": -3.0, "top_k": 5.0, "stop_token_ids": [7.0, 8.0, 9.0]}
        params = params_of(dialect, **given)
        assert (params.max_tokens, params.top_k, params.stop_token_ids) == (4, 5, (7, 8, 9))
        assert params.seed == (1 << 64) - 3
    params = DECODED["completions"](b'{"model": "m", "prompt": [1.0, 2, 3.0], "n":2.0 , "seed": -3e0, "top_k": 5.00}')
    assert (params.token_ids, params.num_choices, params.seed, params.top_k) == ([1, 2, 3], 2, (1 << 64) - 3, 5)
    assert params_of("completions", prompt=[[1.0, 2.0]]).token_ids == [1, 2]
    assert params_of("messages", max_tokens=6.0).max_tokens == 6
    assert params_of("chat", messages=[said("user", "[1.0]")], n=2.0).messages == (said("user", "[1.0]"),)


TIERS: dict[str | None, ServiceClass | None] = {
    **{None: None, "auto": None, "default": ServiceClass.STANDARD, "scale": ServiceClass.STANDARD},
    **{"priority": ServiceClass.INTERACTIVE, "flex": ServiceClass.BATCH},
}


def test_service_tier_names_the_class() -> None:
    for dialect in f"{SHARED} generate".split():
        for tier, service_class in TIERS.items():
            fields = {} if tier is None else {"service_tier": tier}
            assert params_of(dialect, **fields).service_class == service_class
    tiers = [params_of("messages", service_tier=tier).service_class for tier in ("auto", "standard_only")]
    assert tiers == [None, ServiceClass.STANDARD]


EMPTY: dict[str, Any] = {"user": "u", "metadata": {}, "presence_penalty": 0, "logit_bias": {}, "store": True}
ROUTERS: dict[str, Any] = {
    **{"provider": {"order": ["a", "b"], "allow_fallbacks": False}, "models": ["m", "n"], "route": "fallback"},
    **{"transforms": ["middle-out"], "usage": {"include": True}},
}
WITHOUT_EFFECT: list[tuple[str, dict[str, Any]]] = [
    ("chat completions responses", EMPTY | {"tools": [], "n": 1}),
    (SHARED, ROUTERS),
    ("chat completions open_inference", {"response_format": {"type": "text"}}),
    ("chat completions open_inference", dict.fromkeys(IGNORED, "x")),
    ("chat", {"tool_choice": "none", "logprobs": False, "top_logprobs": 0, "chat_template_kwargs": {}}),
    ("completions", {"best_of": 1, "echo": False}),
    ("responses", {"truncation": "auto", "user": "u", "safety_identifier": "s", "max_tool_calls": 3}),
    ("responses", {"background": False, "previous_response_id": None, "conversation": None, "prompt": None}),
    ("responses", {"text": {"format": {"type": "text"}}, "stream": True, "stream_options": {"include_obfuscation": 0}}),
    ("responses", {"tool_choice": "auto", "parallel_tool_calls": False, "top_logprobs": 0, "some_extension": 1}),
    ("messages", {"container": None, "cache_control": {"type": "ephemeral"}, "speed": "fast", "tool_choice": None}),
    ("messages", {"output_config": {"effort": "low"}, "metadata": {"user_id": "u"}}),
]


def test_fields_without_effect_are_ignored_and_documented() -> None:
    for dialects, fields in WITHOUT_EFFECT:
        for dialect in dialects.split():
            assert params_of(dialect, **fields) == params_of(dialect), (dialect, fields)
    page = (Path(__file__).parents[4] / "docs/rest.md").read_text()
    listed = page.partition("**Accepted and without effect**")[2].partition("\n\n")[0]
    assert {name for name in IGNORED if f"`{name}`" in listed} == IGNORED


# Fields of other servers that are not ignored, with a value that has an effect, and with a value that has none.
OF_OTHERS: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("mirostat", "no_repeat_ngram_size"), (2, 0)),
    **dict.fromkeys(("top_a", "dry_multiplier", "xtc_probability"), (0.2, 0)),
    **dict.fromkeys(("typical_p", "tfs_z", "length_penalty"), (0.9, 1.0)),
    **dict.fromkeys(("include_stop_str_in_output", "use_beam_search", "early_stopping"), (True, False)),
    **dict.fromkeys(("bad_words", "logits_processors"), (["x"], [])),
    **dict.fromkeys(("regex", "ebnf", "grammar", "json_schema", "custom_logit_processor", "lora_path"), ("x", None)),
    **{"skip_special_tokens": (False, True), "allowed_token_ids": ([1], []), "plugins": ([{"id": "web"}], [])},
    **{"truncate_prompt_tokens": (1, None), "moderation": ({"model": "x"}, None)},
    **{"web_search_options": ({}, None), "modalities": (["text", "audio"], ["text"]), "audio": ({"voice": "x"}, None)},
}
OF_CHATS: dict[str, tuple[Any, Any]] = {"chat_template": ("{{ m }}", None), "documents": ([{}], [])}
OF_CHATS |= {"add_generation_prompt": (False, True)}


def test_fields_of_other_servers_are_not_ignored() -> None:
    named = ((name, values, SHARED) for name, values in OF_OTHERS.items())
    for name, (value, harmless), dialects in (*named, *((*each, "chat responses") for each in OF_CHATS.items())):
        for dialect in dialects.split():
            if harmless is not None or dialect != "open_inference":  # whose parameters have values
                params_of(dialect, **{name: harmless})
            with pytest.raises(InvalidRequest, match=rf"^{name} is not supported") as caught:
                params_of(dialect, **{name: value})
            assert caught.value.field == name


RANGES = {"temperature": (0, 2), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (0.01, 10)}
RANGES |= dict.fromkeys(("presence_penalty", "frequency_penalty"), (-2, 2))


def test_numbers_out_of_range_are_refused() -> None:
    for name, (low, high) in RANGES.items():
        for dialect in f"{SHARED} generate{' messages' * (name == 'top_p')}".split():
            assert [getattr(params_of(dialect, **{name: value}), name) for value in (low, high)] == [low, high]
            for value in (low - 0.01, high + 0.01):
                with pytest.raises(InvalidRequest, match=f"must be between {low} and {high}") as caught:
                    params_of(dialect, **{name: value})
                assert caught.value.field == name


def test_nan_and_infinity_are_refused_by_name() -> None:
    for dialect in JSON.split():
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "logit_bias", "seed", "n"):
            if dialect == "messages" and name not in ("temperature", "top_p"):
                continue
            for number in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999"):
                value = f'{{"5": {number}}}' if name == "logit_bias" else number
                body = json.dumps({"model": "m", **PROMPTS[dialect]})[:-1] + f', "{name}": {value}}}'
                with pytest.raises(InvalidRequest, match=r"finite|range|not supported") as caught:
                    DECODED[dialect](body.encode())
                assert caught.value.field == name


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def begun(answer: Any) -> list[dict[str, Any]]:
    return [said("user", "c"), said("assistant", answer)]


def some(number: int) -> dict[str, int]:
    return {str(each): 1 for each in range(number)}


def allowed(tools: list[Any]) -> dict[str, Any]:
    """As ``tool_choice`` of Responses, and of chats, which have the tools within an object."""
    return {"type": "allowed_tools", "mode": "auto", "tools": tools, "allowed_tools": {"mode": "auto", "tools": tools}}


def space(name: str, tools: list[Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": tools}


def answered(schema: dict[str, Any], kind: str = "json_schema") -> dict[str, Any]:
    return {"format": {"type": kind, "schema": schema or {"type": "object"}}}


STRICT = FUNCTION | {"strict": True, "parameters": {"type": "object"}}
TOOL, NAMED = {"type": "function", "name": "f"}, {"type": "function", "function": {"name": "w"}, "name": "w"}
MANY_TOOLS = [space("b", [TOOL | {"name": f"f{number}"} for number in range(128)])]
USED = [{"type": "text", "text": "a"}, {"type": "tool_use", "id": "c", "name": "weather", "input": {}}]
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "r"}
OBJECT = {"type": "json_object"}
CONTINUED = {"messages": begun("{"), "continue_final_message": True}
ROLES = "messages[0].role must be one of system, developer, user, assistant, tool, function, not 'usr'"
NO_PARAMETER = "is no parameter of this protocol"


def faults(dialects: str, field: str, why: str, *values: Any, **others: Any) -> list[tuple[str, str, str, Any]]:
    """Requests whose ``field``, with each of the values, is refused with ``why``; ...: it is not given."""
    return [(dialect, field, why, {field: value} | others) for dialect in dialects.split() for value in values]


FAULTS = [
    # Numbers.
    *faults("chat completions", "max_tokens", "must be at least 1, not 0, without", 0),
    *faults("chat", "max_completion_tokens", "at least 1, not 0, without prompt_logprobs", 0),
    *faults("responses messages open_inference", "max_tokens", "must be at least 1, not 0", 0),
    *faults("completions", "max_tokens", "must be at least 1, not 0", 0.0),
    *faults(f"{JSON} open_inference", "max_tokens", "must be an integer, not 'ten'", "ten"),
    *faults("messages", "max_tokens", "max_tokens is missing", ...),
    *faults("responses", "max_completion_tokens", "named max_output_tokens here", 5),
    *faults(SHARED, "temperature", "temperature must be a number, not 'hot'", "hot"),
    *faults("messages", "temperature", "temperature must be at most 1", 1.5),
    *faults(SHARED, "min_tokens", "min_tokens must be at least 0, not -1", -1),
    *faults(BODIES, "seed", "must be between -2**63 and 2**63 - 1, not 9223372036854775808", HUGE),
    *faults(BODIES, "seed", "seed", -HUGE - 1, 1 << 70),
    *faults("open_inference", "seed", "must be between -2**63 and", str(HUGE), str(-HUGE - 1)),
    *faults(SHARED, "seed", "seed must be an integer, not 1e+300", 1e300),
    *faults("messages", "top_k", "top_k must be at least 0", -1),
    *faults("generate", "n", "out of range", 0),
    *faults("generate", "max_tokens", "out of range", 0),
    *faults("chat completions open_inference", "n", "n must be at least 1", 0),
    *faults("chat completions open_inference", "n", "n must be an integer", True, 2.5, "x"),
    *faults("chat completions", "max_tokens", "max_tokens must be an integer, not 2.5", 2.5, n=4.0),
    *faults("responses", "n", "not supported yet", 2),
    *faults("completions", "best_of", "best_of must be at least n (3), not 2", 2, n=3),
    *faults("completions", "best_of", "not possible in a stream", 2, stream=True),
    # Stop strings, tokens and biases.
    *faults(ALL, "stop", "must have 1 to 512 characters", [""], ["a" * 513]),
    *faults(ALL, "stop", "has 5 strings; at most 4", ["a"] * 5),
    *faults(f"{JSON} open_inference", "stop", "must be a string", [1]),
    *faults(SHARED, "stop", "stop", ""),
    *faults(SHARED, "stop_token_ids", "must be", [-1], 5),
    *faults(f"{SHARED} generate", "stop_token_ids", "at most 64", [*range(65)]),
    *faults(SHARED, "stop_token_ids", "stop_token_ids[0] must be an integer, not a number", [1.5]),
    *faults(SHARED, "logit_bias", "logit_bias[...] must be a number, not a string", {"5": "x"}),
    *faults(SHARED, "logit_bias", "is not a token id", {"a": 1}, {"-1": 1}, {"٣": 1}),
    *faults(SHARED, "logit_bias", "must be between -100 and 100", {"5": 100.5}),
    *faults("generate", "logit_bias", "must be between -100 and 100", {5: 100.5}),
    *faults(SHARED, "logit_bias", "at most 1024", some(1025)),
    # Tiers, streams and logprobs.
    *faults(f"{SHARED} generate", "service_tier", "one of auto, default, flex, priority", "Priority", "fast"),
    *faults(SHARED, "service_tier", "not ''", ""),
    *faults("messages", "service_tier", "auto or standard_only", "fast"),
    *faults(JSON, "stream", "stream must be true or false, not 'yes'", "yes"),
    *faults("open_inference", "stream", "must be a boolean", "yes"),
    *faults(BODIES, "stream_options", "only with stream: true", {}, {"include_usage": True}),
    *faults(BODIES, "stream_options", "only with stream: true", {}, stream=False),
    *faults(BODIES, "stream_options", "must be true or false", {"include_usage": 3}, stream=True),
    *faults("chat", "top_logprobs", "must be between 0 and 20, not", 21, -1, logprobs=True),
    *faults("responses generate", "top_logprobs", "must be between 0 and 20", 21),
    *faults("chat completions", "prompt_logprobs", "must be between 0 and 20, not", 21, -1),
    *faults("chat completions", "prompt_logprobs", "not possible in a stream", 0, stream=True),
    *faults("responses", "prompt_logprobs", "not supported yet", 0),
    *faults("chat", "logprobs", "top_logprobs requires logprobs to be true", ..., top_logprobs=3),
    *faults("chat", "logprobs", "logprobs must be true or false, not 3", 3),
    *faults("completions", "logprobs", "between 0 and 5", 6, -1),
    *faults("completions", "logprobs", "must be an integer", True),
    *faults("completions", "logprobs", "not possible in a stream", 0, echo=True, stream=True),
    # Names of fields.
    *faults(JSON, "model", "model must be a string", 3),
    *faults("generate", "model", "out of range", ""),
    *faults("chat completions", "max_token", "unknown field max_token; did you mean max_tokens?", 5),
    *faults("messages", "max_token", "did you mean max_tokens", 3, max_tokens=...),
    *faults("responses", "instruction", "did you mean instructions", "a"),
    *faults(BODIES, "top_b", "did you mean top_p?", 2, prediction={}, zzz=1),
    *faults(JSON, "temperatur", "did you mean temperature?", 1),
    *(row for name in ("beam_width", "best_of", "logprobs") for row in faults("open_inference", name, NO_PARAMETER, 2)),
    *faults("completions", "suffix", "suffix is not supported yet", "x"),
    *faults("chat", "function_call", "function_call is not supported yet", "auto"),
    *faults("responses", "response_format", "named text.format here", OBJECT),
    *faults("responses", "previous_response_id", "send the items of the conversation", "resp_1"),
    *faults("responses", "conversation", "send all of its items", "conv_1"),
    *faults("responses", "background", "use stream: true", True),
    *faults("responses", "prompt", "send instructions and input", {"id": "p"}),
    *faults("messages", "container", "container is not supported yet", "c-1"),
    *faults("messages", "inference_geo", "inference_geo is not supported yet", "us"),
    # Prompts and messages.
    *faults("completions", "prompt", "prompt must be", None),
    *faults("completions", "prompt", "prompt must be a text, a list of token ids, or a list of either", [1, "a"]),
    *faults("completions", "prompt", "token ids must be non-negative and below 2**32", [1 << 40], [-1]),
    *faults("chat", "messages", "messages must be a list, not a string", "a secret"),  # errors do not repeat prompts
    *faults("responses", "messages", "input must be a string or a list", None),
    *faults(f"{WITH_TOOLS} generate", "messages", "must not be empty", []),
    *faults("chat generate", "messages", ROLES, [said("usr", "c")]),
    *faults("responses", "messages", "role must be one of user, assistant", [said("tool", "a")]),
    *faults("messages", "messages", "role must be one of user, assistant, system", [said("developer", "a")]),
    *faults("chat", "messages", "messages[1] of role system", [said("user", "c"), {"role": "system"}]),
    *faults("chat responses", "messages", "must have content", [said("user", None)]),
    *faults("chat", "messages", "must have content", [said("user", [])]),
    *faults("messages", "messages", "must have content", [said("user", "")]),
    *faults(WITH_TOOLS, "messages", "content of type 'input_picture'", [said("user", [{"type": "input_picture"}])]),
    *faults("chat", "messages", "messages[0].content must be a string or a list, not an int", [said("user", 5)]),
    *faults("chat responses", "messages", "[0].role is missing", [{"content": "c"}]),
    *faults("messages", "messages", "must have a turn of the user", [said("system", "a")]),
    *faults("messages", "messages", "without a name", [said("assistant", [{"type": "tool_use", "id": "c"}])]),
    *faults("messages", "messages", "with text and without calls", begun(" "), begun(USED)),
    *faults("chat", "messages", "must be the assistant's", [said("user", "a")], continue_final_message=True),
    *faults("chat", "add_generation_prompt", "must be false", True, continue_final_message=True),
    *faults("chat", "response_format", "the format of a whole answer", OBJECT, **CONTINUED),
    *faults("responses", "continue_final_message", "not supported yet", True),
    *faults("responses", "input", "has no message", [{"type": "reasoning"}]),
    *faults("responses", "input", "send the item itself", [{"type": "item_reference", "id": "x"}]),
    *faults("responses", "input", "input[0].type 'web_call'", [{"type": "web_call"}]),
    *faults("responses", "input", "no earlier item calls it", [RESULT]),
    *faults("responses", "input", "input[0].call_id is missing", [CALL | {"call_id": None}]),
    *faults("responses", "input", "input[0].arguments is missing", [CALL | {"arguments": None}]),
    *faults("responses", "input", "input[1].output is missing", [CALL, RESULT | {"output": None}]),
    # Tools.
    *faults("chat", "tools", "tools[0].type must be 'function'", [{}]),
    *faults("responses", "tools", "tools[0].type must be function", [{"type": "functoin"}], [{"type": ["function"]}]),
    *faults("chat responses", "tools", "tools[0]: ", [{"type": "function"}]),
    *faults("responses", "tools", "tools[1].name must have", [{"type": "web_search"}, TOOL | {"name": "a b"}]),
    *faults("chat responses", "functions", "must have 1 to 64 letters, digits", [FUNCTION | {"name": "a b"}]),
    *faults("messages", "functions", "tools[0].name must have 1 to 128 letters", [FUNCTION | {"name": "a b"}]),
    *faults("chat responses", "functions", "at most 128", [FUNCTION] * 129),
    *faults("messages", "functions", "tools has 1,025 entries", [FUNCTION] * 1025),
    *faults("responses messages", "functions", "tools[1] has the name of another tool", [FUNCTION] * 2),
    *faults("chat", "functions", "tools[0].function.parameters: an object of a strict schema must", [STRICT]),
    *faults("responses", "functions", "tools[0].parameters: an object of a strict schema must", [STRICT]),
    *faults("messages", "functions", "tools[0].input_schema: an object of a strict schema must", [STRICT]),
    *faults("responses", "tools", "more than 128 entries, with those of its", [space("a", [TOOL] * 1), *MANY_TOOLS]),
    *faults("responses", "tools", "tools[0].tools[0].type", [space("a", [{"type": "mcp"}])]),
    *faults("responses", "tools", "format.type must be", [{"type": "custom", "name": "a", "format": {"type": "json"}}]),
    *faults("chat", "tool_choice", "tool_choice is allowed only with tools", "auto"),
    *faults("chat", "tool_choice", "tool_choice is allowed only with tools", "required", tools=[]),
    *faults("chat", "parallel_tool_calls", "parallel_tool_calls is allowed only with tools", True),
    *faults("responses", "tool_choice", "there are no tools", "required"),
    *faults("chat", "tool_choice", 'must be "none", "auto", "required"', "sometimes", functions=[FUNCTION]),
    *faults("messages", "tool_choice", "must be auto, any, none, or a tool", {"type": "some"}, functions=[FUNCTION]),
    *faults("chat responses", "tool_choice", "'w', which is not among", NAMED, functions=[FUNCTION]),
    *faults("messages", "tool_choice", "'w', which is not", {"type": "tool", "name": "w"}, functions=[FUNCTION]),
    *faults("chat", "tool_choice", "must be functions", allowed([{"type": "x"}]), functions=[FUNCTION]),
    *faults("chat responses", "tool_choice", "allows 129 tools", allowed([TOOL] * 129), functions=[FUNCTION]),
    *faults("chat responses", "guided_grammar", "combined with tools", 'start: "a"', functions=[FUNCTION]),
    # Formats of answers, variables of templates, metadata.
    *faults("chat responses", "chat_template_kwargs", "must be an object", []),
    *faults("chat responses", "chat_template_kwargs", "must not contain messages", {"messages": []}),
    *faults("chat responses", "chat_template_kwargs", "at most 32 entries, and 16,384", {"x": "y" * 17_000}, some(33)),
    *faults("chat completions", "response_format", "type", {"type": "xml"}),
    *faults("chat completions", "response_format", "schema", {"type": "json_schema"}),
    *faults("responses", "response_format", "object", 0),
    *faults("responses", "text.format", "the schema is missing", ..., text={"format": {"type": "json_schema"}}),
    *faults("responses", "text.format", "must be text, json_object or", ..., text={"format": {"type": "x"}}),
    *faults("responses", "guided_regex", "text.format and guided_regex are given", "a", text={"format": OBJECT}),
    *faults("messages", "output_config", "output_config.format.type must be json_sch", answered({}, "text")),
    *faults("messages", "output_config", "be combined with an answer's beginning", answered({}), messages=begun("{")),
    *faults(SHARED, "guided_regex", "must not be empty", ""),
    *faults(SHARED, "guided_regex", "guided_json and guided_regex", "a", guided_json={}),
    *faults("completions", "guided_json", "guided_json is no JSON", "{"),
    *faults(SHARED, "structured_outputs", "must have 1 to", {"choice": []}),
    *faults(SHARED, "structured_outputs", "structural_tag", {"choice": ["a"], "structural_tag": "{}"}),
    *faults("messages", "thinking", "thinking.type", {"type": "maybe"}),
    *faults("responses", "truncation", "auto or disabled", "middle"),
    *faults("responses", "metadata", "512 characters at most", {"k": "v" * 513}),
    *faults("responses", "metadata", "at most 16", dict.fromkeys(some(17), "")),
]


def test_faults_name_their_field(subtests: pytest.Subtests) -> None:
    for dialect, field, why, fields in FAULTS:
        with subtests.test(f"{dialect} {field}: {why}"):
            with pytest.raises(InvalidRequest) as caught:
                params_of(dialect, **fields)
            assert caught.value.field == NAMES.get(dialect, {}).get(field, field)
            assert why in caught.value.message
    with pytest.raises(InvalidRequest, match="max_tokens is named max_output_tokens here"):
        DECODED["responses"](b'{"model": "m", "input": "i", "max_tokens": 5}')


@pytest.mark.parametrize("dialect", DECODED)
def test_body_that_is_no_request_is_refused(dialect: str) -> None:
    prompt = next(iter(PROMPTS[dialect]))
    surrogate = json.dumps({"model": "m", **PROMPTS[dialect], "user": "a@"}).replace("@", r"\ud800")
    for body, field, why in (
        ("{}", "model", "model is missing"),
        ('{"model": "m"}', prompt, f"{prompt} is missing"),
        ("[]", None, "the body must be an object, not a list"),
        ("", None, "the body is empty"),
        (b"\xff", None, "not valid JSON"),
        (surrogate, "user", "user has a lone surrogate"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            DECODED[dialect](body if isinstance(body, bytes) else body.encode())
        assert caught.value.field == field and why in caught.value.message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "model messages prompt stop seed n max_tokens top_k stream_options logit_bias min_p logprobs top_logprobs"
    " stop_token_ids presence_penalty service_tier input tools tool_choice"
)


@given(st.dictionaries(st.sampled_from(FIELDS.split()), json_values))
def test_any_body_is_decoded_or_refused(fields: dict[str, Any]) -> None:
    for dialect in JSON.split():
        try:
            params_of(dialect, **fields)
        except InvalidRequest as error:
            assert error.message
