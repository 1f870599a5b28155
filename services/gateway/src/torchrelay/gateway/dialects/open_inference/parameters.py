"""Parameters of a request: those that dialects share, in the request's map or as JSON in ``sampling_parameters``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.bodies.body_decoder import OtherFields, decode
from torchrelay.gateway.bodies.shared_body import IGNORED, REFUSED, BaseBody, format_of, shared_params
from torchrelay.gateway.dialects.open_inference.tensors import TEXT_INPUT
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.inference.v2 import open_inference_pb2 as pb

_FIELDS: Final = OtherFields(IGNORED, REFUSED)
_KNOWN: Final = frozenset(BaseBody.__struct_fields__) | _FIELDS.names
_DECODER: msgspec.json.Decoder[BaseBody] = msgspec.json.Decoder(BaseBody)
# Fields with a place of their own in the request, or without one in the response.
_ELSEWHERE: Final = frozenset(("model", "stream_options", "return_token_ids"))
_TEXTS: Final = frozenset(("stop", "service_tier", "user", "session_id", "request_id"))  # never read as JSON
_MAX_PARAMETERS = 128
_MAX_CHARS, _MAX_GRAMMAR_CHARS = 64 << 10, 512 << 10  # of a parameter; of one that describes an answer's format
_OF_CLIENTS: Final = "triton_"  # what its clients say of themselves


def params_of(request: pb.ModelInferRequest, inputs: Mapping[str, Any]) -> tuple[GenerateParams, bool]:
    """The parameters of an answer, and whether it is streamed. Raises ``InvalidRequest``."""
    if inputs.get("exclude_input_in_output") is False:
        message = "exclude_input_in_output: false is not supported; the text of an answer is without the prompt"
        raise InvalidRequest(message, field="exclude_input_in_output")
    fields = dict(_given(request.parameters)) | _sampling(inputs.get("sampling_parameters", "{}"))
    is_stream = inputs.get("stream", fields.pop("stream", False))
    if not isinstance(is_stream, bool):
        raise InvalidRequest("stream must be a boolean", field="stream")
    for name in fields:
        if name not in _KNOWN or name in _ELSEWHERE:
            raise InvalidRequest(f"{name[:80]!r} is no parameter of this protocol", field=name[:80])
    try:
        encoded = json.dumps({**fields, "model": request.model_name}).encode()
    except RecursionError:
        raise InvalidRequest("the parameters are nested too deeply", field="sampling_parameters") from None
    body = decode(_DECODER, encoded, _FIELDS)
    params = shared_params(body, text=inputs[TEXT_INPUT], max_tokens=body.max_tokens, answer_format=format_of(body))
    return params, is_stream


def _given(parameters: Mapping[str, pb.InferParameter]) -> Iterator[tuple[str, Any]]:
    if len(parameters) > _MAX_PARAMETERS:
        message = f"there are {len(parameters):,} parameters; at most {_MAX_PARAMETERS} are allowed"
        raise InvalidRequest(message, field="parameters")
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequest(f"the parameter {name[:80]!r} has no value", field=name[:80])
        if not name.startswith(_OF_CLIENTS):
            value = getattr(parameter, choice)
            yield name, _typed(name, value) if isinstance(value, str) else value


def _sampling(text: str) -> dict[str, Any]:
    """The parameters in a JSON object, whose values may be strings of JSON, as some clients write them."""
    _check_length("sampling_parameters", text, _MAX_GRAMMAR_CHARS)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise InvalidRequest("sampling_parameters must be a JSON object", field="sampling_parameters")
    return {name: _typed(name, value) if isinstance(value, str) else value for name, value in fields.items()}


def _typed(name: str, text: str) -> Any:
    """The value that a string stands for, as the parameters of the standard have neither fractions nor lists."""
    is_grammar = name.startswith("guided_")
    _check_length(name[:80], text, _MAX_GRAMMAR_CHARS if is_grammar else _MAX_CHARS)
    if name in _TEXTS and not text.startswith("["):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _check_length(name: str, text: str, max_chars: int) -> None:
    if len(text) > max_chars:
        raise InvalidRequest(f"{name} has {len(text):,} characters; at most {max_chars:,} are allowed", field=name)
