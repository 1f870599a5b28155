"""Encodes messages or text as the prompt's token ids."""

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
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.inference.text.template_renderer import TemplateRenderer
from torchrelay.gateway.inference.text.tokenizer_cache import TokenizerCache
from torchrelay.gateway.thread_pool import batch_executor

MAX_CONFIG_BYTES = 4 << 20
MAX_TEMPLATE_CHARS = 1 << 20
MAX_FORMATS = 64
# Tokenizing takes memory per character; no prompt that fits a context has more characters per token.
MAX_CHARS_PER_CONTEXT_TOKEN = 32
NUM_ENCODER_THREADS = 2  # the library releases the GIL
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a version turns messages into text; ``template`` is empty if it has none."""

    template: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)


def chat_format(tokenizer_config: bytes | None, template_file: bytes | None) -> ChatFormat:
    """The chat format of an upload; ``chat_template.jinja`` takes precedence over the configuration's own template.

    Raises ``DataCorrupted`` for malformed files.
    """
    try:
        config = msgspec.json.decode(tokenizer_config or b"{}", type=dict[str, Any])
        template = template_file.decode() if template_file is not None else _template_of(config.get("chat_template"))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataCorrupted(f"cannot read the model's chat format: {error}", field="tokenizer_config.json") from error
    if len(template) > MAX_TEMPLATE_CHARS:
        raise DataCorrupted(
            f"the model's chat template is longer than {MAX_TEMPLATE_CHARS} characters", field="chat_template.jinja"
        )
    tokens = {name: _content(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
    return ChatFormat(template, tokens)


def _template_of(value: Any) -> str:
    if isinstance(value, list):  # several named templates: [{"name": "default", "template": ...}, ...]
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""


def _content(token: Any) -> str:
    content = token.get("content", "") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


class PromptEncoder:
    """Renders and tokenizes prompts. Caches the chat formats of recently used versions."""

    def __init__(self, files: StoreFileReader, tokenizers: TokenizerCache, templates: TemplateRenderer) -> None:
        self._files = files
        self._tokenizers = tokenizers
        self._templates = templates
        self._formats: LRUCache[str, ChatFormat] = LRUCache(MAX_FORMATS)
        self._encoders = batch_executor(NUM_ENCODER_THREADS, "encode")

    async def tokenizer(self, model: PublishedModel) -> Tokenizer:
        """The model's tokenizer. Raises ``TorchrelayError`` if it cannot be loaded."""
        digest = model.version.file_digests.get("tokenizer.json")
        if digest is None:
            raise InvalidRequest(f"{model.name} has no tokenizer.json", field="model")
        return await self._tokenizers.get(digest)

    async def token_ids(self, model: PublishedModel, params: GenerateParams) -> tuple[int, ...]:
        """The prompt. Raises ``InvalidRequest`` if it is empty, has an unknown id, or the template rejects it."""
        if params.token_ids is not None:
            prompt, vocab_size = params.token_ids, model.version.shape.vocab_size
            if prompt and max(prompt) >= vocab_size:
                message = f"token id {max(prompt)} is out of range; the model's token ids are 0 to {vocab_size - 1}"
                raise InvalidRequest(message, field="prompt")
        elif params.messages is not None:
            text = await self._render(model, params)
            prompt = await self._encode(model, text, params.prompt_field, add_special_tokens=False)
        else:
            prompt = await self._encode(model, params.text or "", params.prompt_field, add_special_tokens=True)
        if not prompt:
            raise InvalidRequest("the prompt must not be empty", field=params.prompt_field)
        return prompt

    async def _render(self, model: PublishedModel, params: GenerateParams) -> str:
        format_ = await self._format(model)
        if not format_.template:
            message = f"{model.name} has no chat template; use /v1/completions, or publish the model with one"
            raise InvalidRequest(message, field="messages")
        variables = {
            **format_.special_tokens,
            "messages": params.messages,
            "tools": None,  # templates test for none, not for definedness
            "documents": None,
            "add_generation_prompt": True,
        }
        return await self._templates.render(format_.template, variables)

    async def _format(self, model: PublishedModel) -> ChatFormat:
        version_id, digests = model.version.version_id, model.version.file_digests
        format_ = self._formats.get(version_id)
        if format_ is None:
            contents: dict[str, bytes] = {}
            for name in ("tokenizer_config.json", "chat_template.jinja"):
                if digest := digests.get(name):
                    contents[name] = await self._files.read(digest, name, MAX_CONFIG_BYTES)
            format_ = chat_format(contents.get("tokenizer_config.json"), contents.get("chat_template.jinja"))
            self._formats[version_id] = format_
        return format_

    async def _encode(
        self, model: PublishedModel, text: str, field_: str, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        max_tokens = model.version.shape.max_context_tokens
        if len(text) > max_tokens * MAX_CHARS_PER_CONTEXT_TOKEN:
            message = f"the prompt has {len(text)} characters, too many for the context length of {max_tokens} tokens"
            raise ContextLengthExceeded(message, field=field_)
        tokenizer = await self.tokenizer(model)

        def encode() -> tuple[int, ...]:
            try:
                # A batch of one, because only batches can skip text offsets, a fifth of the work.
                token_ids = tuple(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # NOTE: a panic of the library is not an Exception
                raise InvalidRequest(f"the tokenizer of {model.name} cannot encode this text", field=field_) from error
            _check_vocabulary_range(tokenizer, token_ids, model.version.shape.vocab_size, field_)
            return token_ids

        # Never on the event loop: a tenant's own patterns can make even a short text slow.
        return await asyncio.get_running_loop().run_in_executor(self._encoders, encode)


def _check_vocabulary_range(tokenizer: Tokenizer, prompt: tuple[int, ...], vocab_size: int, field_: str) -> None:
    """Some tokenizers know more tokens than the model: Gemma 3's has an image token its text models lack."""
    highest = max(prompt, default=0)
    if highest >= vocab_size:
        token = tokenizer.id_to_token(highest)
        message = f"the prompt contains token {token!r} ({highest}); the model's token ids are 0 to {vocab_size - 1}"
        raise InvalidRequest(message, field=field_)
