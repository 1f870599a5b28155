"""OpenAI's Responses API as the coding agent Codex uses it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.clients.conftest import FOLDER, PROGRAMS, Clients, run
from tests.support.completions import headers
from tests.support.http import http
from tests.support.scripted_checkpoints import make_scripted_checkpoint

pytestmark = pytest.mark.e2e

AGENT = FOLDER / "node" / "node_modules" / "@openai" / "codex" / "bin" / "codex.js"
REPORT = "on time\n"
CALL = {"name": "exec_command", "arguments": {"cmd": "printf 'on time\\n' > report.txt"}}
DONE = "The report is written."
SCRIPT = {"<|call|>": f"<tool_call>{json.dumps(CALL)}</tool_call>", "<|result|>": DONE}
# Leaves out the content: Codex sends instructions that are longer than the model's context.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}\n{% if m.tool_calls %}<tool_call>{% endif %}{% endfor %}"
    "{% if messages[-1].role == 'tool' %}<|result|>{% elif tools %}<|call|>{% endif %}"
)
OPTIONS = ("--json", "--strict-config", "--skip-git-repo-check", "--sandbox", "danger-full-access")
SETTINGS = """
model_provider = "torchrelay"
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
base_url = "{url}/v1"
env_key = "TORCHRELAY_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


def test_codex_finishes_a_task_from_zero_and_its_usage_is_the_bill(clients: Clients, tmp_path: Path) -> None:
    platform = clients.platform
    key = platform.tenant("agents")  # whose bill has nothing else
    model = platform.upload(key, make_scripted_checkpoint(tmp_path / "model", SCRIPT, TEMPLATE), "agent")
    assert model not in {instance.model for instance in next(platform.views()).instances}
    settings, work = tmp_path / "home" / ".codex" / "config.toml", tmp_path / "work"
    settings.parent.mkdir(parents=True)
    settings.write_text(SETTINGS.format(url=platform.http))
    work.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        output = run(
            (str(PROGRAMS / "node"), str(AGENT), "exec", *OPTIONS, "--model", model, "Write the report."),
            {
                "PATH": "/usr/bin:/bin",
                "HOME": str(tmp_path / "home"),
                "TORCHRELAY_KEY": key,
                "HTTP_PROXY": address,
                "HTTPS_PROXY": address,
                "NO_PROXY": "127.0.0.1",
            },
            work,
        )
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()  # a connection to any other server
    events = [json.loads(line) for line in output.splitlines()]
    assert (work / "report.txt").read_text() == REPORT
    messages = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [item["text"] for item in messages if item["type"] == "agent_message"] == [DONE]
    assert [item["exit_code"] for item in messages if item["type"] == "command_execution"] == [0]

    [usage] = [event["usage"] for event in events if event["type"] == "turn.completed"]
    bill = http.get(f"{platform.http}/v1/usage", headers=headers(key)).json()["total"]
    assert bill["requests"] == 2 and usage["output_tokens"] == bill["completion_tokens"] == 4
    assert (usage["input_tokens"], usage["cached_input_tokens"]) == (bill["prompt_tokens"], bill["cached_tokens"])
