"""Other commits of this repository, to run beside the present code."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
HERE = "."  # the files of the repository as they are, with what is not committed


def git(*command: str | Path) -> str:
    """The output of git. Raises ``CalledProcessError``."""
    return subprocess.run(("git", *command), cwd=REPO, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The folder of the commit's files."""
    if commit == HERE:
        yield REPO
        return
    with tempfile.TemporaryDirectory(prefix="torchrelay-commit-") as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--quiet", "--detach", tree, commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", tree)


def start_module(tree: Path, module: str, *arguments: str | Path) -> subprocess.Popen[str]:
    """Starts a module of the commit with the commit's own packages, and the present virtual environment for others."""
    packages = sorted(
        {path.parent / "src" for path in (*tree.glob("*/pyproject.toml"), *tree.glob("*/*/pyproject.toml"))}
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [tree, *packages]))}
    command = (sys.executable, "-m", module, *map(str, arguments))
    return subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
