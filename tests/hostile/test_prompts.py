"""Hostile models and prompts of a tenant at the gateway, while a neighbour's chats go on.

Templates and tokenizers that are beyond the limits of an upload are refused in ``test_uploads``; these are within them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.completions import headers
from tests.support.http import http
from tests.support.platform import Platform
from tests.unit.param_store.model_folders import write_folder

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("watch")]

HELLO = [{"role": "user", "content": "hello"}]
SLOW = "a*a*a*[bd]e"
LINE = "a" * 600 + "d "


SPLIT = {"type": "Split", "pattern": {"Regex": SLOW}, "behavior": "Isolated", "invert": False}
NORMALIZER = {"type": "Replace", "pattern": {"Regex": SLOW}, "content": "x"}
TOKENIZERS: dict[str, dict[str, Any]] = {
    "patterns": {"normalizer": {"type": "Sequence", "normalizers": [NORMALIZER] * 8}, "pre_tokenizer": SPLIT},
    "pre-tokenizer inverted": {"pre_tokenizer": {**SPLIT, "invert": True}},
    "nested repetition": {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+[bd]e"}, "content": "x"}},
    "back-reference": {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a*)(a*)\\1\\2[bd]e"}, "content": "x"}},
    "text that grows": {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 8}},
}
TEMPLATES = {
    "loop that sets": "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}",
    "doubled list": "{% set n = namespace(x=['y']) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled text": "{% set n = namespace(x='y') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "format": "{{ '%9999999999d' | format(1) }}",
    "endless output": "{% for a in range(99999) %}{% for b in range(99999) %}yyyyyyyy{% endfor %}{% endfor %}",
    "escape by format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "import": "{% import 'os' as os %}{{ os.environ }}",
    "environment": "{{ environ }}{{ self._TemplateReference__context.environment.loader.searchpath }}",
    "nested blocks": "{% if 1 %}" * 50 + "{% endif %}" * 50,
    "error of its own": "{{ raise_exception('tr-secret' * 100000) }}",
}


def chats(
    platform: Platform, key: str, model: str, body: dict[str, Any] | None = None, count: int = 3
) -> list[httpx.Response]:
    """The answers to ``count`` concurrent chats, encoded before any connects: a client that is silent is closed."""
    content = json.dumps({"model": model, "messages": HELLO, "max_tokens": 2, **(body or {})})
    sent = {**headers(key), "content-type": "application/json"}

    def chat(_: int) -> httpx.Response:
        return http.post(f"{platform.http}/v1/chat/completions", content=content, headers=sent)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(chat, range(count)))


def check_refused(answers: list[httpx.Response], *statuses: int) -> None:
    for answer in answers:
        assert answer.status_code in statuses, answer.text[:500]
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["message"] and len(answer.content) < 10_000
            assert "Traceback" not in error["message"]


def test_hostile_tokenizer_costs_its_own_prompts_only(
    platform: Platform, mallory: str, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    body = {"messages": [{"role": "user", "content": LINE * 40}]}
    for number, (name, change) in enumerate(TOKENIZERS.items()):
        with subtests.test(name):
            folder = write_folder(tmp_path / str(number))
            tokenizer = json.loads((folder / "tokenizer.json").read_text())
            (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, **change}))
            (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
            model = platform.upload(mallory, folder, "pattern")
            check_refused(chats(platform, mallory, model, body), 400, 429, 503)


def test_hostile_template_costs_its_own_prompts_only(
    platform: Platform, mallory: str, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for number, (name, template) in enumerate(TEMPLATES.items()):
        with subtests.test(name):
            folder = write_folder(tmp_path / str(number))
            (folder / "chat_template.jinja").write_text(template)
            answers = chats(platform, mallory, platform.upload(mallory, folder, "template"))
            check_refused(answers, 200, 400, 429, 503)
            assert not [answer for answer in answers if "root:" in answer.text or "TORCHRELAY_" in answer.text]


# Bodies that take memory or time; the unit tests of gateway/dialects have single fields out of their range.
BODIES: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    "280,000 messages": (lambda: {"messages": HELLO * 280_000}, 413),
    "150,000 messages": (lambda: {"messages": HELLO * 150_000}, 400),
    "a message of 7 MB": (lambda: {"messages": [{"role": "user", "content": "a" * 7_000_000}]}, 400),
    "a word of a million letters": (lambda: {"messages": [{"role": "user", "content": "ab" * 500_000}]}, 400),
    "emoji by the hundred thousand": (lambda: {"messages": [{"role": "user", "content": "🔥" * 300_000}]}, 400),
    "n of 2**70": (lambda: {"n": 2**70}, 400),
    "stop strings by the thousand": (lambda: {"stop": ["x"] * 10_000}, 400),
    "stop string of a megabyte": (lambda: {"stop": "x" * (1 << 20)}, 400),
    "logit_bias of the vocabulary": (lambda: {"logit_bias": {str(i): 1 for i in range(200_000)}}, 400),
    "role of a megabyte": (lambda: {"messages": [{"role": "r" * (1 << 20), "content": "x"}]}, 400),
    "messages nested": (lambda: {"messages": nested(900)}, 400),  # what Python's encoder can write
    "name of a megabyte": (lambda: {"model": "m" * (1 << 20)}, 404),
}


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def test_oversized_body_is_refused(platform: Platform, mallory: str, glossary: str, subtests: pytest.Subtests) -> None:
    for name, (make, status) in BODIES.items():
        with subtests.test(name):
            for answer in chats(platform, mallory, glossary, make()):
                assert answer.status_code in (status, 400, 429), answer.text[:500]
                assert answer.json()["error"]["message"] and len(answer.content) < 10_000


def test_most_choices_at_once_are_served(platform: Platform, mallory: str, glossary: str) -> None:
    for answer in chats(platform, mallory, glossary, {"n": 16, "max_tokens": 8}, 4):
        assert answer.status_code in (200, 429), answer.text[:500]
