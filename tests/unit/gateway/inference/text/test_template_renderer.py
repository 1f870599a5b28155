"""Templates are untrusted code: rendered like in transformers, and contained."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from torchrelay.common.errors import InvalidRequest
from torchrelay.gateway.inference.text.template_renderer import TemplateRenderer

MESSAGES: list[dict[str, str]] = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "größer?\nJa 🔥"},
]
CHATML = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set rest = messages[1:] %}
    {{- bos_token + messages[0].content | trim + '\\n' }}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set ns = namespace(n=0) %}
{%- for message in rest %}
    {%- if message.role not in ['user', 'assistant'] %}{% continue %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
{{ '<|' + message['role'] + '|>' }}
{{ message | tojson }}
    {% generation %}{{ message.content }}{% endgeneration %}
{%- endfor %}
{% if add_generation_prompt %}
<|assistant|>{{ ns.n }}
{% endif %}
"""


async def test_halves_of_characters_are_no_text(renderer: TemplateRenderer) -> None:
    with pytest.raises(InvalidRequest, match="its output is not valid text"):
        await renderer.render("{{ '\\ud800' }}", {})
    assert await renderer.render("fine", {}) == "fine"


@pytest.fixture
async def renderer() -> AsyncIterator[TemplateRenderer]:
    async with TemplateRenderer(timeout_s=1.0) as renderer:
        yield renderer


def variables(**more: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "add_generation_prompt": True, "bos_token": "<s>", **more}


async def test_a_template_renders_as_in_transformers(renderer: TemplateRenderer) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        conversations=[MESSAGES], chat_template=CHATML, add_generation_prompt=True, bos_token="<s>"
    )
    expected = rendered[0][0]
    assert await renderer.render(CHATML, variables()) == expected
    assert "<|user|>" in expected and "<brief>" in expected


async def test_the_time_is_there(renderer: TemplateRenderer) -> None:
    assert await renderer.render("{{ strftime_now('%Y') }}", {}) == time.strftime("%Y")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{% for %}", "Expected"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception.__globals__['sys'] }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "underscore"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
        ("{{ 'x' * 10000000000 }}", "memory"),
        ("{{ 'x' * 20000000 }}", "longer"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "deeply"),
        ("{% include '/etc/passwd' %}", "loader"),
    ],
)
async def test_what_a_template_does_wrong_is_its_fault(renderer: TemplateRenderer, template: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        await renderer.render(template, variables())
    assert caught.value.field == "messages"
    assert await renderer.render("{{ bos_token }}", variables()) == "<s>"


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOMB = "{% set ns = namespace(x=['y'] * 1000) %}{% for i in range(99999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"


async def test_an_endless_template_is_killed_in_time_and_then_refused_at_once(renderer: TemplateRenderer) -> None:
    await renderer.render("", {})
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="took longer than 1 s") as caught:
        await renderer.render(LOOP, {})
    assert caught.value.field == "messages"
    assert time.monotonic() - began < 2.0
    assert await renderer.render("fine", {}) == "fine"
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="took longer than 1 s"):
        await renderer.render(LOOP, {})
    assert time.monotonic() - began < 0.1


async def test_one_huge_power_cannot_hold_the_process(renderer: TemplateRenderer) -> None:
    with pytest.raises(InvalidRequest):
        await renderer.render("{{ 9 ** (9 ** 9) }}", {})
    assert await renderer.render("fine", {}) == "fine"


async def test_memory_is_bounded(renderer: TemplateRenderer) -> None:
    with pytest.raises(InvalidRequest, match=r"memory|too much|longer"):
        await renderer.render(BOMB, {})
    assert await renderer.render("fine", {}) == "fine"


async def test_a_cancelled_rendering_leaves_no_answer_behind(renderer: TemplateRenderer) -> None:
    await renderer.render("", {})
    rendering = asyncio.ensure_future(renderer.render(LOOP, {}))
    await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    rendering.cancel()
    await asyncio.gather(rendering, return_exceptions=True)
    assert await renderer.render("fine", {}) == "fine"


async def test_a_child_that_died_is_replaced(renderer: TemplateRenderer) -> None:
    await renderer.render("", {})
    assert renderer._child is not None
    os.kill(renderer._child.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        await renderer._child.wait()
    assert await renderer.render("fine", {}) == "fine"


async def test_many_at_once_each_get_their_own_answer(renderer: TemplateRenderer) -> None:
    texts = await asyncio.gather(*(renderer.render("{{ x }}" + " " * (i % 3), {"x": i}) for i in range(50)))
    assert [int(text) for text in texts] == list(range(50))
