"""What all token paths promise over HTTP: keys, methods, bodies, faults that depend on the model, and headers."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from tests.support.gateway_ports import ADMIN_KEY
from tests.unit.gateway.dialects.all_dialects import FUNCTION, TEMPLATE
from tests.unit.gateway.token_path_rig import PROMPT, MakeRig, TokenPathRig
from torchrelay.gateway.core import RateLeft, RatesLeft
from torchrelay.gateway.dialects.embeddings.requests import MAX_INPUTS
from torchrelay.gateway.http.openapi import TOKEN_PATHS
from torchrelay.gateway.inference.parameter_ranges import MAX_PROMPTS
from torchrelay.gateway.limits.refusals import RateExceeded

TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
PATHS: dict[str, dict[str, Any]] = {
    CHAT: {"model": "acme/echo", "max_tokens": 3, **TALK},
    COMPLETIONS: {"model": "acme/echo", "max_tokens": 3, "prompt": PROMPT},
    RESPONSES: {"model": "acme/echo", "max_output_tokens": 3, "input": "hi"},
    MESSAGES: {"model": "acme/echo", "max_tokens": 3, **TALK},
    COUNT: {"model": "acme/echo", **TALK},
    EMBEDDINGS: {"model": "acme/embed", "input": "a"},
    RERANK: {"model": "acme/rerank", "query": "a", "documents": ["b"]},
}
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}


@pytest.fixture
async def rig(make_rig: MakeRig) -> TokenPathRig:
    return await make_rig(template=TEMPLATE)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error, with the type of its status, and without a ``param`` and a ``code`` in Anthropic's format."""
    body = answer.json()
    error: dict[str, Any] = body["error"]
    if "/messages" in answer.url.path:
        assert error.keys() == {"type", "message"}
        assert (body["type"], body["request_id"]) == ("error", answer.headers["request-id"])
        assert error["type"] == TYPES.get(answer.status_code, "invalid_request_error")
    else:
        assert error.keys() == {"message", "type", "param", "code"} and answer.headers["x-request-id"]
        others = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        assert error["type"] == others.get(answer.status_code, "invalid_request_error")
    return error


def test_every_path_has_a_request() -> None:
    assert PATHS.keys() == TOKEN_PATHS.keys()


@pytest.mark.parametrize("path", PATHS)
async def test_refusals_have_their_status(rig: TokenPathRig, path: str, subtests: pytest.Subtests) -> None:
    body, most = json.dumps(PATHS[path]).encode(), rig.settings.max_body_bytes
    is_json, admin, other = {"content-type": "application/json"}, f"Bearer {ADMIN_KEY}", "Bearer tr-other"
    zipped = "Content-Encoding 'gzip' is not supported: send the body without compression"
    for method, content, headers, status, code, said in (
        ("GET", b"", {}, 405, "method_not_allowed", "use POST"),
        *((method, b"", {"authorization": ""}, 401, "invalid_api_key", "") for method in ("GET", "PUT", "DELETE")),
        ("POST", body, {"authorization": other}, 401, "invalid_api_key", ""),
        *[("POST", body, is_json | {"authorization": admin}, 403, "permission_denied", "")] * (path != COUNT),
        ("POST", body.replace(b"acme", b"other"), is_json, 404, "model_not_found", ""),
        ("POST", b"", {}, 400, "invalid_request", "the body is empty"),
        ("POST", b"{nonsense", is_json, 400, "invalid_request", "not valid JSON"),
        ("POST", b" " * (most + 1), is_json, 413, "invalid_request", f"{most:,}"),
        ("POST", gzip.compress(body), {"content-encoding": "gzip"}, 415, "invalid_request", zipped),
        *(
            ("POST", body, {"content-type": kind}, 415, "invalid_request", f"Content-Type '{kind}' is not supported")
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x")
        ),
    ):
        with subtests.test(f"{method} {headers} {status} {said}"):
            answer = await rig.http.request(method, path, content=content, headers=headers)
            error = error_of(answer)
            assert (answer.status_code, error.get("code", code)) == (status, code) and said in error["message"]
            fields = {404: "model", 415: next(iter(headers), "").title()}
            assert error.get("param", fields.get(status)) == fields.get(status)
            assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
            assert answer.headers.get("allow") == ("POST" if status == 405 else None)  # only tenants learn it
    for headers in ({}, {"content-type": "application/json;charset=UTF-8"}):
        assert (await rig.http.post(path, content=body, headers=headers)).status_code == 200


@pytest.mark.parametrize("name", ["X-Request-ID", "X-Client-Request-Id"])
async def test_callers_id_comes_back_beside_ours(rig: TokenPathRig, name: str) -> None:
    for path, body in PATHS.items():
        for sent, status in ((body, 200), ({**body, "model": 0}, 400)):
            answer = await rig.http.post(path, json=sent, headers={name: "trace-7"})
            assert (answer.status_code, answer.headers["x-client-request-id"]) == (status, "trace-7")
            ours = answer.headers["request-id" if "messages" in path else "x-request-id"]
            assert ours.startswith("resp_" if path == RESPONSES else "req-")
        odd = await rig.http.post(path, json=body, headers={name: "a b"})
        assert odd.status_code == 200 and "x-client-request-id" not in odd.headers


@pytest.mark.parametrize("path", [path for path in PATHS if path != COUNT])
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_tell_their_time_and_what_is_left_of_the_rate(rig: TokenPathRig, path: str, stream: bool) -> None:
    names = [f"x-ratelimit-{name}-{of}" for of in ("requests", "tokens") for name in ("limit", "remaining", "reset")]
    body = {**PATHS[path]} if path in (EMBEDDINGS, RERANK) else {**PATHS[path], "stream": stream}
    unlimited = await rig.http.post(path, json=body)
    assert not set(names) & set(unlimited.headers)
    rig.ports.rates = RatesLeft(RateLeft(per_minute=60, num_left=57.5), RateLeft(per_minute=1000, num_left=-2.0))
    limited = await rig.http.post(path, json=body)
    assert [limited.headers[name] for name in names] == ["60", "57", "2.500s", "1000", "0", "60.120s"]
    num_starts = sum(len(worker.starts) for worker in rig.workers)
    rig.ports.refusal = RateExceeded("no", RatesLeft(RateLeft(per_minute=60, num_left=0)), retry_after_s=1)
    refused = await rig.http.post(path, json=body)
    assert [refused.headers[name] for name in ("retry-after", *names[:3])] == ["1", "60", "0", "60.000s"]
    assert sum(len(worker.starts) for worker in rig.workers) == num_starts and len(rig.ports.opened) == 2
    invalid = await rig.http.post(path, json={**body, "model": 0})
    assert [each.status_code for each in (unlimited, limited, refused, invalid)] == [200, 200, 429, 400]
    assert all(int(each.headers["openai-processing-ms"]) <= 60_000 for each in (unlimited, limited, refused, invalid))


def faults(path: str, field: str, said: str, *values: Any, **others: Any) -> list[tuple[str, dict[str, Any], str, str]]:
    """Requests whose ``field``, with each of the values, is refused with ``said``."""
    return [(path, {field: value} | others, field, said) for value in values]


HUGE = "an integer below -2**63 or above 2**64 - 1"
MAXIMUM = FUNCTION | {"parameters": {"maximum": 1 << 70}}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": 1 << 64})}
EITHER = "must be a text, a list of token ids, or a list of either"
NO_FORMAT = {"format": {"type": "json_schema", "schema": {"type": "object", "if": {}}}}
FAULTS = [
    *faults(CHAT, "tools", HUGE, [{"type": "function", "function": MAXIMUM}]),
    *faults(CHAT, "chat_template_kwargs", HUGE, {"x": 1 << 70}),
    *faults(CHAT, "guided_regex", "guided_regex", "(", "a" * 600_000),
    *faults(CHAT, "messages", "template", TALK["messages"], model="acme/plain"),
    *faults(RESPONSES, "input", "contains an integer", [CALLED]),
    *faults(RESPONSES, "tools", "contains an integer", [{"type": "function", **MAXIMUM}]),
    *faults(RESPONSES, "input", "prompt is too long: ", "one " * 600),
    *faults(MESSAGES, "output_config", "output_config: no answer can follow this format: ", NO_FORMAT),
    *faults(COMPLETIONS, "prompt", f"prompt has 33 prompts; at most {MAX_PROMPTS} are allowed", ["a"] * 33),
    *faults(COMPLETIONS, "prompt", f"prompt {EITHER}", ["a", [1]], ["a", 1]),
    *faults(COMPLETIONS, "prompt", "token ids must be", [[1], [-1]]),
    *faults(COMPLETIONS, "prompt", "prompt must not be empty", [[1], []], ["a", ""], []),
    *faults(COMPLETIONS, "prompt", "token id 524288 is out of range", [1 << 19]),
    *faults(COMPLETIONS, "prompt", "prompt is too long", "a" * 20_000),
    *faults(
        COMPLETIONS,
        "prompt",
        "prompt is too long: 512 tokens > 512 maximum; this model's maximum context length is 512",
        [[1], [1] * 512],
    ),
    *faults(COMPLETIONS, "min_tokens", "500 prompt and 13 output tokens", 13, prompt=[1] * 500, max_tokens=20),
    *faults(COMPLETIONS, "best_of", "best_of must be at most 16", 17),
    *faults(COMPLETIONS, "n", "n must be at most 16", 17),
    *faults(COMPLETIONS, "logit_bias", "token 99999", {"99999": 1}),
    *faults(COMPLETIONS, "stop_token_ids", "token 99999", [99999]),
    *faults(COMPLETIONS, "guided_grammar", "guided_grammar", "start: x"),
    *(row for name in ("prompt", "stop") for row in faults(COMPLETIONS, name, "surrogate", "a@")),
    *faults(EMBEDDINGS, "model", "acme/echo declares no embeddings", "echo"),
    *faults(EMBEDDINGS, "input", "input must not be empty", []),
    *faults(EMBEDDINGS, "input", "the prompt must not be empty", ""),
    *faults(EMBEDDINGS, "input", f"input {EITHER}", ["a", [1]], [1, "a"]),
    *faults(EMBEDDINGS, "input", "token ids must be", [[1], [-1]]),
    *faults(EMBEDDINGS, "input", "input[1]: the prompt must not be empty", [[1], []]),
    *faults(EMBEDDINGS, "input", "input[2]: token id", [[1], [2], [1 << 20]]),
    *faults(EMBEDDINGS, "input", "input[1]: prompt is too long: 65 tokens > 64 maximum; ", [[1], [1] * 65]),
    *faults(EMBEDDINGS, "input", "prompt is too long", "word " * 200, ["a", "word " * 200]),
    *faults(EMBEDDINGS, "input", "at most 2,048", ["a"] * (MAX_INPUTS + 1)),
    *faults(EMBEDDINGS, "input", "input", {}),
    *faults(EMBEDDINGS, "encoding_format", "one of float, base64", "int8"),
    *faults(EMBEDDINGS, "dimensions", "at least 1", 0),
    *faults(EMBEDDINGS, "dimensions", "dimensions must be at most 8", 9),
    *faults(EMBEDDINGS, "truncate_prompt_tokens", "is not supported", 3),
    *faults(EMBEDDINGS, "input_type", "is not supported", "query"),
    *faults(EMBEDDINGS, "dimension", "did you mean dimensions?", 3),
    *faults(RERANK, "model", "acme/embed is no reranker: /v1/rerank takes classifiers of one label", "embed"),
    *faults(RERANK, "model", "acme/echo is no reranker", "echo"),
    *faults(RERANK, "documents", "documents must not be empty", []),
    *faults(RERANK, "documents", "documents has 2,049 entries; at most 2,048 are allowed", ["a"] * (MAX_INPUTS + 1)),
    *faults(RERANK, "documents", "documents[1]: prompt is too long", ["a", "word " * 200]),
    *faults(RERANK, "documents", "must be a list", "a"),
    *faults(RERANK, "query", "prompt is too long", "word " * 200),
    *faults(
        RERANK,
        "documents",
        "has 81,922,048 characters; at most 8,388,608 are allowed (max_body_bytes): send fewer",
        ["a"] * MAX_INPUTS,
        query="word " * 8000,
    ),
    *faults(
        RERANK, "documents", "documents[1]: Object contains unknown field `title`", ["a", {"text": "a", "title": "b"}]
    ),
    *faults(
        RERANK, "documents", "documents[0]: Object contains unknown field `xxxxx", [{"text": "a", "x" * 10**5: "b"}]
    ),
    *faults(RERANK, "query", "query", 3),
    *faults(RERANK, "top_n", "top_n must be at least 1", 0),
    *faults(RERANK, "max_tokens_per_doc", "is not supported", 512),
]


async def test_faults_that_depend_on_the_model_name_their_field(rig: TokenPathRig, subtests: pytest.Subtests) -> None:
    for path, fields, field, said in FAULTS:
        with subtests.test(f"{path} {field}: {said}"):
            content = json.dumps({**PATHS[path], **fields}).replace("@", r"\ud800")
            answer = await rig.http.post(path, content=content, headers={"content-type": "application/json"})
            error = error_of(answer)
            assert (answer.status_code, error.get("param", field)) == (400, field) and said in error["message"]
            is_long = "too long" in said or field == "min_tokens"
            code = "context_length_exceeded" if is_long else "invalid_request"
            assert error.get("code", code) == code
            assert not rig.ports.opened and not rig.ports.reserved and not rig.token_path.pipeline.requests
            assert rig.shares.requests.num_held == rig.shares.body_bytes.num_held == 0
