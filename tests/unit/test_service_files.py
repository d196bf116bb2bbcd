"""The systemd unit and the compose file: what they start and mount is there, and their own tools accept them."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire_server.commands import COMMANDS
from quire_server.flags import parse_flags
from quire_server.programs.launch import BAD_USAGE
from quire_server.settings import Settings

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "quire.service"
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"


class Keys(configparser.ConfigParser):
    def optionxform(self, optionstr: str) -> str:  # keys of units keep their case
        return optionstr


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    unit = Keys(interpolation=None)
    unit.read_string(UNIT.read_text())
    assert unit.sections() == ["Unit", "Service", "Install"]
    return dict(unit["Service"])


def test_the_unit_waits_for_what_the_server_says(service: dict[str, str]) -> None:
    assert service["Type"] == "notify"
    assert service["RestartPreventExitStatus"] == str(BAD_USAGE)
    assert float(service["TimeoutStopSec"]) > Settings().drain_timeout + 5
    for key in ("ExecStartPre", "ExecStart"):
        path, command, *words = shlex.split(service[key])
        assert path == "/opt/quire/bin/quire"
        assert command in COMMANDS
        assert words[-2:] == ["--config", "/etc/quire/quire.yaml"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With a program that exists in place of the installed one."""
    program = shutil.which("true")
    text = UNIT.read_text()
    assert text.count("/opt/quire/bin/quire ") == 2
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace("/opt/quire/bin/quire ", f"{program} "))
    command = ["systemd-analyze", "verify", "--recursive-errors=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, [line for line in done.stderr.splitlines() if UNIT.name in line]) == (
        0,
        "",
        [],
    )
    copy.write_text(copy.read_text().replace("Type=notify", "Type=nonsense"))
    assert UNIT.name in subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    parsed = yaml.safe_load(COMPOSE.read_text())
    assert set(parsed) == {"services", "volumes"}
    found: dict[str, dict[str, Any]] = parsed["services"]
    named = {volume.split(":")[0] for each in found.values() for volume in each["volumes"]}
    assert {name for name in named if re.fullmatch(r"\w+", name)} == set(parsed["volumes"])
    return found


def mounts(service: dict[str, Any]) -> dict[str, Path]:
    """The files of this tree by their paths in the container."""
    pairs = (volume.removesuffix(":ro").rsplit(":", 1) for volume in service["volumes"])
    return {inside: (COMPOSE.parent / outside).resolve() for outside, inside in pairs if outside.startswith(".")}


def test_every_file_that_is_mounted_exists(services: dict[str, dict[str, Any]]) -> None:
    found = {path: inside for each in services.values() for inside, path in mounts(each).items()}
    assert len(found) == 4
    assert [path for path in found if not path.exists()] == []


def test_nothing_but_this_machine_reaches_a_port(services: dict[str, dict[str, Any]]) -> None:
    assert all(port.startswith("127.0.0.1:") for each in services.values() for port in each["ports"])


def test_the_server_s_flags_are_understood(services: dict[str, dict[str, Any]]) -> None:
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in services["quire"]["command"]]
    assert parse_flags(words) == Settings()
    assert (COMPOSE.parent / services["quire"]["build"]["context"] / "Dockerfile").resolve() == ROOT / "Dockerfile"


def test_prometheus_asks_the_server_and_grafana_asks_prometheus(services: dict[str, dict[str, Any]]) -> None:
    prometheus, grafana = (mounts(services[name]) for name in ("prometheus", "grafana"))
    ours = yaml.safe_load(prometheus["/etc/prometheus/prometheus.yml"].read_text())
    alone = yaml.safe_load((ROOT / "configs" / "prometheus" / "prometheus.yml").read_text())
    (job,) = ours["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["quire:8000"]}]
    alone["scrape_configs"][0]["static_configs"] = job["static_configs"]
    assert ours == alone
    folder = grafana["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((folder / "dashboards" / "quire.yaml").read_text())["providers"]
    dashboard = f"{provider['options']['path']}/quire.json"
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard
    variables = json.loads(grafana[dashboard].read_text())["templating"]["list"]
    assert [each["query"] for each in variables if each["type"] == "datasource"] == [source["type"]]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_prometheus_accepts_its_files(tmp_path: Path, services: dict[str, dict[str, Any]]) -> None:
    for inside, path in mounts(services["prometheus"]).items():
        (tmp_path / Path(inside).name).write_bytes(path.read_bytes())
    subprocess.run(["promtool", "check", "config", str(tmp_path / "prometheus.yml")], check=True, capture_output=True)


def compose() -> list[str] | None:
    """The command of a Compose that is installed here."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker"):
        asked = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        return ["docker", "compose"] if asked.returncode == 0 else None
    return None


@pytest.mark.skipif(compose() is None, reason="Docker Compose is not installed here (Debian: docker-compose)")
def test_compose_accepts_the_file() -> None:
    done = subprocess.run(
        [*(compose() or ()), "-f", str(COMPOSE), "config"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == {"quire", "prometheus", "grafana"}
