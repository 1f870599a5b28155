"""The flags of `torchrelay up`: what each is called, means, and may be."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from torchrelay.common.host.labels import checked_labels


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class PoolMode(StrEnum):
    off = "off"
    advise = "advise"


class ScalingMode(StrEnum):
    act = "act"
    advise = "advise"


def worker_range(text: str) -> tuple[int, int]:
    """The least and the most workers of ``0..2``. Raises ``typer.BadParameter`` for anything else."""
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    least, most = (int(match[1]), int(match[2])) if match else (0, 0)
    if most < max(least, 1):
        raise typer.BadParameter(f"{text!r} is not a range of workers: use for example 0..2", param_hint="--workers")
    return least, most


def check_engine(engine: str) -> str:
    """Returns ``engine``. Raises ``typer.BadParameter`` when workers cannot be started on it."""
    if re.fullmatch(r"(kubernetes|slurm|ray|ray://.+:\d+)?", engine) is None:
        raise typer.BadParameter(
            f"{engine!r} is not an engine for workers: use kubernetes, slurm, ray or ray://HOST:PORT"
        )
    return engine


def check_labels(labels: list[str] | None) -> list[str]:
    """Returns the labels. Raises ``typer.BadParameter`` for texts that are not labels."""
    try:
        return checked_labels(labels or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def check_device(device: str) -> str:
    """Returns ``device``. Raises ``typer.BadParameter`` when it is not a valid device."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
        raise typer.BadParameter(f"{device!r} is not a valid device: use cpu, cuda:N with the GPU's number, or auto")
    return device


Host: TypeAlias = Annotated[
    str,
    typer.Option(
        envvar="TORCHRELAY_HOST",
        help="Address of the public API (0.0.0.0: all IPv4, :: IPv6 too); the rest: loopback.",
    ),
]
ClusterHost: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Address of this machine at which others may join with the home's join.toml; default: none may.",
        show_default=False,
    ),
]
HttpPort: TypeAlias = Annotated[
    int,
    typer.Option(
        envvar="TORCHRELAY_HTTP_PORT",
        min=0,
        max=65535,
        help="REST port; 0: the home's last one, else 8080, else any free one.",
    ),
]
GrpcPort: TypeAlias = Annotated[
    int, typer.Option(envvar="TORCHRELAY_GRPC_PORT", min=0, max=65535, help="gRPC port; 0: any free one.")
]
PrefillWorkers: TypeAlias = Annotated[
    int | None, typer.Option(min=0, help="Workers for prefill; default: 1, on GPUs none.", show_default=False)
]
DecodeWorkers: TypeAlias = Annotated[
    int | None, typer.Option(min=0, help="Workers for decode; default: 1, on GPUs none.", show_default=False)
]
BothWorkers: TypeAlias = Annotated[
    int | None, typer.Option(min=0, help="Workers for both roles; default: none, or one per GPU.", show_default=False)
]
Workers: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Workers for both roles that start when needed, MIN..MAX; instead of the other counts.",
        metavar="MIN..MAX",
    ),
]
On: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Start the workers of --workers on other machines: kubernetes, slurm, ray, ray://HOST:10001.",
        metavar="ENGINE",
        show_default=False,
        callback=check_engine,
    ),
]
Pod: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="With --on kubernetes: the manifest of which worker pods are made.", show_default=False),
]
Remote: TypeAlias = Annotated[
    str,
    typer.Option(envvar="TORCHRELAY_REMOTE_URL", help="Pack store: a folder or s3://BUCKET/PREFIX; default: in home."),
]
ArenaMb: TypeAlias = Annotated[int, typer.Option(min=0, help="Memory for parameters, in MiB; 0: chosen automatically.")]
KvPoolMb: TypeAlias = Annotated[int, typer.Option(min=0, help="KV memory per worker, in MiB; 0: chosen automatically.")]
IdleTimeoutS: TypeAlias = Annotated[
    float,
    typer.Option(envvar="TORCHRELAY_IDLE_TIMEOUT_S", min=0, help="Idle seconds before scaling to 0; 0: computed."),
]
Threads: TypeAlias = Annotated[
    int, typer.Option(envvar="TORCHRELAY_THREADS", min=0, help="Compute threads per worker; 0: one per core.")
]
Labels: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        help="Label of this host for its workers; several. Models may require it: models set --hosts.",
        metavar="KEY=VALUE",
        callback=check_labels,
        show_default=False,
    ),
]
Device: TypeAlias = Annotated[
    str,
    typer.Option(envvar="TORCHRELAY_DEVICE", help="cpu, cuda:N, or auto (a GPU if any).", callback=check_device),
]
Devices: TypeAlias = Annotated[
    int,
    typer.Option(
        envvar="TORCHRELAY_DEVICES",
        min=1,
        max=64,
        help="Devices of each worker, which compute a model together; several need TORCHRELAY_ENGINE=vllm.",
    ),
]
WithTls: TypeAlias = Annotated[
    bool, typer.Option("--tls", help="TLS between the services, with generated certificates.")
]
Log: TypeAlias = Annotated[
    LogLevel, typer.Option(envvar="TORCHRELAY_LOG_LEVEL", case_sensitive=False, help="What the services log.")
]
PoolModeOption: TypeAlias = Annotated[
    PoolMode | None,
    typer.Option(
        "--pool-mode",
        envvar="TORCHRELAY_POOL_MODE",
        help="advise: `top` and `events` show how many slots are needed; nothing changes.",
    ),
]
ScalingOption: TypeAlias = Annotated[
    ScalingMode | None,
    typer.Option(
        "--scaling",
        envvar="TORCHRELAY_SCALING",
        help="advise: only minimums are loaded; `explain` and `events` show what else would be loaded or drained.",
    ),
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", help="Say neither what to do next nor that it stops.")]
