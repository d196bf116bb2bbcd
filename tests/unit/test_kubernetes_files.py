"""The manifests of deploy/kubernetes: parts that belong together are there, and every command line is understood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from quire_server.commands import health
from quire_server.flags import ENGINE, parse_flags
from support.documents import section, text

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
VERSIONS = {
    "Service": "v1",
    "Deployment": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "ScaledObject": "keda.sh/v1alpha1",
}


class Strict(yaml.SafeLoader):
    """No key twice, which `kubectl` refuses and YAML's reader for Python does not."""


def _mapping(loader: Strict, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    assert len(keys) == len(set(keys)), keys
    return loader.construct_mapping(node, deep=True)


Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
OBJECTS: list[dict[str, Any]] = [
    each for file in FILES for each in yaml.load_all(file.read_text(encoding="utf-8"), Loader=Strict)
]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in OBJECTS if each["kind"] == kind}


DEPLOYMENTS = of_kind("Deployment")


def pod(name: str) -> dict[str, Any]:
    return dict(DEPLOYMENTS[name]["spec"]["template"]["spec"])


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["containers"]
    return dict(only)


def labels(name: str) -> dict[str, str]:
    return dict(DEPLOYMENTS[name]["spec"]["template"]["metadata"]["labels"])


def test_every_object_is_of_a_known_kind_and_named_once() -> None:
    assert [file.name for file in FILES] == ["autoscaling.yaml", "fronts.yaml", "nodes.yaml"]
    assert all(each["apiVersion"] == VERSIONS[each["kind"]] for each in OBJECTS)
    names = [(each["kind"], each["metadata"]["name"]) for each in OBJECTS]
    assert len(names) == len(set(names))
    assert {each["kind"] for each in OBJECTS} == set(VERSIONS)
    assert set(DEPLOYMENTS) == {"quire-front", "quire-node"}


def test_every_selector_finds_the_pods_of_one_deployment() -> None:
    found = []
    for each in OBJECTS:
        selector = each["spec"].get("selector")
        if selector is None:
            continue
        wanted = selector if each["kind"] == "Service" else selector["matchLabels"]
        chosen = [name for name in DEPLOYMENTS if wanted.items() <= labels(name).items()]
        assert len(chosen) == 1, each["metadata"]
        found.append((each["kind"], chosen[0]))
    budgets = {("PodDisruptionBudget", name) for name in DEPLOYMENTS}
    assert {*budgets, ("PodMonitor", "quire-front"), ("Service", "quire-front"), ("Service", "quire-node")} <= set(
        found
    )


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_pod_has_what_it_names(name: str) -> None:
    spec, own = pod(name), container(name)
    assert spec["enableServiceLinks"] is False, "a service called quire sets QUIRE_PORT in every pod beside it"
    assert spec["securityContext"]["runAsNonRoot"] is True
    volumes = {each["name"]: each for each in spec["volumes"]}
    mounts = {each["mountPath"]: volumes[each["name"]] for each in own["volumeMounts"]}
    assert set(volumes) == {each["name"] for each in own["volumeMounts"]}
    assert mounts["/links"]["secret"]["defaultMode"] & 0o007 == 0, "a key that all may read is refused"
    probes = [own[probe]["exec"]["command"] for probe in ("startupProbe", "readinessProbe") if "exec" in own[probe]]
    for words in (own["args"], *probes):
        for path in (word.partition("=")[2] for word in words if "=/" in word):
            folder, _, file = path.rpartition("/")
            assert folder == "/links"
            assert file in section("docs/nodes.md", "Two machines"), "which says how it is made"
            assert f"--from-file={file}" in (FOLDER / "nodes.yaml").read_text(encoding="utf-8")
    ports = {each["name"]: each["containerPort"] for each in own["ports"]}
    for service in of_kind("Service").values():
        if service["spec"]["selector"].items() <= labels(name).items():
            assert all(each["targetPort"] in ports for each in service["spec"]["ports"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if "httpGet" in own.get(probe, {}):
            assert own[probe]["httpGet"]["port"] in ports


def flags(name: str) -> Any:
    """The settings of a container's command line."""
    program, *argv = container(name)["command"][1:] + container(name)["args"]
    return parse_flags(argv, ENGINE if program == "engine" else "quire serve")


def test_the_command_lines_are_understood_and_fit_together() -> None:
    node, front = (flags(name) for name in ("quire-node", "quire-front"))
    service = of_kind("Service")["quire-nodes"]["spec"]
    assert service["clusterIP"] == "None"
    port = container("quire-node")["ports"][0]["containerPort"]
    assert node.listen == f"0.0.0.0:{port}"
    assert front.engines == (f"dns:quire-nodes:{service['ports'][0]['port']}",)
    assert front.port == container("quire-front")["ports"][0]["containerPort"]
    for name, settings in (("quire-node", node), ("quire-front", front)):
        hook = container(name).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert pod(name)["terminationGracePeriodSeconds"] >= settings.drain_timeout + float(hook[1]) + 10
        assert settings.engine_tls_ca is not None
        assert settings.model == "/model"
    assert container("quire-front")["lifecycle"]["preStop"]["exec"]["command"][0] == "sleep"
    words = container("quire-node")["startupProbe"]["exec"]["command"]
    assert words[:2] == ["quire", "health"]
    assert f"--node=127.0.0.1:{port}" in words
    assert container("quire-node")["readinessProbe"]["exec"]["command"] == words


def test_a_node_that_does_not_answer_fails_its_probe(capsys: pytest.CaptureFixture[str]) -> None:
    words = container("quire-node")["startupProbe"]["exec"]["command"][2:]
    assert health.run(words) == 1
    assert "--engine-tls-key /links/peer.key: No such file" in capsys.readouterr().err
    assert health.run(["--node", "127.0.0.1:1", "--timeout", "2"]) == 1
    assert "127.0.0.1:1: " in capsys.readouterr().err


def test_nodes_are_scaled_by_a_metric_that_there_is() -> None:
    (scaled,) = of_kind("ScaledObject").values()
    assert scaled["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "quire-node"}
    assert "replicas" not in DEPLOYMENTS["quire-node"]["spec"], "or each `kubectl apply` would undo the scaling"
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert queries == ["sum(quire_replicas_wanted)", "max(quire_replicas_wanted_at_least)"]
    assert {trigger["metadata"]["threshold"] for trigger in scaled["spec"]["triggers"]} == {"1"}
    for name in ("quire_replicas_wanted", "quire_replicas_wanted_at_least"):
        assert f"| `{name}` |" in text("docs/metrics.md")
    assert 1 < scaled["spec"]["minReplicaCount"] < scaled["spec"]["maxReplicaCount"]
    (policy,) = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]["policies"]
    assert policy["periodSeconds"] >= pod("quire-node")["terminationGracePeriodSeconds"]
    (monitor,) = of_kind("PodMonitor").values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {each["name"] for each in container("quire-front")["ports"]}
    assert endpoint["path"] == "/metrics"
