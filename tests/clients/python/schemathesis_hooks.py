"""Completes requests that schemathesis makes, so that many of them reach a model."""

from __future__ import annotations

import time
from typing import Any
from zlib import crc32

import schemathesis

from tests.clients.python.settings import EMBEDDING_MODEL, MODEL

MESSAGES = [{"role": "user", "content": "Run."}]
# The description leaves open what these fields contain: each becomes text that the model answers.
TEXTS = {"messages": MESSAGES, "input": "Run.", "prompt": "<|text|>"}
# Their descriptions have most of the fields, and most cases differ in the value of a field that another of them has.
LARGE = tuple(
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
)
KEEP_ONE_OF = 3
JSON = "application/json"
PATCHED = "described/patched"  # which no request calls
CHANGE_S = 0.25  # in which a tenant may make another change, after those that were too many


def before_call(_: Any, case: Any, __: Any) -> None:
    path, body = case.operation.path, case.body
    if path.startswith("/v1/models/") and case.method in ("GET", "PATCH", "PUT"):
        case.path_parameters["name"] = PATCHED
        if case.method != "GET" and is_valid(case):
            time.sleep(CHANGE_S)
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = EMBEDDING_MODEL if path == "/v1/embeddings" else MODEL
        for name, text in TEXTS.items():
            if isinstance(body.get(name), str | list):
                body[name] = text


def is_valid(case: Any) -> bool:
    return case.meta is not None and case.meta.generation.mode.is_positive


def filter_case(_: Any, case: Any) -> bool:
    """Keeps a part of the bodies of operations with hundreds of them, the same in every run."""
    operation = case.operation
    content_type = (case.headers or {}).get("Content-Type", case.media_type)
    if operation.path not in LARGE or case.method != operation.method.upper() or content_type != JSON or is_valid(case):
        return True
    return crc32(repr(case.body).encode()) % KEEP_ONE_OF == 0


schemathesis.hook(before_call)
schemathesis.hook(filter_case)
