"""Tensors of a request and a response: a text and its options, with the names of Triton's backend for vLLM."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from torchrelay.common.errors import InvalidRequest
from torchrelay.inference.v2 import open_inference_pb2 as pb

Metadata = pb.ModelMetadataResponse.TensorMetadata
TEXT_INPUT: Final = "text_input"
INPUTS: Final = {
    TEXT_INPUT: "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",  # JSON of parameters
    "exclude_input_in_output": "BOOL",
}
# One element per choice, except for the tokens of the prompt.
OUTPUTS: Final = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
_MAX_DIMENSIONS, _MAX_OUTPUTS = 8, 32


class Output(NamedTuple):
    name: str
    elements: Sequence[Any]


def input_metadata() -> list[Metadata]:
    return [Metadata(name=name, datatype=datatype, shape=[1]) for name, datatype in INPUTS.items()]


def output_metadata() -> list[Metadata]:
    shapes = {"num_input_tokens": 1, "num_output_tokens": 1}
    return [Metadata(name=name, datatype=datatype, shape=[shapes.get(name, -1)]) for name, datatype in OUTPUTS.items()]


def inputs_of(request: pb.ModelInferRequest) -> dict[str, Any]:
    """The element of each input. Raises ``InvalidRequest``."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        message = f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs"
        raise InvalidRequest(message, field="raw_input_contents")
    elements: dict[str, Any] = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name
        if name not in INPUTS:
            message = f"inputs[{index}] is named {name[:80]!r}; the inputs are {', '.join(INPUTS)}"
            raise InvalidRequest(message, field="inputs")
        if tensor.datatype != INPUTS[name]:
            message = f"{name} must have the datatype {INPUTS[name]}, not {tensor.datatype[:40]!r}"
            raise InvalidRequest(message, field=name)
        if raw and tensor.HasField("contents"):
            raise InvalidRequest(f"{name} must not have contents beside raw_input_contents", field=name)
        listed = _raw(tensor.datatype, raw[index]) if raw else _contents(tensor)
        if len(listed) != 1 or len(tensor.shape) > _MAX_DIMENSIONS or any(size != 1 for size in tensor.shape):
            raise InvalidRequest(f"{name} must have one element; send a request per text", field=name)
        if name in elements:
            raise InvalidRequest(f"{name} occurs twice", field="inputs")
        elements[name] = listed[0] if tensor.datatype == "BOOL" else _text(name, listed[0])
    if TEXT_INPUT not in elements:
        raise InvalidRequest(f"the input {TEXT_INPUT} is missing", field=TEXT_INPUT)
    return elements


def add_outputs(response: pb.ModelInferResponse, request: pb.ModelInferRequest, outputs: Sequence[Output]) -> None:
    """Adds the outputs that were requested, or all; as raw contents if the inputs were raw."""
    wanted = {output.name for output in request.outputs} or set(OUTPUTS)
    for output in outputs:
        if output.name not in wanted:
            continue
        datatype = OUTPUTS[output.name]
        tensor = response.outputs.add(name=output.name, datatype=datatype, shape=[len(output.elements)])
        if request.raw_input_contents:
            encode = _raw_bytes if datatype == "BYTES" else _raw_integer
            response.raw_output_contents.append(b"".join(map(encode, output.elements)))
        elif datatype == "BYTES":
            tensor.contents.bytes_contents.extend(output.elements)
        else:
            tensor.contents.uint_contents.extend(output.elements)


def check_outputs(request: pb.ModelInferRequest) -> None:
    """Raises ``InvalidRequest`` for an unknown output, or for more than ``_MAX_OUTPUTS``."""
    if len(request.outputs) > _MAX_OUTPUTS:
        message = f"outputs has {len(request.outputs):,} entries; at most {_MAX_OUTPUTS} are allowed"
        raise InvalidRequest(message, field="outputs")
    for index, output in enumerate(request.outputs):
        if output.name not in OUTPUTS:
            message = f"outputs[{index}] is named {output.name[:80]!r}; the outputs are {', '.join(OUTPUTS)}"
            raise InvalidRequest(message, field="outputs")


def _contents(tensor: pb.ModelInferRequest.InferInputTensor) -> Sequence[Any]:
    contents = tensor.contents
    return contents.bool_contents if tensor.datatype == "BOOL" else contents.bytes_contents


def _raw(datatype: str, encoded: bytes) -> list[Any]:
    """The first two elements of raw contents: bytes follow their length. An input has one."""
    if datatype == "BOOL":
        return [byte != 0 for byte in encoded[:2]]
    elements: list[bytes] = []
    at = 0
    while at + 4 <= len(encoded):
        if len(elements) == 2:
            return elements
        (length,) = struct.unpack_from("<I", encoded, at)
        elements.append(encoded[at + 4 : at + 4 + length])
        at += 4 + length
    if at != len(encoded):
        raise InvalidRequest("raw contents of BYTES end within an element", field="raw_input_contents")
    return elements


def _raw_bytes(element: bytes) -> bytes:
    return struct.pack("<I", len(element)) + element


_raw_integer: Callable[[int], bytes] = struct.Struct("<I").pack


def _text(name: str, encoded: bytes) -> str:
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name} is not valid UTF-8", field=name) from None
