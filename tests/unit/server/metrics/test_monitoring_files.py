"""The dashboard and the alert rules speak of metrics that exist, and the alerts fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quire_server.engine.replicas import ReplicaRow
from quire_server.metrics.alert_rules import RULES
from quire_server.metrics.gpu_use import GpuReader, GpuUse
from quire_server.metrics.metrics import Metrics
from support.exposition import busy

CONFIGS = Path(__file__).parents[4] / "configs"
REPLICA = ReplicaRow(
    name="0", state="ready", draining=False, streams=1, prompt_tokens_ahead=0, restarts=0, numerics="", pid=None
)


class SeenGpu(GpuReader):
    """A GPU that this machine need not have."""

    def read(self) -> GpuUse:
        return GpuUse(busy=0.5, memory=1)


# Made by Prometheus itself.
BUILT_IN = {"up", "ALERTS"}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


def exported() -> dict[str, set[str]]:
    """Sample names with their labels, as a fresh server exports them."""
    metrics = Metrics("tiny")
    metrics.http_request("/health", "GET", 200, 0.1)
    metrics.replica_rows = lambda: [REPLICA]
    metrics.replicas.decided("load")
    metrics.replicas.answered("0", 0.1, 0.2)
    metrics.observe_step(busy(total_rank_seconds=(0.1, 0.2), seen_seconds=0.02, predicted_seconds=0.02))
    metrics.gpu.reader = SeenGpu()
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


def expressions() -> Iterator[tuple[str, str]]:
    dashboard = json.loads((CONFIGS / "grafana" / "quire.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"].split("(")[1].split(",")[0]
    rules = yaml.safe_load((CONFIGS / "prometheus" / "alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def test_every_metric_and_label_referred_to_exists():
    names = exported()
    seen = 0
    for title, expression in expressions():
        bare = re.sub(r'"[^"]*"', '""', expression)
        for name, selector in re.findall(r"\b((?:quire|process|vllm)[a-z0-9_:]*|up)\b(?:\{([^}]*)\})?", bare):
            seen += 1
            if name in BUILT_IN:
                continue
            assert name in names, f"{title}: no metric {name}"
            for label in re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector):
                assert label in names[name] | {"job", "instance"}, f"{title}: {name} has no label {label}"
        grouped = {
            label for labels in re.findall(r"by \(([^)]*)\)", bare) for label in labels.replace(" ", "").split(",")
        }
        known = set().union(*names.values()) | {"le", "job", "instance"}
        assert grouped <= known, f"{title}: {grouped - known}"
    assert seen > 50


def test_the_dashboard_is_complete():
    dashboard = json.loads((CONFIGS / "grafana" / "quire.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) >= 16
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(panel["description"] and panel["targets"] for panel in panels)
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) < 24


def test_the_dashboards_alerts_are_those_of_prometheus():
    """All but the one that only somebody outside of the server can notice."""
    groups = yaml.safe_load((CONFIGS / "prometheus" / "alerts.yml").read_text())["groups"]
    files = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    assert files.pop("QuireDown")
    assert [rule.name for rule in RULES] == list(files)
    for rule in RULES:
        told = files[rule.name]
        seconds = {"s": 1, "m": 60}
        wanted = told.get("for", "0s")
        assert rule.for_seconds == int(wanted[:-1]) * seconds[wanted[-1]], rule.name
        assert rule.severity == told["labels"]["severity"], rule.name
        assert rule.threshold == float(told["expr"].rpartition("> ")[2]), rule.name
        assert rule.advice == told["annotations"]["description"], rule.name
        said = re.sub(r"{{ \$labels.model_name }}: | \({{ \$labels.reason }}\)", "", told["annotations"]["summary"])
        words = [part.strip() for part in re.split(r"{[^{}]*}%?(?: s\b)?|{{ \$value[^}]*}}", said)]
        assert words == [part.strip() for part in re.split(r"{[^}]*}%?(?: s\b)?", rule.summary)], rule.name


@needs_promtool
def test_promtool_accepts_the_configuration():
    result = subprocess.run(
        ["promtool", "check", "config", CONFIGS / "prometheus" / "prometheus.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@needs_promtool
def test_alerts_fire_when_they_should():
    rules = Path(__file__).with_name("alerts_test.yml")
    result = subprocess.run(
        ["promtool", "test", "rules", rules.name], cwd=rules.parent, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
