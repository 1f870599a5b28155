"""`torchrelay join`: this machine's devices for a platform that runs on another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from torchrelay.cli.errors import CliError
from torchrelay.cli.join_file import JoinFile
from torchrelay.cli.up import flags
from torchrelay.common.host.gpus import first_gpu, visible_gpus

EXAMPLE = "Example:  torchrelay join join.toml --workers 2"


def join(
    file: Annotated[
        Path,
        typer.Argument(help="The join.toml of an `up` with --cluster-host; -: standard input.", show_default=False),
    ],
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Workers; 0: only the store, whose memory holds models. Default: one per GPU, or one.",
            show_default=False,
        ),
    ] = None,
    worker_id: Annotated[str, typer.Option(help="Id of the only worker.", show_default=False)] = "",
    host_id: Annotated[
        str, typer.Option(help="Id of this machine and its store; default: from its host name.", show_default=False)
    ] = "",
    advertise_host: Annotated[
        str,
        typer.Option(
            help="Address at which the others reach this machine; default: that of its link to the scheduler.",
            show_default=False,
        ),
    ] = "",
    home: Annotated[
        Path | None, typer.Option(help="Folder for logs and data, on a local disk; default: below /tmp.")
    ] = None,
    label: flags.Labels = None,
    device: flags.Device = "auto",
    threads: flags.Threads = 0,
    arena_mb: flags.ArenaMb = 0,
    kv_pool_mb: flags.KvPoolMb = 0,
) -> None:
    """Run workers of a platform on this machine; Ctrl-C leaves it.

    Starts a param-store for the machine and its workers, and restarts whatever dies. Several programs may run on one
    machine with different worker ids: they share the store.
    """
    if worker_id and workers not in (None, 1):
        raise CliError("--worker-id names a single worker", "leave out --workers")
    gpus = visible_gpus() if device != "cpu" else ()
    if workers is None:
        workers = 1 if worker_id else max(len(gpus) - first_gpu(device), 1)
    from torchrelay.cli.join.plan import JoinOptions
    from torchrelay.cli.join.run import run_join
    from torchrelay.cli.up.machine_check import check_gpus

    check_gpus(device, gpus, workers)
    options = JoinOptions(
        num_workers=workers,
        worker_id=worker_id,
        host_id=host_id,
        advertise_host=advertise_host,
        home=home.absolute() if home is not None else None,
        labels=tuple(label or ()),
        device=device,
        gpus=gpus,
        threads=threads,
        arena_bytes=arena_mb << 20,
        kv_pool_bytes=kv_pool_mb << 20,
    )
    asyncio.run(run_join(JoinFile.read(file), options))
