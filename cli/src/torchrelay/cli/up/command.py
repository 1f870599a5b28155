"""`torchrelay up`: the whole platform on this machine."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torchrelay.cli.home import Home
from torchrelay.cli.problems import Problem
from torchrelay.cli.up.options import UpOptions
from torchrelay.cli.up.stack import Stack, StackPlan
from torchrelay.cli.up.supervisor import Supervisor
from torchrelay.common.service import announced

console = Console(highlight=False)


def up(
    home: Annotated[Path | None, typer.Option(help="Where keys, data and logs lie.", envvar="TORCHRELAY_HOME")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="REST port; 0: 8080 when free, else any.")] = 0,
    grpc_port: Annotated[int, typer.Option(help="gRPC port; 0: any free one.")] = 0,
    prefill_workers: Annotated[int, typer.Option(min=0, help="Workers for prompts.")] = 1,
    decode_workers: Annotated[int, typer.Option(min=0, help="Workers for the tokens after the first.")] = 1,
    both_workers: Annotated[int, typer.Option(min=0, help="Workers that play both roles.")] = 0,
    arena_mb: Annotated[int, typer.Option(min=0, help="Memory for parameters, in MiB; 0: what can be spared.")] = 0,
    kv_pool_mb: Annotated[int, typer.Option(min=0, help="KV memory per worker, in MiB; 0: the default.")] = 0,
    idle_timeout_s: Annotated[
        float, typer.Option(min=0, help="Idle seconds until a model goes to zero; 0: default.")
    ] = 0,
    threads: Annotated[int, typer.Option(min=0, help="Compute threads per worker; 0: one per core.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, or cuda:N.")] = "cpu",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Start the platform on this machine; Ctrl-C stops it.

    Starts redis-server and nats-server (unless TORCHRELAY_REDIS_URL and TORCHRELAY_NATS_URL name running ones), a
    param-store, a scheduler, a gateway and workers, and starts again whatever dies.
    """
    if prefill_workers + both_workers < 1 or decode_workers + both_workers < 1:
        raise Problem(
            "no worker for prompts, or none for tokens",
            "give --prefill-workers and --decode-workers, or --both-workers",
        )
    options = UpOptions(
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        num_prefill_workers=prefill_workers,
        num_decode_workers=decode_workers,
        num_both_workers=both_workers,
        arena_bytes=arena_mb << 20,
        kv_pool_bytes=kv_pool_mb << 20,
        idle_timeout_s=idle_timeout_s,
        threads=threads,
        device=device,
        log_level=log_level,
    )
    asyncio.run(run_up(Home.at(home), options))


async def run_up(home: Home, options: UpOptions) -> None:
    """Runs the platform until SIGINT or SIGTERM."""
    if (pid := home.running_pid()) is not None:
        raise Problem(f"a platform already runs at {home.path} (process {pid})", "stop it, or choose another --home")
    home.make()
    stack = StackPlan(home, options).stack()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    async def until_stopped() -> None:
        with announced(home.endpoints_file, stack.endpoints):
            _greet(home, stack)
            await stop.wait()
        console.print("stopping ...")

    await Supervisor(stack, _tell).run(until_stopped)
    console.print("stopped; nothing is left running")


def _tell(name: str, what: str) -> None:
    console.print(f"  [bold]{name:<12}[/bold] {what}")


def _greet(home: Home, stack: Stack) -> None:
    console.print(
        f"\n[bold green]Torchrelay is up[/bold green]  REST {stack.endpoints['http']}  gRPC {stack.endpoints['grpc']}"
    )
    console.print(f"  admin key  {home.path / 'admin.key'}\n  logs       {home.logs}")
    console.print("  next       torchrelay upload DIR   (Ctrl-C here stops everything)\n")
