"""Lists text that is not plain English: docstrings that open with a fragment, variables named by a pronoun, and
metaphors in place of technical terms. Exits with status 1 if it lists anything.

    python tools/prose.py [PATH ...]        by default all sources and pages
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATHS = (
    "README.md",
    "bench",
    "cli",
    "deploy",
    "docs",
    "examples",
    "libs",
    "proto/src",
    "services",
    "sim",
    "tests/support",
    "tools",
)
SUFFIXES = (".py", ".md", ".proto", ".sh", ".yaml", ".Dockerfile")
FRAGMENT = re.compile(
    r"(Of|Those|Who|Whose|Whom|Whoever|What|Whatever|Else|At which|After which|Ones?|Likewise|Beside|By(?! default))\b"
    r"|As (``|(many|few|far|if|last|now|of|measured|predicted)\b)"
    r"|((?!Embed)[A-Z]\w*[^\We]ed|Held|Kept|Sent|Written|Taken|Made|Built|Known|Given|Chosen|Drawn)"
    r" (by|from|for|to|with|in|on|at|once|when|while|only|anew|as)\b"
)
PRONOUNS = {"one", "ones", "found", "those", "who", "another"}
METAPHOR = re.compile(
    r"\b(houses?|doors?|lanes?|desks?|strangers?|patience|promised?|promises|overheard|heard|rooms?|roads?|berths?|"
    r"mend|mends|mended)\b",
    re.IGNORECASE,
)
LITERAL = re.compile(r"\b(SIMD|vector|warp|memory|PCIe) lanes?\b|\bnever heard of\b", re.IGNORECASE)


def files(paths: list[Path]) -> Iterator[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    listed = subprocess.run([*command, *map(str, paths)], capture_output=True, text=True, check=True).stdout
    for name in sorted(set(listed.split("\0"))):
        path = ROOT / name
        if name.endswith(SUFFIXES) and "_pb2" not in name and path.exists() and path != Path(__file__).resolve():
            yield path


def fragments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring that opens with a pronoun, a preposition or a bare participle."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if FRAGMENT.match(text):
                yield getattr(node, "lineno", 1), f"docstring opens as a fragment: {text.splitlines()[0][:80]}"


def pronouns(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each variable, parameter or attribute that is named by a pronoun."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                if name.lstrip("_") in PRONOUNS:
                    yield node.lineno, f"variable {name!r}: name it by its noun"


def metaphors(text: str) -> Iterator[tuple[int, str]]:
    """Line and word of each metaphor, in names and in prose."""
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"_+|(?<=[a-z])(?=[A-Z])", " ", LITERAL.sub("", line))
        for match in METAPHOR.finditer(words):
            yield number, f"metaphor {match.group()!r}: use the field's term"


def offences(name: str, text: str) -> list[str]:
    """A line for each offence in the file's text."""
    rows = set(metaphors(text))
    if name.endswith(".py"):
        tree = ast.parse(text)
        rows |= {*fragments(tree), *pronouns(tree)}
    return [f"{name}:{line}: {fault}" for line, fault in sorted(rows)]


def main() -> None:
    paths = [Path(name).resolve() for name in sys.argv[1:]] or [ROOT / name for name in PATHS]
    rows = [row for path in files(paths) for row in offences(str(path.relative_to(ROOT)), path.read_text())]
    if rows:
        sys.exit("\n".join([*rows, f"prose: {len(rows)} places to rewrite in plain English"]))


if __name__ == "__main__":
    main()
