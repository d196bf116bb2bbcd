"""The notebooks and the loop of one's own in docs: each cell is run, and says what is shown beside it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from quire_engine.build import build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.demo import demo_model_path
from support.covering import few
from support.documents import ROOT, text
from support.offline import generate

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LOOP = ROOT / "docs" / "examples" / "own_loop.py"
PARTS = ("server", "engine", "kernels", "benchmarks", "lab")
OURS = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in PARTS)}
MOST_BYTES = 20_000  # of a notebook: pictures and states of widgets are no part of one


def test_there_is_one_for_each_lesson():
    lessons = ["chunked_prefill", "continuous_batching", "paged_kv", "prefix_cache"]
    assert [path.stem for path in NOTEBOOKS] == lessons
    assert all(f"notebooks/{name}.ipynb" in text("docs/learn.md") for name in lessons)


@pytest.mark.parametrize(
    "path",
    few(NOTEBOOKS, *(path for path in NOTEBOOKS if path.stem != "continuous_batching")),
    ids=[path.stem for path in NOTEBOOKS],
)
def test_a_notebook_shows_what_its_cells_print(path: Path):
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert path.stat().st_size < MOST_BYTES
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    names = {"__name__": "__main__"}
    for cell in cells:
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile("".join(cell["source"]), f"{path.stem}:{cell['id']}", "exec"), names)
        assert printed.getvalue() == shown, f"{path.stem}, cell {cell['execution_count']}"


def test_the_loop_of_ones_own_gives_the_engines_tokens(monkeypatch: pytest.MonkeyPatch):
    """With the very tokens of the engine, however its batches and chunks differ."""
    source = LOOP.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "own_loop"}
    exec(compile(source, str(LOOP), "exec"), names)
    prompts = [
        "Once upon a time",
        "The capital of France is " * 12,
        "A shy princess",
        "One spring day, Tom",
        "The",
        "Be patient",
    ]
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    asked = [
        GenerationRequest(
            request_id=prompt,
            prompt_token_ids=tuple(tokenizer.encode(prompt).ids),
            sampling=SamplingParams(temperature=0),
            stop=StopParams(max_new_tokens=20),
        )
        for prompt in prompts
    ]
    config = EngineConfig(
        model=str(demo_model_path()), device="cpu", dtype="float32", kernels="reference", kv_memory=8 << 20
    )
    replies = generate(build(config), asked)
    expected = [replies[prompt, 0].token_ids for prompt in prompts]
    assert names["serve"]([list(each.prompt_token_ids) for each in asked], 20) == expected  # type: ignore[operator]
    assert len(names["free"]) == names["NUM_BLOCKS"], "every block is free again"  # type: ignore[arg-type]


@pytest.mark.matrix  # the same loop runs beside it
def test_the_loop_runs_as_a_script():
    done = subprocess.run(
        [sys.executable, str(LOOP)], capture_output=True, text=True, env=OURS, check=True, timeout=100
    )
    assert "The capital of France is Paris." in done.stdout
    answers, rate = done.stdout.strip().rsplit("\n", 1)
    assert answers in text("docs/learn.md")
    assert re.fullmatch(r"[\d,]+ output tokens a second", rate)
