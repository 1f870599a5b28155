"""Every import contract of pyproject.toml holds, and each is broken by an import that it forbids."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

# By contract: an import that it forbids, and the module that gets it.
VIOLATIONS = {
    "packages": ("torchrelay.common.errors", "import torchrelay.transfer.errors"),
    "services": ("torchrelay.gateway.settings", "import torchrelay.scheduler.settings"),
    "no-torch": ("torchrelay.scheduler.settings", "import torch"),
    "no-cycles": ("torchrelay.common.errors", "import torchrelay.common.net.rpc"),
    "pure-cores": ("torchrelay.scheduler.policy.dispatch.placement", "import time"),
    "common-layers": ("torchrelay.common.process.heap", "import torchrelay.common.net.rpc"),
    "transfer-layers": ("torchrelay.transfer.arena.slab", "import torchrelay.transfer.serve.holder"),
    "fetch-layers": ("torchrelay.transfer.fetch.rates", "import torchrelay.transfer.fetch.source_policy"),
    "engine-layers": ("torchrelay.engine.batching.pages", "import torchrelay.engine.kernels.backends"),
    "worker-layers": ("torchrelay.worker.metrics.step_metrics", "import torchrelay.worker.slot.slot"),
    "gateway-layers": ("torchrelay.gateway.sql.database", "import torchrelay.gateway.billing.ledger"),
    "gateway-dialects": (
        "torchrelay.gateway.dialects.openai.replies",
        "import torchrelay.gateway.dialects.responses.events",
    ),
    "param-store-layers": ("torchrelay.param_store.packer.core", "import torchrelay.param_store.store"),
    "scheduler-layers": ("torchrelay.scheduler.policy.types", "import torchrelay.scheduler.service.epoch"),
    "policy-layers": ("torchrelay.scheduler.policy.types", "import torchrelay.scheduler.policy.state"),
    "cli-layers": ("torchrelay.cli.errors", "import torchrelay.cli.home"),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources and pyproject.toml, to be broken."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for source in sources(ROOT):
        shutil.copytree(source, folder / source.relative_to(ROOT), ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


def sources(root: Path) -> list[Path]:
    return [
        root / "proto/src",
        root / "cli/src",
        root / "sim/src",
        *root.glob("libs/*/src"),
        *root.glob("services/*/src"),
    ]


def lint(root: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    chosen = [part for contract in contracts for part in ("--contract", contract)]
    # The copy's packages come before those that are installed.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources(root))), "COLUMNS": "200"}
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", *chosen]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60)


def test_each_contract_has_a_violation_here() -> None:
    assert {contract["id"] for contract in CONTRACTS} == VIOLATIONS.keys()


def test_contracts_are_kept(copy: Path) -> None:
    run = lint(copy)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in run.stdout


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_forbidden_import_breaks_contract(copy: Path, contract: str) -> None:
    module, statement = VIOLATIONS[contract]
    (path,) = (path for source in sources(copy) if (path := source / f"{module.replace('.', '/')}.py").is_file())
    sound = path.read_text()
    path.write_text(f"{sound}\n\ndef _forbidden() -> None:\n    {statement}\n")
    try:
        run = lint(copy, contract)
    finally:
        path.write_text(sound)
    assert run.returncode == 1 and "Contracts: 0 kept, 1 broken." in run.stdout, run.stdout + run.stderr
    # A cycle is reported for its package.
    assert (".".join(module.split(".")[:2]) if contract == "no-cycles" else module) in run.stdout
