"""Maps every error to OpenAI's format: ours, validation errors, and the framework's 404 and 405."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from torchrelay.common.errors import TorchrelayError
from torchrelay.common.process.telemetry import get_logger
from torchrelay.common.validation import describe_error
from torchrelay.gateway.exchange.errors import body, refusal

log = get_logger(__name__)
# Paths of inference, which clients build from a base address with or without the version.
_PATHS: Final = frozenset(
    f"/v1/{name}"
    for name in ("chat/completions", "completions", "responses", "embeddings", "rerank", "messages", "models")
)


def install_error_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """``routes``: all those of ``app``, for the methods that a path allows."""
    app.state.routes = routes
    app.add_exception_handler(TorchrelayError, _ours)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _frameworks)
    app.add_exception_handler(Exception, _unexpected)


async def _ours(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TorchrelayError)
    return refusal(error)


async def _malformed(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    message, param = first_fault(error.errors())
    return JSONResponse(body(400, message, param=param, code="invalid_request"), 400)


def first_fault(faults: Sequence[Any]) -> tuple[str, str | None]:
    """The message of a validation error and the field it is about (``files.0.size``)."""
    fault = faults[0]
    where = [str(part) for part in fault["loc"][1:]]
    if fault["type"] == "json_invalid":
        return "the body is not valid JSON", None
    if fault["type"] == "missing" and not where:
        return "the request must have a body", None
    if isinstance(fault["input"], bytes) and not where:  # FastAPI parses only what is declared as JSON
        return "send the body with the header `content-type: application/json`, which is missing", None
    field = ".".join(where)
    return describe_error(field or "the body", fault), field or None


async def _frameworks(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    headers = {"allow": _allowed(request)} if error.status_code == 405 else error.headers
    # OpenAI's clients leave the version to their base address; Anthropic's add it.
    meant = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    hint = f"; did you mean {meant}?" if meant in _PATHS else ""
    message, code = {
        404: (f"{path} not found{hint}", "not_found"),
        405: (f"method {method} is not allowed for {path}", "method_not_allowed"),
    }.get(error.status_code, (str(error.detail), "invalid_request"))
    return JSONResponse(body(error.status_code, message, code=code), error.status_code, headers)


def _allowed(request: Request) -> str:
    """All methods of the path; the framework's list has only those of the first route."""
    routes = (route for route in request.app.state.routes if route.matches(request.scope)[0] is not Match.NONE)
    methods = {method for route in routes for method in route.methods}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    # The server logs the traceback.
    log.error("unexpected", error=type(error).__name__, request_id=request.state.request_id)
    message = "internal error; include the request id when reporting it"
    return JSONResponse(body(500, message, code="internal"), 500)
