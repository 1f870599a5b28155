"""A platform with a scripted model for clients, and the environment that they run in."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import declare_embeddings, make_checkpoint, make_headless
from tests.support.completions import headers
from tests.support.http import http
from tests.support.platform import Platform, running_platform
from tests.support.scripted_checkpoints import make_scripted_checkpoint

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PROGRAMS = FOLDER / ".venv" / "bin"
CLIENT_S = 280  # against hanging
ANSWER = ("The torch ", "is passed ", "on.")
TEXT = "".join(ANSWER)
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'
AFTER_CALL = "It rains in Zürich."
SCRIPT = {
    "<|text|>": ANSWER[0],
    ANSWER[0]: ANSWER[1],
    ANSWER[1]: ANSWER[2],
    "<|call|>": CALL,
    "<|result|>": AFTER_CALL,
    "<|count|>": "tick ",
    "tick ": "tack ",
    "tack ": "tick ",
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% if m.tool_calls %}<tool_call>{% endif %}{% endfor %}"
    "{% if messages[-1].content == 'Count.' %}<|count|>{% elif messages[-1].role == 'tool' %}<|result|>"
    "{% elif tools %}<|call|>{% else %}<|text|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Clients:
    """A tenant of a platform, its models, and the programs of ``make test-clients``."""

    platform: Platform
    key: str
    model: str
    embedding_model: str

    def run(self, *command: str) -> dict[str, Any]:
        """The results that a program prints, an object with a name a line, by their names."""
        results: dict[str, Any] = {}
        for line in run(command, self.environment(), ROOT).splitlines():
            results |= json.loads(line)
        return results

    def run_node(self, script: str) -> dict[str, Any]:
        return self.run(str(PROGRAMS / "node"), str(FOLDER / "node" / script))

    def run_python(self, module: str) -> dict[str, Any]:
        return self.run(str(PROGRAMS / "python"), "-m", f"tests.clients.python.{module}")

    def environment(self) -> dict[str, str]:
        """What a client sees: nothing of the caller's environment but PATH and HOME."""
        names = {name: os.environ[name] for name in ("PATH", "HOME")}
        return {
            **names,
            "TORCHRELAY_URL": self.platform.http,
            "TORCHRELAY_KEY": self.key,
            "TORCHRELAY_LIMITED_KEY": self.limited_key(),
            "TORCHRELAY_MODEL": self.model,
            "TORCHRELAY_EMBEDDING_MODEL": self.embedding_model,
        }

    def limited_key(self, requests_per_minute: int = 1) -> str:
        """A new key with a limit."""
        with self.platform.admin() as admin:
            body = {"tenant": "clients", "name": "limited", "requests_per_minute": requests_per_minute}
            key: str = admin.call("POST", "/v1/keys", json=body)["key"]
            return key

    def completion_tokens(self) -> int:
        """All tokens billed so far."""
        total = http.get(f"{self.platform.http}/v1/usage", headers=headers(self.key)).json()["total"]
        tokens: int = total["completion_tokens"]
        return tokens


def run(command: Sequence[str], environment: Mapping[str, str], folder: Path, limit_s: float = CLIENT_S) -> str:
    """The output of a program that ends well."""
    process = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout


@pytest.fixture(scope="package")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    folder = tmp_path_factory.mktemp("clients")
    options = ("--arena-mb", "256", "--kv-pool-mb", "64", "--threads", "1", "--idle-timeout-s", "3")
    with running_platform(folder / "home", options) as platform:
        key = platform.tenant("clients")
        scripted = make_scripted_checkpoint(folder / "scripted", SCRIPT, TEMPLATE)
        embedding = declare_embeddings(make_headless(make_checkpoint(folder / "embedding", "qwen3")))
        yield Clients(
            platform, key, platform.upload(key, scripted, "scripted"), platform.upload(key, embedding, "embedding")
        )
