"""The schema at ``/openapi.json``: FastAPI's of the REST routes, completed by the token paths and the true errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from fastapi import FastAPI

from torchrelay.common.sampling import RANGES
from torchrelay.gateway.dialects.anthropic.dialect import COUNT_PATH
from torchrelay.gateway.dialects.anthropic.dialect import PATH as MESSAGES_PATH
from torchrelay.gateway.dialects.anthropic.requests import Body as MessagesBody
from torchrelay.gateway.dialects.embeddings.asgi_app import PATH as EMBEDDINGS_PATH
from torchrelay.gateway.dialects.embeddings.requests import EmbeddingsBody
from torchrelay.gateway.dialects.embeddings.rerank import PATH as RERANK_PATH
from torchrelay.gateway.dialects.embeddings.rerank import RerankBody
from torchrelay.gateway.dialects.openai.requests import ChatBody, CompletionBody
from torchrelay.gateway.dialects.responses.requests import ResponseBody
from torchrelay.gateway.exchange.errors import ErrorBody

_JSON: Final = "application/json"
_REF: Final = "#/components/schemas/{name}"
_BEARER: Final[dict[str, list[str]]] = {"HTTPBearer": []}
_API_KEY: Final[dict[str, list[str]]] = {"ApiKey": []}  # of Anthropic's clients
_ERRORS: Final = {
    400: "the request is malformed or out of range; `param` names the field",
    401: "the key is missing, unknown or revoked",
    403: "the key has no permission, or the budget or quota is spent",
    404: "the model, or what else the path names, does not exist",
    405: "the path does not have the method",
    408: "the headers or the body arrived too slowly",
    409: "a conflict with the present state",
    413: "the body is too large",
    414: "the address is too long",
    415: "the body is compressed or not JSON",
    422: "the upload is refused; `param` names the file",
    429: "too many requests; `Retry-After` says when to retry",
    431: "the headers are too large",
    500: "an internal error",
    503: "a part of the platform is unavailable, or at capacity",
    504: "the deadline has passed",
    507: "a disk of the platform is full",
}
_OF_UPLOADS: Final = (422, 507)
_ANTHROPIC_ERROR: Final = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
# In OpenAPI 3.1 the schema of a stream describes each of its events.
_EVENT: Final = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string", "description": "JSON, or `[DONE]`"}},
}
# The body of each token path, and its description.
TOKEN_PATHS: Final[dict[str, tuple[type[msgspec.Struct], str]]] = {
    "/v1/chat/completions": (ChatBody, "An answer to messages, in OpenAI's format"),
    "/v1/completions": (CompletionBody, "The continuation of prompts, in OpenAI's format"),
    EMBEDDINGS_PATH: (EmbeddingsBody, "Embeddings of texts, in OpenAI's format"),
    RERANK_PATH: (RerankBody, "Documents by their relevance to a query, in the format of Jina, Cohere and vLLM"),
    "/v1/responses": (ResponseBody, "An answer to a conversation, in the format of OpenAI's Responses"),
    "/v1/messages": (MessagesBody, "An answer to messages, in Anthropic's format"),
    "/v1/messages/count_tokens": (MessagesBody, "The number of prompt tokens of messages; nothing runs"),
}


def described(app: FastAPI) -> dict[str, Any]:
    """The schema of all paths that need a key."""
    schema = app.openapi()
    schemas: dict[str, Any] = schema["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's, which no answer has
        schemas.pop(name, None)
    schema["components"]["securitySchemes"]["ApiKey"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"] = _responses(operation["responses"], path)
    bodies = dict.fromkeys(body for body, _ in TOKEN_PATHS.values())
    references, components = msgspec.json.schema_components([*bodies, ErrorBody], ref_template=_REF)
    schemas |= components | {"AnthropicError": _ANTHROPIC_ERROR}
    by_body = dict(zip(bodies, references, strict=False))
    for body in bodies:
        _add_ranges(schemas[body.__name__]["properties"])
    for path, (body, summary) in TOKEN_PATHS.items():
        schema["paths"][path] = {"post": _token_operation(path, summary, by_body[body])}
    return schema


def _responses(responses: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The successes, and every error that the path can answer with."""
    error = _REF.format(name="AnthropicError" if path in (MESSAGES_PATH, COUNT_PATH) else ErrorBody.__name__)
    content = {_JSON: {"schema": {"$ref": error}}}
    is_upload = path.startswith("/v1/uploads")
    return {status: each for status, each in responses.items() if status < "300"} | {
        str(status): {"description": text, "content": content}
        for status, text in _ERRORS.items()
        if is_upload or status not in _OF_UPLOADS
    }


def _add_ranges(properties: dict[str, Any]) -> None:
    """Adds the ranges that are checked after a body is decoded."""
    for name, (low, high) in RANGES.items():
        for kind in properties.get(name, {}).get("anyOf", ()):
            if kind["type"] == "number":
                kind.setdefault("minimum", low)
                kind.setdefault("maximum", high)


def _token_operation(path: str, summary: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {_JSON: {"schema": {"type": "object"}}}
    if path not in (EMBEDDINGS_PATH, RERANK_PATH, COUNT_PATH):
        answer["text/event-stream"] = {"schema": _EVENT}
    return {
        "summary": summary,
        "operationId": path.removeprefix("/v1/").replace("/", "_"),
        "security": [_BEARER, _API_KEY] if path in (MESSAGES_PATH, COUNT_PATH) else [_BEARER],
        "requestBody": {"required": True, "content": {_JSON: {"schema": body}}},
        "responses": _responses({"200": {"description": "the answer", "content": answer}}, path),
    }
