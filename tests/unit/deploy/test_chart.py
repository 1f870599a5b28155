"""The chart in every variant: valid for Kubernetes, consistent in itself, with settings that the services have."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import Chart
from helm_python.errors import HelmError

from tests.support.deploy import COMPOSE, DEPLOY, DISTRIBUTIONS, SETTINGS, environment_of, health_check_of, stages_of
from torchrelay.common.identity.credentials_file import main as write_credentials
from torchrelay.scheduler.policy.types import Pool, Role
from torchrelay.scheduler.service.external_scaler import selected_pool

CHART = DEPLOY / "chart"
Manifest = dict[str, Any]
SMALLEST: Manifest = {"secret": "torchrelay", "store": {"remoteUrl": "s3://bucket/packs"}}
PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "backends"}}}]
METADATA_SERVER = {"to": [{"ipBlock": {"cidr": "169.254.169.254/32"}}], "ports": [{"port": 80, "protocol": "TCP"}]}
TLS = {role: f"{role}-tls" for role in ("scheduler", "gateway", "store", "worker")}
SHAPE = {"role": "decode", "replicas": 3, "cpus": 8, "memoryMebibytes": 65536, "kvPoolMebibytes": 16384}
SCALED = {name: value for name, value in SHAPE.items() if name != "replicas"}
VARIANTS: dict[str, Manifest] = {
    "smallest": {},
    "standby": {"scheduler": {"replicas": 2}},
    "tls": {"tls": TLS},
    "metrics": {"metrics": {"enabled": True}},
    "service-monitor": {"metrics": {"enabled": True, "serviceMonitor": True}, "network": {"prometheus": PEERS}},
    "gpus": {
        "workers": [
            {**SHAPE, "name": "long", "role": "prefill", "gpus": 1, "nodeSelector": {"gpu": "h100"}},
            {**SHAPE, "name": "short", "gpus": 0},
            {"name": "plain", "role": "decode", "replicas": 1, "cpus": 4, "gpus": 1, "runtimeClassName": "nvidia"},
        ],
        "nodes": {"selector": {"pool": "models"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
    },
    "keda": {
        "scheduler": {"replicas": 2},
        "workers": [
            {**SCALED, "name": "long", "role": "prefill", "gpus": 1, "keda": {"maxReplicas": 4}},
            {**SCALED, "name": "short", "gpus": 0, "keda": {"minReplicas": 1, "maxReplicas": 9, "cooldownSeconds": 60}},
        ],
    },
    "keda-tls": {
        "workers": [
            {**SHAPE, "name": "long", "role": "prefill", "gpus": 1},
            {**SCALED, "name": "short", "gpus": 1, "keda": {"minReplicas": 0, "maxReplicas": 1}},
        ],
        "tls": {**TLS, "keda": "keda-tls"},
        "network": {"keda": PEERS},
    },
    "everything-else": {
        "image": {"repository": "registry.example/torchrelay", "tag": "1.2.3", "pullSecrets": ["pull"]},
        "graceSeconds": 60,
        "nats": {"prefix": "blue", "replicas": 3},
        "gateway": {"replicas": 5, "serviceType": "LoadBalancer", "settings": {"max_choices": 4}},
        "scheduler": {"settings": {"idle_timeout_s": 0.5, "replicate": False}},
        "store": {
            "remoteEndpoint": "https://s3.example",
            "credentialsSecret": "s3",
            "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/reader"}},
            "podLabels": {"azure.workload.identity/use": "true"},
            "arenaMebibytes": 65536,
            "diskGibibytes": 200,
        },
        "uploads": {
            "storageClass": "fast",
            "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/writer"}},
            "arenaMebibytes": 8192,
        },
        "network": {
            "clients": PEERS,
            **{server: {"port": 9999, "peers": PEERS} for server in ("nats", "redis", "database", "objectStore")},
            "egress": [{"to": PEERS, "ports": [{"port": 4317, "protocol": "TCP"}]}],
            "storeEgress": [METADATA_SERVER],
        },
    },
}
KEDA: list[Manifest] = VARIANTS["keda"]["workers"]
COMPONENTS = {"scheduler", "gateway", "store", "uploads", "worker"}
# The callers of docs/security.md, with the port of the called.
CALLS = {
    ("gateway", "scheduler", 7101),
    ("gateway", "uploads", 7103),
    ("gateway", "worker", 7201),
    ("scheduler", "worker", 7201),
    ("scheduler", "store", 7103),
    ("scheduler", "uploads", 7103),
    ("worker", "store", 7103),
    ("worker", "worker", 7201),
    ("worker", "worker", 7202),
    *((one, other, 7104) for one in ("store", "uploads") for other in ("store", "uploads")),
}


def merged(values: Manifest, other: Manifest) -> Manifest:
    """The values, with those of ``other`` in their place."""
    both = {name for name in values.keys() & other.keys() if isinstance(other[name], dict)}
    return {**values, **other, **{name: merged(values[name], other[name]) for name in both}}


def manifests(values: Manifest) -> tuple[Manifest, ...]:
    with Chart.load(CHART) as chart:
        texts = chart.render(merged(SMALLEST, values), name="demo", namespace="models")
    return tuple(each for text in texts.values() for each in yaml.safe_load_all(text) if each)


@cache
def rendered(variant: str) -> tuple[Manifest, ...]:
    return manifests(VARIANTS[variant])


def of_kind(variant: str, *kinds: str) -> list[Manifest]:
    return [each for each in rendered(variant) if each["kind"] in kinds]


def workloads(variant: str) -> list[Manifest]:
    return of_kind(variant, "Deployment", "DaemonSet", "StatefulSet")


def pods(variant: str) -> list[Manifest]:
    """The templates of the pods."""
    return [each["spec"]["template"] for each in workloads(variant)]


def component_of(pod: Manifest) -> str:
    component: str = pod["metadata"]["labels"]["app.kubernetes.io/component"]
    return component


def role_of(pod: Manifest) -> str:
    return "store" if component_of(pod) == "uploads" else component_of(pod)


def containers(pod: Manifest) -> list[Manifest]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def service_of(pod: Manifest) -> str:
    """The service in the pod, by its image."""
    (container,) = pod["spec"]["containers"]
    return str(container["image"].rpartition("/")[2].partition(":")[0])


def selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels", selector)
    assert wanted, "an empty selector"
    return bool(wanted.items() <= labels.items())


every_variant = pytest.mark.parametrize("variant", VARIANTS)


@every_variant
@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_manifests_are_valid(variant: str, version: str) -> None:
    for manifest in rendered(variant):
        if manifest["apiVersion"] not in ("monitoring.coreos.com/v1", "keda.sh/v1alpha1"):
            assert kubernetes_validate.validate(manifest, version, strict=True) == version
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered(variant)]
    assert len(names) == len(set(names))
    assert bool(of_kind(variant, "ServiceMonitor")) == (variant == "service-monitor")


@every_variant
def test_pods_are_restricted(variant: str) -> None:
    """The rules of the restricted profile, and a root that cannot be written to."""
    assert {component_of(pod) for pod in pods(variant)} == COMPONENTS
    accounts = {each["metadata"]["name"] for each in of_kind(variant, "ServiceAccount")}
    assert not of_kind(variant, "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
    for pod in pods(variant):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False and spec["serviceAccountName"] in accounts
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        kinds = {kind for volume in spec["volumes"] for kind in volume.keys() - {"name"}}
        assert kinds <= {"emptyDir", "secret", "persistentVolumeClaim"}
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
            assert all("hostPort" not in port for port in container.get("ports", []))


@every_variant
def test_selectors_match_pods(variant: str) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(variant)]
    for workload in workloads(variant):
        selector = workload["spec"]["selector"]
        assert [selects(selector, each) for each in labels].count(True) == 1
        assert selects(selector, workload["spec"]["template"]["metadata"]["labels"])
    for budget in of_kind(variant, "PodDisruptionBudget"):
        assert [selects(budget["spec"]["selector"], each) for each in labels].count(True) == 1
    for monitor in of_kind(variant, "ServiceMonitor"):
        watched = [
            each
            for each in of_kind(variant, "Service")
            if selects(monitor["spec"]["selector"], each["metadata"]["labels"])
        ]
        assert [port["name"] for each in watched for port in each["spec"]["ports"]] == ["metrics"]
    for service in of_kind(variant, "Service"):
        selected = [pod for pod in pods(variant) if selects(service["spec"]["selector"], pod["metadata"]["labels"])]
        assert selected
        for pod in selected:
            ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
            for port in service["spec"]["ports"]:
                assert ports[port["targetPort"]] == port["port"]


def variables(container: Manifest) -> dict[str, Any]:
    listed = [each["name"] for each in container["env"]]
    assert len(listed) == len(set(listed))
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def resolved(variables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Values as the kubelet and the Secret of the installation give them."""
    secret = {"admin-key": f"tra-{'a' * 32}", "cluster-key": "ab" * 32, "database-url": "postgresql://u:p@db/name"}
    fields = {"spec.nodeName": "node-1.example", "metadata.name": "pod-0", "status.podIP": "10.0.0.7"}
    for name, value in variables.items():
        if isinstance(value, str):
            yield name, value
        elif "fieldRef" in value:
            yield name, fields[value["fieldRef"]["fieldPath"]]
        else:
            assert value["secretKeyRef"]["name"] == "torchrelay"
            yield name, secret.get(value["secretKeyRef"]["key"], "redis://demo:6379")


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """A word of a container's command with its variables, as Kubernetes expands them."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word)


@every_variant
def test_environment_forms_valid_settings(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in pods(variant):
        with monkeypatch.context() as environment:
            for container in pod["spec"].get("initContainers", []):
                told = dict(resolved(variables(container)))
                assert told.keys() == {"TORCHRELAY_CLUSTER_KEY", "POD_NAME", "NODE_NAME"}
                environment.setenv("TORCHRELAY_CLUSTER_KEY", told["TORCHRELAY_CLUSTER_KEY"])
                command = [expanded(word, told) for word in container["command"]]
                written = [str(tmp_path / "settings.toml") if word.endswith(".toml") else word for word in command]
                environment.setattr("sys.argv", written)
                write_credentials()
                environment.delenv("TORCHRELAY_CLUSTER_KEY")
            (container,) = pod["spec"]["containers"]
            ours = {
                name: value for name, value in resolved(variables(container)) if not name.startswith("TORCHRELAY_TLS_")
            }
            if configuration := ours.pop("TORCHRELAY_CONFIG", ""):
                assert configuration in command
                environment.setenv("TORCHRELAY_CONFIG", str(tmp_path / "settings.toml"))
            settings = SETTINGS[service_of(pod)]
            assert {name.removeprefix("TORCHRELAY_").lower() for name in ours} <= settings.model_fields.keys()
            for name, value in ours.items():
                environment.setenv(name, value)
            settings()


@every_variant
def test_pods_have_tls_files_and_time_to_stop(variant: str) -> None:
    for pod in pods(variant):
        (container,) = pod["spec"]["containers"]
        files = {value for name, value in variables(container).items() if name.startswith("TORCHRELAY_TLS_")}
        mounted = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "tls"]
        secrets = [each["secret"]["secretName"] for each in pod["spec"]["volumes"] if each["name"] == "tls"]
        role = role_of(pod)
        expected = (3, ["/tls"], [f"{role}-tls"]) if variant in ("tls", "keda-tls") else (0, [], [])
        assert (len(files), mounted, secrets) == expected
        grace_s, told = pod["spec"]["terminationGracePeriodSeconds"], variables(container)
        assert float(told.get("TORCHRELAY_GRACE_S", 0)) + 15 <= grace_s
        assert float(told.get("TORCHRELAY_STOP_LIMIT_S", 0)) < grace_s


@every_variant
def test_addresses_and_ports_agree(variant: str) -> None:
    services = {each["metadata"]["name"]: each["spec"]["ports"] for each in of_kind(variant, "Service")}
    for pod in pods(variant):
        (container,) = pod["spec"]["containers"]
        told = variables(container)
        for name in (name for name in told if name.endswith("_ADDRESS")):
            host, _, port = told[name].removeprefix("dns:///").partition(":")
            assert int(port) in [each["port"] for each in services[host]]
        listening = {int(told[name]) for name in told if name.endswith("_PORT")}
        assert {port["containerPort"] for port in container["ports"]} == listening
        if component_of(pod) == "gateway":
            assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
        else:
            check = health_check_of(stages_of(service_of(pod))[-1])
            assert container["startupProbe"]["exec"]["command"] == check
            assert container["livenessProbe"]["exec"]["command"] == check
            assert environment_of(stages_of(service_of(pod))[-1])["TORCHRELAY_PORT"] == told["TORCHRELAY_PORT"]
    headless = {
        each["metadata"]["name"] for each in of_kind(variant, "Service") if each["spec"].get("clusterIP") == "None"
    }
    has_standby = VARIANTS[variant].get("scheduler", {}).get("replicas", 1) > 1
    assert ("demo-schedulers" in headless) == has_standby, "the name has the addresses of all schedulers"
    local = [each for each in of_kind(variant, "Service") if each["spec"].get("internalTrafficPolicy") == "Local"]
    assert [each["metadata"]["name"] for each in local] == ["demo-store"]


def permits(rules: list[Manifest], direction: str, labels: Mapping[str, str], port: int) -> bool:
    """Whether one of the rules names a pod of the installation with these labels, and the port."""
    return any(
        any(each["port"] == port for each in rule["ports"])
        and any(selects(peer["podSelector"], labels) for peer in rule.get(direction, []) if "podSelector" in peer)
        for rule in rules
    )


@every_variant
def test_policies_permit_calls_between_services_and_no_others(variant: str) -> None:
    labels = {component_of(pod): pod["metadata"]["labels"] for pod in pods(variant)}
    policies = of_kind(variant, "NetworkPolicy")
    assert all(policy["spec"]["policyTypes"] == ["Ingress", "Egress"] for policy in policies)

    def rules(component: str, kind: str) -> list[Manifest]:
        chosen = [each["spec"] for each in policies if selects(each["spec"]["podSelector"], labels[component])]
        assert chosen
        return [rule for spec in chosen for rule in spec.get(kind, [])]

    ports = {port for *_, port in CALLS}
    everything = [(one, other, port) for one in labels for other in labels for port in ports]
    assert {call for call in everything if permits(rules(call[0], "egress"), "to", labels[call[1]], call[2])} == CALLS
    assert {
        call for call in everything if permits(rules(call[1], "ingress"), "from", labels[call[0]], call[2])
    } == CALLS
    # Rules without peers are for clients and servers outside, and of our ports for the gateway's and the metrics'.
    for component in labels:
        opened = {each["port"] for rule in rules(component, "ingress") if "from" not in rule for each in rule["ports"]}
        own = {"gateway": {7301, 8080}, "scheduler": {7102} if variant == "keda" else set()}
        assert opened <= {9464, *own.get(component, set())}
        outside = {each["port"] for rule in rules(component, "egress") if "to" not in rule for each in rule["ports"]}
        servers = {"gateway": {6379, 5432}, "store": {443}, "uploads": {443}}.get(component, set())
        assert outside == ({53} if variant == "everything-else" else {53, 4222, *servers})


@every_variant
def test_secrets_reach_only_their_services(variant: str) -> None:
    """The cluster key reaches the scheduler, and otherwise only containers that end before a service starts."""
    for pod in pods(variant):
        (container,) = pod["spec"]["containers"]
        references = [
            value["secretKeyRef"]["key"] for value in variables(container).values() if "secretKeyRef" in value
        ]
        role = role_of(pod)
        own = {"scheduler": {"cluster-key"}, "gateway": {"admin-key", "database-url", "redis-url"}}
        assert set(references) == {f"{role}-nats-url"} | own.get(role, set())
        with_credentials = variant == "everything-else" and role == "store"
        assert container.get("envFrom", []) == ([{"secretRef": {"name": "s3"}}] if with_credentials else [])


@every_variant
def test_workers_map_arena_of_their_nodes_store(variant: str) -> None:
    (volume,), (claim,) = of_kind(variant, "PersistentVolume"), of_kind(variant, "PersistentVolumeClaim")
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["claimRef"] == {"name": claim["metadata"]["name"], "namespace": "models"}
    assert volume["spec"]["hostPath"]["path"] == "/dev/shm"
    mounts = {}
    for pod in pods(variant):
        if component_of(pod) in ("store", "worker"):
            (container,) = pod["spec"]["containers"]
            (mount,) = (each for each in container["volumeMounts"] if each["name"] == "arena")
            (source,) = (each for each in pod["spec"]["volumes"] if each["name"] == "arena")
            assert source["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
            mounts[component_of(pod)] = mount
            told = variables(container)["TORCHRELAY_HOST_ID"]
            assert told == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert mounts["worker"] == {**mounts["store"], "readOnly": True}
    assert mounts["store"]["subPath"] == "torchrelay-models-demo"


def named(variant: str, name: str, kind: str) -> Manifest:
    (manifest,) = (each for each in of_kind(variant, kind) if each["metadata"]["name"] == name)
    return manifest


INGRESS: Manifest = {"ingress": {"certificateSecret": "certificate"}, "network": {"clients": PEERS}}


def test_ingress_stands_before_the_gateways(tmp_path: Path) -> None:
    """With a certificate HAProxy alone calls the gateways, with the configuration that compose has, too."""
    made = manifests(INGRESS)
    for manifest in made:
        assert kubernetes_validate.validate(manifest, "1.33", strict=True) == "1.33"
    by_kind = {each["kind"]: each for each in made if each["metadata"]["name"] == "demo-ingress"}
    pod = by_kind["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    told = {each["name"]: each["value"] for each in container["env"]}
    services = {each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "Service"}
    for name in ("GATEWAY_REST", "GATEWAY_GRPC"):
        host, _, port = told[name].partition(":")
        assert int(port) in [each["port"] for each in services[host]["ports"]]
    assert [each["containerPort"] for each in container["ports"]] == [int(told["INGRESS_PORT"])]
    assert selects(services["demo-ingress"]["selector"], pod["metadata"]["labels"])
    assert services["demo-ingress"]["externalTrafficPolicy"] == "Local", "limits are those of a client's address"
    configuration = by_kind["ConfigMap"]["data"]["haproxy.cfg"]
    assert configuration == (CHART / "files" / "haproxy.cfg").read_text()
    assert (DEPLOY / COMPOSE["configs"]["ingress"]["file"]).read_text() == configuration
    assert set(re.findall(r"\$\{(\w+)", configuration)) == told.keys()
    assert COMPOSE["services"]["ingress"]["environment"].keys() <= told.keys()
    assert container["image"] == COMPOSE["services"]["ingress"]["image"]
    policies = {each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "NetworkPolicy"}
    (to_gateway,) = policies["demo-gateway"]["ingress"]
    assert [selects(peer["podSelector"], pod["metadata"]["labels"]) for peer in to_gateway["from"]] == [True]
    assert policies["demo-ingress"]["ingress"] == [{"ports": [{"port": 8443, "protocol": "TCP"}], "from": PEERS}]
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["spec"]["securityContext"]["runAsNonRoot"]
    assert not [each for each in rendered("smallest") if each["metadata"]["name"].endswith("-ingress")]


LIMITS: dict[str, list[Manifest]] = {
    "keda": [
        {"minReplicaCount": 0, "maxReplicaCount": 4},
        {"minReplicaCount": 1, "maxReplicaCount": 9, "cooldownPeriod": 60},
    ],
    "keda-tls": [{"minReplicaCount": 0, "maxReplicaCount": 1}],
}


@every_variant
def test_keda_asks_the_scheduler_how_many_pods_each_deployment_should_have(variant: str) -> None:
    deployments = {each["metadata"]["name"]: each for each in of_kind(variant, "Deployment")}
    scaled = [each["spec"] for each in of_kind(variant, "ScaledObject")]
    names = [each["scaleTargetRef"]["name"] for each in scaled]
    assert {name for name, each in deployments.items() if "replicas" not in each["spec"]} == set(names)
    for spec, limits in zip(scaled, LIMITS.get(variant, []), strict=True):
        assert spec | limits == spec
        (trigger,) = spec["triggers"]
        assert trigger["type"] == "external-push"
        assert trigger["metadata"]["scalerAddress"] == "demo-scheduler.models:7102"
        deployment = deployments[spec["scaleTargetRef"]["name"]]
        told = variables(deployment["spec"]["template"]["spec"]["containers"][0])
        assert selected_pool(trigger["metadata"]) == Pool(1, Role[told["TORCHRELAY_ROLES"].upper()])


@pytest.mark.parametrize("variant", LIMITS)
def test_keda_reaches_the_schedulers_port_for_it_alone(variant: str) -> None:
    has_tls = variant == "keda-tls"
    pod = named(variant, "demo-scheduler", "Deployment")["spec"]["template"]
    told = variables(pod["spec"]["containers"][0])
    assert (told["TORCHRELAY_KEDA_PORT"], told["TORCHRELAY_POOL_MODE"]) == ("7102", "follow")
    service = named(variant, "demo-scheduler", "Service")
    assert {"name": "keda", "port": 7102, "targetPort": "keda"} in service["spec"]["ports"]
    policy = named(variant, "demo-scheduler", "NetworkPolicy")
    (rule,) = (rule for rule in policy["spec"]["ingress"] if {"port": 7102, "protocol": "TCP"} in rule["ports"])
    assert len(rule["ports"]) == 1 and rule.get("from", []) == (PEERS if has_tls else [])
    secrets = {"caCert": "ca.crt", "tlsClientCert": "tls.crt", "tlsClientKey": "tls.key"}
    shown = [{"parameter": name, "name": "keda-tls", "key": key} for name, key in secrets.items()]
    authentications = of_kind(variant, "TriggerAuthentication")
    assert [each["spec"]["secretTargetRef"] for each in authentications] == ([shown] if has_tls else [])
    for each in of_kind(variant, "ScaledObject"):
        (trigger,) = each["spec"]["triggers"]
        assert ("enableTLS" in trigger["metadata"]) == has_tls
        used = [{"name": each["metadata"]["name"]} for each in authentications]
        assert [trigger["authenticationRef"]] == used if used else "authenticationRef" not in trigger


def immutable_fields(manifest: Manifest) -> Any:
    """The fields of which the API server refuses a change, or, of volumes, most changes."""
    spec = manifest.get("spec", {})
    match manifest["kind"]:
        case "Deployment" | "DaemonSet":
            return spec["selector"]
        case "StatefulSet":
            return {name: value for name, value in spec.items() if name not in ("replicas", "template")}
        case "PersistentVolume" | "PersistentVolumeClaim":
            return spec
        case "Service":
            return spec.get("clusterIP")
    return None


@every_variant
def test_upgrades_change_no_immutable_field(variant: str) -> None:
    """Values can change after the installation, but for the disk of uploads, whose size and class a claim keeps."""
    disk = {name: VARIANTS[variant].get("uploads", {}).get(name) for name in ("storageClass", "diskGibibytes")}
    before = manifests({"uploads": {name: value for name, value in disk.items() if value}})
    after = {(each["kind"], each["metadata"]["name"]): immutable_fields(each) for each in rendered(variant)}
    fields = {(each["kind"], each["metadata"]["name"]): immutable_fields(each) for each in before}
    kept = fields.keys() & after.keys()
    assert {kind for kind, _ in kept} >= {"Deployment", "DaemonSet", "StatefulSet", "PersistentVolumeClaim", "Service"}
    assert {name: fields[name] for name in kept} == {name: after[name] for name in kept}


@every_variant
def test_roll_outs_need_no_free_gpu(variant: str) -> None:
    for deployment in of_kind(variant, "Deployment"):
        limits = [each["resources"]["limits"] for each in deployment["spec"]["template"]["spec"]["containers"]]
        if any("nvidia.com/gpu" in each for each in limits):
            strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
            assert deployment["spec"]["strategy"] == strategy


@every_variant
def test_cached_packs_have_a_size_that_the_node_reserves(variant: str) -> None:
    (pod,) = (each for each in pods(variant) if component_of(each) == "store")
    (container,) = pod["spec"]["containers"]
    (data,) = (each["emptyDir"] for each in pod["spec"]["volumes"] if each["name"] == "data")
    cache_bytes = int(variables(container)["TORCHRELAY_DISK_CACHE_BYTES"])
    size_bytes, reserved_bytes = (
        int(size.removesuffix("Gi")) << 30
        for size in (data["sizeLimit"], container["resources"]["requests"]["ephemeral-storage"])
    )
    gibibytes = VARIANTS[variant].get("store", {}).get("diskGibibytes", 10)
    assert gibibytes << 30 == cache_bytes < size_bytes <= reserved_bytes
    (uploads,) = (each for each in workloads(variant) if each["kind"] == "StatefulSet")
    (claim,) = uploads["spec"]["volumeClaimTemplates"]
    told = variables(uploads["spec"]["template"]["spec"]["containers"][0])
    claimed_bytes = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) << 30
    assert int(told["TORCHRELAY_DISK_CACHE_BYTES"]) * 2 == claimed_bytes, "the other half is for uploads"


def test_stores_have_identities_of_their_own_for_the_object_store() -> None:
    accounts = {each["metadata"]["name"]: each["metadata"] for each in of_kind("everything-else", "ServiceAccount")}
    roles = {"store": "reader", "uploads": "writer"}
    for pod in pods("everything-else"):
        component = component_of(pod)
        annotations = accounts[pod["spec"]["serviceAccountName"]].get("annotations", {})
        role = {"eks.amazonaws.com/role-arn": f"arn:aws:iam::1:role/{roles[component]}"} if component in roles else {}
        assert annotations == role
        assert ("azure.workload.identity/use" in pod["metadata"]["labels"]) == (component == "store")
        policies = [
            each["spec"]
            for each in of_kind("everything-else", "NetworkPolicy")
            if selects(each["spec"]["podSelector"], pod["metadata"]["labels"])
        ]
        reaches = any(METADATA_SERVER in each["egress"] for each in policies)
        assert reaches == (component in roles), "the metadata server gives its caller the node's identity"


def scrape_labels(component: str, node: str) -> dict[str, str]:
    """The labels of a pod's series, which the Prometheus operator gives them for the ServiceMonitor."""
    (monitor,) = (each["spec"] for each in of_kind("service-monitor", "ServiceMonitor"))
    (service,) = (
        each["metadata"]
        for each in of_kind("service-monitor", "Service")
        if selects(monitor["selector"], each["metadata"]["labels"])
    )
    (endpoint,) = monitor["endpoints"]
    discovered = {"__meta_kubernetes_pod_node_name": node}
    return {
        "job": service["labels"].get(monitor.get("jobLabel"), service["name"]),
        "instance": f"10.1.0.{len(component)}:9464",
        "pod": f"demo-{component}-0",
        **{rule["targetLabel"]: discovered[rule["sourceLabels"][0]] for rule in endpoint.get("relabelings", [])},
    }


def series(name: str, labels: Mapping[str, str]) -> str:
    return f"{name}{{{', '.join(f'{label}={json.dumps(value)}' for label, value in labels.items())}}}"


def test_rules_see_services_that_are_scraped_by_the_service_monitor(tmp_path: Path) -> None:
    """A worker that does not answer, a gateway that has no pod, and the power of a node's GPU."""
    scheduler, worker = scrape_labels("scheduler", "node-1"), scrape_labels("worker", "node-2")
    exporter = {"job": "dcgm", "instance": "10.1.0.99:9400", "gpu": "0", "Hostname": "node-2"}
    given = {
        series("up", scheduler): "1x20",
        series("target_info", scheduler | {"service_name": "scheduler"}): "1x20",
        series("up", worker): "0x20",
        series("torchrelay_worker_positions_total", worker | {"phase": "decode"}): "0+6000x20",
        series("DCGM_FI_DEV_POWER_USAGE", exporter): "300x20",
    }
    down = {"summary": f"{worker['instance']} does not answer Prometheus"}
    alerts = {
        "TorchrelayServiceDown": [{"exp_labels": {"severity": "critical", **worker}, "exp_annotations": down}],
        "TorchrelayServiceMissing": [
            {
                "exp_labels": {"severity": "critical", "job": "torchrelay", "service_name": "gateway"},
                "exp_annotations": {"summary": "Prometheus finds no gateway"},
            }
        ],
    }
    power = {"labels": series("torchrelay:joules_per_position", {"host": "node-2"}), "value": 3}
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in given.items()],
        "alert_rule_test": [
            {"eval_time": "10m", "alertname": name, "exp_alerts": expected} for name, expected in alerts.items()
        ],
        "promql_expr_test": [{"expr": "torchrelay:joules_per_position", "eval_time": "10m", "exp_samples": [power]}],
    }
    rules = [str(DEPLOY / "monitoring" / "rules.yaml")]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": rules, "tests": [case]}))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_gpu_shapes_and_nodes() -> None:
    long, short, plain = (each["spec"] for each in pods("gpus") if component_of(each) == "worker")
    assert long["nodeSelector"] == {"pool": "models", "gpu": "h100"} and short["nodeSelector"] == {"pool": "models"}
    (store,) = (each["spec"] for each in pods("gpus") if component_of(each) == "store")
    assert store["nodeSelector"] == {"pool": "models"} and store["tolerations"] == long["tolerations"]
    assert long["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert variables(long["containers"][0])["TORCHRELAY_DEVICE"] == "cuda:0"
    assert variables(short["containers"][0])["TORCHRELAY_DEVICE"] == "cpu"
    assert "nvidia.com/gpu" not in short["containers"][0]["resources"]["limits"]
    assert plain["runtimeClassName"] == "nvidia" and "runtimeClassName" not in long
    cpu = next(each["spec"] for each in pods("smallest") if component_of(each) == "worker")
    for spec, memory, kv_pool_bytes in (
        (long, "65536Mi", 16 << 30),
        (plain, "16384Mi", 0),
        (cpu, "4096Mi", 256 << 20),
    ):
        (container,) = spec["containers"]
        assert container["resources"]["limits"]["memory"] == memory
        assert int(variables(container)["TORCHRELAY_KV_POOL_BYTES"]) == kv_pool_bytes


def test_settings_of_values_reach_services() -> None:
    told = {component_of(pod): variables(pod["spec"]["containers"][0]) for pod in pods("everything-else")}
    assert told["scheduler"]["TORCHRELAY_IDLE_TIMEOUT_S"] == "0.5"
    assert told["scheduler"]["TORCHRELAY_REPLICATE"] == "false"
    assert told["gateway"]["TORCHRELAY_MAX_CHOICES"] == "4"
    images = {container["image"] for pod in pods("everything-else") for container in containers(pod)}
    assert images == {f"registry.example/torchrelay/{name}:1.2.3" for name in SETTINGS}


def test_chart_version_is_that_of_images() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == DISTRIBUTIONS["torchrelay-gateway"].version


@pytest.mark.parametrize(("part", "name"), [*zip(TLS, ("scheduler", "gateway", "param-store", "decode"), strict=True)])
def test_values_take_all_settings_that_chart_does_not_set(part: str, name: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    names = set(schema["$defs"][f"{part}Settings"]["propertyNames"]["enum"])
    assert names <= SETTINGS[name].model_fields.keys()
    for variant in ("tls", "service-monitor", "everything-else"):
        for pod in pods(variant):
            if role_of(pod) == part:
                given = {name.removeprefix("TORCHRELAY_").lower() for name in variables(pod["spec"]["containers"][0])}
                assert not names & given - {"idle_timeout_s", "replicate", "max_choices"}


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"scheduler": {"replicas": 4}}, "/scheduler/replicas"),
        ({"secret": ""}, "/secret"),
        ({"store": {"remoteUrl": "file:///data"}}, "/store/remoteUrl"),
        ({"workers": [{**SHAPE, "name": "short", "gpus": 0}]}, "/workers"),
        ({"tls": {"gateway": "gateway-tls"}}, "/tls"),
        ({"metrics": {"serviceMonitor": True}}, "/metrics"),
        ({"gateway": {"settings": {"max_choises": 4}}}, "invalid propertyName 'max_choises'"),
        ({"gateway": {"settings": {"database_url": "sqlite:///l.db"}}}, "invalid propertyName 'database_url'"),
        ({"gatway": {}}, "gatway"),
        ({"workers": [*KEDA, {**SHAPE, "name": "more", "gpus": 0}]}, "short has keda, so it must be the only shape"),
        ({"workers": [{**each, "replicas": 1} for each in KEDA]}, "/workers/0"),
        ({"workers": [{**each, "keda": {"minReplicas": 3, "maxReplicas": 2}} for each in KEDA]}, "keda.minReplicas of"),
        ({"workers": KEDA, "scheduler": {"settings": {"pool_mode": "advise"}}}, "scheduler.settings.pool_mode: leave"),
        ({"workers": KEDA, "tls": TLS}, "tls.keda: name the Secret"),
        ({"tls": {"keda": "keda-tls"}}, "/tls"),
    ],
)
def test_values_that_cannot_work_are_refused(values: Manifest, fault: str) -> None:
    with Chart.load(CHART) as chart, pytest.raises(HelmError) as refused:
        chart.render(merged(SMALLEST, values), name="demo", namespace="models")
    assert fault in str(refused.value)
