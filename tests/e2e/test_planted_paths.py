"""Servers on a simulated GPU with faults in its optional paths: each starts, has the plain bits, and names the paths.

Promises: every path has a fault, and each kind of fault is in two paths at least. Must not know: how paths are checked.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.served import Served
from quire_kernels.optional_paths import (
    DECODE_CHAIN,
    DEPENDENT_LAUNCH,
    FLASH_ATTENTION,
    FP8_CACHE,
    FUSED_GATE_UP,
    GRAPHS,
    NAMES,
    PACKED_WEIGHTS,
    PATHS,
    STORED_PRODUCTS,
    UNMASKED_PROMPTS,
)
from support.checkpoints import shared_checkpoint
from support.model_steps import random_ids
from support.simulated_serve import program

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]  # tests/model/test_proven_paths.py stands for it

# Simulated steps take long: a model and steps that are small.
FLAGS = (
    *("--dtype", "float32", "--kv-memory", "4MiB", "--max-model-len", "128"),
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--prefill-chunk", "32"),
)
SETTINGS = ("--quantization", "int8", "--kv-cache-dtype", "fp8", "--set", "attention=flash-attn")
KEPT = {
    PACKED_WEIGHTS: "wrong",
    FP8_CACHE: "exception",
    FLASH_ATTENTION: "signal",
    STORED_PRODUCTS: "wrong",
    UNMASKED_PROMPTS: "hang",
    FUSED_GATE_UP: "signal",
    DECODE_CHAIN: "exception",  # without which launches cannot depend on others
    GRAPHS: "hang",
}
NOT_KEPT = {STORED_PRODUCTS: "memory", DEPENDENT_LAUNCH: "wrong", GRAPHS: "memory"}
LINE = re.compile(r"the optional path (\S+) is left out on this GPU, instead: (.*?) \(")
Answers = list[dict[str, Any]]


def answers(url: str) -> Answers:
    """One completion after the other, so that all servers have the same steps."""
    given = [
        {"prompt": random_ids(45, 1, vocab_size=400), "temperature": 0},  # in two chunks
        {"prompt": random_ids(9, 2, vocab_size=400), "temperature": 0.9, "seed": 5},
        {"prompt": random_ids(17, 3, vocab_size=400), "temperature": 0.8, "top_p": 0.9, "n": 2, "seed": 6},
    ]
    plain = {"max_tokens": 16, "ignore_eos": True, "logprobs": 2, "return_token_ids": True}
    found = [httpx.post(url + "/v1/completions", json={**plain, **each}, timeout=300) for each in given]
    assert [each.status_code for each in found] == [200] * len(given), [each.text for each in found]
    return [choice for each in found for choice in each.json()["choices"]]


@pytest.fixture(scope="module")
def model() -> str:
    return str(shared_checkpoint())


@pytest.fixture(scope="module")
def plain(model: str) -> Answers:
    """Without optional paths: there are none on a CPU."""
    with Served(model, "--device", "cpu", "--set", "kernels=reference", *FLAGS) as server:
        return answers(server.url)


def planted(model: str, faults: dict[str, str], home: Path, *settings: str) -> Served:
    environment = {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    return Served(model, "--device", "cuda", *FLAGS, *settings, program=program(faults), env=environment)


def check(server: Served, left_out: list[str], plain: Answers) -> None:
    assert answers(server.url) == plain
    instead = {path.name: path.plain for path in PATHS}
    assert LINE.findall(server.log()) == [(name, instead[name]) for name in left_out], "one line a path"
    found = [name for name in NAMES if server.metric("quire_gpu_path_left_out", path=name)]
    assert found == left_out
    assert server.metric("quire_gpu_path_left_out") == len(left_out)
    assert not server.metric("quire_kernels_replaced")


def test_with_a_fault_in_each_path_two_starts_have_the_plain_bits_and_the_second_checks_nothing(model, plain, tmp_path):
    for _ in range(2):
        with planted(model, KEPT, tmp_path, *SETTINGS) as server:
            check(server, list(NAMES), plain)
    assert len((tmp_path / "checked").read_text().splitlines()) == 1


def test_paths_without_memory_are_left_out_and_the_others_serve(model, plain, tmp_path):
    with planted(model, NOT_KEPT, tmp_path) as server:
        check(server, [name for name in NAMES if name in NOT_KEPT], plain)
