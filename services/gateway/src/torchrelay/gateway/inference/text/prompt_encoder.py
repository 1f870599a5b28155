"""From what was asked to the prompt's token ids."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
from cachetools import LRUCache
from tokenizers import Tokenizer

from torchrelay.common.errors import ContextLengthExceeded, DataCorrupted, InvalidRequest
from torchrelay.gateway.clients.file_reader import StoreFileReader
from torchrelay.gateway.core import PublishedModel
from torchrelay.gateway.executor import batch_executor
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.inference.text.template_renderer import TemplateRenderer
from torchrelay.gateway.inference.text.tokenizer_cache import TokenizerCache

MAX_CONFIG_BYTES = 4 << 20
MAX_TEMPLATE_CHARS = 1 << 20
MAX_FORMATS = 64
# Tokenizing takes memory by the character: no prompt that could fit a context has more of them per token.
MAX_CHARS_PER_CONTEXT_TOKEN = 32
NUM_ENCODER_THREADS = 2  # threads; the library releases the interpreter's lock
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a version turns messages into text; ``template`` is empty when it does not."""

    template: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)


def chat_format(tokenizer_config: bytes | None, template_file: bytes | None) -> ChatFormat:
    """The chat format of an uploaded folder; a ``chat_template.jinja`` counts before the configuration's own template.

    Raises ``DataCorrupted`` when the files are not what they should be.
    """
    try:
        config = msgspec.json.decode(tokenizer_config or b"{}", type=dict[str, Any])
        template = template_file.decode() if template_file is not None else _template_of(config.get("chat_template"))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataCorrupted(
            f"the model's chat format cannot be read: {error}", field="tokenizer_config.json"
        ) from error
    if len(template) > MAX_TEMPLATE_CHARS:
        raise DataCorrupted("the model's chat template is too long", field="chat_template.jinja")
    tokens = {name: _content(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
    return ChatFormat(template, tokens)


def _template_of(value: Any) -> str:
    if isinstance(value, list):  # several by name: [{"name": "default", "template": ...}, ...]
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""


def _content(token: Any) -> str:
    content = token.get("content", "") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


class PromptEncoder:
    """Renders and tokenizes. Keeps the chat formats of recently used versions."""

    def __init__(self, files: StoreFileReader, tokenizers: TokenizerCache, templates: TemplateRenderer) -> None:
        self._files = files
        self._tokenizers = tokenizers
        self._templates = templates
        self._formats: LRUCache[str, ChatFormat] = LRUCache(MAX_FORMATS)
        self._encoders = batch_executor(NUM_ENCODER_THREADS, "encode")

    async def tokenizer(self, model: PublishedModel) -> Tokenizer:
        """Raises ``TorchrelayError`` when it cannot be had."""
        digest = model.version.file_digests.get("tokenizer.json")
        if digest is None:
            raise InvalidRequest(f"{model.name} was published without tokenizer.json", field="model")
        return await self._tokenizers.get(digest)

    async def token_ids(self, model: PublishedModel, params: GenerateParams) -> tuple[int, ...]:
        """The prompt. Raises ``InvalidRequest`` for an empty one, an unknown id, or messages the template refuses."""
        if params.token_ids is not None:
            prompt = params.token_ids
            if prompt and max(prompt) >= model.version.shape.vocab_size:
                raise InvalidRequest(f"the model has no token {max(prompt)}", field="prompt")
        elif params.messages is not None:
            text = await self._render(model, params)
            prompt = await self._encode(model, text, params.prompt_field, add_special_tokens=False)
        else:
            prompt = await self._encode(model, params.text or "", params.prompt_field, add_special_tokens=True)
        if not prompt:
            raise InvalidRequest("the prompt is empty", field=params.prompt_field)
        return prompt

    async def _render(self, model: PublishedModel, params: GenerateParams) -> str:
        format_ = await self._format(model)
        if not format_.template:
            message = f"{model.name} has no chat template: use /v1/completions, or publish it with one"
            raise InvalidRequest(message, field="messages")
        variables = {
            **format_.special_tokens,
            "messages": params.messages,
            "tools": None,  # templates ask whether it is none, not whether it is there
            "documents": None,
            "add_generation_prompt": True,
        }
        return await self._templates.render(format_.template, variables)

    async def _format(self, model: PublishedModel) -> ChatFormat:
        version_id, digests = model.version.version_id, model.version.file_digests
        format_ = self._formats.get(version_id)
        if format_ is None:
            found: dict[str, bytes] = {}
            for name in ("tokenizer_config.json", "chat_template.jinja"):
                if digest := digests.get(name):
                    found[name] = await self._files.read(digest, name, MAX_CONFIG_BYTES)
            format_ = chat_format(found.get("tokenizer_config.json"), found.get("chat_template.jinja"))
            self._formats[version_id] = format_
        return format_

    async def _encode(
        self, model: PublishedModel, text: str, field_: str, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        max_tokens = model.version.shape.max_context_tokens
        if len(text) > max_tokens * MAX_CHARS_PER_CONTEXT_TOKEN:
            message = f"the prompt has {len(text)} characters, far more than the model's {max_tokens} tokens can hold"
            raise ContextLengthExceeded(message, field=field_)
        tokenizer = await self.tokenizer(model)

        def encode() -> tuple[int, ...]:
            try:
                # A batch of one: only batches come without offsets into the text: a fifth less work.
                found = tuple(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # NOTE: a panic of the library is no Exception
                raise InvalidRequest(f"the tokenizer of {model.name} fails at this text", field=field_) from error
            _check_vocabulary_range(tokenizer, found, model.version.shape.vocab_size, field_)
            return found

        # Never on the event loop: a tenant's own patterns decide how long even a short text takes.
        return await asyncio.get_running_loop().run_in_executor(self._encoders, encode)


def _check_vocabulary_range(tokenizer: Tokenizer, prompt: tuple[int, ...], vocab_size: int, field_: str) -> None:
    """Gemma 3's tokenizer, for one, has a special token for images that its text models have no row for."""
    highest = max(prompt, default=0)
    if highest >= vocab_size:
        spelt = tokenizer.id_to_token(highest)
        said = f"the prompt has the token {spelt!r} ({highest}), and the model knows only 0 to {vocab_size - 1}"
        raise InvalidRequest(said, field=field_)
