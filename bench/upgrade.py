"""A rolling upgrade under load: each process of an older commit is replaced by the present code, one after another.

    python bench/upgrade.py [--quick] [--from COMMIT]

Builds the wheels of the older commit (by default the last but one) and installs them into a virtual environment of
their own. From it run a param-store, a scheduler, two workers and two gateways, with NATS, Redis and PostgreSQL. While
clients stream answers, each process gets SIGTERM, and when it has ended, its successor from this repository starts with
the same settings. Clients open a connection for each request; if a gateway refuses it, they ask the other, as a load
balancer does. The model is fp32, so every answer is compared with an undisturbed one.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.commits import REPO, checkout
from bench.random_checkpoint import LLAMA_33MB
from bench.report import Check, finish, parser_of, progress
from tests.support.checkpoints import make_checkpoint
from tests.support.clients import NUM_TOKENS, Clients, Outcomes
from tests.support.completions import headers
from tests.support.parts import Parts, parts_of
from tests.support.platform import Platform
from tests.support.scheduler import watch
from tests.unit.gateway.postgres_server import postgres_server
from torchrelay.cli.up.plan import UpOptions
from torchrelay.common.identity.callers import SCHEDULER_NODE, Caller

NUM_CLIENTS = 6
OPTIONS = UpOptions(
    num_prefill_workers=0, num_decode_workers=0, num_both_workers=2, arena_bytes=256 << 20, kv_pool_bytes=64 << 20,
    threads=1,
)  # fmt: skip
ORDER = ("param-store", "worker-0", "worker-1", "gateway-0", "gateway-1", "scheduler")
QUICK = ("worker-0", "gateway-0", "scheduler")


def run(*command: str | Path, cwd: Path = REPO) -> str:
    """The output of a program. Raises ``CalledProcessError``."""
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def build_wheel(folder: Path, package: Path) -> None:
    """Calls the package's build backend (PEP 517), which takes a third of the time that `pip wheel` takes."""
    backend = tomllib.loads((package / "pyproject.toml").read_text())["build-system"]["build-backend"]
    program = f"import sys; from {backend} import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, folder], cwd=package, check=True, capture_output=True)


@contextmanager
def old_programs(commit: str, folder: Path) -> Iterator[Path]:
    """The folder of the programs of an older commit, installed from its wheels."""
    wheels, root = folder / "wheels", folder / "venv"
    with checkout(commit) as tree:
        packages = [path.parent for path in tree.glob("*/pyproject.toml")]
        packages += [path.parent for path in tree.glob("*/*/pyproject.toml")]
        wheels.mkdir()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(partial(build_wheel, wheels), sorted(packages, key=lambda path: path.name != "engine")))
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
        run(sys.executable, "-m", "venv", "--without-pip", root)
        base = {"base": str(root), "platbase": str(root)}
        third_party = folder / "third-party"
        third_party.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if "torchrelay" not in path.name and path.suffix != ".pth":  # which make this repository importable
                (third_party / path.name).symlink_to(path)
        (Path(sysconfig.get_path("purelib", "venv", base)) / "third-party.pth").write_text(f"{third_party}\n")
        python = str(root / "bin" / "python")
        run(*pip, "--python", python, "install", "--no-index", "--no-deps", *wheels.iterdir())
        yield root / "bin"


def num_billed(gateway: Platform, key: str) -> int:
    """Completion tokens in the ledger."""
    reply = httpx.get(f"{gateway.http}/v1/usage", headers=headers(key), timeout=30)
    num_tokens: int = reply.json()["total"]["completion_tokens"]
    return num_tokens


def instances(parts: Parts) -> set[str]:
    address = f"127.0.0.1:{parts.setting('scheduler', 'PORT')}"
    view = next(watch(address, None, parts.home.call_token(SCHEDULER_NODE, Caller.CLI)))
    return {instance.instance_id for instance in view.instances}


async def measure(programs: Path, folder: Path, is_quick: bool) -> tuple[Outcomes, int, dict[str, float], int]:
    """Outcomes, the tokens in the ledger, how long each replacement took, and the instances that the store's ended."""
    async with parts_of(folder / "home", OPTIONS, {"GRACE_S": "15"}) as parts:
        parts.copy("gateway-0", "gateway")
        parts.copy("gateway-1", "gateway", "HTTP_PORT", "GRPC_PORT")
        await parts.start(*ORDER, programs=programs)
        gateways = [parts.platform(name) for name in ("gateway-0", "gateway-1")]
        key = await asyncio.to_thread(gateways[0].tenant, "acme")
        checkpoint = await asyncio.to_thread(make_checkpoint, folder / "model", "llama", **LLAMA_33MB)
        model = await asyncio.to_thread(gateways[0].upload, key, checkpoint, "llama")
        clients = await asyncio.to_thread(Clients, gateways, key, model, NUM_CLIENTS)
        took, num_ended = dict[str, float](), 0
        with clients.asking():
            for name in QUICK if is_quick else ORDER:
                before, begin_s = await asyncio.to_thread(instances, parts), time.monotonic()
                await parts.leave(name)
                await parts.start(name)
                took[name] = time.monotonic() - begin_s
                progress(f"{name} replaced in {took[name]:.1f} s, {clients.outcomes.num_answers} answers")
                await asyncio.sleep(2.0)  # load between replacements
                if name == "param-store":
                    num_ended = len(before - await asyncio.to_thread(instances, parts))
        billed = await asyncio.to_thread(num_billed, gateways[0], key)
        return clients.outcomes, billed - NUM_TOKENS * NUM_CLIENTS, took, num_ended


def main() -> None:
    parser = parser_of(__doc__, "replaces a worker, a gateway and the scheduler alone")
    parser.add_argument("--from", dest="commit", default="HEAD~1", help="the older commit; default: %(default)s")
    arguments = parser.parse_args()
    commit = run("git", "rev-parse", "--short", arguments.commit)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        progress(f"building the wheels of {commit}")
        programs = stack.enter_context(old_programs(commit, folder))
        os.environ["TORCHRELAY_DATABASE_URL"] = stack.enter_context(postgres_server())
        outcomes, billed, took, num_ended = asyncio.run(measure(programs, folder, arguments.quick))
    for error in outcomes.errors[:10]:
        progress(f"lost: {error}")
    checks = [
        Check("lost_requests", len(outcomes.errors), "", 0),
        Check("wrong_answers", outcomes.num_wrong, "", 0, against="an undisturbed answer"),
        Check("tokens_billed_wrong", abs(billed - outcomes.num_received), "", 0, against="the tokens received"),
        Check("instances_ended_with_store", num_ended, "", 0),
        Check("answers", outcomes.num_answers, ""),
        Check("refused_connections", outcomes.num_passed_by, ""),
        Check("longest_gap_s", outcomes.max_gap_s, "s"),
        *(Check(f"{name}_replaced_s", took_s, "s") for name, took_s in took.items()),
    ]
    conditions = {"from": commit, "to": run("git", "rev-parse", "--short", "HEAD"), "clients": NUM_CLIENTS}
    finish("upgrade", {**conditions, "quick": arguments.quick, "connections": "one per request"}, checks)


if __name__ == "__main__":
    main()
