"""Prints the lines of source and of tests of each package, beside those of the last release.

    python tools/size.py            # make check
    python tools/size.py --release  # writes the table of CONTRIBUTING.md

Nothing fails: a change that makes a package larger says in its message what for. Generated files and data are left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- tools/size.py writes from here -->", "<!-- to here -->"
SUFFIXES = (".py", ".js", ".c", ".h", ".css", ".html")
OTHERS = ("bench", "deploy", "examples", "tools")  # no packages, and no source of the product
ROW = "| {:<22} | {:>6} | {:>6} |\n"


def lines_by_package() -> dict[str, tuple[int, int]]:
    """Lines of source and of tests by package. A package's tests are those of ``tests/unit`` with its name; all others
    are in the row ``tests``.
    """
    source, tests = Counter[str](), Counter[str]()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    paths = [Path(line) for line in listed.splitlines()]
    packages = {
        path.parts[1].replace("-", "_"): "/".join(path.parts[:2]) for path in paths if path.parts[2:3] == ("src",)
    }
    packages |= {path.parts[0]: path.parts[0] for path in paths if path.parts[1:2] == ("src",)}
    for path in paths:
        if path.suffix not in SUFFIXES or "_pb2" in path.name or "vendor" in path.parts or not (ROOT / path).exists():
            continue
        with (ROOT / path).open(encoding="utf-8") as file:
            number = sum(1 for _ in file)
        if path.parts[0] == "tests":
            own = packages.get(path.parts[2], "") if path.parts[1] == "unit" else ""
            tests[own or "tests"] += number
        elif path.parts[0] in OTHERS:
            source[path.parts[0]] += number
        elif "src" in path.parts:
            source["/".join(path.parts[: path.parts.index("src")])] += number
    return {name: (source[name], tests[name]) for name in sorted(source | tests)}


def table(lines: dict[str, tuple[int, int]]) -> str:
    rows = "".join(ROW.format(name, *numbers) for name, numbers in lines.items())
    total = ROW.format("**all**", *(sum(numbers) for numbers in zip(*lines.values(), strict=True)))
    return f"{ROW.format('', 'source', 'tests')}| --- | ---: | ---: |\n{rows}{total}"


def released(page: str) -> dict[str, tuple[int, int]]:
    """The table of the last release."""
    rows = page[page.index(BEGIN) : page.index(END)].splitlines()[3:]
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows if row]
    return {name: (int(source), int(tests)) for name, source, tests in cells}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--release", action="store_true", help="write the table of CONTRIBUTING.md")
    page, lines = PAGE.read_text(encoding="utf-8"), lines_by_package()
    if parser.parse_args().release:
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(lines)}{END}{rest.partition(END)[2]}", encoding="utf-8")
        return 0
    known = released(page)
    lines["**all**"] = (sum(source for source, _ in lines.values()), sum(tests for _, tests in lines.values()))
    for name, numbers in lines.items():
        then = known.get(name, (0, 0))
        source, tests = (f"{number:6} ({number - before:+d})" for number, before in zip(numbers, then, strict=True))
        print(f"size: {name.strip('*'):<20} source {source:<16} tests {tests}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
