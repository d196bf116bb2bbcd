"""`quire eval-quant` from outside: the table, the files it leaves, one clear line for what cannot be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire_engine.execution.models.checkpoint import fingerprint
from quire_engine.quality_store import default_directory, stored_quality
from quire_server.commands import eval_quant
from quire_server.engine import json_child
from support.checkpoints import make_checkpoint, shared_checkpoint


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache of its own, but for the compiled kernels."""
    kernels = default_directory().parent / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    cache = tmp_path / "home" / ".cache" / "quire"
    cache.mkdir(parents=True)
    shutil.copytree(kernels, cache / "kernels")  # a link would not be trusted
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def eval_quant_process(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire_server.cli", "eval-quant", *argv, "--num-threads", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_a_model_is_measured(home: Path, tmp_path: Path):
    path, file = shared_checkpoint(), tmp_path / "results.json"
    result = eval_quant_process(str(path), "--quantization", "int4", "--kv-cache-dtype", "int8", "--json", str(file))
    assert result.returncode == 0, result.stderr
    assert "int4" in result.stdout
    assert "KL is how far" in result.stdout
    (written,) = json.loads(file.read_text())["results"]
    stored = stored_quality(fingerprint(path), "int4", "int8")
    assert stored is not None
    assert stored.mean_kl == written["mean_kl"] > 0
    assert stored.prompts == "text"
    assert f"{stored.greedy_agreement:.1%}" in result.stdout


@pytest.mark.matrix  # as a model that cannot be loaded
def test_a_model_without_a_tokenizer(home: Path, tmp_path: Path):
    path = make_checkpoint(tmp_path / "model")
    (path / "tokenizer.json").unlink()
    result = eval_quant_process(str(path), "--quantization", "int8")
    assert result.returncode == 0, result.stderr
    assert "pseudo-random tokens" in result.stderr
    assert "of random ids" in result.stdout


@pytest.mark.matrix  # a child that refuses or dies: test_json_child.py, and the next test
def test_a_model_that_cannot_be_loaded(home: Path, tmp_path: Path):
    path = make_checkpoint(tmp_path / "model")
    (path / "model.safetensors").unlink()
    result = eval_quant_process(str(path))
    assert result.returncode == 1
    assert "model.safetensors" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_process_that_dies_is_told(monkeypatch, capsys):
    monkeypatch.setattr(json_child.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -9, stdout=b""))
    assert eval_quant.run([str(shared_checkpoint())]) == 1
    assert "exit code -9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["/nowhere/at-all"], 1, "no such directory"),
        (["--tokenizer", "/nowhere"], 1, "the file is missing"),
        (["--quantization", "int3"], 2, "'int3' is unknown; use int8, int4 or none"),
        (["--quantization", "none"], 2, "nothing to measure"),
        (["--json", "/nowhere/at/all.json"], 2, "no such directory"),
        (["--kv-cache-dtype", "fp4"], 2, "fp4"),
        (["--device", "tpu"], 2, "tpu"),
        pytest.param(
            ["--device", "cpu", "--kv-cache-dtype", "fp8"],
            1,
            "set kv_cache_dtype to int8",
            marks=pytest.mark.matrix,  # the child's refusal, as that of a model that cannot be loaded
        ),
        (["--num-threads", "0"], 2, "--num-threads"),
    ],
)
def test_what_cannot_be(argv, code, said, capsys):
    try:
        found = eval_quant.run(argv)
    except SystemExit as stop:
        found = stop.code
    captured = capsys.readouterr()
    assert found == code
    assert said in captured.err
    assert captured.err.startswith("quire eval-quant: ")
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""
