"""Completes requests that schemathesis makes, so that many of them reach a model."""

from __future__ import annotations

from typing import Any

import schemathesis

from tests.clients.python.settings import EMBEDDING_MODEL, MODEL

MESSAGES = [{"role": "user", "content": "Run."}]
# The description leaves open what these fields contain: each becomes text that the model answers.
TEXTS = {"messages": MESSAGES, "input": "Run.", "prompt": "<|text|>"}
PATCHED = "described/patched"  # which no request calls


def before_call(_: Any, case: Any, __: Any) -> None:
    path, body = case.operation.path, case.body
    if path.startswith("/v1/models/") and case.method in ("GET", "PATCH", "PUT"):
        case.path_parameters["name"] = PATCHED
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = EMBEDDING_MODEL if path == "/v1/embeddings" else MODEL
        for name, text in TEXTS.items():
            if isinstance(body.get(name), str | list):
                body[name] = text


schemathesis.hook(before_call)
