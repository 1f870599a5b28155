"""`torchrelay up`: the whole platform on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer

from torchrelay.cli.api.access import HomeOption
from torchrelay.cli.errors import CliError
from torchrelay.cli.home import Home
from torchrelay.cli.up import flags
from torchrelay.common.host.addresses import REACHED_AT, plain_host
from torchrelay.common.host.gpus import first_gpu, visible_gpus

EXAMPLE = "Example:  torchrelay up --home /srv/torchrelay --http-port 8080"


def up(
    context: typer.Context,
    home: HomeOption = None,
    host: flags.Host = "127.0.0.1",
    cluster_host: flags.ClusterHost = "",
    http_port: flags.HttpPort = 0,
    grpc_port: flags.GrpcPort = 0,
    prefill_workers: flags.PrefillWorkers = None,
    decode_workers: flags.DecodeWorkers = None,
    both_workers: flags.BothWorkers = None,
    workers: flags.Workers = None,
    on: flags.On = "",
    pod: flags.Pod = None,
    remote: flags.Remote = "",
    arena_mb: flags.ArenaMb = 0,
    kv_pool_mb: flags.KvPoolMb = 0,
    idle_timeout_s: flags.IdleTimeoutS = 0,
    threads: flags.Threads = 0,
    label: flags.Labels = None,
    device: flags.Device = "cpu",
    devices: flags.Devices = 1,
    tls: flags.WithTls = False,
    pool_mode: flags.PoolModeOption = None,
    scaling: flags.ScalingOption = None,
    log_level: flags.Log = flags.LogLevel.info,
    quiet: flags.Quiet = False,
) -> None:
    """Start the platform on this machine; Ctrl-C stops it.

    Starts Valkey and NATS (unless TORCHRELAY_REDIS_URL and TORCHRELAY_NATS_URL name running ones), a
    param-store, a scheduler, a gateway and workers, and restarts whatever dies. Keys, models and the ledger stay in the
    home folder.
    """
    least_workers: int | None = None
    gpus = visible_gpus() if device != "cpu" and not on else ()
    num_gpu_slots = max((len(gpus) - first_gpu(device)) // devices, 1) if gpus else 0
    prefill_workers, decode_workers, both_workers = _counts(
        prefill_workers, decode_workers, both_workers, num_gpu_slots
    )
    if workers is not None:
        if pool_mode is not None:
            raise CliError("--workers and --pool-mode exclude each other", "pass one of them")
        least_workers, both_workers = flags.worker_range(workers)
        prefill_workers = decode_workers = 0
        if devices > 1:
            raise CliError(
                "--workers and --devices exclude each other", "workers that start when needed have one device"
            )
    num_remote_workers = 0
    if pod is not None and on != "kubernetes":
        raise CliError("--pod is for workers on Kubernetes", "pass --on kubernetes, or leave it out")
    if on:
        _check_remote(on, workers, cluster_host, pod, tls=tls)
        num_remote_workers, both_workers = both_workers, 0
    if plain_host(cluster_host) in REACHED_AT:
        raise CliError(
            f"--cluster-host {cluster_host} is no address that other machines reach", "name one of this one's"
        )
    have_both = prefill_workers + both_workers and decode_workers + both_workers
    if not have_both and not (cluster_host and prefill_workers == decode_workers == 0):
        raise CliError(
            "no worker for prefill or decode", "pass --prefill-workers and --decode-workers, or --both-workers"
        )
    # These import gRPC: not for `torchrelay --help`.
    from torchrelay.cli.up.plan import UpOptions
    from torchrelay.cli.up.run import run_up
    from torchrelay.cli.up.settings_check import check_config_file, variables_without_effect
    from torchrelay.common.process.settings import PREFIX

    own = {str(option.envvar).removeprefix(PREFIX).lower() for option in context.command.params if option.envvar}
    for message in variables_without_effect(own):
        typer.echo(f"torchrelay: {message}", err=True)
    check_config_file()
    options = UpOptions(
        host=plain_host(host),
        cluster_host=plain_host(cluster_host),
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
        labels=tuple(label or ()),
        device=device,
        num_devices=devices,
        gpus=gpus,
        log_level=log_level.value,
        on=on,
        pod=pod,
        num_remote_workers=num_remote_workers,
        tls=tls,
        least_workers=least_workers,
        pool_mode=pool_mode.value if pool_mode is not None else "",
        scaling=scaling.value if scaling is not None else "",
    )
    asyncio.run(run_up(Home.at(home), options, is_quiet=quiet))


def _counts(prefill: int | None, decode: int | None, both: int | None, num_gpu_slots: int) -> tuple[int, int, int]:
    """The workers for prefill, for decode and for both. By default those for both have all GPUs, because two workers
    would hold the weights twice and hand KV over through the host; without GPUs there is one for each role.
    """
    if num_gpu_slots:
        is_default = prefill is None and decode is None and both is None
        return prefill or 0, decode or 0, num_gpu_slots if is_default else both or 0
    return 1 if prefill is None else prefill, 1 if decode is None else decode, both or 0


def _check_remote(engine: str, workers: str | None, cluster_host: str, pod: Path | None, *, tls: bool) -> None:
    """Raises ``CliError`` for options that workers on other machines exclude or need."""
    if workers is None:
        raise CliError(f"--on {engine} needs the least and the most workers", "pass for example --workers 0..4")
    if not cluster_host:
        raise CliError(
            f"--on {engine} needs an address at which its machines reach this one", "pass it as --cluster-host"
        )
    if engine == "kubernetes" and pod is None:
        raise CliError("--on kubernetes needs the manifest of a worker's pod", "pass it as --pod worker.yaml")
    if tls:
        raise CliError("--on and --tls exclude each other", "its workers would have no certificates; see `join`")
