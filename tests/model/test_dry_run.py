"""`quire serve --dry-run`: the plan of the configuration, without a weight being read."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quire_engine.build
from quire_engine.build import resolve_plan
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.execution.models.checkpoint import Checkpoint
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.weights import expected_shapes
from quire_engine.memory_plan import plan_text
from quire_engine.tools import adapter_facts
from quire_engine.tools.dry_run import answers
from quire_server.commands import serve
from quire_server.engine import adapters
from quire_server.programs import launch
from quire_server.settings import Settings
from quire_server.settings.values import LoraModule
from quire_server.state import check_model
from support.checkpoints import make_checkpoint, shared_checkpoint, write_tokenizer

# Runs a command and prints the most memory that a process of it had, after what it printed.
MEASURED = (
    "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]);"
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024); sys.exit(code)"
)


def dry_run(*argv: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *before, "-m", "quire_server.cli", "serve", "--dry-run", "--device", "cpu", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ.copy(), check=False)


def refusal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str
) -> subprocess.CompletedProcess[str]:
    """What the command writes when it runs in this process, which also makes the plan."""
    monkeypatch.setattr(launch, "ask", lambda tool, config, _: [resolve_plan(config)])
    capfd.readouterr()  # what made the model may have shown its progress
    code = serve.run(["--dry-run", "--device", "cpu", *argv])
    out, err = capfd.readouterr()
    return subprocess.CompletedProcess(argv, code, out, err)


def make_sparse_checkpoint(path: Path) -> Path:
    """A model of over a gigabyte whose weights are a hole in its file."""
    config = json.loads((shared_checkpoint("llama") / "config.json").read_text())
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 128, "num_attention_heads": 16}
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**config, **sizes, "num_hidden_layers": 10, "dtype": "bfloat16"}))
    header, end = {}, 0
    for name, shape in expected_shapes(load_model_config(path)).items():
        start, end = end, end + 2 * int.__mul__(*shape, *[1] * (2 - len(shape)))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    write_tokenizer(path)
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


def test_the_plan_is_that_of_the_configuration(monkeypatch):
    monkeypatch.setattr(quire_engine.build.Loading, "load", None)
    monkeypatch.setattr(Checkpoint, "tensor", None)
    asked = EngineConfig(model=str(shared_checkpoint()), device="cpu", kv_memory=1 << 20, num_threads=1)
    assert list(answers(iter([asdict(asked)] * 2))) == [asdict(resolve_plan(asked))] * 2


@pytest.mark.matrix  # as the plan is printed
def test_what_quantisation_costs_is_part_of_it():
    result = dry_run(str(shared_checkpoint()), "--dtype", "bfloat16", "--quantization", "int4", "--kv-memory", "1MiB")
    assert "not measured: run quire eval-quant" in result.stdout


def test_the_plan_is_printed_and_no_weight_is_read(tmp_path: Path):
    path = make_sparse_checkpoint(tmp_path / "model")
    argv = (str(path), "--kv-memory", "64MiB", "--num-threads", "1", "--set", "kernels=reference")
    result = dry_run(*argv, before=("-c", MEASURED, sys.executable))
    assert result.returncode == 0, result.stderr
    *plan, most = result.stdout.splitlines()
    settings = Settings(model=str(path), device="cpu", kv_memory=64 << 20, num_threads=1, kernels="reference")
    assert plan == plan_text(resolve_plan(settings.engine_config())).splitlines()
    assert any("estimated" in line for line in plan)
    assert "599,828,480 parameters" in plan[0]
    assert int(most) < 0.7 * 2 * 599_828_480


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--set", "kernels=reference", "--kv-memory", "1KiB"], 2, "--kv-memory 16384 or more"),
        # They take the same way; test_build.py has their lines.
        pytest.param(
            ["--set", "kernels=cpu", "--dtype", "float32"], 2, "(set dtype to bfloat16)", marks=pytest.mark.matrix
        ),
        pytest.param(
            ["--set", "kernels=reference", "--max-model-len", "513"],
            2,
            "set --max-model-len 512 or less",
            marks=pytest.mark.matrix,
        ),
        (["--max-num-seqs", "600"], 2, "--max-num-seqs"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line_and_exit_code_2(argv, code, said, capfd, monkeypatch):
    assert_one_line(refusal(capfd, monkeypatch, str(shared_checkpoint()), *argv), code, said)


def test_a_model_that_cannot_be_read_is_one_line_and_exit_code_1(tmp_path: Path, capfd, monkeypatch):
    path = make_checkpoint(tmp_path / "model")
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1])
    assert_one_line(refusal(capfd, monkeypatch, str(path)), 1, "not a complete safetensors file")


@pytest.mark.matrix  # as what cannot be read
def test_a_model_that_is_nowhere_is_one_line_and_exit_code_1(tmp_path: Path):
    assert_one_line(dry_run(str(tmp_path / "nowhere")), 1, "no such directory")


@pytest.mark.matrix  # as what cannot be read
def test_what_a_start_refuses_is_refused():
    assert_one_line(
        dry_run(str(shared_checkpoint()), "--set", "kernels=reference", "--chat-template", "x"), 2, "none of that name"
    )


def _without_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def _with_broken_template(path: Path) -> None:
    (path / "chat_template.jinja").write_text("{% for %}")


def _with_wrong_defaults(path: Path) -> None:
    (path / "generation_config.json").write_text('{"temperature": 9}')


def _as_it_is(path: Path) -> None:
    assert path.is_dir()


@pytest.mark.parametrize(
    ("change", "asked", "said"),
    [
        (_without_tokenizer, {}, r"tokenizer\.json: the file is missing"),
        (_with_broken_template, {}, "the chat template does not compile"),
        (_with_wrong_defaults, {}, r"generation_config\.json: temperature"),
        (_as_it_is, {"tool_call_parser": "nobody"}, "tool call parser 'nobody' is unknown"),
        (_as_it_is, {"default_chat_template_kwargs": {"nothing": 1}}, "the template has no variable 'nothing'"),
        (
            _as_it_is,
            {"enable_lora": True, "lora_modules": (LoraModule(name="a", path="/nowhere"),)},
            "/nowhere: there is no such directory of an adapter",
        ),
    ],
)
def test_texts_and_adapters_are_checked_without_an_engine(
    change: Callable[[Path], None], asked: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(tool: str, questions: Sequence[dict[str, Any]], *_: object, timeout: float) -> list[Any]:
        """Read adapters without the process in which test_adapter_facts.py reads them."""
        plain = [{**each, "config": asdict(each["config"])} for each in questions]
        return list(adapter_facts.answers(iter(plain)))

    monkeypatch.setattr(adapters, "ask_each", here)
    path = Path(shutil.copytree(shared_checkpoint(), tmp_path / "model"))
    plan = resolve_plan(EngineConfig(model=str(path), device="cpu", kv_memory=1 << 20, num_threads=1))
    asyncio.run(check_model(Settings(model=str(path)), plan))
    change(path)
    with pytest.raises((ConfigError, ModelLoadError), match=said):
        asyncio.run(check_model(Settings(model=str(path), **asked), plan))


def test_left_over_tensors_are_refused_without_a_weight(tmp_path: Path) -> None:
    path = Path(shutil.copytree(shared_checkpoint(), tmp_path / "model"))
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "model.sinks": torch.zeros(4)}, path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"does not use: model\.sinks"):
        resolve_plan(EngineConfig(model=str(path), device="cpu", kv_memory=1 << 20))


def assert_one_line(result: subprocess.CompletedProcess[str], code: int, said: str) -> None:
    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert result.stderr.startswith("quire serve: ")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
