"""The JSON documents and the template of an upload, read strictly and within limits."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from torchrelay.common.chat_syntax import InvalidSyntax, check_syntax
from torchrelay.common.tokens.tokenizer_document import AddedTokenEntry, TokenizerDocument, read_tokenizer
from torchrelay.common.tokens.tokenizer_limits import MAX_TOKEN_CHARS, TokenizerRefused
from torchrelay.modelspec.config import ModelConfig, read_config
from torchrelay.modelspec.errors import UnsupportedModel
from torchrelay.modelspec.opaque import VLLM, OpaqueModel, check_known, read_opaque
from torchrelay.modelspec.text_part import text_config
from torchrelay.param_store.embedding import EmbeddingSpec, UnsupportedEmbedding, model_embedding
from torchrelay.param_store.model_files import (
    ADDED_TOKENS,
    CONFIG,
    GENERATION,
    MAX_FILE_BYTES,
    MODULES,
    PASSED_ON,
    SPECIAL_TOKENS,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOOL_TEMPLATE,
    named_tokens,
)
from torchrelay.param_store.packer.added_tokens import TokenDeclarations
from torchrelay.param_store.packer.core import QUANTIZE, PackRefused, listed, quoted

_MAX_NUMBER = 2**31 - 1
MAX_DEPTH = 32  # of nested objects and lists; all readers of these documents parse recursively
MAX_EOS_TOKENS = 64  # every request carries them


def parse_object(file: str, encoded: bytes) -> dict[str, Any]:
    """A JSON object without duplicate keys, NaN or infinity, at most ``MAX_DEPTH`` deep."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = next(name for name, count in counts.items() if count > 1)
            raise PackRefused(file, f"the key {quoted(twice)} appears twice in one object")
        return members

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise PackRefused(file, f"the number {quoted(text)} is not finite")
        return value

    try:
        parsed = json.loads(
            encoded.decode("utf-8"), object_pairs_hook=unique, parse_float=finite, parse_constant=finite
        )
    except RecursionError:
        raise PackRefused(file, "its JSON is nested too deeply") from None
    except UnicodeDecodeError:
        raise PackRefused(file, "it is not UTF-8 text") from None
    except ValueError as error:
        raise PackRefused(file, f"it is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise PackRefused(file, "its JSON is not an object")
    _check_depth(file, parsed)
    return parsed


def _check_depth(file: str, parsed: dict[str, Any]) -> None:
    level: list[Any] = [parsed]
    for _ in range(MAX_DEPTH):
        level = [
            member
            for value in level
            for member in (value.values() if isinstance(value, dict) else value)
            if isinstance(member, dict | list)
        ]
        if not level:
            return
    raise PackRefused(file, f"its JSON is nested too deeply; at most {MAX_DEPTH} levels are allowed")


def read_document(folder: Path, file: str) -> dict[str, Any]:
    """Reads a small document. Raises ``PackRefused``, also if it is missing."""
    return parse_object(file, _read_bounded(folder, file))


def _read_bounded(folder: Path, file: str) -> bytes:
    """Reads a file. Raises ``PackRefused`` if it is missing or exceeds the limit of its kind."""
    try:
        size = (folder / file).stat().st_size
    except FileNotFoundError:
        raise PackRefused(file, "it is missing from the upload") from None
    if size > MAX_FILE_BYTES[file]:
        raise PackRefused(file, f"it has {size:,} bytes; at most {MAX_FILE_BYTES[file]:,} are read")
    return (folder / file).read_bytes()


def read_model_config(folder: Path, engines: Sequence[str]) -> tuple[dict[str, Any], ModelConfig | OpaqueModel]:
    """Reads config.json; returns it as uploaded and the model that it describes. One that Torchrelay's engine cannot
    compute is opaque, if vLLM knows its architecture and is among ``engines``; none: they are not known.
    """
    document = read_document(folder, CONFIG)
    config: ModelConfig | OpaqueModel
    try:
        config = read_config(document)
    except UnsupportedModel as error:
        config = _opaque_model(document, engines, error)
    numbers = {
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_context_tokens,
        "vocab_size": config.vocab_size,
        "head_dim": config.head_dim,
    }
    for field, value in numbers.items():
        if not 0 < value <= _MAX_NUMBER:
            raise PackRefused(CONFIG, f"{field}: {quoted(value)} is out of range")
    try:  # the manifest contains it, so it must be encodable
        msgspec.json.encode(document)
    except (ValueError, OverflowError, TypeError) as error:
        raise PackRefused(CONFIG, f"a value cannot be encoded: {error}") from None
    return document, config


def _opaque_model(document: dict[str, Any], engines: Sequence[str], refusal: UnsupportedModel) -> OpaqueModel:
    """The model for vLLM. Raises ``PackRefused`` with the ``refusal`` of the own engine, or that of vLLM."""
    try:
        check_known(document)
    except UnsupportedModel as error:
        raise PackRefused(CONFIG, f"{refusal.field}: {refusal if VLLM not in engines else error}") from None
    is_unknown = refusal.field == "architectures"
    if VLLM not in engines and (engines or not is_unknown):
        detail = f"only the engine {VLLM} computes {document['architectures'][0]}" if is_unknown else str(refusal)
        offered = f", and this model may run with {' and '.join(engines)}" if is_unknown else ""
        raise PackRefused(CONFIG, f"{refusal.field}: {detail}{offered}; upload the model with the engine {VLLM}")
    try:
        return read_opaque(document)
    except UnsupportedModel as error:
        raise PackRefused(CONFIG, f"{error.field}: {error}") from None


def check_engine(config: ModelConfig | OpaqueModel, engines: Sequence[str], is_quantized_here: bool = False) -> None:
    """Raises ``PackRefused`` if only an engine computes the weights that is not among ``engines``; none: any is."""
    needed = config.needed_engine
    if needed and engines and needed not in engines:
        offered = " and ".join(sorted(engines))
        detail = f"only the engine {needed} computes weights that are quantized so; this model may run with {offered}"
        file, field = (QUANTIZE, "") if is_quantized_here else (CONFIG, "quantization_config: ")
        raise PackRefused(file, field + detail)


def check_eos(folder: Path, config: dict[str, Any], vocab_size: int) -> None:
    """Checks that every end-of-sequence token is in the vocabulary. Raises ``PackRefused``."""
    for file, document in ((GENERATION, _optional(folder, GENERATION)), (CONFIG, text_config(config))):
        token_ids = named_tokens(document.get("eos_token_id"))
        if len(token_ids) > MAX_EOS_TOKENS:
            text = f"eos_token_id: it lists {len(token_ids):,} tokens; at most {MAX_EOS_TOKENS} are used"
            raise PackRefused(file, text)
        for token in token_ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                text = f"eos_token_id: {quoted(token)} is not a token id below the vocab_size {vocab_size}"
                raise PackRefused(file, text)
        if token_ids:
            return  # of the other file, tokens beyond the vocabulary are ignored


def check_embedding(folder: Path, config: ModelConfig | OpaqueModel) -> EmbeddingSpec | None:
    """Checks the files that declare embeddings; returns those that the model gives, if any.

    Raises ``PackRefused``, also for a model that gives neither tokens nor embeddings.
    """

    def read(file: str) -> bytes | None:
        return _read_bounded(folder, file) if (folder / file).exists() else None

    try:
        declared = model_embedding(read, config)
    except UnsupportedEmbedding as error:
        raise PackRefused(error.file, error.detail) from None
    if isinstance(config, OpaqueModel):
        is_quantized, headless = config.quantization is not None, config.architecture if config.is_embedder else ""
    else:
        is_quantized, headless = config.vllm is not None, "" if config.has_head else config.architecture.headless_name
    if declared is not None and is_quantized:
        raise PackRefused(CONFIG, "quantization_config: models with weights that are quantized so give no embeddings")
    if declared is None and headless:
        detail = f"architectures: {headless} has no head for tokens, and no {MODULES} declares embeddings"
        raise PackRefused(CONFIG, detail)
    return declared


def _optional(folder: Path, file: str) -> dict[str, Any]:
    return read_document(folder, file) if (folder / file).exists() else {}


def check_tokenizer(folder: Path, vocab_size: int) -> dict[str, bytes]:
    """Checks that tokenizer.json is within its limits, and its ids, except of special tokens, within ``vocab_size``.

    Returns the files that are published instead of those in the folder, as other files declare more tokens.
    """
    # Special tokens beyond the embeddings arise only from text that spells them out (Gemma 3's text models have one for
    # images), and the gateway refuses prompts with such a token.
    encoded = _read_bounded(folder, TOKENIZER)
    try:
        document = read_tokenizer(encoded)
        ids = [token_id for part in document.vocabulary() for _, token_id in part]
    except TokenizerRefused as refused:
        raise PackRefused(TOKENIZER, str(refused)) from None
    special = {token.id for token in document.added_tokens if token.special}
    needed = [*ids, *(token.id for token in document.added_tokens)]
    checked = [token for token in needed if token < vocab_size or token not in special]
    if not checked:
        raise PackRefused(TOKENIZER, "its vocabulary is empty")
    lowest, highest = min(checked), max(checked)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise PackRefused(
            TOKENIZER,
            f"token id {quoted(wrong)} is outside the vocab_size {vocab_size} of config.json: the tokenizer has tokens"
            " that the model has no embedding for",
        )
    return _completed_files(folder, encoded, document, vocab_size)


def _completed_files(folder: Path, encoded: bytes, document: TokenizerDocument, vocab_size: int) -> dict[str, bytes]:
    config = _optional(folder, TOKENIZER_CONFIG)
    declarations = TokenDeclarations(config, _optional(folder, SPECIAL_TOKENS), _optional(folder, ADDED_TOKENS))
    files: dict[str, bytes] = {}
    completed_config = declarations.completed_config()
    if completed_config != config:
        files[TOKENIZER_CONFIG] = msgspec.json.encode(completed_config)
    added_tokens = declarations.completed(document, vocab_size)
    if [_without_id(token) for token in added_tokens] != [_without_id(token) for token in document.added_tokens]:
        fields = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
        fields["added_tokens"] = msgspec.Raw(msgspec.json.encode([token.fields() for token in added_tokens]))
        files[TOKENIZER] = msgspec.json.encode(fields)
        try:
            read_tokenizer(files[TOKENIZER])
        except TokenizerRefused as refused:
            raise PackRefused(TOKENIZER, f"with the tokens that other files declare, {refused}") from None
    return files


def _without_id(token: AddedTokenEntry) -> dict[str, Any]:
    """A token of tokenizer.json as transformers reads it: ids follow from the vocabulary."""
    return token.fields() | {"id": None}


def check_other_documents(folder: Path) -> tuple[str, ...]:
    """Checks the documents for the gateway: valid JSON, texts within limits, templates that parse.

    Returns notes about templates that the gateway does not use.
    """
    for file in PASSED_ON:
        _check_texts(file, _optional(folder, file))
    for file in (TEMPLATE, TOOL_TEMPLATE):
        if (folder / file).exists():
            try:
                _check_template(file, "", _read_bounded(folder, file).decode("utf-8"))
            except UnicodeDecodeError:
                raise PackRefused(file, "it is not UTF-8 text") from None
    templates = _optional(folder, TOKENIZER_CONFIG).get("chat_template")
    names = [each.get("name") for each in templates if isinstance(each, dict)] if isinstance(templates, list) else []
    used = () if (folder / TEMPLATE).exists() else ("default", "tool_use")
    if unused := [name for name in names if isinstance(name, str) and name not in used]:
        return (f"chat templates of {TOKENIZER_CONFIG} were left out: {listed(unused)}",)
    return ()


def gives_token_types(folder: Path) -> bool:
    """Whether the tokenizer gives types of tokens, as transformers does unless its config leaves them out."""
    names = _optional(folder, TOKENIZER_CONFIG).get("model_input_names")
    return not isinstance(names, list) or "token_type_ids" in names


def _check_texts(file: str, document: dict[str, Any]) -> None:
    """Checks the texts that the gateway takes from a document: chat templates, special tokens."""
    for name, value in document.items():
        if name == "chat_template":
            for template in value if isinstance(value, list) else [value]:
                _check_template(file, f"{name}: ", template.get("template") if isinstance(template, dict) else template)
        elif name.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                _check_length(file, f"{name}: ", content, MAX_TOKEN_CHARS)


def _check_template(file: str, where: str, template: Any) -> None:
    if isinstance(template, str):
        _check_length(file, where, template, MAX_FILE_BYTES[TEMPLATE])
        try:
            check_syntax(template)
        except InvalidSyntax as error:
            raise PackRefused(file, f"{where}the chat template does not parse: {error}") from None


def _check_length(file: str, where: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise PackRefused(file, f"{where}it has {len(text):,} characters; at most {limit:,} are allowed")
