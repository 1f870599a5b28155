"""Jobs of Kubernetes: one pod per worker, made from a manifest of the operator's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import aiohttp
import yaml
from kubernetes_asyncio import client, config

from torchrelay.cli.errors import CliError
from torchrelay.cli.launchers.jobs import JobError, JobProgram

Manifest: TypeAlias = dict[str, Any]
Api: TypeAlias = Any  # client.CoreV1Api, which takes manifests; its annotations name models alone
_T = TypeVar("_T")

PLATFORM_LABEL = "torchrelay.dev/platform"
CONTAINER = "worker"
_FOLDER = "/etc/torchrelay"
_FILE = "join.toml"
_TIMEOUT_S = 15.0
_GRACE_S = 45  # above the grace of `torchrelay join`, and its shutdown
_ENDED = ("Succeeded", "Failed")
_MAX_FAILED = 8  # that stay for their logs
_UNAUTHORIZED, _NOT_FOUND, _CONFLICT = 401, 404, 409


class KubernetesJobs:
    """The platform's pods have its label; a pod's name is its worker's id. ``pod``: the manifest that all are made of.

    The join file is in a Secret. Pods that succeeded are deleted; the last that failed stay, for their logs.
    Raises ``CliError`` for a manifest that cannot be completed.
    """

    output = "`kubectl logs` of its pod"

    def __init__(self, program: JobProgram, pod: Manifest) -> None:
        self._program, self._pod = program, pod
        self._namespace = pod.get("metadata", {}).get("namespace", "default")
        self._api: Api = None  # None until the first call
        self._has_secret = False
        try:
            self.pod_of("node")
        except (AttributeError, KeyError, TypeError) as error:
            raise CliError(f"--pod cannot be completed: {error!r}", "leave out fields without a value") from error

    async def listed(self) -> Mapping[str, str | None]:
        async def ask(api: Api) -> Mapping[str, str | None]:
            selector = f"{PLATFORM_LABEL}={self._program.jobs_name}"
            pods = await api.list_namespaced_pod(self._namespace, label_selector=selector, _request_timeout=_TIMEOUT_S)
            # Those that are being deleted: on a node that is lost, that may take for ever.
            here = {pod.metadata.name: pod.status for pod in pods.items if pod.metadata.deletion_timestamp is None}
            phases = {name: status.phase if status else "Pending" for name, status in here.items()}
            succeeded = [name for name in here if phases[name] == "Succeeded"]
            failed = [name for name in here if phases[name] == "Failed"]
            for name in (*succeeded, *failed[:-_MAX_FAILED]):
                await self._delete(api, name)
            live = [name for name in here if phases[name] not in _ENDED]
            return {name: None if phases[name] == "Running" else _why_waiting(here[name]) for name in live}

        return await self._asked("list pods", ask)

    async def start(self, worker_id: str) -> None:
        async def ask(api: Api) -> None:
            if not self._has_secret:
                await self._write_secret(api)
                self._has_secret = True
            try:
                await api.create_namespaced_pod(self._namespace, self.pod_of(worker_id), _request_timeout=_TIMEOUT_S)
            except client.ApiException as error:
                if error.status != _CONFLICT:  # an earlier attempt, whose answer was lost, has made it
                    raise

        await self._asked(f"create pod {worker_id}", ask)

    async def stop(self, worker_id: str, *, at_once: bool = False) -> None:
        grace_s = 0 if at_once else None  # None: the pod's own
        await self._asked(f"delete pod {worker_id}", lambda api: self._delete(api, worker_id, grace_s))

    def pod_of(self, worker_id: str) -> Manifest:
        """Returns the manifest with the worker's name, its command, the join file, and memory for its parameters."""
        pod = deepcopy(self._pod)
        metadata = pod.setdefault("metadata", {})
        metadata |= {"name": worker_id, "namespace": self._namespace}
        metadata.setdefault("labels", {})[PLATFORM_LABEL] = self._program.jobs_name
        spec = pod["spec"]
        spec["restartPolicy"] = "Never"
        spec.setdefault("terminationGracePeriodSeconds", _GRACE_S)
        spec.setdefault("automountServiceAccountToken", False)
        container = next(each for each in spec["containers"] if each.get("name") == CONTAINER)
        arguments = self._program.arguments(worker_id, f"{_FOLDER}/{_FILE}")
        container["command"] = ["torchrelay", *arguments, "--host-id", worker_id]
        mounts, volumes = container.setdefault("volumeMounts", []), spec.setdefault("volumes", [])
        mounts.append({"name": "torchrelay-join", "mountPath": _FOLDER, "readOnly": True})
        volumes.append({"name": "torchrelay-join", "secret": {"secretName": self._program.jobs_name}})
        if not any(mount["mountPath"] == "/dev/shm" for mount in mounts):
            mounts.append({"name": "torchrelay-arena", "mountPath": "/dev/shm"})
            volumes.append({"name": "torchrelay-arena", "emptyDir": {"medium": "Memory"}})
        return pod

    async def _write_secret(self, api: Api) -> None:
        name = self._program.jobs_name
        secret = {"metadata": {"name": name}, "stringData": {_FILE: self._program.join_file.as_toml()}}
        try:
            await api.create_namespaced_secret(self._namespace, secret, _request_timeout=_TIMEOUT_S)
        except client.ApiException as error:
            if error.status != _CONFLICT:
                raise
            await api.patch_namespaced_secret(name, self._namespace, secret, _request_timeout=_TIMEOUT_S)

    async def _delete(self, api: Api, name: str, grace_s: int | None = None) -> None:
        options = {} if grace_s is None else {"grace_period_seconds": grace_s}
        try:
            await api.delete_namespaced_pod(name, self._namespace, **options, _request_timeout=_TIMEOUT_S)
        except client.ApiException as error:
            if error.status != _NOT_FOUND:
                raise

    async def close(self) -> None:
        if self._api is not None:
            await self._api.api_client.close()
            self._api = None

    async def _asked(self, what: str, ask: Callable[[Api], Awaitable[_T]]) -> _T:
        """The answer; reads the access first if need be. Raises ``JobError``."""
        try:
            if self._api is None:
                self._api = client.CoreV1Api(await _access())
            return await ask(self._api)
        except client.ApiException as error:
            if error.status == _UNAUTHORIZED:  # credentials that have expired; the next call reads them again
                await self.close()
            raise JobError(f"Kubernetes refuses to {what}: {error.status} {error.reason}") from error
        except (aiohttp.ClientError, OSError, config.ConfigException) as error:
            raise JobError(f"Kubernetes does not {what}: {error!r}") from error


def _why_waiting(status: Any) -> str:
    """Why a pod has no node, or why a container of it does not start; empty where nothing says it."""
    if status is None:
        return ""
    containers = (*(status.init_container_statuses or ()), *(status.container_statuses or ()))
    waiting = [each.state.waiting for each in containers if each.state is not None and each.state.waiting is not None]
    conditions = [each for each in status.conditions or () if each.type == "PodScheduled" and each.status == "False"]
    says = next(iter((*waiting, *conditions)), None)
    return "" if says is None else ": ".join(filter(None, (says.reason, says.message)))


def read_manifest(path: Path) -> Manifest:
    """The manifest of a pod with a container for the worker. Raises ``CliError``."""
    hint = "docs/operating.md has an example"
    try:
        manifest = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CliError(f"--pod {path} cannot be read: {error}", hint) from error
    if not isinstance(manifest, dict) or manifest.get("kind") != "Pod":
        raise CliError(f"--pod {path} is no manifest of kind Pod", hint)
    spec = manifest.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    named = {each.get("name"): each for each in containers or () if isinstance(each, dict)}
    if CONTAINER not in named:
        raise CliError(f"--pod {path} has no container named {CONTAINER!r} in spec.containers", hint)
    if given := [name for name in ("command", "args") if named[CONTAINER].get(name)]:
        set_by_up = f"--pod {path} sets {' and '.join(given)} of the container {CONTAINER!r}, which only `up` sets"
        raise CliError(set_by_up, "leave it out; `up` takes the flags of its workers, such as --threads")
    return manifest


async def _access() -> client.ApiClient:
    """The access of the pod in which this program runs, else of the kubeconfig's current context."""
    try:
        config.load_incluster_config()  # type: ignore[no-untyped-call]
    except config.ConfigException:
        await config.load_kube_config()
    return client.ApiClient()
