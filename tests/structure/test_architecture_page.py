"""docs/architecture.md matches the repository: its tree is up to date, and its walks name functions that exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
STEP = re.compile(r"`([\w/.-]+\.py):([\w.]+)`")


def test_tree_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "tools" / "architecture.py"), "--print"]
    page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert page == PAGE, "docs/architecture.md is out of date: run make architecture"


def test_each_folder_has_a_description() -> None:
    tree = PAGE.split("```")[1].strip("\n").split("\n")
    assert len(tree) > 80
    assert [line for line in tree if not re.match(r" *[\w/-]+/ +\w", line)] == []


def test_steps_of_walks_exist() -> None:
    walks = PAGE.split("## A request")[1]
    steps = STEP.findall(walks)
    assert len(steps) >= 40 and len(re.findall(r"^\d+\. ", walks, re.MULTILINE)) >= 20
    assert [step for step in steps if not exists(*step)] == []


def exists(short: str, name: str) -> bool:
    """Whether the file, named as in the tree, defines the function, or the class and its method."""
    kind, *rest = short.split("/")
    folder = [kind] if kind in ("sim", "cli") else [kind, rest.pop(0)]
    path = ROOT.joinpath(*folder, "src", "torchrelay", folder[-1].replace("-", "_"), *rest)
    if not path.is_file():
        return False
    definition: ast.AST | None = ast.parse(path.read_text())
    for part in name.split("."):
        nodes = ast.iter_child_nodes(definition) if definition else ()
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        definition = next((node for node in nodes if isinstance(node, kinds) and node.name == part), None)
    return definition is not None


def test_unit_tests_mirror_packages() -> None:
    packages = {path.name: path for source in ROOT.glob("*/*/src/torchrelay") for path in source.iterdir()}
    packages |= {name: ROOT / name / "src/torchrelay" / name for name in ("sim", "cli")}
    unmatched = [
        str(folder.relative_to(ROOT))
        for package, root in packages.items()
        for folder in (ROOT / "tests/unit" / package).glob("**/")
        if any(folder.glob("test_*.py")) and not (root / folder.relative_to(ROOT / "tests/unit" / package)).is_dir()
    ]
    assert unmatched == []
