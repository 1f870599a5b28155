"""Encodes messages or text as the prompt's token ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from torchrelay.common.errors import InvalidRequest, TorchrelayError
from torchrelay.gateway.core import Principal, PublishedModel
from torchrelay.gateway.inference.answers.syntax import PLAIN, AnswerSyntax
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.inference.text.decoder_cache import DecoderCache, ModelDecoder
from torchrelay.gateway.inference.text.model_files import ModelFiles
from torchrelay.gateway.inference.text.processes.frames import (
    CHAT_TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOOL_TEMPLATE,
    FileId,
    Prompt,
    Refusal,
    TextLimits,
    TokenIds,
)
from torchrelay.gateway.inference.text.processes.text_pool import FileRefused, PromptKilled
from torchrelay.gateway.inference.text.processes.text_processes import TextProcesses
from torchrelay.gateway.inference.text.refusals import (
    file_error,
    kill_error,
    refusal_error,
    too_many_characters,
)

# Tokenizing takes memory per character; no prompt that fits a context has more characters per token.
MAX_CHARS_PER_CONTEXT_TOKEN: Final = 32


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt, the syntax of the answer to its messages, and the grammar that the answer follows, if any."""

    token_ids: Sequence[int]  # an array: a tuple takes ten times as much memory
    syntax: AnswerSyntax = PLAIN
    grammar: str = ""
    second_text: int = 0  # where that of a pair begins, by the types of tokens; 0: nowhere

    def __len__(self) -> int:
        return len(self.token_ids)


class PromptEncoder:
    """Has prompts rendered and encoded by text processes, and loads the decoders of the answers.

    The gateway itself never runs a tenant's template or pattern.
    """

    def __init__(self, files: ModelFiles, decoders: DecoderCache, processes: TextProcesses, limits: TextLimits) -> None:
        self._files = files
        self._decoders = decoders
        self._processes = processes
        self._limits = limits

    async def decoder(self, principal: Principal, model: PublishedModel) -> ModelDecoder:
        """The model's decoder of token ids. Raises ``TorchrelayError`` if it cannot be loaded."""
        file_id = _tokenizer_file(model)
        decoder = self._decoders.get(principal.tenant_id, file_id[1])
        if decoder is None:
            # First in a process that can be killed, so that the gateway never loads a file of unknown cost.
            await self._encode(principal, model, GenerateParams(model.name, text=""))
            async with self._files.held(principal.tenant_id, [file_id]) as files:
                decoder = await self._decoders.load(principal.tenant_id, files[0])
        return decoder

    async def encode(self, principal: Principal, model: PublishedModel, params: GenerateParams) -> EncodedPrompt:
        """The prompt. Raises ``InvalidRequest`` if it is empty, has an unknown id, or the template rejects it, and if
        no answer can follow the format.
        """
        prompt = EncodedPrompt(())
        if params.token_ids is None or params.answer_format is not None:
            prompt = await self._encode(principal, model, params)
        if params.token_ids is not None:
            vocab_size, highest = model.version.shape.vocab_size, max(params.token_ids, default=0)
            if highest >= vocab_size:
                message = f"token id {highest} is out of range; the model's token ids are 0 to {vocab_size - 1}"
                raise InvalidRequest(message, field=params.prompt_field)
            prompt = replace(prompt, token_ids=array("i", params.token_ids))
        if not prompt.token_ids:
            raise InvalidRequest("the prompt must not be empty", field=params.prompt_field)
        return prompt

    async def _encode(self, principal: Principal, model: PublishedModel, params: GenerateParams) -> EncodedPrompt:
        shape, field = model.version.shape, params.prompt_field
        max_chars = shape.max_context_tokens * MAX_CHARS_PER_CONTEXT_TOKEN
        text = params.text or ""
        if (num_chars := len(text) + len(params.second_text or "")) > max_chars:
            raise too_many_characters(num_chars, model, field)
        file_ids = [_tokenizer_file(model)]
        if params.messages is not None:
            _check_integers(params)
            digests = model.version.file_digests
            names = (TOKENIZER_CONFIG, CHAT_TEMPLATE, TOOL_TEMPLATE)
            file_ids += [(name, digests[name]) for name in names if name in digests]
        prompt = Prompt(
            files=tuple(file_ids),
            vocab_size=shape.vocab_size,
            max_tokens=shape.max_context_tokens,
            max_chars=max_chars,
            messages=params.messages,
            continues_last=params.continues_last,
            tools=params.tools,
            template_kwargs=params.template_kwargs,
            answer_format=params.answer_format,
            text=text,
            second_text=params.second_text,
            adds_special_tokens=_adds_special_tokens(params),
        )
        tenant = principal.tenant_id
        try:
            async with self._files.held(tenant, file_ids) as files:
                answer = await self._processes.run(tenant, model.name, prompt, files)
        except FileRefused as refused:
            raise file_error(refused) from refused
        except PromptKilled as killed:
            raise kill_error(killed, self._limits, field) from killed
        match answer:
            case TokenIds(packed, syntax, grammar, second_text):
                return EncodedPrompt(array("i", packed), syntax, grammar, second_text)
            case Refusal("format"):
                format_field = "tools" if params.answer_format is None else params.answer_format.field
                raise refusal_error(answer, model, format_field)
            case Refusal():
                raise refusal_error(answer, model, field)
            case _:
                raise TorchrelayError("a text process answered out of turn")


def _adds_special_tokens(params: GenerateParams) -> bool:
    """By default none to messages, since chat templates write them."""
    return params.messages is None if params.add_special_tokens is None else params.add_special_tokens


def _check_integers(params: GenerateParams) -> None:
    """Raises ``InvalidRequest`` for integers that the message to a text process cannot hold."""
    calls = [message["tool_calls"] for message in params.messages or () if "tool_calls" in message]
    values = {"tools": params.tools, params.messages_field: calls, "chat_template_kwargs": params.template_kwargs}
    for name, value in values.items():
        try:
            msgspec.msgpack.encode(value)
        except OverflowError as error:
            raise InvalidRequest(f"{name} contains an integer below -2**63 or above 2**64 - 1", field=name) from error


def _tokenizer_file(model: PublishedModel) -> FileId:
    digest = model.version.file_digests.get(TOKENIZER)
    if digest is None:
        raise InvalidRequest(f"{model.name} has no tokenizer.json", field="model")
    return TOKENIZER, digest
