"""The built wheel: what is in it, the tag that it has, the bits of its kernels, its life without a compiler.

Run by `make wheel-test`, which builds the wheel and brings the wheels of what it depends on: from then on nothing is
fetched. A wheel for another kind of machine is looked at too, and its kernels are loaded by an emulator where one is.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernels.test_recorded_bits import RECORD, coarse_table, digests
from quire_engine.execution.models import weights
from quire_kernels.cpu import library
from quire_kernels.cpu.compiler import FLAGS
from quire_kernels.cpu.variants import Variant, compilable_variants, usable_variants

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-release"
WHEELS = {path.stem.rpartition("linux_")[2].split("_", 2)[-1]: path for path in (ROOT / "dist").glob("*linux_*.whl")}
HERE = platform.machine()
# What a shell script of an installed command may call; no compiler is among them.
PROGRAMS = ("sh", "env", "realpath", "dirname", "uname")


@pytest.fixture(scope="module", params=sorted(WHEELS))
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def files(machine: str) -> dict[str, bytes]:
    with zipfile.ZipFile(WHEELS[machine]) as wheel:
        assert wheel.testzip() is None
        return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}


def libraries(files: dict[str, bytes]) -> dict[str, bytes]:
    prefix = "quire_kernels/prebuilt/"
    return {name.removeprefix(prefix): data for name, data in files.items() if name.startswith(prefix)}


def test_there_is_a_wheel_for_this_machine() -> None:
    assert HERE in WHEELS, f"{sorted(WHEELS)} in dist/"


def test_it_has_every_instruction_set_whole_and_of_these_sources(machine: str, files: dict[str, bytes]) -> None:
    sources = ROOT / "kernels" / "csrc"
    expected = {
        f"{each.name}-{library._key(sources, (*FLAGS, *each.flags), machine)}.so"
        for each in compilable_variants(machine)
    }
    found = libraries(files)
    assert set(found) == expected
    assert len(expected) > 1
    for name, data in found.items():
        assert hashlib.sha256(data[:-32]).digest() == data[-32:], name  # auditwheel has left it as it was


def test_besides_it_is_the_tree(files: dict[str, bytes], machine: str) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "server", "engine", "kernels", "benchmarks/quire_bench", "lab"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    folders = {
        "server/": "",
        "engine/": "",
        "kernels/csrc/": "quire_kernels/csrc/",
        "kernels/": "",
        "benchmarks/": "",
        "lab/": "",
    }
    expected = {}
    for name in filter(None, listed):
        folder, package = next((old, new) for old, new in folders.items() if name.startswith(old))
        expected[package + name.removeprefix(folder)] = (ROOT / name).read_bytes()
    found = {name: data for name, data in files.items() if not name.startswith("quire-")}
    assert {name for name in found if name.removeprefix("quire_kernels/prebuilt/") not in libraries(files)} == set(
        expected
    )
    assert [name for name in expected if found[name] != expected[name]] == []


def test_its_tag_is_what_auditwheel_finds(machine: str) -> None:
    wheel = WHEELS[machine]
    environment = {**os.environ, "PATH": f"{TOOLS / 'bin'}:{os.environ['PATH']}"}
    shown = subprocess.run(
        [TOOLS / "bin" / "auditwheel", "show", wheel], env=environment, capture_output=True, text=True, check=True
    )
    (tag,) = re.findall(r'following platform tag:\s+"([^"]+)"', " ".join(shown.stdout.split()))
    assert tag.startswith("manylinux_2_")
    assert tag in wheel.name.rpartition("-")[2].removesuffix(".whl").split(".")


@pytest.mark.parametrize("variant", usable_variants(), ids=lambda variant: variant.name)
def test_its_kernels_compute_the_bits_of_compiled_ones(
    variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole models of four families in every form of weights and pool: logits and pool, by both libraries."""
    monkeypatch.setattr(weights, "rope_table", coarse_table)
    compiled = digests(tmp_path, variant)
    with zipfile.ZipFile(WHEELS[HERE]) as wheel:
        wheel.extractall(tmp_path / "wheel")
    monkeypatch.setattr(library, "_PREBUILT", tmp_path / "wheel" / "quire_kernels" / "prebuilt")
    monkeypatch.setattr(library, "find_compiler", lambda: pytest.fail("the wheel's library was not found"))
    prebuilt = digests(tmp_path, variant)
    assert prebuilt == compiled
    assert prebuilt == json.loads(RECORD.read_text()).get(variant.name, prebuilt)


def test_their_products_are_exact_where_sums_are(machine: str, tmp_path: Path) -> None:
    """Of every instruction set that runs here, those of another kind of machine by an emulator: see `products.cpp`."""
    if machine == HERE:
        compiler, emulator, wanted = shutil.which("c++"), [], {each.name for each in usable_variants()}
    else:
        compiler, wanted = (
            shutil.which(f"{machine}-linux-gnu-g++"),
            {each.name for each in compilable_variants(machine)},
        )
        found = shutil.which(f"qemu-{machine}")
        emulator = [found, "-cpu", "max", "-L", f"/usr/{machine}-linux-gnu"] if found else []
    if compiler is None or (machine != HERE and not emulator):
        pytest.skip(f"no compiler or no emulator for {machine} (Debian: g++-{machine}-linux-gnu, qemu-user)")
    with zipfile.ZipFile(WHEELS[machine]) as wheel:
        names = [name for name in wheel.namelist() if Path(name).name.rpartition("-")[0] in wanted]
        wheel.extractall(tmp_path, names)
    program, sources = tmp_path / "products", ROOT / "kernels" / "csrc"
    flags = ("-std=c++17", "-O1", "-Wno-psabi", "-Wno-ignored-attributes", f"-I{sources}", "-ldl", "-pthread")
    subprocess.run([compiler, ROOT / "tests" / "wheels" / "products.cpp", "-o", program, *flags], check=True)
    command = [*emulator, program, *(tmp_path / name for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == wanted


class Empty:
    """A home without a cache and a PATH without a compiler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name in PROGRAMS:
            (folder / "bin" / name).symlink_to(shutil.which(name) or f"/bin/{name}")
        self.environment = {
            "PATH": str(folder / "bin"),
            "HOME": str(folder),
            "UV_CACHE_DIR": str(folder / "uv"),
            "UV_NO_CONFIG": "1",
            "UV_OFFLINE": "1",
            "UV_NO_INDEX": "1",
            "UV_FIND_LINKS": str(TOOLS / "wheels"),
            "UV_PYTHON": os.path.realpath(sys.executable),
        }

    def uv(self, *words: str | Path) -> str:
        done = subprocess.run(
            [TOOLS / "bin" / "uv", *words], env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    @contextmanager
    def running(self, *words: str | Path) -> Iterator[tuple[str, Path]]:
        """A server: its address, when it answers, and the file with what it says."""
        log = self.folder / "log"
        with log.open("w") as output:
            server = subprocess.Popen(
                [*words, "--port", "0"], env=self.environment, cwd=self.folder, stdout=output, stderr=output
            )
        try:
            deadline = time.monotonic() + 240
            while not (found := re.search(r"Uvicorn running on (http://\S+)", log.read_text())):
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield found[1], log
            server.terminate()
            assert server.wait(timeout=60) == 0, log.read_text()
        finally:
            server.kill()
            server.wait()


def answer(url: str) -> dict[str, object]:
    body = {"model": "quire-demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
        found: dict[str, object] = json.load(reply)
    return found


def kernels_of(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/metrics", timeout=60) as reply:
        (found,) = re.findall(r'^quire_model_info\{.*kernels="([^"]+)"', reply.read().decode(), re.MULTILINE)
    return str(found)


@pytest.fixture
def empty(tmp_path: Path) -> Empty:
    return Empty(tmp_path)


@pytest.mark.timeout(600)
def test_installed_where_no_compiler_is_it_serves(empty: Empty) -> None:
    place = empty.folder / "venv"
    empty.uv("venv", place)
    empty.uv("pip", "install", "--python", place / "bin" / "python", WHEELS[HERE])
    assert "compatible" in empty.uv("pip", "check", "--python", place / "bin" / "python")
    quire = place / "bin" / "quire"
    checked = subprocess.run([quire, "config", "check"], env=empty.environment, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    with empty.running(quire, "serve") as (url, log):
        assert answer(url)["usage"]
        assert kernels_of(url) == "cpu"
        assert "compiling" not in log.read_text()
    assert not list((empty.folder / ".cache" / "quire" / "kernels").glob("*.so"))


@pytest.mark.timeout(600)
def test_run_from_the_wheel_alone_it_answers(empty: Empty) -> None:
    """As `uvx` does it, first with an empty cache: nothing of this tree but the wheel. The times are printed."""
    run = (TOOLS / "bin" / "uv", "tool", "run", "--from", WHEELS[HERE], "quire", "serve")
    for cache in ("empty", "warm"):
        began = time.monotonic()
        with empty.running(*run) as (url, log):
            assert answer(url)["usage"]
            print(f"first answer, {cache} cache: {time.monotonic() - began:.1f} s")
            assert "compiling" not in log.read_text()
