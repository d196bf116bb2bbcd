"""Directories that others quantised, over HTTP on AVX2: streams by the OpenAI client, a cached prefix, `kill -9`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from e2e.served import Served
from quire_kernels.cpu.variants import cpu_features
from support.model_steps import random_ids
from support.quantised import FORMS, make_quantised

pytestmark = pytest.mark.e2e

TOKENS = 60


def answer(server: Served, *, killed: bool = False) -> tuple[str, int]:
    """A streamed answer and the tokens of its prompt that were cached; the engine may be killed meanwhile."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    stream = client.completions.create(
        model="quantised",
        prompt=random_ids(40, vocab_size=200),
        max_tokens=TOKENS,
        temperature=0.7,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    ids, usage = [], None
    for place, chunk in enumerate(stream):
        for choice in chunk.choices:
            ids += choice.model_extra["token_ids"] if choice.model_extra else []
        usage = chunk.usage or usage
        if killed and place == TOKENS // 4:
            os.kill(server.engine().pid, signal.SIGKILL)
    assert usage is not None
    assert len(ids) == usage.completion_tokens == TOKENS
    details = usage.prompt_tokens_details
    return str(ids), (details.cached_tokens or 0) if details else 0


@pytest.mark.skipif(not {"avx2", "fma"} <= cpu_features(), reason="the processor has no AVX2")
# What the formats' numbers are: tests/model/test_quantised_checkpoints.py.
@pytest.mark.parametrize("name", [pytest.param("awq", marks=pytest.mark.matrix), "gptq"])
def test_a_directory_answers_the_same_again_and_after_a_kill(name: str, tmp_path: Path) -> None:
    built = [sys.executable, "-m", "quire_kernels.cpu.build", "--cpu-variant", "avx2"]
    subprocess.run(built, check=True, timeout=600)  # longer than a server's start is waited for
    path, _ = make_quantised(tmp_path, FORMS[name])
    path = path.rename(tmp_path / "quantised")
    flags = ["--device", "cpu", "--dtype", "bfloat16", "--set", "cpu_variant=avx2"]
    with Served(str(path), *flags, "--kv-memory", "4MiB", "--packed-cache", "off") as server:
        wanted, cached = answer(server)
        assert not cached
        again, cached = answer(server)
        assert again == wanted
        assert cached >= 16
        before = server.metric("quire_engine_restarts_total")
        assert answer(server, killed=True)[0] == wanted
        assert server.metric("quire_engine_restarts_total") == before + 1
        assert answer(server)[0] == wanted
        assert f"kept as {name.upper()}, 4 bits" in server.log()
        assert server.metric("quire_model_info", cpu_variant="avx2") == 1.0
