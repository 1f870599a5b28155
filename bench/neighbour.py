"""Cost of a tenant's attacks to a neighbour: the latency of the neighbour's chats under the attacks of tests/hostile.

    python bench/neighbour.py [--quick]

Runs the attacks of each file as the test suite does, on an otherwise idle machine. Meanwhile a process that shares
nothing with the attacker sends chats of 12 tokens, each over a new connection. Their P99 under all attacks of a file is
compared with their P99 before the file's first attack, and the slowest chat of any single attack with the same P99.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import Check, finish, parser_of, percentile

ROOT = Path(__file__).resolve().parents[1]
FILES = ("test_grpc_bytes", "test_rest_bytes", "test_uploads", "test_prompts")
QUICK = ("-k", "malformed")
MAX_P99_RATIO, MAX_SLOWEST_RATIO = 2.0, 10.0


def recorded(files: tuple[str, ...], options: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Seconds of the neighbour's chats by file: a list ``peace_s``, and ``attack_s`` with a list for each attack."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "chats.json"
        paths = [f"tests/hostile/{name}.py" for name in files]
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", *paths, *options]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "TORCHRELAY_NEIGHBOUR_RECORD": str(record)}, check=True)
        return {Path(name).stem: chats for name, chats in json.loads(record.read_text()).items()}


def main() -> None:
    is_quick = parser_of(__doc__, "a part of the attacks of one file, under 50 s").parse_args().quick
    files = ("test_rest_bytes",) if is_quick else FILES
    chats = recorded(files, QUICK if is_quick else ())
    checks = []
    for name in files:
        row = chats[name]
        peace_s, under_attack = row["peace_s"], [chat_s for chats_s in row["attack_s"].values() for chat_s in chats_s]
        peace_p99_s = percentile(peace_s, 99)
        against = f"P99 of {len(peace_s)} chats before the attacks, {1e3 * peace_p99_s:.0f} ms"
        short = name.removeprefix("test_")
        checks += [
            Check(
                f"{short}_p99_ratio",
                percentile(under_attack, 99) / peace_p99_s,
                "x",
                MAX_P99_RATIO,
                against,
            ),
            Check(f"{short}_slowest_ratio", max(under_attack) / peace_p99_s, "x", MAX_SLOWEST_RATIO, against),
        ]
    limits = "head 2 s, body silence 3 s, idle 5 s, answer silence 2 s, 2,200 connections: lower than the defaults"
    conditions = {"quick": is_quick, "attacks": list(files), "attacker_nice": 10, "limits": limits}
    finish("neighbour", conditions, checks)


if __name__ == "__main__":
    main()
