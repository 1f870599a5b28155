"""The site of the documentation: it builds without a warning, with every link checked, and has the references."""

from __future__ import annotations

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
