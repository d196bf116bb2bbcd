"""The embedded model as a GGUF file, by the doors that have no server: the offline API, the plan, commands."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire_engine.demo import demo_model_path
from support.gguf_models import all_of, convert

PROMPTS = ["Once upon a time", "<|im_start|>user\nWhat is a quire?<|im_end|>\n<|im_start|>assistant\n"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file beside the model's own tokenizer.json, since nobody else splits text as it does."""
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(demo_model_path(), folder / "dense")
    path = convert(folder / "dense", folder / "quire-demo-BF16.gguf", "qwen3", kinds=all_of("BF16"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, folder / name)
    return path


def answers(model: Path, packed: Path) -> list[tuple[list[int], str]]:
    with LLM(str(model), kv_memory=16 << 20, packed_cache=packed, device="cpu") as llm:
        results = llm.generate(PROMPTS, SamplingParams(max_tokens=40, temperature=0))
        return [(list(each.outputs[0].token_ids), each.outputs[0].text) for each in results]


@pytest.mark.matrix  # the command below takes the same file
def test_the_offline_api_gives_the_answers_of_the_embedded_model(demo: Path, tmp_path: Path) -> None:
    assert answers(demo, tmp_path) == answers(demo_model_path(), tmp_path)
    assert answers(demo, tmp_path) == answers(demo_model_path(), tmp_path)  # from packed weights


def test_what_cannot_be_read_is_a_value_error(demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(demo.read_bytes()[:-4000])
    with pytest.raises(ValueError, match=r"cut\.gguf: .*the file is damaged or cut"):
        LLM(str(path))


def quire(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "quire_server.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_command_takes_the_file(demo: Path) -> None:
    plan = quire("serve", str(demo), "--dry-run", "--device", "cpu", "--kv-memory", "32MiB")
    assert "GGUF, BF16" in plan


@pytest.mark.matrix  # what a plan counts: test_gguf_models.py
def test_the_plan_of_the_file_is_that_of_the_model(demo: Path) -> None:
    memory = [quire("plan", "--kv", "--model", str(each), "--memory", "1GB") for each in (demo, demo_model_path())]
    assert memory[0].splitlines()[-1] == memory[1].splitlines()[-1]
