"""Output on a terminal whose encoding lacks characters of the tables and of users' names."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from torchrelay.cli.views import console
console.write_any_text()
table = console.ResultTable("model", "size", right=("size",))
table.add_line("acme/modèle…", "5 GB")
console.out().print(table)
console.out().print("████░░ │ → • Ω")
console.err().print("fehlt: größe")
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_encoding_gets_plain_text(encoding: str) -> None:
    environment = {"PYTHONIOENCODING": encoding, "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(encoding)
    shown, told = done.stdout.decode(encoding), done.stderr.decode(encoding)
    expected = {
        "ascii": ("acme/mod?le.", "####.. | > * ?", "gr??e"),
        "latin-1": ("acme/modèle.", "####.. | > * ?", "größe"),
        "utf-8": ("acme/modèle…", "████░░ │ → • Ω", "größe"),
    }[encoding]
    assert expected[0] in shown and expected[1] in shown and expected[2] in told
