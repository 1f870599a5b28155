"""Coding agents finish a task, from zero and warm: they look at an image and write a file of 700 tokens."""

from __future__ import annotations

import json
import socket
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import FOLDER, PROGRAMS, Clients, run
from tests.support.completions import headers
from tests.support.http import http
from tests.support.scripted_checkpoints import make_scripted_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]  # two tasks of up to ``CLIENT_S`` each

PACKAGES = FOLDER / "node" / "node_modules"
CONTEXTS = (32_768, 65_536)  # agents ask for answers of 32,000 tokens
NUMBERS = [f"{number} " for number in range(1, 701)]
DONE = "The report is written."
TASK = "Look at picture.png and write the report."
# Has the beginning of each message: an agent's instructions take minutes on a CPU.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content[:1200] }}\n{% if m.tool_calls %}<tool_call>{% endif %}"
    "{% endfor %}"
    "{% set results = messages | selectattr('role', 'equalto', 'tool') | list | length %}"
    "{% if not tools or results > 1 %}<|done|>{% elif results %}<|write|>{% else %}<|look|>{% endif %}"
)


@dataclass(frozen=True)
class Agent:
    """How an agent calls its tools, is set up in its home, and reports.

    ``look`` and ``write`` are calls in JSON. ``@folder`` is that of the task, ``@text`` what the file gets,
    ``@context`` the number of tokens that the model takes.
    """

    look: str
    write: str
    command: tuple[str, ...]
    settings: tuple[str, str]  # a file in its home, and its content
    environment: Mapping[str, str]
    finished: Callable[[str], str]  # the answer in its output
    asks_registry: bool = False  # of packages, and goes on without


def call(name: str, **arguments: str) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def events_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


AGENTS = {
    "codex": Agent(
        call("view_image", path="@folder/picture.png"),
        call("exec_command", cmd="printf '@text' > report.txt"),
        (
            *(str(PROGRAMS / "node"), str(PACKAGES / "@openai" / "codex" / "bin" / "codex.js"), "exec", "--json"),
            *("--strict-config", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--model", "@model", TASK),
        ),
        (
            ".codex/config.toml",
            """
model_provider = "torchrelay"
model_context_window = @context
check_for_update_on_startup = false
web_search = "disabled"

[features]
plugins = false  # whose lists Codex fetches from the internet

[analytics]
enabled = false

[feedback]
enabled = false

[model_providers.torchrelay]
name = "Torchrelay"
base_url = "@url/v1"
env_key = "TORCHRELAY_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
""",
        ),
        {"TORCHRELAY_API_KEY": "@key"},
        lambda output: next(
            event["item"]["text"]
            for event in events_of(output)
            if event["type"] == "item.completed" and event["item"]["type"] == "agent_message"
        ),
    ),
    "claude": Agent(
        call("Read", file_path="@folder/picture.png"),
        call("Write", file_path="@folder/report.txt", content="@text"),
        (
            *(str(PACKAGES / "@anthropic-ai" / "claude-code-linux-x64" / "claude"), "-p", TASK, "--output-format"),
            *("json", "--allowedTools", "Read,Write", "--permission-mode", "acceptEdits"),
        ),
        (".claude/settings.json", "{}"),
        {
            "ANTHROPIC_BASE_URL": "@url",
            "ANTHROPIC_AUTH_TOKEN": "@key",
            "ANTHROPIC_MODEL": "@model",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "@model",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        lambda output: str(events_of(output)[-1]["result"]),
    ),
    "opencode": Agent(
        call("read", filePath="@folder/picture.png"),
        call("write", filePath="@folder/report.txt", content="@text"),
        (
            str(PACKAGES / "opencode-linux-x64-baseline" / "bin" / "opencode"),
            *("run", "--format", "json", TASK),
        ),
        (
            ".config/opencode/opencode.json",
            json.dumps(
                {
                    "autoupdate": False,
                    "share": "disabled",
                    "permission": {"*": "allow"},
                    "model": "torchrelay/@model",
                    "provider": {
                        "torchrelay": {
                            "npm": "@ai-sdk/openai-compatible",
                            "options": {"baseURL": "@url/v1", "apiKey": "@key"},
                            "models": {
                                "@model": {
                                    "limit": {"context": "@context", "output": 8192},
                                    "modalities": {"input": ["text", "image"], "output": ["text"]},
                                }
                            },
                        }
                    },
                }
            ),
        ),
        {"OPENCODE_DISABLE_MODELS_FETCH": "1"},
        lambda output: next(event["part"]["text"] for event in events_of(output) if event["type"] == "text"),
        asks_registry=True,
    ),
}


def script_of(agent: Agent, folder: Path) -> dict[str, str]:
    before, after = f"<tool_call>{agent.write.replace('@folder', str(folder))}</tool_call>".split("@text")
    chain = ["<|write|>", before, *NUMBERS, after]
    looks = f"<tool_call>{agent.look.replace('@folder', str(folder))}</tool_call>"
    return {"<|look|>": looks, "<|done|>": DONE, **dict(pairwise(chain))}


def png() -> bytes:
    """A red square of eight pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    parts = {
        b"IHDR": struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress((b"\0" + b"\xff\0\0" * 8) * 8),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts.items())


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", AGENTS)
def test_agent_finishes_a_task_and_pays_for_its_requests_alone(
    clients: Clients, tmp_path: Path, name: str, context: int
) -> None:
    agent, platform = AGENTS[name], clients.platform
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    (work / "picture.png").write_bytes(png())
    key = platform.tenant(f"agents-{name}-{context}")  # whose bill has nothing else
    checkpoint = make_scripted_checkpoint(tmp_path / "model", script_of(agent, work), TEMPLATE, context)
    model = platform.upload(key, checkpoint, "agent")
    assert model not in {instance.model for instance in next(platform.views()).instances}

    def filled(text: str) -> str:
        numbers = text.replace('"@context"', str(context)).replace("@context", str(context))
        return numbers.replace("@model", model).replace("@url", platform.http).replace("@key", key)

    path, content = agent.settings
    (home / path).parent.mkdir(parents=True)
    (home / path).write_text(filled(content))
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "NO_PROXY": "127.0.0.1"}
    environment |= {variable: filled(value) for variable, value in agent.environment.items()}
    for _ in ("from zero", "warm"):
        with socket.create_server(("127.0.0.1", 0)) as proxy:
            address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
            proxied = environment | {"HTTP_PROXY": address, "HTTPS_PROXY": address}
            # Their runtimes have many threads, which the platforms of other tests need not wait for.
            output = run(["nice", "-n", "10", *(filled(part) for part in agent.command)], proxied, work)
            proxy.setblocking(False)
            if not agent.asks_registry:
                with pytest.raises(BlockingIOError):
                    proxy.accept()  # a connection to any other server
        assert agent.finished(output) == DONE
        assert (work / "report.txt").read_text().split() == "".join(NUMBERS).split()
        (work / "report.txt").unlink()
    bill = http.get(f"{platform.http}/v1/usage", headers=headers(key)).json()["total"]
    assert bill["requests"] >= 6 and bill["completion_tokens"] >= 2 * (len(NUMBERS) + 7)
