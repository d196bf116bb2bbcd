"""The baselines: static batches by our engine and by transformers' generate, alone and as processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from quire_bench import baselines
from quire_bench.baselines import BASELINES, start_baseline
from quire_bench.measures import measure
from quire_bench.servers import BenchError
from quire_bench.workload import Job, LoadPoint
from quire_engine.build import build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.tools.baselines import hf_generate, static
from quire_engine.tools.baselines.batches import Member
from support.checkpoints import shared_checkpoint
from support.covering import few
from support.model_steps import random_ids
from support.offline import generate

MEMBERS = [Member(prompt=(5, 6, 7), output_tokens=2), Member(prompt=(9,) * 6, output_tokens=5)]

NUM_TOKENS = 24


@pytest.fixture(autouse=True)
def _keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config(**changes) -> EngineConfig:
    values = {"model": str(shared_checkpoint()), "device": "cpu", "num_threads": 1, "kv_memory": 8 << 20}
    return EngineConfig(**(values | changes))


@pytest.mark.parametrize("baseline", [static, hf_generate], ids=["static", "hf-generate"])
def test_times_are_those_of_the_tokens_asked_for(baseline):
    run = baseline.load(config())
    for _ in range(2):
        short, long = run(MEMBERS)
        assert (len(short), len(long)) == (2, 5)
        assert long[0] > 0
        assert long == sorted(set(long))  # every step takes its time
    (alone,) = run([Member(prompt=(5,), output_tokens=1)])
    assert len(alone) == 1


def test_static_batches_keep_their_places(monkeypatch):
    """The short member computes as many tokens as the long one: this is the waste that is measured."""
    built = static.build(config())
    engine = static.Engine(built.scheduler, built.executor)
    generated = []
    original = engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: (generated.append(request.stop), original(request)))
    static.run_batch(engine, MEMBERS)
    assert [stop.max_new_tokens for stop in generated] == [5, 5]
    assert {stop.stop_token_ids for stop in generated} == {()}


def test_generate_ends_by_length_only():
    """transformers would stop at the end token; with random weights it comes up sooner or later."""
    run = hf_generate.load(config())
    members = [Member(prompt=(token, 3, 5), output_tokens=40) for token in range(10, 18)]
    assert [len(times) for times in run(members)] == [40] * 8


def test_the_same_greedy_tokens_as_our_engine(monkeypatch):
    """By transformers in a batch padded on the left, alone, and by our engine in one batch without padding."""
    run = hf_generate.load(config())
    model, calls = run.args[0], []
    original = model.generate
    monkeypatch.setattr(model, "generate", lambda **options: calls.append(original(**options)) or calls[-1])
    prompts = [(5, 6, 7), tuple(range(20, 31)), (9,) * 6, tuple(random_ids(50, seed=3))]
    run([Member(prompt=prompt, output_tokens=NUM_TOKENS) for prompt in prompts])
    for prompt in prompts:
        run([Member(prompt=prompt, output_tokens=NUM_TOKENS)])
    padded, *alone = [tokens[:, -NUM_TOKENS:].tolist() for tokens in calls]
    assert [[row] for row in padded] == alone

    built = build(config(kernels="reference", dtype="float32"))
    requests = [
        GenerationRequest(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, num_logprobs=2),
            stop=StopParams(max_new_tokens=NUM_TOKENS),
        )
        for number, prompt in enumerate(prompts)
    ]
    ours = [generated for _, generated in sorted(generate(built, requests).items())]
    assert [generated.token_ids for generated in ours] == padded
    # No choice was so close that another order of summation could have made the other one.
    margins = [each.top_logprobs[0] - each.top_logprobs[1] for generated in ours for each in generated.logprobs]
    assert len(margins) == len(prompts) * NUM_TOKENS
    assert min(margins) > 0.01


def measured(name: str, jobs: list[Job], **changes):
    async def go():
        baseline = await start_baseline(name, config(**changes), streams=2)
        try:
            return measure(await baseline.run(LoadPoint(mode="concurrency", value=2), jobs, None))
        finally:
            await baseline.close()

    return asyncio.run(go())


@pytest.mark.parametrize("name", few(BASELINES, "static"))
def test_as_a_process(name: str):
    jobs = [Job(prompt=[7, 8, 9 + i], output_tokens=2 + i) for i in range(5)]
    measures = measured(name, jobs)
    assert (measures.ok, measures.errors, measures.wrong_length) == (5, {}, 0)
    assert measures.input_tokens == 15
    assert measures.output_tokens == 2 + 3 + 4 + 5 + 6
    assert measures.ttft_ms.p50 > 0
    assert measures.little.in_flight <= 2


def test_what_a_process_refuses_is_named(monkeypatch: pytest.MonkeyPatch):
    code = """import sys; sys.stdin.readline(); print('{"error": "config.json: no such file"}')"""
    monkeypatch.setattr(baselines, "module_command", lambda module: [sys.executable, "-c", code])
    with pytest.raises(BenchError, match=r"baseline static cannot run: config\.json: no such file"):
        measured("static", [])


@pytest.mark.matrix  # as what another process refuses
def test_a_model_that_is_not_there(tmp_path: Path):
    with pytest.raises(BenchError, match=r"baseline static cannot run: .*config\.json"):
        measured("static", [], model=str(tmp_path))


def test_what_libraries_print_does_not_come_between_the_replies():
    program = (
        "import sys; from quire_engine.tools.baselines.batches import answer\n"
        "def load(config):\n    print('loading')\n"
        "    return lambda members: print('working') or [[0.5]] * len(members)\n"
        "sys.exit(answer(load))"
    )
    lines = [json.dumps(asdict(config())), json.dumps([[[1, 2], 1]]), json.dumps([[[1], 1], [[2], 1]])]
    done = subprocess.run(
        [sys.executable, "-c", program], input="\n".join(lines), capture_output=True, text=True, timeout=60, check=True
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"ready": True},
        {"times": [[0.5]]},
        {"times": [[0.5], [0.5]]},
    ]
    assert "loading" in done.stderr


def test_generate_says_what_it_needs_for_a_gguf_file(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr(hf_generate, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install accelerate"):
        hf_generate.load(config(model=str(tmp_path)))


def test_generate_reads_safetensors_where_a_gguf_file_lies_beside_them(tmp_path, monkeypatch):
    for file in shared_checkpoint().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr(hf_generate, "find_spec", lambda name: None)
    (times,) = hf_generate.load(config(model=str(tmp_path)))([Member(prompt=(5,), output_tokens=2)])
    assert len(times) == 2
