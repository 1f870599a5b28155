"""Templates get messages in the form that they expect: strings or parts, and roles that they know."""

from __future__ import annotations

import pytest

from torchrelay.gateway.inference.text.processes.chat_template import ChatTemplate

LOOP = "{% for p in {} %}{% if p.type == 'text' %}<{{ p.text }}>{% endif %}{% endfor %}"
SYSTEM = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def rendered(source: str, messages: list[dict[str, str]]) -> str:
    template = ChatTemplate(source)
    return template.render({"messages": template.messages(messages)}, 1000)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}" + LOOP.replace("{}", "m.content") + "{% endfor %}",
        "{% for m in messages %}" + LOOP.replace("{}", "m['content']") + "{% endfor %}",
        "{% for m in messages %}" + LOOP.replace("{}", "m['content'] | list") + "{% endfor %}",
        "{% for m in messages %}{% set c = m.content %}" + LOOP.replace("{}", "c") + "{% endfor %}",
    ],
)
def test_template_that_loops_over_parts_gets_parts(source: str) -> None:
    assert rendered(source, SYSTEM) == "<Be brief.><Hi>"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}<{{ m.content }}>{% endfor %}",
        "{% for m in messages %}{% if m.content is string %}<{{ m.content }}>{% else %}"
        + LOOP.replace("{}", "m.content")
        + "{% endif %}{% endfor %}",
        "{% for m in messages %}{% set c = m['content'] %}{% if c is not string %}"
        + LOOP.replace("{}", "c")
        + "{% else %}<{{ c }}>{% endif %}{% endfor %}",
    ],
)
def test_template_that_takes_strings_gets_strings(source: str) -> None:
    assert rendered(source, SYSTEM) == "<Be brief.><Hi>"


def test_developer_is_system_where_the_template_knows_only_system() -> None:
    only_system = "{% for m in messages %}{% if m.role == 'system' %}[{{ m.content }}]{% endif %}{% endfor %}"
    assert rendered(only_system, SYSTEM) == "[Be brief.]"
    knows_both = "{% for m in messages %}{{ m.role }} {% endfor %}{# system and developer #}"
    assert rendered(knows_both, SYSTEM) == "developer user "
    assert SYSTEM[0]["role"] == "developer", "the request's own messages stay"
