"""The documentation: its site builds without a warning and has the references; the tests that it names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from torchrelay.gateway.http.openapi import TOKEN_PATHS

ROOT = Path(__file__).resolve().parents[2]


def test_site_builds_with_the_references_of_both_apis(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    rest = (tmp_path / "api" / "rest-reference.html").read_text()
    assert all(f"POST {path}" in rest for path in TOKEN_PATHS)
    assert "rpc Generate(GenerateRequest)" in (tmp_path / "search" / "search_index.json").read_text()


def test_every_test_that_a_document_names_exists() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = {
        (document, path)
        for document in listed.splitlines()
        for path in re.findall(r"tests/[\w/-]+\.py\b", (ROOT / document).read_text())
    }
    assert named and [pair for pair in sorted(named) if not (ROOT / pair[1]).is_file()] == []
