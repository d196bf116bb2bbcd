"""Model folders that cannot be served: each is refused in one line that names the file, before anything listens."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire_engine.build import build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_server.checkpoint.inspect import check_checkpoint
from quire_server.text.tokenizer import TextTokenizer
from support.checkpoints import make_checkpoint, shared_checkpoint

SECONDS = 30.0
WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
INDEX, TOKENIZER_CONFIG = "model.safetensors.index.json", "tokenizer_config.json"
Break = Callable[[Path], object]


def serve(folder: Path, **settings: object) -> None:
    """What the command does of it: its checks, its text half and its engine, in one process."""
    check_checkpoint(folder)
    TextTokenizer.load(folder)
    given: dict[str, Any] = {"kernels": "reference", "kv_memory": 1 << 22, **settings}
    build(EngineConfig(model=str(folder), **given))


def refusal(folder: Path, **settings: object) -> str:
    started = time.monotonic()
    with pytest.raises((ModelLoadError, ConfigError)) as caught:
        serve(folder, **settings)
    assert time.monotonic() - started < SECONDS
    return str(caught.value)


def option(**changes: object) -> Break:
    """An option of config.json; `...` takes it out."""

    def change(folder: Path) -> None:
        values = json.loads((folder / CONFIG).read_text())
        values.update(changes)
        values = {name: value for name, value in values.items() if value is not ...}
        (folder / CONFIG).write_text(json.dumps(values))

    return change


def written(name: str, content: str | bytes) -> Break:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def without(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def a_pipe(name: str) -> Break:
    """Opening it would wait for somebody to write."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def a_folder(name: str) -> Break:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


def cut(name: str, keep: int) -> Break:
    return lambda folder: os.truncate(folder / name, keep)


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return rewrite


def header(length: int | None = None, **tensors: object) -> Break:
    """A safetensors file with this header and 64 bytes behind it."""

    def change(folder: Path) -> None:
        text = json.dumps(tensors).encode()
        size = len(text) if length is None else length
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", size) + text + bytes(64))

    return change


def placed(shard: object) -> Break:
    """An index that places a tensor in a file of that name."""

    def change(folder: Path) -> None:
        (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))

    return change


def renamed(old: str, new: str) -> Break:
    return lambda folder: (folder / old).rename(folder / new)


def tensor(begin: int, end: int, kind: str = "F32", shape: tuple[int, ...] = (4,)) -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


DEEP = "[" * 100_000
BROKEN: dict[str, tuple[Break, str, str]] = {  # by what is wrong: how, the file that is named, some of the words
    "no config": (without(CONFIG), "", "config.json: the file is missing"),
    "a config that is no JSON": (written(CONFIG, "{"), CONFIG, "as JSON"),
    "an empty config": (written(CONFIG, ""), CONFIG, "as JSON"),
    "a config in bytes": (written(CONFIG, b"\xff\xfe\x00"), CONFIG, "as JSON"),
    "a config that is a list": (written(CONFIG, "[]"), CONFIG, "must hold a JSON object"),
    "a config nested deeply": (written(CONFIG, DEEP), CONFIG, "as JSON"),
    "a number of many digits": (written(CONFIG, '{"a": ' + "9" * 5000 + "}"), CONFIG, "as JSON"),
    "a config that is a folder": (a_folder(CONFIG), CONFIG, "not a plain file"),
    "a config that is a pipe": (a_pipe(CONFIG), CONFIG, "not a plain file"),
    "no architecture": (option(architectures=...), CONFIG, "must name exactly one architecture"),
    "an architecture that is a number": (option(architectures=[7]), CONFIG, "must name exactly one architecture"),
    "an architecture of others": (option(architectures=["GPT9"]), CONFIG, "has no GPT9"),
    "a size that is text": (option(hidden_size="64"), CONFIG, "hidden_size must be an integer"),
    "a size that is true": (option(hidden_size=True), CONFIG, "hidden_size must be an integer"),
    "a size below zero": (option(intermediate_size=-96), CONFIG, "intermediate_size must be an integer"),
    "a size without end": (option(vocab_size=1 << 80), CONFIG, "vocab_size must be an integer"),
    "a billion layers": (option(num_hidden_layers=10**9), CONFIG, "num_hidden_layers must be an integer"),
    "no heads": (option(num_attention_heads=0), CONFIG, "num_attention_heads must be an integer"),
    "heads that do not share": (option(num_key_value_heads=3), CONFIG, "cannot share 3 key-value heads"),
    "an odd width of heads": (option(head_dim=7), CONFIG, "head_dim=7 must be even"),
    "an epsilon that is none": (option(rms_norm_eps=float("nan")), CONFIG, "rms_norm_eps must be a positive number"),
    "a dtype of others": (option(dtype="int3", torch_dtype=...), CONFIG, "is not supported"),
    "rope of others": (option(rope_parameters={"rope_type": "x"}, rope_scaling=...), CONFIG, "rope"),
    "rope that is a number": (option(rope_parameters=3, rope_scaling=...), CONFIG, "must be an object"),
    "quantised by others": (option(quantization_config={"bits": 4}), CONFIG, "quantization_config"),
    "no weights": (without(WEIGHTS), "", "no file ends with .safetensors"),
    "pickled weights": (renamed(WEIGHTS, "pytorch_model.bin"), "", "the weights are pickled, which can run code"),
    "weights for llama.cpp": (renamed(WEIGHTS, "model.gguf"), "model.gguf", "not a GGUF file"),
    "an adapter": (renamed(CONFIG, "adapter_config.json"), "", "an adapter (LoRA), not a model"),
    "weights cut short": (cut(WEIGHTS, 5000), WEIGHTS, "not a complete safetensors file"),
    "weights of no bytes": (cut(WEIGHTS, 0), WEIGHTS, "not a complete safetensors file"),
    "weights that are a pipe": (a_pipe(WEIGHTS), WEIGHTS, "not a plain file"),
    "weights that are a folder": (a_folder(WEIGHTS), WEIGHTS, "not a plain file"),
    "a header of 2^63 bytes": (header(1 << 63), WEIGHTS, "not a complete safetensors file"),
    "a header of 2^64 - 1 bytes": (header((1 << 64) - 1), WEIGHTS, "not a complete safetensors file"),
    "a header that is no JSON": (written(WEIGHTS, struct.pack("<Q", 4) + b"{{{{"), WEIGHTS, "not a complete"),
    "tensors that overlap": (header(a=tensor(0, 16), b=tensor(8, 24)), WEIGHTS, "not a complete safetensors file"),
    "a tensor behind the end": (header(a=tensor(0, 4096, shape=(1024,))), WEIGHTS, "not a complete safetensors file"),
    "a tensor that ends before it begins": (header(a=tensor(64, 0)), WEIGHTS, "not a complete safetensors file"),
    "a shape without end": (header(a=tensor(0, 64, shape=(1 << 40, 1 << 40))), WEIGHTS, "not a complete"),
    "a missing tensor": (weights(lambda each: each.pop("model.norm.weight")), "", "missing tensors: model.norm.weight"),
    "a tensor too many": (weights(lambda each: each.update(x=torch.zeros(2))), "", "does not use: x"),
    "a misshapen tensor": (
        weights(lambda each: each.update({"model.norm.weight": torch.zeros(3)})),
        *(WEIGHTS, "the configuration implies"),
    ),
    "a tensor of integers": (
        weights(lambda each: each.update({"model.norm.weight": torch.zeros(64, dtype=torch.int64)})),
        *(WEIGHTS, "is stored as I64"),
    ),
    "a shard outside": (placed("../../x"), INDEX, "is not the name of a safetensors file in this directory"),
    "a shard outside by name": (placed("../model.safetensors"), INDEX, "is not the name of a safetensors file"),
    "a shard from the root": (placed("/etc/passwd.safetensors"), INDEX, "is not the name of a safetensors file"),
    "a shard that is a number": (placed(7), INDEX, "is not the name of a safetensors file"),
    "a shard that is not there": (placed("gone.safetensors"), "gone.safetensors", "the checkpoint is incomplete"),
    "an index without a map": (written(INDEX, '{"weight_map": []}'), INDEX, "weight_map must be a non-empty object"),
    "no tokenizer": (without(TOKENIZER), TOKENIZER, "the file is missing"),
    "a tokenizer that is no JSON": (written(TOKENIZER, "{"), TOKENIZER, "not a tokenizer"),
    "a tokenizer that is none": (written(TOKENIZER, "{}"), TOKENIZER, "not a tokenizer"),
    "a tokenizer nested deeply": (written(TOKENIZER, DEEP), TOKENIZER, "not a tokenizer"),
    "a tokenizer in bytes": (written(TOKENIZER, b"\x00\xff" * 99), TOKENIZER, "not a tokenizer"),
    "a tokenizer that is a pipe": (a_pipe(TOKENIZER), TOKENIZER, "the file is missing"),
    "settings of it that are a list": (written(TOKENIZER_CONFIG, "[]"), TOKENIZER_CONFIG, "must hold a JSON object"),
    "settings of it nested deeply": (written(TOKENIZER_CONFIG, DEEP), TOKENIZER_CONFIG, "not readable as JSON"),
    "a template that is a number": (
        written(TOKENIZER_CONFIG, '{"chat_template": 7}'),
        TOKENIZER_CONFIG,
        "must be text",
    ),
    "an end of text that is unknown": (
        written(TOKENIZER_CONFIG, '{"eos_token": "<nowhere>"}'),
        *(TOKENIZER_CONFIG, "'<nowhere>' is not in tokenizer.json"),
    ),
    "an end of text that is text": (
        written("generation_config.json", '{"eos_token_id": "2"}'),
        *("generation_config.json", "eos_token_id must be an integer"),
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_checkpoint(), tmp_path / "model"))


def test_the_folder_is_served_as_it_is(folder: Path):
    serve(folder)


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_one_line_that_names_the_file(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    change, file, words = BROKEN[what]
    change(folder)
    opened: list[str] = []
    monkeypatch.setattr("quire_engine.execution.models.checkpoint.safe_open", _listing(opened))
    said = refusal(folder)
    assert "\n" not in said
    assert str(folder / file) in said
    assert words in said
    assert len(said) < 1000
    assert all(Path(each).resolve().parent == folder for each in opened)


def _listing(opened: list[str]) -> Callable[..., object]:
    from safetensors import safe_open

    def listed(path: str, **options: object) -> object:
        opened.append(path)
        return safe_open(path, **options)  # type: ignore[no-untyped-call]

    return listed


def test_there_are_enough_of_them():
    assert len(BROKEN) >= 25


SETTINGS: dict[str, tuple[dict[str, object], str]] = {
    "int8 keys and values of heads that the kernels do not take": (
        {"kernels": "auto", "dtype": "bfloat16", "kv_cache_dtype": "int8"},
        "multiple of 16 up to 512, not head_dim 72",
    ),
    "the same by name": (
        {"kernels": "cpu", "dtype": "bfloat16", "kv_cache_dtype": "int8"},
        "multiple of 16 up to 512, not head_dim 72",
    ),
    "int8 by the reference": ({"kv_cache_dtype": "int8"}, "(set kv_cache_dtype to auto)"),
    "fp8 on a CPU": ({"kernels": "auto", "dtype": "bfloat16", "kv_cache_dtype": "fp8"}, "not in fp8"),
    "int4 weights in float32": (
        {"kernels": "auto", "dtype": "float32", "quantization": "int4"},
        "set dtype to bfloat16",
    ),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_what_no_kernels_can_do_is_refused_at_the_start(what: str, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.getbasetemp() / "heads-of-72"
    if not path.exists():
        make_checkpoint(path, "llama", hidden_size=288, head_dim=72)
    settings, words = SETTINGS[what]
    said = refusal(path, **settings)
    assert "\n" not in said
    assert words in said


@pytest.mark.parametrize(("architecture", "is_served"), [("Qwen3Model", True), ("GPT2Model", False)])
def test_a_model_without_a_head_is_native_where_its_family_is(architecture: str, is_served: bool, tmp_path: Path):
    folder = make_checkpoint(tmp_path, kind="Model")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"architectures": [architecture]}))
    if is_served:
        check_checkpoint(folder, "native")
    else:
        with pytest.raises(ModelLoadError, match=f"architecture {architecture} have no entry of ours"):
            check_checkpoint(folder, "native")
