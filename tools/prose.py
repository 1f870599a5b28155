"""Lists prose that does not read as plain English: docstrings that open with a fragment, variables named by a pronoun,
and metaphors of the vocabulary that the style guide rules out. Exits with 1 if there are any.

    python tools/prose.py [PATH ...]        the packages' sources by default
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("libs", "services", "cli", "sim", "bench", "tools", "examples", "deploy", "tests/support")
FRAGMENT = re.compile(
    r"(Of|Those|Who|Whose|Whoever|Else|By|At which|After which|One|Ones|Likewise|What|Whatever|Whom|Beside|As|"
    r"[A-Z][a-z]+ed (by|from|for|to|with|in|on|at|once|when|while|only|anew|as))\b"
)
PRONOUNS = {"one", "ones", "found", "those", "who", "another"}
METAPHOR = re.compile(
    r"\b(house|houses|door|doors|lanes?|desks?|strangers?|patience|promised?|promises|overheard|heard|rooms?|roads?|"
    r"berths?|mends?|mended)\b",
    re.IGNORECASE,
)
LITERAL = re.compile(r"memory lanes|SIMD lanes|warp lanes", re.IGNORECASE)


def python_files(paths: list[Path]) -> Iterator[Path]:
    listed = subprocess.run(
        [
            "git",
            "-C",
            str(ROOT),
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
            "--",
            *map(str, paths),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in sorted(set(listed.stdout.split("\0"))):
        if name.endswith(".py") and "_pb2" not in name and (ROOT / name).exists():
            yield ROOT / name


def fragments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring that opens with a pronoun, a preposition or a bare participle."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if FRAGMENT.match(text):
                yield getattr(node, "lineno", 1), f"docstring opens as a fragment: {text.splitlines()[0][:80]}"


def pronouns(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each variable or parameter that is named by a pronoun instead of its noun."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in PRONOUNS:
            yield node.lineno, f"variable named {node.id}: name it by its noun"
        if isinstance(node, ast.arg) and node.arg in PRONOUNS:
            yield node.lineno, f"parameter named {node.arg}: name it by its noun"


def metaphors(source: str) -> Iterator[tuple[int, str]]:
    """Line and word of each metaphor, in names and in prose."""
    for number, line in enumerate(source.splitlines(), 1):
        words = re.sub(r"_+|(?<=[a-z])(?=[A-Z])", " ", LITERAL.sub("", line))
        if match := METAPHOR.search(words):
            yield number, f"metaphor {match.group()!r}: use the field's term"


def findings(path: Path) -> list[str]:
    source = path.read_text()
    tree = ast.parse(source)
    rows = sorted({*fragments(tree), *pronouns(tree), *metaphors(source)})
    return [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in rows]


def main() -> None:
    paths = [Path(name).resolve() for name in sys.argv[1:]] or [ROOT / name for name in SOURCES]
    rows = [row for path in python_files(paths) if path != Path(__file__).resolve() for row in findings(path)]
    for row in rows:
        print(row)
    if rows:
        sys.exit(f"prose: {len(rows)} places to rewrite in plain English; docs/architecture.md says how the code reads")


if __name__ == "__main__":
    main()
