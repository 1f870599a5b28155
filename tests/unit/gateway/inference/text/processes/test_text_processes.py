"""Templates and tokenizers are tenants' code: rendered as in transformers, contained, and no delay for others."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split

from tests.support.programs import Program
from tests.support.sample_tokenizers import large_tokenizer
from tests.support.wait import eventually
from tests.unit.gateway.inference.text.processes.text_rig import CONFIG, LOOP, MESSAGES, TINY, TextRig, text_rig
from torchrelay.common.errors import QueueFull, Unavailable
from torchrelay.gateway.inference.text.processes.frames import TOKENIZER_CONFIG, Prompt, Refusal, TokenIds
from torchrelay.gateway.inference.text.processes.text_pool import MAX_WAITING, FileRefused, PromptKilled

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
BOMB = "{% set ns = namespace(x=['y'] * 1000) %}{% for i in range(99999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"


def regex_tokenizer(pattern: str) -> bytes:
    """A tokenizer whose normalizer replaces ``pattern``."""
    tokenizer = Tokenizer.from_str(TINY.decode())
    tokenizer.normalizer = normalizers.Replace(Regex(pattern), "x")
    return tokenizer.to_str().encode()


SLOW_TOKENIZER = regex_tokenizer("a*a*a*[bd]e")
SLOW_TEXT = ("a" * 600 + "d ") * 20  # minutes


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[TextRig]:
    async with text_rig(tmp_path) as rig:
        yield rig


async def cause(answering: Any) -> tuple[str, str]:
    answer = await answering
    assert isinstance(answer, Refusal), answer
    return answer.cause, answer.detail


async def test_template_renders_as_in_transformers(rig: TextRig) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        conversations=[list(MESSAGES)], chat_template=CHATML, add_generation_prompt=True, bos_token="<s>"
    )
    expected = rendered[0][0]
    assert await rig.rendered(CHATML) == expected
    assert "<|user|>" in expected and "<brief>" in expected
    assert await rig.rendered("{{ strftime_now('%Y') }}") == time.strftime("%Y")


LOOPS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content WHITE }}</s>\n{% endfor %}"


@pytest.mark.parametrize("content", ["The sum is", "The sum is: ", "Ja 🔥\n{", "brief"])
async def test_answer_continues_the_last_message_as_in_transformers(rig: TextRig, content: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template, messages = LOOPS.replace("WHITE", ""), (*MESSAGES, {"role": "assistant", "content": content})
    expected: Any = render_jinja_template(
        conversations=[list(messages)], chat_template=template, continue_final_message=True, bos_token="<s>"
    )
    assert await rig.rendered(template, messages=messages, continues_last=True) == expected[0][0]
    trimmed = await rig.rendered(LOOPS.replace("WHITE", "| trim"), messages=messages, continues_last=True)
    assert trimmed.endswith(f"<|assistant|>{content}")


@pytest.mark.parametrize("content", ["s", "/", " s>", "</s>\n"])
async def test_continued_message_may_be_a_part_of_what_follows_it(rig: TextRig, content: str) -> None:
    messages = (*MESSAGES, {"role": "assistant", "content": content})
    text = await rig.rendered(LOOPS.replace("WHITE", "| trim"), messages=messages, continues_last=True)
    assert text.endswith(f"Ja 🔥</s>\n<|assistant|>{content.lstrip()}")


@pytest.mark.parametrize(
    ("content", "begins"), [("<think>\nWe add", True), ("<think>We add.</think>The sum", False), ("The sum", False)]
)
async def test_answer_continues_the_reasoning_of_the_last_message(rig: TextRig, content: str, begins: bool) -> None:
    template, messages = (
        "{# </think> #}" + LOOPS.replace("WHITE", ""),
        (*MESSAGES, {"role": "assistant", "content": content}),
    )
    for continues_last in (True, False):
        answer = await rig.answer(template, messages=messages, continues_last=continues_last)
        assert isinstance(answer, TokenIds) and answer.syntax.begins_thinking == (begins and continues_last)


async def test_message_that_a_template_changes_cannot_be_continued(rig: TextRig) -> None:
    messages = (*MESSAGES, {"role": "assistant", "content": "The sum is"})
    answer = rig.answer(LOOPS.replace("WHITE", "| upper"), messages=messages, continues_last=True)
    assert await cause(answer) == (
        "template",
        "it does not show the last message as it is, so no answer can continue it",
    )


async def test_arguments_that_are_no_object_reach_templates_that_take_objects(rig: TextRig) -> None:
    """A model has written them, and the template loops over their items."""
    items = "{% for m in messages %}{% for c in m.tool_calls %}{% for k, v in c.function.arguments | items %}"
    template = "{{ tools }}" + items + "<{{ k }}>{{ v }}{% endfor %}{% endfor %}{% endfor %}"
    calls = [{"id": "", "type": "function", "function": {"name": "f", "arguments": each}} for each in ("{a", {"b": 1})]
    messages = (*MESSAGES, {"role": "assistant", "content": "", "tool_calls": calls})
    assert await rig.rendered(template, messages=messages) == "None<arguments>{a<b>1"
    as_text = (
        "{{ messages[2].tool_calls[0].function.arguments | upper }}{{ tools }}{{ messages[2].tool_calls | length }}"
    )
    assert await rig.rendered(as_text, messages=messages) == "{ANone2"


TEMPLATE_FAULTS = [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ nothing.at.all }}", "undefined"),
    ("{% for %}", "Expected"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ("{{ messages.__init__.__globals__ }}", "unsafe"),
    ("{{ messages[0].update(x=1) }}", "unsafe"),
    ("{{ messages.append(1) }}", ""),  # they are read-only
    ("{{ raise_exception.__globals__['sys'] }}", "unsafe"),
    ("{{ namespace(__class__=1) }}", "underscore"),
    ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
    ("{{ 'x' * 10000000000 }}", "memory"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "deeply"),
    ("{% include '/etc/passwd' %}", "loader"),
    ("{{ '\\ud800' }}", "its output is not valid text"),
]


async def test_template_faults_are_named(rig: TextRig) -> None:
    for template, why in TEMPLATE_FAULTS:
        fault, detail = await cause(rig.answer(template))
        assert fault == "template" and why in detail, template
        assert await rig.rendered("{{ bos_token }}") == "<s>"


async def test_overlong_texts_and_prompts_are_refused(rig: TextRig) -> None:
    for template in ("{{ 'x' * 1000 }}", "{% for a in range(9999) %}xx{% endfor %}"):
        answer = await rig.answer(template, max_chars=100)
        assert isinstance(answer, Refusal) and answer.cause == "characters" and answer.number > 100
    answer = await rig.answer(text="hello " * 50, max_tokens=10)
    assert isinstance(answer, Refusal) and answer.cause == "tokens" and answer.number > 10
    answer = await rig.answer(text="hello", vocab_size=100)
    assert isinstance(answer, Refusal) and answer.cause == "vocabulary" and answer.number >= 100 and answer.detail


async def test_chat_without_a_template_is_refused(rig: TextRig) -> None:
    files = [rig.file("tokenizer.json", TINY), rig.file(TOKENIZER_CONFIG, CONFIG)]
    prompt = Prompt(tuple(file.id for file in files), 1 << 20, 100, 100, messages=MESSAGES)
    assert await rig.processes.run("acme", "acme/echo", prompt, files) == Refusal("no_template")


@pytest.mark.parametrize("encoded", [b"{", b"[]", b'{"model": {"type": "BPE", "vocab": 3, "merges": []}}'])
async def test_unreadable_files_are_refused_and_the_process_stays(rig: TextRig, encoded: bytes) -> None:
    await rig.answer(text="hello")
    pids = rig.processes.pids
    with pytest.raises(FileRefused) as caught:
        await rig.answer(text="hello", tokenizer=encoded)
    assert caught.value.name == "tokenizer.json" and caught.value.detail
    assert rig.text(await rig.answer(text="hello")) == "hello"
    assert rig.processes.pids == pids


async def test_endless_templates_and_slow_patterns_are_killed_and_named(rig: TextRig) -> None:
    assert await rig.rendered("fine") == "fine"
    endless: list[tuple[dict[str, Any], int | None]] = [
        ({"template": LOOP}, -signal.SIGPROF),
        ({"template": "{{ 9 ** (9 ** 9) }}"}, None),  # a power that no signal of Python interrupts
        ({"text": SLOW_TEXT, "tokenizer": SLOW_TOKENIZER}, -signal.SIGVTALRM),
    ]
    for asked, status in endless:
        pids = rig.processes.pids
        with pytest.raises(PromptKilled) as caught:
            await rig.answer(**asked)
        assert status is None or (caught.value.status, caught.value.loading) == (status, None)
        assert await rig.rendered("fine") == "fine"
        assert not set(pids) <= set(rig.processes.pids)


async def test_slow_tokenizer_load_is_killed_and_named(tmp_path: Path) -> None:
    async with text_rig(tmp_path, load_cpu_s=0.05) as rig:
        with pytest.raises(PromptKilled) as caught:
            await rig.answer(text="hello", tokenizer=large_tokenizer(100_000))
    assert (caught.value.status, caught.value.loading) == (-signal.SIGPROF, "tokenizer.json")


async def test_panicking_tokenizer_is_refused(rig: TextRig) -> None:
    tokenizer = Tokenizer(BPE(vocab={"a": 0}, merges=[]))
    tokenizer.pre_tokenizer = Split(Regex("(a+)+!"), "isolated")
    answer = await rig.answer(text="a" * 30 + "c", tokenizer=tokenizer.to_str().encode())
    assert answer == Refusal("tokenizer")


async def test_process_memory_is_bounded(tmp_path: Path) -> None:
    async with text_rig(tmp_path, max_memory_bytes=256 << 20, prompt_cpu_s=20) as rig:
        assert await cause(rig.answer(BOMB)) == ("template", "out of memory")
        assert await rig.rendered("fine") == "fine"


async def test_prompt_out_of_memory_ends_only_its_process(tmp_path: Path) -> None:
    async with text_rig(tmp_path, max_memory_bytes=96 << 20, prompt_cpu_s=30) as rig:
        with pytest.raises(PromptKilled) as caught:
            await rig.answer(text="a " * (1 << 19))
        assert caught.value.status == -signal.SIGABRT
        assert await rig.rendered("fine") == "fine"


async def test_template_killed_for_a_tenant_serves_others(rig: TextRig) -> None:
    """A killed template used to be refused for all tenants, for a minute."""
    template = "{% for message in messages %}{% for a in range(99999) %}{% endfor %}{% endfor %}{{ messages | length }}"
    with pytest.raises(PromptKilled):
        await rig.answer(template, messages=MESSAGES * 5000)
    assert rig.text(await rig.answer(template, tenant="beta")) == "2"
    assert rig.text(await rig.answer(template)) == "2", "also for the tenant that sent too much"


async def test_killed_model_is_confined_to_the_suspects_pool(rig: TextRig) -> None:
    with pytest.raises(PromptKilled):
        await rig.answer(LOOP, model="acme/loop")
    assert await rig.rendered("fine", tenant="beta") == "fine"
    kept = rig.processes.pids
    for _ in range(2):
        with pytest.raises(PromptKilled):
            await rig.answer(LOOP, model="acme/loop")
    assert await rig.rendered("fine", tenant="beta") == "fine"
    assert set(kept) <= set(rig.processes.pids)


async def test_slow_prompts_leave_a_process_to_other_tenants(tmp_path: Path) -> None:
    """Each of ten prompts runs until its CPU limit, which a waiting neighbour would see end."""
    async with text_rig(tmp_path, prompt_cpu_s=30) as rig:
        await rig.rendered("fine", tenant="beta")
        slow = [asyncio.ensure_future(rig.answer(LOOP)) for _ in range(10)]
        await eventually(lambda: len(rig.processes.pids) == 2)  # a slow prompt has a second process started
        for number in range(20):
            assert await rig.rendered(f"fine {number}", tenant="beta") == f"fine {number}"
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


async def test_cancelled_prompt_leaves_process_and_answers_intact(tmp_path: Path) -> None:
    template = "{% for a in range(20) %}{% for b in range(99999) %}{% endfor %}{% endfor %}slow"
    async with text_rig(tmp_path, num_processes=1, prompt_cpu_s=30) as rig:
        await rig.rendered("fine")
        pids = rig.processes.pids
        cancelled = [asyncio.ensure_future(rig.answer(template, tenant=tenant)) for tenant in ("acme", "beta")]
        await asyncio.sleep(0)  # one runs, one waits
        for task in cancelled:
            task.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)
        assert await rig.rendered("fine") == "fine"
        assert rig.processes.pids == pids


async def test_process_that_ends_idle_is_replaced(rig: TextRig) -> None:
    await rig.rendered("fine")
    (pid,) = rig.processes.pids
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: not rig.processes.pids)
    assert await rig.rendered("fine") == "fine"


async def test_hung_process_is_replaced_without_suspecting_tenant(tmp_path: Path) -> None:
    async with text_rig(tmp_path, hung_s=1) as rig:
        await rig.rendered("fine")
        (pid,) = rig.processes.pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="did not answer"):
            await rig.rendered("fine")
        assert await rig.rendered("fine") == "fine"


async def test_concurrent_prompts_get_their_own_answers(rig: TextRig) -> None:
    texts = await asyncio.gather(
        *(rig.rendered(f"{{{{ messages | length }}}} of {i}", tenant=f"tenant-{i % 3}") for i in range(50))
    )
    assert texts == [f"2 of {i}" for i in range(50)]


async def test_full_queue_refuses_only_its_tenant(tmp_path: Path) -> None:
    async with text_rig(tmp_path, prompt_cpu_s=30) as rig:
        await rig.rendered("fine")
        waiting = [asyncio.ensure_future(rig.answer(LOOP)) for _ in range(MAX_WAITING + 1)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="too many of your prompts") as caught:
            await rig.answer(LOOP)
        assert caught.value.retry_after_s >= 1
        assert await rig.rendered("fine", tenant="beta") == "fine"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_expired_wait_names_its_cause(tmp_path: Path) -> None:
    async with text_rig(tmp_path, num_processes=1, max_wait_s=5) as rig:
        await rig.rendered("fine")
        os.kill(rig.processes.pids[0], signal.SIGSTOP)
        slow = asyncio.ensure_future(rig.answer("slow"))
        await asyncio.sleep(0)
        own = asyncio.ensure_future(rig.answer("fine"))
        others = asyncio.ensure_future(rig.answer("fine", tenant="beta"))
        with pytest.raises(QueueFull, match="behind other prompts of yours"):
            await own
        with pytest.raises(Unavailable, match="text processes are busy"):
            await others
        assert not slow.done()
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)


async def test_idle_processes_end_but_one(tmp_path: Path) -> None:
    template = "{% for a in range(100) %}{% for b in range(99999) %}{% endfor %}{% endfor %}slow"
    async with text_rig(tmp_path, prompt_cpu_s=60, idle_s=0.5) as rig:
        slow = asyncio.ensure_future(rig.rendered(template))
        await eventually(lambda: len(rig.processes.pids) == 2)
        assert await slow == "slow"
        await eventually(lambda: len(rig.processes.pids) == 1)
        assert await rig.rendered("fine") == "fine"


async def test_evicted_files_are_loaded_again(tmp_path: Path) -> None:
    async with text_rig(tmp_path, num_processes=1, max_cached_bytes=10) as rig:
        for _ in range(2):
            for number in range(3):
                assert await rig.rendered(f"fine {number}") == f"fine {number}"


@dataclass(frozen=True)
class ProcessRights:
    """The kernel's view of a process."""

    environment: str
    limits: dict[str, str]  # soft limits by name
    descriptors: set[str]
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> ProcessRights:
        proc = Path(f"/proc/{pid}")
        lines = (proc / "limits").read_text().splitlines()[1:]
        return cls(
            (proc / "environ").read_text(),
            {line[:26].strip(): line[26:].split()[0] for line in lines},
            {os.readlink(path) for path in (proc / "fd").iterdir()},
            len(list((proc / "task").iterdir())),
        )


async def test_process_has_no_secrets_and_no_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Program.__base__)  # not forked from a template of the tests
    monkeypatch.setenv("TORCHRELAY_ADMIN_KEY", "tra-secret")
    async with text_rig(tmp_path, num_processes=1) as rig:
        await rig.rendered("fine")
        (pid,) = rig.processes.pids
        rights = ProcessRights.of(pid)
    assert "tra-secret" not in rights.environment
    for name in ("Max open files", "Max processes", "Max file size", "Max core file size"):
        assert rights.limits[name] == "0", name
    assert rights.limits["Max address space"] == str(1 << 30)
    assert len(rights.descriptors) == 2 and "/dev/null" in rights.descriptors, "its socket and nothing else"
    assert rights.num_threads == 2, (
        "its own and that of grammars; the tokenizers library's would cost each prompt two switches"
    )


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_close_ends_processes_and_waiting_prompts(tmp_path: Path) -> None:
    async with text_rig(tmp_path, prompt_cpu_s=30) as rig:
        await rig.rendered("fine")
        pids = rig.processes.pids
        waiting = [asyncio.ensure_future(rig.answer(LOOP)) for _ in range(3)]
        await asyncio.sleep(0)
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, Unavailable) and "shutting down" in error.message
    assert not any(map(is_alive, pids))
