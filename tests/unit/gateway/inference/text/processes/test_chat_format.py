"""Chat formats from a model's files."""

from __future__ import annotations

import json

import pytest

from torchrelay.gateway.inference.text.processes.chat_format import MAX_TEMPLATE_CHARS, template_file, tokenizer_config


def encoded(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def rendered(config: bytes) -> str | None:
    template = tokenizer_config(config).template
    return None if template is None else template.render({}, 100)


def test_special_tokens_are_read_in_both_forms() -> None:
    config = encoded(bos_token="<s>", eos_token={"content": "</s>", "lstrip": False}, pad_token=None, chat_template="x")
    assert tokenizer_config(config).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert rendered(config) == "x"


def test_default_of_named_templates_is_used() -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert rendered(encoded(chat_template=named)) == "d"
    assert rendered(encoded(chat_template=named[:1])) is None
    assert rendered(encoded()) is None


@pytest.mark.parametrize("config", [b"[]", b"{", b'"x"', b"\xff", b"[" * 100_000])
def test_invalid_config_files_are_refused(config: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        tokenizer_config(config)


def test_overlong_template_is_refused() -> None:
    for parse in (template_file, lambda template: tokenizer_config(encoded(chat_template=template.decode()))):
        with pytest.raises(ValueError, match="longer than"):
            parse(b"x" * (MAX_TEMPLATE_CHARS + 1))
    assert template_file(b"x" * 10).render({}, 10) == "x" * 10
