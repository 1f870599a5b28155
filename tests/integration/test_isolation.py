"""Services are independent: none imports another, and gateway, scheduler and param-store do not import torch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

from torchrelay.transfer.protocol.tickets import derive_node_key

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("gateway", "scheduler", "param_store", "prefill", "decode")
FOLDERS = {
    "torchrelay-proto": "proto",
    "torchrelay-common": "libs/common",
    "torchrelay-modelspec": "libs/modelspec",
    "torchrelay-transfer": "libs/transfer",
    "torchrelay-gateway": "services/gateway",
    "torchrelay-scheduler": "services/scheduler",
    "torchrelay-param-store": "services/param-store",
}


def imported_modules(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


@pytest.mark.parametrize("service", SERVICES)
def test_service_imports_no_other_service(service: str) -> None:
    others = tuple(f"torchrelay.{other}" for other in (*SERVICES, "cli") if other != service)
    source = ROOT / "services" / service.replace("_", "-") / "src"
    files = sorted(source.rglob("*.py"))
    assert files
    guilty = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in files
        for module in imported_modules(path)
        if any(module == other or module.startswith(f"{other}.") for other in others)
    }
    assert guilty == set()


def requirements(package: str) -> set[str]:
    """The distributions that installing ``package`` brings, itself included; extras that are not asked for left out."""
    names: set[str] = set()
    waiting = [(package, frozenset[str]())]
    seen = set()
    while waiting:
        item = waiting.pop()
        if item in seen:
            continue
        seen.add(item)
        name, extras = item
        try:
            metadata = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform or Python
        names.add(normal(name))
        for line in metadata.requires or []:
            matched = re.match(r"([A-Za-z0-9._-]+)(?:\[([^\]]*)\])?", line)
            assert matched is not None
            condition = line.partition(";")[2]
            wanted = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", condition)
            if wanted is None or normal(wanted[1]) in extras:
                asked = frozenset(normal(extra) for extra in (matched[2] or "").split(",") if extra.strip())
                waiting.append((matched[1], asked))
    return names


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def link_distribution(installed: Distribution, folder: Path) -> None:
    """Links the top-level files and folders of one installed distribution into ``folder``."""
    for file in installed.files or []:
        top = file.parts[0]
        if top not in ("..", "__pycache__") and not top.endswith(".pth"):
            target = Path(str(installed.locate_file(top)))
            link = folder / top
            if target.exists() and not link.exists():
                link.symlink_to(target)


@pytest.fixture
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The variables of a Python that finds one service, what it requires, and nothing else."""
    packages = requirements(request.param)
    site = tmp_path / "site"
    site.mkdir()
    for name in packages - set(FOLDERS):
        link_distribution(distribution(name), site)
    sources = [str(ROOT / FOLDERS[name] / "src") for name in packages & set(FOLDERS)]
    assert not {"torch", "transformers"} & packages
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([*sources, str(site)])}


@pytest.mark.parametrize(
    ("environment", "module", "settings"),
    [
        (
            "torchrelay-gateway",
            "gateway",
            {"DATABASE_URL": "sqlite:///{folder}/ledger.db", "ADMIN_KEY": f"tra-{'0' * 32}"},
        ),
        ("torchrelay-scheduler", "scheduler", {"CLUSTER_KEY": "11" * 32}),
        (
            "torchrelay-param-store",
            "param_store",
            {
                "NODE_KEY": derive_node_key(bytes(32), "alone").hex(),
                "STORE_ID": "alone",
                "ARENA_PATH": "{folder}/arena",
                "ARENA_BYTES": str(32 << 20),
                "DATA_DIR": "{folder}/data",
                "REMOTE_URL": "file://{folder}/remote",
            },
        ),
    ],
    indirect=["environment"],
)
def test_service_starts_with_its_own_requirements_only(
    environment: dict[str, str], module: str, settings: dict[str, str], tmp_path: Path, nats_url: str, redis_url: str
) -> None:
    ready = tmp_path / "ready.json"
    (tmp_path / "remote").mkdir()
    variables = {f"TORCHRELAY_{name}": value.format(folder=tmp_path) for name, value in settings.items()}
    urls = {"TORCHRELAY_NATS_URL": nats_url, "TORCHRELAY_REDIS_URL": redis_url, "TORCHRELAY_READY_FILE": str(ready)}
    program = f"import sys; from torchrelay.{module}.main import main; sys.argv = ['alone']; main()"
    # -S: without the site-packages of this environment.
    command = [sys.executable, "-S", "-c", program]
    process = subprocess.Popen(
        command, env={**environment, **variables, **urls, "TORCHRELAY_NATS_PREFIX": f"alone-{module}"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            output = "" if process.poll() is None or process.stdout is None else process.stdout.read().decode()
            assert process.poll() is None and time.monotonic() < deadline, output[-3000:]
            time.sleep(0.02)
        loaded = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in loaded
    finally:
        process.terminate()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()
