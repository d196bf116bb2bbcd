"""The Dockerfile agrees with what is pinned, and finds what it copies."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")

# torch's release: the CUDA toolkit and the triton that its Linux wheel on PyPI asks for, as `Requires-Dist:
# cuda-toolkit[...]==` and `triton==` of the wheel's METADATA say.
BUILT_WITH = {"2.13.0": ("13.0.3", "3.7.1")}


def _pinned(name: str) -> str:
    (found,) = re.findall(rf"^{name}==(\S+)", CONSTRAINTS, re.MULTILINE)
    return found


def _cuda_of(dockerfile: str) -> str:
    (found,) = re.findall(r"^ARG CUDA=(\S+)$", dockerfile, re.MULTILINE)
    return found


def test_the_cuda_base_is_that_of_the_pinned_torch():
    torch = _pinned("torch")
    assert torch in BUILT_WITH, f"look at the METADATA of torch {torch}'s Linux wheel and write its CUDA down here"
    assert (_cuda_of(DOCKERFILE), _pinned("triton")) == BUILT_WITH[torch]
    assert "ARG BASE_CUDA=nvidia/cuda:${CUDA}-base-" in DOCKERFILE


def test_what_is_written_down_is_what_an_installed_wheel_says():
    """Only a wheel with CUDA names a toolkit."""
    installed = version("torch").partition("+")[0]
    toolkit = re.search(r"cuda-toolkit(?:\[[^]]*\])?==([\d.]+)", " ".join(requires("torch") or ()))
    if toolkit is None or installed not in BUILT_WITH:
        pytest.skip("the installed torch has no CUDA, or is of another release")
    assert toolkit[1] == BUILT_WITH[installed][0]


def test_the_labels_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', DOCKERFILE))
    assert found["title"] == project["name"]
    assert found["licenses"] == project["license"]
    assert found["description"].removesuffix(" (${DEVICE})") in project["description"]
    assert (found["version"], found["revision"]) == ("${VERSION}", "${REVISION}")
    assert re.findall(r"^ARG VERSION=(\S+)$", DOCKERFILE, re.MULTILINE) == [project["version"]]


def test_the_wheel_is_built_from_what_the_image_is():
    """The same sources and the same lock, on the same base."""
    wheel = (ROOT / "release" / "wheel.Dockerfile").read_text(encoding="utf-8")
    assert _copied(wheel) == _copied(DOCKERFILE)
    (base,) = re.findall(r"^ARG BASE=(\S+)$", wheel, re.MULTILINE)
    assert f"ARG BASE_CPU={base}\n" in DOCKERFILE


def _copied(dockerfile: str) -> set[str]:
    """Sources of COPY in the build's context."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE)
    return {source for line in lines for source in line.split()}


def test_what_is_copied_exists_and_is_not_left_out_of_the_context():
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = _copied(DOCKERFILE)
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


def test_the_wheels_sources_are_copied():
    """What `pip install .` packs: a folder that is missing in the context makes an image without it."""
    (packed,) = re.findall(r"^only-include = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for folder in re.findall(r'"([^"]+)"', packed):
        assert any(folder == source or folder.startswith(source + "/") for source in _copied(DOCKERFILE)), folder
