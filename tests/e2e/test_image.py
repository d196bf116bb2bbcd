"""The image as it is built and run: small without a GPU, answering without rights, asked after its health.

Not covered: torch's CUDA wheels, for which the CUDA image gets an empty stand-in; NVIDIA's base image, where it cannot
be pulled; a container runtime.
"""

from __future__ import annotations

import json
import re
import urllib.request
import zipfile
from pathlib import Path

import pytest

from support.images import ROOT, Container, Images, folder_with_cpu_torch, why_not

MOST_BYTES = 1_500_000_000
CPU, CUDA = "localhost/quire-test", "localhost/quire-test-cuda"

pytestmark = [
    pytest.mark.image,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    images = Images(tmp_path_factory.mktemp("images"))
    try:
        yield images
    finally:
        images.close()


@pytest.fixture(scope="module")
def base(images) -> str:
    (default,) = re.findall(r"^ARG BASE_CPU=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    found = images.base(f"docker.io/library/{default}")
    if found is None:
        pytest.skip(f"{default} cannot be pulled, and debootstrap cannot make another base here")
    return found


@pytest.fixture(scope="module")
def cpu(images, base) -> str:
    wheels = folder_with_cpu_torch()
    index = {} if wheels is None else {"TORCH_CPU_INDEX": ""}
    images.build(CPU, wheels=wheels, BASE_CPU=base, BASE_CUDA=base, **index)
    return CPU


@pytest.fixture(scope="module")
def cuda(images, base, tmp_path_factory) -> str:
    """On the CPU's base, with all dependencies but torch."""
    folder = tmp_path_factory.mktemp("wheels")
    _stand_in_for_torch(folder)
    images.build(CUDA, wheels=folder, DEVICE="cuda", BASE_CPU=base, BASE_CUDA=base)
    return CUDA


def _stand_in_for_torch(folder: Path) -> None:
    """A wheel of the pinned version that pip prefers to the real one, and that says it was built with CUDA."""
    (version,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    version += "+standin"
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch/__init__.py", "")
        wheel.writestr("torch/version.py", "cuda = 'none'\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def _ask(address: str, path: str, **body: object) -> str:
    request = urllib.request.Request(
        address + path,
        data=json.dumps(body).encode() if body else None,
        headers={"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as reply:
        return reply.read().decode()


def _address(container: Container) -> str:
    return container.healthy().split()[2].removesuffix(":")


def test_the_cpu_image_carries_no_gigabytes(images, cpu):
    size = images.size(cpu)
    print(f"the CPU image has {size / 1e9:.2f} GB")
    assert size <= MOST_BYTES


def test_it_lists_its_parts(images, cpu):
    with images.running(cpu, "/opt/quire/quire.cdx.json", entry="cat") as container:
        assert container.wait() == 0
        listed = json.loads(container.output())
    assert listed["bomFormat"] == "CycloneDX"
    parts = {part["name"]: part["version"] for part in listed["components"]}
    assert {"torch", "fastapi", "tokenizers"} <= set(parts)
    assert not {"hatchling", "cyclonedx-bom", "pytest"} & set(parts)
    assert listed["metadata"]["component"]["name"] == "quire"


def test_it_answers_as_the_user_it_declares_with_a_root_that_is_read_only(images, cpu):
    assert images.config(cpu)["User"] not in ("", "0", "root")
    with images.running(cpu, "--host", "127.0.0.1", "--port", "0") as container:
        address = _address(container)
        reply = json.loads(_ask(address, "/v1/completions", model="quire-demo", prompt="Once upon", max_tokens=8))
        assert reply["usage"]["completion_tokens"] == 8
        assert reply["choices"][0]["text"]
        # There is no compiler: the kernels are those that were built with the image.
        assert 'kernels="cpu"' in _ask(address, "/metrics")
        assert container.run("sh", "-c", "touch /opt/quire/x || touch /x").returncode != 0
        assert container.stop() == 0


def test_its_health_follows_any_user_and_any_way_to_listen(images, cpu):
    """Not ready before the model is loaded; then found at a Unix socket just as well."""
    with images.running(cpu, "--uds", "/tmp/quire.sock", user="12345:0") as container:
        early = container.run("quire", "health")
        assert (early.returncode, early.stdout) == (1, ""), early
        assert container.healthy() == "quire health: /tmp/quire.sock: ready\n"
        assert container.stop() == 0


def test_the_cuda_image_is_complete_but_for_torch(images, cuda):
    """Triton compiles C against Python's headers at the first use of a kernel, as whoever runs the server."""
    config = images.config(cuda)
    assert (config["Entrypoint"], config["Healthcheck"]["Test"]) == (["quire", "serve"], ["CMD", "quire", "health"])
    with images.running(cuda, "--help") as container:
        assert container.wait() == 0, container.output()
    source = r'printf "#include <Python.h>\nint f(void) { return Py_IsInitialized(); }\n" > $HOME/f.c'
    include = "$(python3 -c 'import sysconfig; print(sysconfig.get_paths()[\"include\"])')"
    with images.running(
        cuda, "-c", f"{source} && gcc -shared -fPIC -I{include} $HOME/f.c -o $HOME/f.so", entry="sh"
    ) as c:
        assert c.wait() == 0, c.output()
