"""Starts that are to be refused, and a kernel library that somebody else has put into the cache."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from e2e.served import Served
from hostile.row import Row

DEMO = Path(__file__).parents[3] / "engine" / "quire_engine" / "demo" / "quire-demo"
SECONDS = 60.0
SOMEBODY = 12345
# Loads the kernels as an engine does, with a compiler that takes no time: it hands out what was compiled before.
LOAD = """
import logging, shutil, sys
from pathlib import Path
from quire_kernels.cpu import library, variants
logging.basicConfig(format="%(message)s")
honest, folder = sys.argv[1:]
library._PREBUILT = Path("/nowhere")
library.declare = lambda _: None
library.compile_library = lambda *args, **_: shutil.copy(honest, args[3])
library.load_library(variants.VARIANTS[-1], cache_dir=Path(folder))
"""
THEIRS = '#include <unistd.h>\n__attribute__((constructor)) static void run() { write(1, "THEIR CODE RAN", 14); }\n'


async def planted(_: Served) -> str:
    plants: dict[str, Callable[[Path, Path], object]] = {
        "of another user": lambda folder, _: os.chown(folder, SOMEBODY, -1),
        "that all may write to": lambda folder, _: folder.chmod(0o777),
        "that its group may write to": lambda folder, _: folder.chmod(0o770),
        "behind a link": lambda folder, _: _linked(folder),
        "with a parent that all may write to": lambda folder, _: folder.parent.chmod(0o777),
        "with a library of another user": lambda _, file: os.chown(file, SOMEBODY, -1),
        "with a library that all may write to": lambda _, file: file.chmod(0o666),
        "with a link for a library": lambda _, file: _linked(file),
        "with a library of two names": lambda _, file: os.link(file, file.with_name("other")),
    }
    ran, quiet = [], []
    for name, plant in plants.items():
        (ran if await asyncio.to_thread(_is_run, plant) else quiet).append(name)
    assert not ran, f"THE PLANTER'S CODE RAN from a folder {'; '.join(ran)}"
    return f"{len(quiet)} kinds of plants, none was loaded"


def _is_run(plant: Callable[[Path, Path], object]) -> bool:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for name, source in (("honest", "int nothing;\n"), ("theirs", THEIRS)):
            (root / f"{name}.c").write_text(source)
            subprocess.run(["cc", "-shared", "-fPIC", "-o", root / name, root / f"{name}.c"], check=True)
        folder = root / "parent" / "cache"
        folder.mkdir(mode=0o700, parents=True)
        first = _load(root / "honest", folder)
        (file,) = folder.glob("*.so")
        library = (root / "theirs").read_bytes()
        file.unlink()
        file.write_bytes(library + hashlib.sha256(library).digest())
        plant(folder, file)
        done = _load(root / "honest", folder)
        assert "THEIR CODE RAN" not in first.stdout
        assert done.returncode == 0, done.stderr
        return "THEIR CODE RAN" in done.stdout


def _load(honest: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOAD, str(honest), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def _linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _copy(root: Path, name: str, data: bytes) -> list[str]:
    shutil.copytree(DEMO, root / "model")
    (root / "model" / name).write_bytes(data)
    return ["--model", str(root / "model")]


def _template(root: Path) -> list[str]:
    (root / "template").write_bytes(b"\xff\xfe")
    return ["--chat-template", str(root / "template")]


def _heads(root: Path) -> list[str]:
    from support.checkpoints import make_checkpoint

    make_checkpoint(root / "model", "llama", hidden_size=288, head_dim=72, dtype="bfloat16")
    return ["--model", str(root / "model"), "--kv-cache-dtype", "int8"]


async def refused(server: Served) -> str:
    port = server.url.rsplit(":", 1)[1]
    starts: dict[str, Callable[[Path], list[str]]] = {
        "a port in use": lambda _: ["--port", port],
        "no such model": lambda _: ["--model", "/nowhere"],
        "weights cut short": lambda root: _copy(root, "model.safetensors", b"\0" * 100),
        "a header of 2^63": lambda root: _copy(root, "model.safetensors", b"\0" * 7 + b"\x80" + b"{}"),
        "a config of wrong types": lambda root: _copy(root, "config.json", b"[]"),
        "a tokenizer that does not parse": lambda root: _copy(root, "tokenizer.json", b"{"),
        "settings of it nested deeply": lambda root: _copy(root, "tokenizer_config.json", b"[" * 100_000),
        "a template that is no text": _template,
        "int8 keys of heads of 72": _heads,
    }
    slowest = 0.0
    for name, make in starts.items():
        with tempfile.TemporaryDirectory() as place:
            command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", *make(Path(place))]
            started = time.monotonic()
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            slowest = max(slowest, time.monotonic() - started)
        # That it listens and loads is said as soon as it does; what the engine finds out comes after that.
        said = re.compile(r"[-0-9]+ [:.0-9]+ INFO quire(: listening on |\.loading: )")
        lines = [line for line in done.stderr.splitlines() if not said.match(line)]
        assert done.returncode not in (0, -6, -11), f"{name}: exit code {done.returncode}"
        assert len(lines) == 1, f"{name}: {len(lines)} lines: {lines}"
        assert lines[0].startswith("quire serve: "), f"{name}: {lines[0]}"
    return f"{len(starts)} kinds, each one line and an exit code, the slowest after {slowest:.1f} s"


ROWS = (
    Row(name="planted-library", what="a kernel library of somebody else's in the cache", act=planted),
    Row(name="refused-starts", what="models and settings that cannot work", act=refused),
)
