"""Chat formats from a model's files, and prompt encoding."""

from __future__ import annotations

import json
from typing import cast

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split

from tests.support.gateway_ports import published_model
from torchrelay.common.errors import DataCorrupted, InvalidRequest
from torchrelay.gateway.clients.file_reader import StoreFileReader
from torchrelay.gateway.inference.core import GenerateParams
from torchrelay.gateway.inference.text.prompt_encoder import MAX_TEMPLATE_CHARS, PromptEncoder, chat_format
from torchrelay.gateway.inference.text.template_renderer import TemplateRenderer
from torchrelay.gateway.inference.text.tokenizer_cache import TokenizerCache


def encoded(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def test_special_tokens_come_in_both_forms() -> None:
    config = encoded(bos_token="<s>", eos_token={"content": "</s>", "lstrip": False}, pad_token=None, chat_template="x")
    found = chat_format(config, None)
    assert found.template == "x"
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_a_template_file_counts_before_the_configuration() -> None:
    assert chat_format(encoded(chat_template="old"), b"new").template == "new"
    assert chat_format(None, b"new").template == "new"


def test_of_named_templates_the_default_is_taken() -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert chat_format(encoded(chat_template=named), None).template == "d"
    assert chat_format(encoded(chat_template=named[:1]), None).template == ""


@pytest.mark.parametrize("config", [b"[]", b"{", b'"x"'])
def test_senseless_files_are_refused(config: bytes) -> None:
    with pytest.raises(DataCorrupted) as caught:
        chat_format(config, None)
    assert caught.value.field == "tokenizer_config.json"


def test_a_template_has_a_size() -> None:
    with pytest.raises(DataCorrupted):
        chat_format(None, b"x" * (MAX_TEMPLATE_CHARS + 1))
    assert chat_format(None, None).template == ""


class OneTokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def get(self, digest: str) -> Tokenizer:
        return self._tokenizer


async def test_a_tokenizer_that_panics_refuses_the_prompt() -> None:
    tokenizer = Tokenizer(BPE(vocab={"a": 0}, merges=[]))
    tokenizer.pre_tokenizer = Split(Regex("(a+)+!"), "isolated")
    prompts = PromptEncoder(
        cast(StoreFileReader, None), cast(TokenizerCache, OneTokenizer(tokenizer)), cast(TemplateRenderer, None)
    )
    model = published_model(file_digests={"tokenizer.json": "digest"})
    with pytest.raises(InvalidRequest, match="tokenizer of acme/echo cannot encode this text") as caught:
        await prompts.token_ids(model, GenerateParams("echo", text="a" * 30 + "c"))
    assert caught.value.field == "prompt"
