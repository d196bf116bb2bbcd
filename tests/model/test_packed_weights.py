"""Weights that are packed once: from memory, a file or a checkpoint they are the same, and what is wrong is found."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import make_big
import quire_engine.execution.memory
from quire_engine.build import BuiltEngine, build
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.execution import loading
from quire_engine.execution.packed.image import is_sealed, new_memory
from quire_kernels.kernel_set import AttentionShape, ExpertMatrices, Norm, Routing
from support.checkpoints import shared_checkpoint
from support.covering import few
from support.limits import engine_config
from support.offline import generate
from support.quantised import FORMS, make_quantised

KINDS = (None, "int8", "int4")
Words = list[tuple[str, int, int]]


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loading, "LEAST_BYTES", 0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fd() -> Iterator[int]:
    handle = new_memory()
    yield handle
    os.close(handle)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_checkpoint("qwen2"), tmp_path / "checkpoint"))


def started(path: Path | str, folder: Path | None, fd: int | None = None, **changes) -> tuple[BuiltEngine, Words]:
    words: Words = []
    config = engine_config(
        model=str(path),
        device="cpu",
        dtype="bfloat16",
        kernels="cpu",
        num_threads=2,
        packed_cache=folder is not None,
        packed_cache_dir=str(folder),
        **changes,
    )
    built = build(config, memory_fd=fd, tell=lambda *word: words.append(word))
    return built, words


def phases(words: Words) -> list[str]:
    return list(dict.fromkeys(phase for phase, _, _ in words))


def tokens(built: BuiltEngine) -> tuple[int, ...]:
    request = GenerationRequest(
        request_id="a",
        prompt_token_ids=(5, 6, 7),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_new_tokens=12),
    )
    return tuple(generate(built, [request])["a", 0].token_ids)


def weights(built: BuiltEngine) -> dict[str, torch.Tensor]:
    """Every tensor of a loaded decoder."""
    held = built.executor._runner._decoder._weights
    found = {"embedding": held.embedding, "final_norm": held.final_norm.weight}
    matrices = {"head": held.head}
    for place, op in enumerate(held.program):
        for field in dataclasses.fields(op):
            value = getattr(op, field.name)
            if field.name == "weight":
                matrices[f"{place}"] = value
            elif isinstance(value, AttentionShape):
                found |= {f"{place} q": value.q_norm, f"{place} k": value.k_norm} if value.q_norm is not None else {}
            elif isinstance(value, Norm):
                found[f"{place} norm"] = value.weight
            elif isinstance(value, Routing):
                matrices[f"{place} router"] = value.weight
                beside = {"bias": value.selection_bias, "scales": value.expert_scales}
                beside["norm"] = None if value.norm is None else value.norm.weight
                found |= {f"{place} {name}": tensor for name, tensor in beside.items() if tensor is not None}
            elif isinstance(value, ExpertMatrices):
                matrices |= {f"{place} gate and up": value.gate_up, f"{place} down": value.down}
            elif isinstance(value, torch.Tensor):
                found[f"{place} {field.name}"] = value
    for name, matrix in matrices.items():
        found |= {f"{name} {part}": tensor for part, tensor in matrix.parts.items()}
    return found


def wait_for_file(folder: Path) -> Path:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if found := list(folder.glob("*.packed")):
            return found[0]
        time.sleep(0.01)
    raise TimeoutError


# With what is added for the choice in float32; with a router of float32; with scales of experts, beside an MLP.
@pytest.mark.parametrize("family", few(["glm4_moe", "ernie4_5_moe", "gemma4_moe"], "gemma4_moe"))
def test_what_rows_choose_by_is_kept(family, tmp_path, fd):
    path, folder = shared_checkpoint(family), tmp_path / "packed"
    plain, _ = started(path, None)
    started(path, folder, fd)
    wait_for_file(folder)
    mapped, words = started(path, folder, fd)
    assert phases(words) == ["preparing", "mapping weights"]
    expected, got = weights(plain), weights(mapped)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert any(name.endswith(("bias", "scales")) for name in expected)
    assert tokens(mapped) == tokens(plain)


@pytest.mark.parametrize("form", few(["awq", "W8A16", "fp8 by row"], "awq"))
def test_what_others_quantised_stays_so_on_each_way(form, tmp_path, fd):
    path, _ = make_quantised(tmp_path, FORMS[form], "qwen2")
    folder = tmp_path / "packed"
    plain, _ = started(path, None)
    packed, _ = started(path, folder, fd)
    wait_for_file(folder)
    mapped, words = started(path, folder, fd)
    assert phases(words) == ["preparing", "mapping weights"]
    read, words = started(path, folder)
    assert "reading packed weights" in phases(words)
    expected = weights(plain)
    for other in (packed, mapped, read):
        got = weights(other)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert tokens(other) == tokens(plain)
    requantised, words = started(path, folder, quantization="int8")  # another file
    assert "packing weights" in phases(words)
    assert tokens(requantised)


# With biases; with norms of heads; with experts.
@pytest.mark.parametrize(
    ("family", "kind", "tied"),
    few(
        itertools.product(("qwen2", "qwen3", "qwen3_moe"), KINDS, (True, False)),
        *(("qwen2", "int8", True), ("qwen3", None, False), ("qwen3_moe", "int4", False)),
    ),
)
def test_each_way_into_memory_gives_the_same(family, kind, tied, tmp_path, fd):
    path, folder = shared_checkpoint(family, tie_word_embeddings=tied), tmp_path / "packed"
    plain, words = started(path, None, quantization=kind)
    assert phases(words) == ["preparing", "packing weights"]
    packed, words = started(path, folder, fd, quantization=kind)
    assert phases(words) == ["preparing", "packing weights", "mapping weights"]
    wait_for_file(folder)
    mapped, words = started(path, folder, fd, quantization=kind)
    assert phases(words) == ["preparing", "mapping weights"]
    read, words = started(path, folder, quantization=kind)
    assert phases(words) == ["preparing", "reading packed weights", "mapping weights"]
    expected = weights(plain)
    for other in (packed, mapped, read):
        got = weights(other)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert tokens(other) == tokens(plain)
        assert other.plan.model.weights_bytes == plain.plan.model.weights_bytes


def test_other_settings_have_other_files(path, tmp_path):
    folder = tmp_path / "packed"
    for count, kind in enumerate(KINDS, start=1):
        started(path, folder, quantization=kind)
        while len(list(folder.glob("*.packed"))) < count:
            time.sleep(0.01)


def test_a_checkpoint_that_changed_is_packed_again(path, tmp_path, fd):
    folder = tmp_path / "packed"
    before, _ = started(path, folder, fd)
    wait_for_file(folder)
    tensors = load_file(path / "model.safetensors")
    save_file({name: tensor * 0.5 for name, tensor in tensors.items()}, path / "model.safetensors")
    after, words = started(path, folder, fd)
    assert "packing weights" in phases(words)
    assert not torch.equal(weights(after)["embedding"], weights(before)["embedding"])
    assert after.plan.identity.checkpoint != before.plan.identity.checkpoint, "so that the server sees it"


def test_a_damaged_file_is_packed_again_and_replaced(path, tmp_path, capfd):
    folder = tmp_path / "packed"
    expected, _ = started(path, folder)
    file = wait_for_file(folder)
    data = bytearray(file.read_bytes())
    data[-1_000_000] ^= 64
    file.write_bytes(bytes(data))
    capfd.readouterr()
    again, words = started(path, folder)
    assert "packing weights" in phases(words)
    line = capfd.readouterr().err.splitlines()[0]
    assert line.startswith(f"quire: the packed weights in {file} are not used, but packed again: the bytes from ")
    assert tokens(again) == tokens(expected)
    wait_for_file(folder)
    assert "reading packed weights" in phases(started(path, folder)[1])


def test_what_is_packed_in_a_moment_gets_no_file(path, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "LEAST_BYTES", 32 << 20)
    started(path, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.bias", "lm_head.weight"]
)
@pytest.mark.parametrize("changes", [{}, {"kernels": "reference", "dtype": "float32"}])
def test_weights_that_are_not_finite_are_refused(value, name, *, changes, path, tmp_path, fd):
    tensors = load_file(path / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, path / "model.safetensors")
    config = engine_config(
        **{"model": str(path), "device": "cpu", "dtype": "bfloat16", "kernels": "cpu", "num_threads": 2, **changes},
        packed_cache_dir=str(tmp_path / "packed"),
    )
    with pytest.raises(ModelLoadError) as caught:
        build(config, memory_fd=fd)
    assert f"model.safetensors: tensor {name} holds values that are not finite numbers" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not is_sealed(fd)
    assert not list(tmp_path.glob("packed/*.packed"))


def test_what_is_in_memory_already_is_not_counted_again(path, monkeypatch, fd):
    """A restart where two copies of the weights would not fit."""
    first, _ = started(path, None, fd, max_num_seqs=1, max_model_len=32)
    free = first.plan.pool.num_bytes * 5
    monkeypatch.setattr(quire_engine.execution.memory, "available_memory", lambda: free)
    assert free < first.plan.model.weights_bytes
    with pytest.raises(ConfigError, match="the weights need"):
        started(path, None, max_num_seqs=1, max_model_len=32)
    again, _ = started(path, None, fd, kv_memory=first.plan.pool.num_bytes, max_model_len=32)
    assert again.plan.scheduler.num_blocks == first.plan.scheduler.num_blocks


def peak(work) -> int:
    """Bytes that this process held at most while it worked, beyond what it held before."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def test_packing_takes_what_is_packed_and_one_layer(tmp_path, fd):
    """Neither the whole checkpoint's pages nor a second copy of anything large."""
    size = make_big.make(tmp_path / "big", 0.012)
    built: list[BuiltEngine] = []
    most = peak(lambda: built.append(started(tmp_path / "big", None, fd, quantization="int8", kv_memory=1 << 20)[0]))
    layers = built[0].plan.cost.layer_parameters * 2 / built[0].executor._runner._decoder.config.num_layers
    allowed = built[0].plan.model.weights_bytes + layers + (24 << 20)  # libraries, code, stacks
    assert most <= allowed < size, (most, allowed, size)


def test_two_that_start_at_once_serve_and_write_one_file(path, tmp_path):
    folder = tmp_path / "packed"
    found: list[BuiltEngine] = []
    threads = [threading.Thread(target=lambda: found.append(started(path, folder)[0])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokens(found[0]) == tokens(found[1])
    wait_for_file(folder)
    assert len(list(folder.glob("*.packed"))) == 1
