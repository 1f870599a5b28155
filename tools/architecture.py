"""Writes the tree of folders into docs/architecture.md, with the docstring and the imports of each package.

`src/torchrelay` is left out of the paths.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- tools/architecture.py writes from here -->", "<!-- to here -->"

TOP = ("proto", "libs", "services", "sim", "cli", "bench", "examples", "docs", "deploy", "tests", "tools")

# Folders that hold no Python package, hence have no docstring.
FOLDERS = {
    "proto": "the contracts, and the stubs generated from them",
    "libs": "code that services share",
    "services": "one folder per service; none imports another",
    "bench": "a program for every figure of speed and memory that we claim",
    "bench/calibration": "workers whose layers take fixed times, for bench/calibrate.py and bench/prediction.py",
    "bench/data_plane": "parts of bench/relay.py: chains, faults and KV streams, on the lab's links and on loopback",
    "bench/device": "parts of the steps of bench/gpu.py: packs, instances, the device's limits, a peer",
    "bench/gpu_steps": "the steps of bench/gpu.py, and what runs them",
    "bench/scaling": "parts of bench/roles.py: a role change on real workers, against a load",
    "bench/scheduling": "parts of bench/scheduler.py, console.py and others: fleets, peers, streams, records",
    "bench/live_scaling": "parts of bench/live.py and burst.py: a lab whose scheduler's strategy changes as it runs",
    "bench/planning": "parts of bench/planner.py: random networks, a simulation, rival plans",
    "bench/simulation": "parts of bench/simulate.py: large clusters in virtual time",
    "bench/serving": "parts of bench/engine.py: models, peers, the memory's limit",
    "bench/streaming": "load on a gateway, and echo servers behind it",
    "deploy": "a compose file, and the program that makes its environment",
    "deploy/images": "image recipes, one per service",
    "deploy/chart/files": "the configuration of HAProxy before the gateways, for compose too",
    "deploy/chart": "a Helm chart for Kubernetes",
    "deploy/chart/templates": "manifests of the services, their rights and their network policies",
    "deploy/monitoring": "Prometheus rules with their tests, and the program that writes the dashboards",
    "deploy/monitoring/grafana": "dashboards for Grafana",
    "proto/control/v1": "between services",
    "proto/inference/v1": "for tenants",
    "proto/inference/v2": "for tenants, the Open Inference Protocol",
    "services/gateway/console/static": "the pages: ES modules that browsers load as they are",
    "services/gateway/console/static/vendor": "libraries of the pages, pinned; their versions, hashes and licences",
    "services/gateway/sql/migrations": "Alembic's environment",
    "services/gateway/sql/migrations/versions": "the steps from one schema to the next",
    "docs": "one page per concept",
    "docs/pictures": "the relay in pictures",
    "examples": "the demo, and what it and its model need",
    "examples/burst": "a burst of calls for a sleeping model, without and with live scaling",
    "examples/glossary": "a tiny chat model of the platform's own words, and the scripts that train it",
    "cli/demo_model": "the trained model of the demo, which examples/glossary makes",
    "examples/smollm2": "a real trained model from PyPI to the platform, and a check of its answers",
    "tests": "unit tests mirror the folders above; the others need more than one of them",
    "tests/unit": "one folder per package, one file per module",
    "tests/structure": "checks of this page, of the import contracts and of prose",
    "tests/integration": "several real parts in one process",
    "tests/e2e/homes": "homes of earlier versions, as archives",
    "tests/clients": "the platform with client libraries that its users have",
    "tests/clients/node": "scripts with the libraries of JavaScript",
    "tests/clients/python": "scripts with those of Python that have an environment of their own",
    "tests/vllm": "the worker with each engine in its slot, in an environment with vLLM",
    "tests/hostile": "attacks by clients and tenants, and faults of machines",
    "tests/console": "the console in a real browser, on a whole platform",
    "tests/console/vendor": "axe-core, which checks that pages are accessible",
    "tests/e2e": "the whole platform as separate processes",
    "tests/fleet": "workers on Slurm and Ray, each a cluster on this host",
    "tests/images": "the images of deploy/images, built, and a platform from them",
    "tests/lab": "hosts in network namespaces, with shaped links",
    "tests/support": "what tests of several packages share",
    "tools": "setup, stubs, this tree, and a check of prose",
}


def tracked() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return [path for name in names if name and (path := ROOT / name).exists()]


def listed_folders(files: list[Path]) -> list[Path]:
    """Folders that hold files, without those around packages; tests/unit stands for the folders below it."""
    folders = set()
    for file in files:
        folder = file.relative_to(ROOT).parent
        parts = folder.parts
        if not parts or parts[0].startswith("."):
            continue
        if "torchrelay" in parts[:-1] or parts[0] not in ("proto", "libs", "services", "sim", "cli"):
            folders |= {folder} if parts[:2] != ("tests", "unit") else {Path("tests/unit")}
            folders |= {Path(parts[0])} if parts[0] not in ("sim", "cli") else set()
    return sorted(folders, key=lambda folder: (TOP.index(folder.parts[0]), folder))


def description(folder: Path) -> str:
    package = ROOT / folder / "__init__.py"
    text = ast.get_docstring(ast.parse(package.read_text())) if package.exists() else None
    sentence = (text or FOLDERS.get(short(folder), "")).split("\n\n")[0]
    return " ".join(sentence.replace("``", "").split()).rstrip(".")


def short(folder: Path) -> str:
    """The path without the folders that every distribution has: libs/engine/kernels."""
    parts = folder.parts
    if "src" not in parts:
        return str(folder)
    at = parts.index("src")
    return "/".join((*parts[:at], *parts[at + 3 :])) if parts[0] != "proto" else "/".join(("proto", *parts[at + 2 :]))


def module_of(path: Path) -> str:
    return ".".join(path.parts[path.parts.index("src") + 1 :]).removesuffix(".py").removesuffix(".__init__")


def imports(folder: Path, modules: set[str]) -> list[str]:
    """Sibling folders, siblings of enclosing folders, and packages that the folder's own modules import."""
    own = module_of(folder)
    imported = set()
    for file in (ROOT / folder).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchrelay."):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {name if name in modules else node.module for name in names}
    others = {module for module in imported if module != own and not module.startswith(f"{own}.")}
    return sorted({_seen_from(own, module, modules) for module in others} - {""})


def _seen_from(own: str, module: str, modules: set[str]) -> str:
    """The imported folder, from the first part that ``own`` does not share; "" for a module in a folder of ``own``."""
    mine, theirs = own.split("."), module.split(".")
    shared = next(
        (n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
    )
    name = ".".join(theirs[: shared + 1])
    is_folder = (name in modules) and any(other.startswith(f"{name}.") for other in modules)
    return theirs[shared] if is_folder and shared < len(theirs) else ""


def tree() -> str:
    files = tracked()
    modules = {module_of(file.relative_to(ROOT)) for file in files if file.suffix == ".py" and "src" in file.parts}
    lines: list[str] = []
    around: list[str] = []  # the folders that hold the next one
    for folder in listed_folders(files):
        name = short(folder)
        while around and not name.startswith(f"{around[-1]}/"):
            around.pop()
        inside = name.removeprefix(f"{around[-1]}/") if around else name
        line = f"{'    ' * len(around)}{inside}/"
        line = f"{line:<28} {description(folder)}"
        around.append(name)
        if "src" in folder.parts and (imported := imports(folder, modules)):
            line += f"  <- {', '.join(imported)}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description="Write the tree of folders into docs/architecture.md.")
    arguments.add_argument("--print", action="store_true", help="print the page instead, and change nothing")
    is_dry = arguments.parse_args().print
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    made = f"{head}{BEGIN}\n```\n{tree()}\n```\n{END}{rest.split(END)[1]}"
    if is_dry:
        sys.stdout.write(made)
    else:
        PAGE.write_text(made)


if __name__ == "__main__":
    main()
