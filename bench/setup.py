"""From a fresh clone to the end of the set-up, with an empty cache of pip: this commit against an older one.

    python bench/setup.py [--quick] [--from COMMIT]

Clones the repository twice and runs `make setup` in each clone, the older commit (by default the last but one) first.
Programs that an older commit installs with apt-get count only where they are missing. ``--quick``: the present commit
alone, with the machine's own cache of pip.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.report import Check, finish, parser_of, progress

REPO = Path(__file__).resolve().parents[1]
QUIET_S = 10.0  # the longest time without a line


def set_up(commit: str, folder: Path, *, has_cache: bool) -> tuple[float, float]:
    """The seconds of the set-up, and the longest time that it printed nothing."""
    clone = folder / commit
    subprocess.run(["git", "clone", "--quiet", REPO, clone], check=True)
    subprocess.run(["git", "checkout", "--quiet", "--detach", commit], cwd=clone, check=True)
    environment = dict(os.environ)
    if not has_cache:
        environment["PIP_CACHE_DIR"] = str(folder / f"cache-{commit}")
    begin_s = last_s = time.monotonic()
    longest_s = 0.0
    process = subprocess.Popen(["make", "setup"], cwd=clone, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
        progress(line.rstrip())
    if process.wait():
        raise SystemExit(f"make setup of {commit} ended with status {process.returncode}")
    ended_s = time.monotonic()
    return ended_s - begin_s, max(longest_s, ended_s - last_s)


def commit_of(name: str) -> str:
    command = ["git", "rev-parse", "--verify", f"{name}^{{commit}}"]
    return subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = parser_of(__doc__, "the present commit alone, with the machine's cache of pip")
    parser.add_argument("--from", dest="older", default="HEAD~1", metavar="COMMIT")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torchrelay-setup-") as name:
        folder = Path(name)
        if not options.quick:
            older_s, _ = set_up(commit_of(options.older), folder, has_cache=False)
        setup_s, quiet_s = set_up(commit_of("HEAD"), folder, has_cache=options.quick)
    checks = [Check("setup_s", setup_s, "s"), Check("silence_s", quiet_s, "s", QUIET_S)]
    if not options.quick:
        against = f"{older_s:.0f} s for {options.older}"
        checks.append(Check("over_older", setup_s / older_s, "", 0.5, against))
    finish("setup", {"cache": "the machine's" if options.quick else "empty"}, checks)


if __name__ == "__main__":
    main()
