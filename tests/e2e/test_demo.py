"""`torchrelay demo`: its answers and its bill; after Ctrl-C it prints "stopped", exits with 130 and leaves no files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.glossary.terms import load_glossary

DEMO = [str(Path(sys.executable).parent / "torchrelay"), "demo"]
ASKED = {
    "What is a cold start?": "cold start",
    "Explain the relay.": "relay",
    "What does the param-store do?": "param-store",
    "What is a pack?  (gRPC)": "pack",
    "What is scale to zero?": "scale to zero",
}


def test_demo_answers_from_glossary_and_bills_tokens(tmp_path: Path) -> None:
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")  # nothing listens there
    done = subprocess.run(
        DEMO,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **proxy, "TMPDIR": str(tmp_path), "COLUMNS": "200"},
    )
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    lines = said.splitlines()
    glossary = load_glossary()
    answers = {question: lines[lines.index(question) + 1].strip() for question in ASKED}
    assert answers == {question: glossary.explanation_of(term) for question, term in ASKED.items()}
    from_remote, from_memory = said.split("Where its time went; the weights were still in host memory")
    assert "from remote" in from_remote and "host copy present" not in from_remote
    assert "host copy present" in from_memory and "from remote" not in from_memory
    (bill,) = (line for line in lines if "acme/glossary │" in line)
    _, _, num_prompt_tokens, num_output_tokens, num_requests, cost, _ = map(str.strip, bill.split("│"))
    over_rest = [int(count) for count in re.findall(r"first token after [\d.]+ m?s · (\d+) tokens", said)]
    assert int(num_requests) == len(ASKED) and len(over_rest) == len(ASKED) - 1
    assert int(num_output_tokens) > sum(over_rest) > int(num_prompt_tokens) > 0
    assert float(cost.removesuffix(" USD")) > 0
    assert "press Ctrl-C" not in said, "nobody pressed it"
    assert lines.count("stopped") == 1 and "torchrelay up" in said.partition("\nstopped\n")[2]
    assert list(tmp_path.glob("torchrelay-demo-*")) == []


def interrupted_demo(folder: Path, step: str = "", **environment: str) -> str:
    """The output of a demo that receives Ctrl-C at ``step``."""
    process = subprocess.Popen(
        DEMO,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1", **environment},
    )
    assert process.stdout is not None
    with process.stdout as output:
        said = ""
        for line in output:
            said += line
            if step and step in line:
                process.send_signal(signal.SIGINT)
                break
        said += output.read()
    assert process.wait(60) == 130, said
    assert "Traceback" not in said
    assert said.endswith("stopped\n") and said.splitlines().count("stopped") == 1
    assert list(folder.glob("torchrelay-demo-*")) == []
    return said


@pytest.mark.parametrize("step", ["1. Start the platform", "3. Upload"])
def test_ctrl_c_stops_demo(tmp_path: Path, step: str) -> None:
    interrupted_demo(tmp_path, step)


def test_ctrl_c_during_imports_of_platform(tmp_path: Path) -> None:
    """The program `up`, when it begins to import, has the demo interrupted."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\nif 'up' in sys.orig_argv:\n    os.kill(os.getppid(), signal.SIGINT)\n"
    )
    assert "press Ctrl-C again to kill" in interrupted_demo(tmp_path, PYTHONPATH=str(tmp_path))
