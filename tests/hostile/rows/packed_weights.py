"""Weights that are broken or tampered with, and a model whose load and whose crash take long, made smaller."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import big_start
import make_big
from e2e.served import Served
from hostile.row import Row

_SCALE = 0.02  # 320 MB
_PATIENCE = 600.0  # seconds


async def _quire(*words: str) -> tuple[int, str]:
    """A command of ours: its exit code and what it says on stderr."""
    command = (sys.executable, "-m", "quire_server.cli", *words)
    child = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        _, said = await asyncio.wait_for(child.communicate(), _PATIENCE)
    finally:
        if child.returncode is None:
            child.kill()
    assert child.returncode is not None
    return child.returncode, said.decode()


async def nan_weights(server: Served) -> str:
    """One NaN in one tensor of many."""
    del server
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_big.make(model, 0.003)
        shard = next(model.glob("*.safetensors"))
        with safe_open(shard, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        name = "model.layers.1.mlp.down_proj.weight"
        tensors[name][-1, -1] = torch.nan
        save_file(tensors, shard, metadata={"format": "pt"})
        code, said = await _quire("serve", str(model), "--port", "0", "--packed-cache", "off")
        assert code == 1, said
        refusal = [line for line in said.splitlines() if "not finite numbers" in line]
        assert len(refusal) == 1, said
        assert shard.name in refusal[0], said
        assert name in refusal[0], said
        assert "Traceback" not in said, said
        return f"exit code 1, one line: {refusal[0].replace(folder, '')}"


async def tampered(server: Served) -> str:
    """A file of packed weights with one bit changed, cut off, and given to another user."""
    del server
    with tempfile.TemporaryDirectory() as folder:
        model, cache = Path(folder) / "model", Path(folder) / "cache"
        make_big.make(model, 0.003)
        pack = ("pack", str(model), "--quantization", "int4", "--packed-cache", str(cache))
        code, said = await _quire(*pack)
        assert code == 0, said
        file = next(cache.glob("*.packed"))
        whole, told = file.read_bytes(), []

        def change_a_bit() -> None:
            file.write_bytes(whole[:-5_000_000] + bytes([whole[-5_000_000] ^ 1]) + whole[-4_999_999:])

        harm = {"one bit": change_a_bit, "cut off": lambda: os.truncate(file, len(whole) // 2)}
        if os.geteuid() == 0:
            harm["another's"] = lambda: os.chown(file, 12345, 12345)
        for what, act in harm.items():
            act()
            code, said = await _quire(*pack)
            assert code == 0, said
            assert said.count("are not used, but packed again") == 1, said
            assert file.read_bytes() == whole, "packed anew it is the same"
            told.append(what)
        return f"each refused with one line and packed again: {', '.join(told)}"


async def big_model(server: Served) -> str:
    """The shape of Llama 3.1 8B at a fiftieth of its size: two starts, then a kill of the engine under four streams."""
    del server
    with tempfile.TemporaryDirectory() as folder:
        model, cache = Path(folder) / "model", Path(folder) / "cache"
        make_big.make(model, _SCALE)
        return await asyncio.to_thread(_starts_and_a_kill, model, cache)


def _starts_and_a_kill(model: Path, cache: Path) -> str:
    flags = ["--quantization", "int4", "--max-model-len", "1024"]
    with big_start.Server(model, cache, flags) as first:
        deadline = time.monotonic() + _PATIENCE
        while not list(cache.glob("*.packed")):
            assert time.monotonic() < deadline, first.log()
            time.sleep(0.05)
    with big_start.Server(model, cache, flags) as second:
        expected, _, _ = asyncio.run(big_start.streams(second, 4, 200, kill=False))
        got, stall, _ = asyncio.run(big_start.streams(second, 4, 200, kill=True, after=1.0))
    assert got == expected, "streams went on with other tokens"
    assert stall > 0, "the streams were over before the kill"
    return (
        f"first start {first.seconds:.1f} s, second {second.seconds:.1f} s; engine killed: four streams identical,"
        f" the next token after {stall:.1f} s"
    )


ROWS = [
    Row(name="nan-weights", what="weights with one NaN", act=nan_weights),
    Row(name="tampered-weights", what="packed weights that were changed", act=tampered),
    Row(name="big-model", what="a big model starts twice, and its engine is killed", act=big_model),
]
