"""Scripts that use the offline API: the one of the README, one written for vLLM, and what each leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.checkpoints import shared_checkpoint
from support.processes import lives

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SETTINGS = {"HF_HUB_OFFLINE": "1", "QUIRE_KV_MEMORY": "8MiB", "QUIRE_NUM_THREADS": "1"}
FOR_VLLM = """
from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64)
llm = LLM(model="meta-llama/Llama-3.2-1B")
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    print(repr(output.prompt), repr(output.outputs[0].text))
"""
ENDS = """
import atexit, os, sys, threading
script = os.getpid()
atexit.register(lambda: os.getpid() == script and print(supervisor.pid))  # the last to be called
from quire import LLM, SamplingParams

llm = LLM("quire-demo")
supervisor = llm._thread._supervisor
print(supervisor.pid, flush=True)
params = SamplingParams(max_tokens=100, ignore_eos=True)
llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
assert "torch" not in sys.modules
"""
AT_WORK = "threading.Thread(target=lambda: llm.generate('Once', params, use_tqdm=False)).start()\n"
FORK = """
if os.fork() == 0:
    try:
        llm.generate("Once", use_tqdm=False)
    except RuntimeError as error:
        sys.exit(7 if "works only in the process that made it" in str(error) else 8)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
"""
LONG_CALL = "print('running', flush=True)\nllm.generate(['Once upon a time'] * 2000, params, use_tqdm=False)\n"


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The script as a file, without a guard around its main part."""
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=os.environ | SETTINGS,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    examples = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "from quire import" in code]
    assert len(examples) == 1
    done = run(examples[0], tmp_path)
    assert done.returncode == 0, done.stderr
    (shown,) = re.findall(re.escape(examples[0]) + r"```\n\n```\n(.*?)```", README, re.DOTALL)
    assert done.stdout == shown
    assert "Processed prompts" in done.stderr


@pytest.mark.matrix  # the README's script runs, too
def test_a_script_for_vllm_needs_another_import_and_a_directory(tmp_path: Path) -> None:
    script = FOR_VLLM.replace("from vllm import", "from quire import")
    (tmp_path / "meta-llama").mkdir()
    refused = run(script, tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("ValueError: meta-llama/Llama-3.2-1B: not in the cache")
    (tmp_path / "meta-llama" / "Llama-3.2-1B").symlink_to(shared_checkpoint("llama"))
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("' '")[0].split("' \"")[0] for line in lines] == [
        "'Hello, my name is",
        "'The capital of France is",
    ]


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        pytest.param("", 0, "", marks=pytest.mark.matrix),
        pytest.param("sys.exit(3)", 3, "", marks=pytest.mark.matrix),  # as its end and an error, with another code
        pytest.param("llm.close()", 0, "", marks=pytest.mark.matrix),
        pytest.param(AT_WORK, 0, "", marks=pytest.mark.matrix),
        pytest.param(FORK, 0, "", marks=pytest.mark.matrix),
        pytest.param("raise ValueError('of the script')", 1, "ValueError: of the script", marks=pytest.mark.matrix),
        (AT_WORK + "raise ValueError('of the script')", 1, "ValueError: of the script"),
    ],
    ids=["its end", "exit", "close", "a thread at work", "a fork", "an error", "an error beside a thread at work"],
)
def test_a_script_leaves_no_engine(tmp_path: Path, ending: str, code: int, said: str) -> None:
    done = run(ENDS + ending, tmp_path)
    assert done.returncode == code, done.stderr
    assert (done.stderr.splitlines() or [""])[-1] == said
    pid, at_the_end = done.stdout.split()
    assert at_the_end == "None", "the script ended before its engine"
    wait_until_gone(int(pid))


@pytest.mark.matrix  # an engine ends with its parent: test_supervisor_ends.py
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_script_ended_by_a_signal_leaves_no_engine(tmp_path: Path, number: signal.Signals) -> None:
    """To the whole group, as a terminal sends a Ctrl-C."""
    (tmp_path / "script.py").write_text(ENDS + LONG_CALL)
    with subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ | SETTINGS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as script:
        assert script.stdout is not None
        assert script.stderr is not None
        pid = int(script.stdout.readline())
        assert script.stdout.readline() == "running\n"
        time.sleep(0.5)
        if number is signal.SIGINT:
            os.killpg(script.pid, number)
        else:
            script.send_signal(number)
        said = script.stderr.read()
        script.wait(300)
    assert script.returncode == -number
    if number is signal.SIGINT:
        assert said.splitlines()[-1] == "KeyboardInterrupt"
        assert "exception was never retrieved" not in said
    wait_until_gone(pid)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 300
    while lives(pid):
        if time.monotonic() > deadline:
            raise AssertionError("the engine process is still there")
        time.sleep(0.02)
