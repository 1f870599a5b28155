"""Pods of workers, by a server that keeps objects in memory; batch scripts, which `tests/fleet` runs on a cluster."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tomllib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import kmock
import pytest
import yaml
from kubernetes_asyncio.config import kube_config
from kubernetes_validate import validate

from torchrelay.cli.errors import CliError
from torchrelay.cli.join_file import JoinFile
from torchrelay.cli.launchers import kubernetes_jobs, slurm_jobs
from torchrelay.cli.launchers.jobs import JobError, JobProgram
from torchrelay.cli.launchers.kubernetes_jobs import PLATFORM_LABEL, KubernetesJobs, read_manifest
from torchrelay.cli.launchers.slurm_jobs import SlurmJobs

FILE = JoinFile("10.0.0.5:7101", "nats://nodes:secret@10.0.0.5:4222", "s3://bucket/packs", "node-.1.mac")
PROGRAM = JobProgram(FILE, "torchrelay-test", "cuda:0")
POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"namespace": "models", "labels": {"team": "a"}},
    "spec": {"containers": [{"name": "worker", "image": "registry/torchrelay:1"}]},
}
Server: TypeAlias = kmock.KubernetesEmulator
PODS = "/api/v1/namespaces/models/pods"


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    """A server to which the kubeconfig leads."""
    async with kmock.KubernetesEmulator() as handler, kmock.Server(handler) as running:
        handler.resources["v1/pods"] = kmock.ResourceInfo(namespaced=True)
        handler.resources["v1/secrets"] = kmock.ResourceInfo(namespaced=True)
        cluster = {"name": "c", "cluster": {"server": str(running.url).rstrip("/")}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        kubeconfig = {"clusters": [cluster], "contexts": [context], "users": [{"name": "u", "user": {}}]}
        file = tmp_path / "kubeconfig"
        file.write_text(yaml.safe_dump({"current-context": "c", **kubeconfig}))
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(file))  # it was read at the import
        yield handler


@pytest.fixture
async def jobs(server: Server) -> AsyncIterator[KubernetesJobs]:
    jobs = KubernetesJobs(PROGRAM, POD)
    yield jobs
    await jobs.close()


def phase(server: Server, name: str, phase: str) -> None:
    server.objects["v1/pods", "models", name].patch({"status": {"phase": phase}})


def names(server: Server) -> set[str]:
    return {
        name for (resource, _, name), each in server.objects.items() if resource.plural == "pods" and not each.deleted
    }


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_pod_is_valid_and_keeps_what_the_operator_wrote(version: str) -> None:
    pod = KubernetesJobs(PROGRAM, POD).pod_of("node-1")
    assert validate(pod, version, strict=True) == version
    (container,) = pod["spec"]["containers"]
    arguments = "join /etc/torchrelay/join.toml --worker-id node-1 --device cuda --host-id node-1"
    assert container["command"] == ["torchrelay", *arguments.split()]
    assert pod["metadata"]["labels"] == {"team": "a", PLATFORM_LABEL: PROGRAM.jobs_name}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/etc/torchrelay", "/dev/shm"}
    assert FILE.token not in json.dumps(pod), "it is in the Secret"
    assert "volumes" not in POD["spec"], "the manifest is for all workers"


def test_shared_memory_of_the_operator_stays() -> None:
    own = {"name": "worker", "image": "i", "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}
    pod = KubernetesJobs(PROGRAM, {**POD, "spec": {"containers": [own], "terminationGracePeriodSeconds": 90}}).pod_of(
        "n"
    )
    assert [mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]] == ["shm", "torchrelay-join"]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 90


async def test_pods_wait_run_and_end(server: Server, jobs: KubernetesJobs) -> None:
    assert await jobs.listed() == {}
    for name in ("node-1", "node-2", "node-3"):
        await jobs.start(name)
    assert await jobs.listed() == {"node-1": "", "node-2": "", "node-3": ""}
    phase(server, "node-1", "Running")
    phase(server, "node-2", "Succeeded")
    phase(server, "node-3", "Failed")
    assert await jobs.listed() == {"node-1": None}
    assert names(server) == {"node-1", "node-3"}, "a failed one stays for its logs"
    await jobs.stop("node-1")
    await jobs.stop("node-1")
    assert names(server) == {"node-3"}
    (listing, *_) = server[kmock.action.LIST]
    assert listing.params["labelSelector"] == f"{PLATFORM_LABEL}={PROGRAM.jobs_name}"


PULL = {"name": "worker", "ready": False, "image": "i", "imageID": "", "restartCount": 0}
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes have a GPU",
}


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"conditions": [UNSCHEDULABLE]}, "Unschedulable: 0/3 nodes have a GPU"),
        (
            {
                "conditions": [{"type": "PodScheduled", "status": "True"}],
                "containerStatuses": [PULL | {"state": {"waiting": {"reason": "ImagePullBackOff"}}}],
            },
            "ImagePullBackOff",
        ),
        (
            {
                "initContainerStatuses": [
                    PULL | {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}}
                ]
            },
            "ErrImagePull: no such tag",
        ),
    ],
)
async def test_pod_that_does_not_start_says_why(
    server: Server, jobs: KubernetesJobs, status: dict[str, Any], why: str
) -> None:
    await jobs.start("node-1")
    server.objects["v1/pods", "models", "node-1"].patch({"status": {"phase": "Pending", **status}})
    assert await jobs.listed() == {"node-1": why}


async def test_secret_has_the_join_file_of_the_latest_run(server: Server, jobs: KubernetesJobs) -> None:
    await jobs.start("node-1")
    again = KubernetesJobs(replace(PROGRAM, join_file=replace(FILE, token="node-.2.mac")), POD)
    server["post /api/v1/namespaces/models/secrets"] << 409
    await again.start("node-2")
    await again.close()
    secret = server.objects["v1/secrets", "models", PROGRAM.jobs_name].last.raw
    assert JoinFile(**tomllib.loads(secret["stringData"]["join.toml"])).token == "node-.2.mac"


async def test_pod_that_an_earlier_attempt_made_is_started(server: Server, jobs: KubernetesJobs) -> None:
    server[f"post {PODS}"] << 409
    await jobs.start("node-1")
    assert await jobs.listed() == {"node-1": ""}


@pytest.mark.parametrize(("status", "reason"), [(403, "Forbidden"), (500, "Internal Server Error")])
async def test_refusal_is_named(server: Server, jobs: KubernetesJobs, status: int, reason: str) -> None:
    server[f"get {PODS}"] << status
    with pytest.raises(JobError, match=f"refuses to list pods: {status} {reason}"):
        await jobs.listed()


async def test_slow_list_is_given_up(server: Server, jobs: KubernetesJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_jobs, "_TIMEOUT_S", 0.2)
    never = asyncio.Event()
    server[f"get {PODS}"] << never.wait
    with pytest.raises(JobError, match="does not list pods"):
        await jobs.listed()


async def test_pod_of_a_lost_node_is_no_job(server: Server, jobs: KubernetesJobs) -> None:
    await jobs.start("node-1")
    leaving = {"status": {"phase": "Running"}, "metadata": {"deletionTimestamp": "2026-11-27T00:00:00Z"}}
    server.objects["v1/pods", "models", "node-1"].patch(leaving)
    assert await jobs.listed() == {}


async def test_expired_credentials_are_read_again(server: Server, jobs: KubernetesJobs) -> None:
    await jobs.start("node-1")
    refused = server[f"get {PODS}"] << 401
    with pytest.raises(JobError, match="401"):
        await jobs.listed()
    assert jobs._api is None
    assert refused


def test_manifest_that_cannot_be_completed_is_refused() -> None:
    with pytest.raises(CliError, match="cannot be completed"):
        KubernetesJobs(PROGRAM, {**POD, "metadata": {"labels": None}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: Deployment", "is no manifest of kind Pod"),
        ("kind: Pod\nspec: {containers: [{name: main}]}", "has no container named 'worker' in spec.containers"),
        (
            "kind: Pod\nspec: {containers: [{name: worker, args: [--threads, '4']}]}",
            "sets args of the container 'worker'",
        ),
        ("kind: Pod\nspec: {containers: [{name: a}, {name: worker, command: [sh]}]}", "sets command of the container"),
        ("{", "cannot be read"),
    ],
)
def test_wrong_manifest_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(text)
    with pytest.raises(CliError, match=message):
        read_manifest(file)


SLURM_FILE = JoinFile("10.0.0.5:7101", 'nats://nodes:"p$a`ss@10.0.0.5:4222', "s3://bucket/packs", "node-.1.mac")


def test_script_runs_the_program_with_the_join_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "torchrelay"
    program.write_text('#!/bin/sh\necho "$@"\ncat\n')
    program.chmod(0o755)
    monkeypatch.setattr(slurm_jobs, "script", lambda: str(program))
    script = SlurmJobs(JobProgram(SLURM_FILE, "torchrelay-test", "cpu", 2, labels=("zone=a",))).script("node-1")
    assert "--gpus" not in script and "#SBATCH --cpus-per-task=2\n" in script
    file = tmp_path / "script"
    file.write_text(script)
    ran = subprocess.run(["sh", str(file)], capture_output=True, text=True, check=True)
    arguments = "join - --worker-id node-1 --device cpu --threads 2 --label zone=a"
    assert ran.stdout == f"{arguments}\n{SLURM_FILE.as_toml()}"


def test_job_gets_a_gpu_unless_it_computes_on_cpus() -> None:
    assert "#SBATCH --gpus=1\n" in SlurmJobs(JobProgram(SLURM_FILE, "torchrelay-test")).script("node-1")


async def test_missing_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(JobError, match="squeue is not installed"):
        await SlurmJobs(JobProgram(SLURM_FILE, "torchrelay-test")).listed()


async def test_jobs_with_a_changed_comment_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(
        "#!/bin/sh\nprintf '7 RUNNING node-1 None\\n8 PENDING node-2 (Partition is down)\\n"
        "9 RUNNING moved by ops\\n10 RUNNING\\n'\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    jobs = await SlurmJobs(JobProgram(SLURM_FILE, "torchrelay-test")).listed()
    assert jobs == {"node-1": None, "node-2": "Slurm says (Partition is down)"}
