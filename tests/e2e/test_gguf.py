"""A GGUF file over HTTP: its name, its template, streams through the OpenAI client, a cached prefix, `kill -9`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from e2e.served import Served
from quire_kernels.cpu.variants import cpu_features
from support.gguf_models import make_gguf

pytestmark = pytest.mark.e2e

TOKENS = 60
CHAT: list[Any] = [{"role": "user", "content": "Question: what is the capital of France? The quick brown fox. " * 2}]


def mixed(name: str, shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return "F32"
    return "Q6_K" if "ffn_down" in name or "token_embd" in name else "Q4_K"


def answer(server: Served, model: str, *, killed: bool = False) -> tuple[str, int | None]:
    """A streamed answer and the tokens of its prompt that were cached; the engine may be killed meanwhile."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    stream = client.chat.completions.create(
        model=model,
        messages=CHAT,
        max_tokens=TOKENS,
        temperature=0.7,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, usage = "", None
    for place, chunk in enumerate(stream):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
        if killed and place == TOKENS // 4:
            os.kill(server.engine().pid, signal.SIGKILL)
    assert usage is not None
    assert usage.completion_tokens == TOKENS
    details = usage.prompt_tokens_details
    return text, details.cached_tokens if details else None


# What is quantised here is decoded first: tests/model/test_gguf_models.py.
@pytest.mark.parametrize(
    ("quantization", "variant"), [(None, "avx2"), pytest.param("int4", None, marks=pytest.mark.matrix)]
)
def test_a_file_answers_the_same_again_and_after_a_kill(quantization: str | None, variant: str | None, tmp_path: Path):
    """Quantised here, it answers as its numbers do, which are decoded first; else they are not rounded as those are."""
    if variant is not None and not {"avx2", "fma"} <= cpu_features():
        variant = None  # the best of this processor then
    path, dense = make_gguf(
        tmp_path, "qwen3", kinds=mixed, hidden_size=256, intermediate_size=512, num_attention_heads=8
    )
    path = path.rename(tmp_path / "Tiny-Q4_K_M.gguf")
    flags = [
        "--device",
        "cpu",
        "--dtype",
        "bfloat16",
        "--kv-memory",
        "16MiB",
        "--packed-cache",
        str(tmp_path / "p"),
        *("--generation-config", "none"),  # a file samples by llama.cpp's defaults else
    ]
    flags += [] if quantization is None else ["--quantization", quantization]
    if variant is not None:
        built = [sys.executable, "-m", "quire_kernels.cpu.build", "--cpu-variant", variant]
        subprocess.run(built, check=True, timeout=600)  # longer than a server's start is waited for
        flags += ["--set", f"cpu_variant={variant}"]
    if quantization is not None:
        with Served(str(dense), "--served-model-name", "Tiny-Q4_K_M", *flags) as server:
            wanted, _ = answer(server, "Tiny-Q4_K_M")
    with Served(str(path), *flags) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        assert [model.id for model in client.models.list()] == ["Tiny-Q4_K_M"]
        first, cached = answer(server, "Tiny-Q4_K_M")
        if quantization is None:
            wanted = first
        assert first == wanted
        assert not cached
        again, cached = answer(server, str(path))
        assert again == wanted
        assert cached
        assert cached >= 16
        before = server.metric("quire_engine_restarts_total")
        assert answer(server, "Tiny-Q4_K_M", killed=True)[0] == wanted
        assert server.metric("quire_engine_restarts_total") == before + 1
        assert answer(server, "Tiny-Q4_K_M")[0] == wanted
        if variant is not None:
            assert server.metric("quire_model_info", cpu_variant=variant) == 1.0
        assert f"{'kept as' if quantization is None else 'decoded from'} GGUF, Q4_K, Q6_K" in server.log()
