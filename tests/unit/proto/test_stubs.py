"""The committed stubs are those that the generator makes of the .proto files."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_committed_stubs_equal_generated_ones(tmp_path: Path) -> None:
    subprocess.run([str(ROOT / "tools/generate_stubs.sh"), str(tmp_path)], check=True, capture_output=True)
    source = ROOT / "proto/src"
    generated = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.py*")}
    committed = {
        path.relative_to(source): path.read_bytes()
        for path in source.rglob("*_pb2*")
        if "__pycache__" not in path.parts
    }
    assert sorted(generated) == sorted(committed)
    assert [str(name) for name in generated if generated[name] != committed[name]] == []
