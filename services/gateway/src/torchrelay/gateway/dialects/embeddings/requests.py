"""Request bodies of ``/v1/embeddings``, decoded and validated."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.bodies.body_decoder import OtherFields, decode
from torchrelay.gateway.bodies.shared_body import IGNORED
from torchrelay.gateway.core import EmbeddingSpec
from torchrelay.gateway.inference.core import GenerateParams

MAX_INPUTS: Final = 2048  # of one request, as at OpenAI
_FORMATS: Final = ("float", "base64")
_MALFORMED: Final = "input must be a text, a list of token ids, or a list of either"


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    add_special_tokens: bool | None = None


# Fields that would change the answer and are not supported, and the values, besides null, that leave it unchanged.
FIELDS: Final = OtherFields(
    IGNORED,
    {
        "input_type": None,
        "messages": None,
        "truncate": None,
        "truncate_prompt_tokens": None,
        "truncation": False,
        "normalize": None,
        "task": None,
        "prompt": "",
        "prompt_name": None,
        "instruction": "",
        "output_dimension": None,
        "output_dtype": "float",
        "embed_dtype": "float32",
        "embedding_types": ["float"],
        "endianness": "little",
    },
)
_DECODER: msgspec.json.Decoder[EmbeddingsBody] = msgspec.json.Decoder(EmbeddingsBody)


def decode_embeddings(encoded: bytes | bytearray) -> EmbeddingsBody:
    """Raises ``InvalidRequest`` naming the faulty field."""
    body = decode(_DECODER, encoded, FIELDS)
    if body.encoding_format not in (None, *_FORMATS):
        message = f"encoding_format must be one of {', '.join(_FORMATS)}, not {body.encoding_format[:40]!r}"
        raise InvalidRequest(message, field="encoding_format")
    return body


def params_of(body: EmbeddingsBody) -> list[GenerateParams]:
    """The prompt of each input. Raises ``InvalidRequest``."""
    given = body.input
    inputs = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not inputs:
        raise InvalidRequest("input must not be empty", field="input")
    if len(inputs) > MAX_INPUTS:
        message = f"input has {len(inputs):,} entries; at most {MAX_INPUTS:,} are allowed"
        raise InvalidRequest(message, field="input")
    if len(set(map(type, inputs))) > 1:
        raise InvalidRequest(_MALFORMED, field="input")
    return [_params_of(body, each) for each in inputs]


def _params_of(body: EmbeddingsBody, given: str | int | list[Any]) -> GenerateParams:
    special, field = body.add_special_tokens, "input"
    if isinstance(given, str):
        return GenerateParams(body.model, text=given, add_special_tokens=special, text_field=field)
    if not isinstance(given, list) or not set(map(type, given)) <= {int}:
        raise InvalidRequest(_MALFORMED, field=field)
    if given and not 0 <= min(given) <= max(given) < 1 << 32:
        raise InvalidRequest("token ids must be non-negative and below 2**32", field=field)
    return GenerateParams(body.model, token_ids=given, text_field=field)


def num_dimensions(body: EmbeddingsBody, embedding: EmbeddingSpec) -> int:
    """The length of the vectors. Raises ``InvalidRequest`` if the model has fewer dimensions than requested."""
    if body.dimensions is None:
        return embedding.num_dimensions
    if body.dimensions > embedding.num_dimensions:
        message = f"dimensions must be at most {embedding.num_dimensions}, which the model has, not {body.dimensions}"
        raise InvalidRequest(message, field="dimensions")
    return body.dimensions
