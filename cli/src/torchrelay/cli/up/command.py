"""`torchrelay up`: the whole platform on this machine."""

from __future__ import annotations

import asyncio
import re
from enum import StrEnum
from typing import Annotated

import typer

from torchrelay.cli.api.access import HomeOption
from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home

EXAMPLE = "Example:  torchrelay up --home /srv/torchrelay --http-port 8080"


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def check_device(device: str) -> str:
    """Returns ``device``. Raises ``typer.BadParameter`` when it is not a valid device."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
        raise typer.BadParameter(f"{device!r} is not a valid device: use cpu, cuda:N with the GPU's number, or auto")
    return device


def up(
    home: HomeOption = None,
    host: Annotated[
        str,
        typer.Option(
            envvar="TORCHRELAY_HOST", help="Address of the public API (0.0.0.0: all); the rest is on loopback."
        ),
    ] = "127.0.0.1",
    http_port: Annotated[
        int,
        typer.Option(
            envvar="TORCHRELAY_HTTP_PORT",
            min=0,
            max=65535,
            help="REST port; 0: the home's last one, else 8080, else any free one.",
        ),
    ] = 0,
    grpc_port: Annotated[
        int, typer.Option(envvar="TORCHRELAY_GRPC_PORT", min=0, max=65535, help="gRPC port; 0: any free one.")
    ] = 0,
    prefill_workers: Annotated[int, typer.Option(min=0, help="Workers for prefill.")] = 1,
    decode_workers: Annotated[int, typer.Option(min=0, help="Workers for decode.")] = 1,
    both_workers: Annotated[int, typer.Option(min=0, help="Workers for both roles.")] = 0,
    remote: Annotated[
        str,
        typer.Option(
            envvar="TORCHRELAY_REMOTE_URL", help="Pack store: a folder or s3://BUCKET/PREFIX; default: in home."
        ),
    ] = "",
    arena_mb: Annotated[int, typer.Option(min=0, help="Memory for parameters, in MiB; 0: chosen automatically.")] = 0,
    kv_pool_mb: Annotated[int, typer.Option(min=0, help="KV memory per worker, in MiB; 0: the default.")] = 0,
    idle_timeout_s: Annotated[
        float,
        typer.Option(envvar="TORCHRELAY_IDLE_TIMEOUT_S", min=0, help="Idle seconds before scaling to 0; 0: default."),
    ] = 0,
    threads: Annotated[
        int, typer.Option(envvar="TORCHRELAY_THREADS", min=0, help="Compute threads per worker; 0: one per core.")
    ] = 0,
    device: Annotated[
        str,
        typer.Option(envvar="TORCHRELAY_DEVICE", help="cpu, cuda:N, or auto (a GPU if any).", callback=check_device),
    ] = "cpu",
    tls: Annotated[bool, typer.Option("--tls", help="TLS between the services, with generated certificates.")] = False,
    log_level: Annotated[
        LogLevel,
        typer.Option(envvar="TORCHRELAY_LOG_LEVEL", case_sensitive=False, help="What the services log."),
    ] = LogLevel.info,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not say what to do next.")] = False,
) -> None:
    """Start the platform on this machine; Ctrl-C stops it.

    Starts redis-server and nats-server (unless TORCHRELAY_REDIS_URL and TORCHRELAY_NATS_URL name running ones), a
    param-store, a scheduler, a gateway and workers, and restarts whatever dies. Keys, models and the ledger stay in the
    home folder.
    """
    if prefill_workers + both_workers < 1 or decode_workers + both_workers < 1:
        raise CliError(
            "no worker for prefill or decode", "pass --prefill-workers and --decode-workers, or --both-workers"
        )
    # Both import gRPC: not for `torchrelay --help`.
    from torchrelay.cli.up.plan import UpOptions
    from torchrelay.cli.up.run import run_up

    options = UpOptions(
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        num_prefill_workers=prefill_workers,
        num_decode_workers=decode_workers,
        num_both_workers=both_workers,
        remote=remote,
        arena_bytes=arena_mb << 20,
        kv_pool_bytes=kv_pool_mb << 20,
        idle_timeout_s=idle_timeout_s,
        threads=threads,
        device=device,
        log_level=log_level.value,
        tls=tls,
    )
    asyncio.run(run_up(Home.at(home), options, is_quiet=quiet))
