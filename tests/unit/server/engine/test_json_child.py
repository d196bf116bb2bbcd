"""A child asked and answered in lines of JSON: what it may print, how it refuses, what is told of one that dies."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from quire_engine.contract.errors import ConfigError, EngineDead, ModelLoadError
from quire_engine.quality_store import Quality
from quire_server.engine import json_child
from quire_server.engine.json_child import ask

PROGRAM = """
import sys
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.tools.json_child import converse

def answers(questions):
    for asked in questions:
        print("noise")
        if asked == "config":
            raise ConfigError("set it to 3")
        if asked == "model":
            raise ModelLoadError("no file")
        if asked == "library":
            import no_such_library
        yield {"asked": asked}

sys.exit(converse(answers))
"""
QUALITY = Quality(
    checkpoint="c",
    quantization=None,
    kv_cache_dtype="int8",
    prompts="text",
    num_positions=3,
    mean_kl=0.5,
    max_kl=1.0,
    greedy_agreement=0.9,
    continuation_agreement=0.8,
    bf16_perplexity=2.0,
    perplexity=2.5,
    measured="2025-01-01",
)


def conversation(*questions: object) -> tuple[int, list[object], str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="".join(json.dumps(question) + "\n" for question in questions),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_a_line_out_for_each_line_in_whatever_libraries_print():
    assert conversation([1], {"a": None}) == (0, [{"asked": [1]}, {"asked": {"a": None}}], "noise\nnoise\n")


@pytest.mark.parametrize(
    ("asked", "code", "refusal"),
    [
        ("config", 2, {"error": "set it to 3", "kind": "config"}),
        ("model", 1, {"error": "no file", "kind": "model"}),
        ("library", 1, {"error": "No module named 'no_such_library'", "kind": "model"}),
    ],
)
def test_a_refusal_is_the_last_reply(asked, code, refusal):
    assert conversation(0, asked, 1)[:2] == (code, [{"asked": 0}, refusal])


def child(monkeypatch, stdout: bytes, code: int = 0) -> list[list[str]]:
    """What `ask` starts from now on replies this; the commands it is started with."""
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess([], code, stdout=stdout)

    monkeypatch.setattr(json_child.subprocess, "run", run)
    return commands


def test_replies_are_records(monkeypatch):
    line = json.dumps({name: getattr(QUALITY, name) for name in Quality.__dataclass_fields__}).encode()
    commands = child(monkeypatch, line + b"\n" + line + b"\n")
    assert ask("quality", {}, Quality) == [QUALITY, QUALITY]
    assert commands[0][-2:] == ["-m", "quire_engine.tools.quality"]


@pytest.mark.parametrize(
    ("stdout", "code", "expected", "said"),
    [
        (b'{"error": "set it to 3", "kind": "config"}\n', 2, ConfigError, "set it to 3"),
        (b'{"a": 1}\n{"error": "no file", "kind": "model"}\n', 1, ModelLoadError, "no file"),
        (b"", -9, EngineDead, r"the quality process ended early \(exit code -9\)"),
        (b'{"a": 1}\n', 1, EngineDead, "was there enough memory"),
    ],
)
def test_a_refusal_or_a_death_is_raised(stdout, code, expected, said, monkeypatch):
    child(monkeypatch, stdout, code)
    with pytest.raises(expected, match=said):
        ask("quality", {}, Quality)
