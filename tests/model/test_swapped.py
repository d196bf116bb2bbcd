"""Swapped requests and restored prefixes get their solo tokens and log-probabilities, to the last bit.

On a CPU, where swapping is refused but to tests: pool and host blocks are the same memory, what is moved is the same.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from model.test_bitwise import engine, mixed_requests, solo
from quire_engine.build import BuiltEngine
from quire_engine.contract.errors import ConfigError
from quire_engine.memory_plan import kept_blocks, plan_text
from quire_engine.scheduling.scheduler import Scheduler
from support.checkpoints import shared_checkpoint
from support.covering import few
from support.limits import engine_config
from support.offline import generate

TESTS = Path(__file__).parents[1]
HOST = {"swap_space": 8 << 20, "swap_on_cpu": True}


def swapping(built: BuiltEngine) -> BuiltEngine:
    """Copies cost nothing, so that whoever can be swapped is."""
    return replace(built, scheduler=Scheduler(replace(built.plan.scheduler, swap_seconds=0.0)))


def tight(model: str, requests, **changes) -> BuiltEngine:
    """A pool for 1.2 of the largest requests, and host blocks."""
    plan = engine(model).plan
    largest = max(
        plan.scheduler.limits.footprint(num_prompt=len(r.prompt_token_ids), max_new_tokens=r.stop.max_new_tokens, n=r.n)
        for r in requests
    )
    length = max(len(r.prompt_token_ids) + r.stop.max_new_tokens for r in requests)
    memory = int(1.2 * largest) * plan.pool.bytes_per_block
    built = engine(model, kv_memory=memory, max_model_len=length, **HOST, **changes)
    return built if "kv_offload_dir" in changes else swapping(built)


@pytest.mark.parametrize(
    ("model", "caching"),
    few(
        [
            ("qwen3", False),
            ("qwen3", True),
            ("bf16", True),
            ("bf16-windowed", False),
            ("int8-kv", True),
            ("int8-kv", False),
        ],
        *(("qwen3", True), ("bf16-windowed", False), ("int8-kv", False)),
    ),
)
def test_swapped_equals_solo(model, caching):
    requests = mixed_requests(20, seed=3)
    small = tight(model, requests, enable_prefix_caching=caching, prefill_chunk=24)
    assert generate(small, requests) == solo(requests, model=model)
    stats = small.scheduler.stats()
    assert stats.total_preemptions_by_mode["swap"] > 1
    assert stats.total_swapped_in_blocks > 3
    assert stats.host_blocks_used == 0


@pytest.mark.parametrize("model", few(["qwen3", "int8-kv"], "int8-kv"))
def test_a_restored_prefix_equals_a_computed_one(model):
    """The second time its blocks have been evicted, and come from the host."""
    requests = prefixed()
    small = tight(model, requests, enable_prefix_caching=True)
    first = {}
    for request in requests:
        first |= generate(small, [request])
    before = small.scheduler.stats()
    again = {}
    for request in requests:
        again |= generate(small, [replace(request, request_id=f"{request.request_id} again")])
    assert {(name.removesuffix(" again"), choice): kept(r) for (name, choice), r in again.items()} == {
        key: kept(r) for key, r in first.items()
    }
    stats = small.scheduler.stats()
    assert stats.total_swapped_in_blocks > before.total_swapped_in_blocks + len(requests)
    assert stats.total_prefix_hit_tokens > before.total_prefix_hit_tokens + 16 * len(requests)


def kept(result):
    return result.token_ids, result.logprobs, result.prompt_logprobs, result.finish


SERVER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from model import test_bitwise
test_bitwise.shared_checkpoint = lambda **_: sys.argv[3]
from model.test_swapped import offloading, prefixed
from support.offline import generate
built = offloading(sys.argv[2])
for request in prefixed():
    generate(built, [request])
built.executor._host._files.close()
os.kill(os.getpid(), signal.SIGKILL)
"""


def prefixed():
    return [replace(r, n=1) for r in mixed_requests(24, seed=4, longest=80) if len(r.prompt_token_ids) > 40]


def offloading(directory) -> BuiltEngine:
    return tight("qwen3", prefixed(), enable_prefix_caching=True, kv_offload_dir=str(directory))


@pytest.mark.matrix  # files from before an end: below
def test_a_prefix_from_before_a_kill_equals_a_computed_one(tmp_path):
    """The tokens that the first server computed are taken from its files by the second, and are as if computed."""
    paths = (TESTS, tmp_path / "kv", shared_checkpoint(family="qwen3"))
    ended = subprocess.run([sys.executable, "-c", SERVER, *map(str, paths)], check=False)
    assert ended.returncode == -signal.SIGKILL
    again = offloading(tmp_path / "kv")
    restored = again.scheduler.stats().host_blocks_cached
    assert restored > 5
    found = {}
    for request in prefixed():
        found |= generate(again, [request])
    assert found == solo(prefixed(), model="qwen3")
    stats = again.scheduler.stats()
    assert stats.total_prefix_hit_tokens >= 16 * 5
    assert stats.total_swapped_in_blocks >= 5


def test_files_of_other_weights_are_not_read_and_own_ones_equal_computed_blocks(tmp_path):
    first = offloading(tmp_path / "kv")
    for request in prefixed()[:6]:
        generate(first, [request])
    first.executor._host._files.close()
    assert first.scheduler.stats().total_swapped_out_blocks > 5
    other = engine("llama", enable_prefix_caching=True, kv_offload_dir=str(tmp_path / "kv"), **HOST)
    assert other.scheduler.stats().host_blocks_cached == 0
    same = offloading(tmp_path / "kv")
    assert same.scheduler.stats().host_blocks_cached > 5
    found = {}
    for request in prefixed()[:6]:
        found |= generate(same, [request])
    assert found == solo(prefixed()[:6], model="qwen3")
    assert same.scheduler.stats().total_swapped_in_blocks >= 5


def test_files_without_a_swap_space_are_refused_on_a_gpu():
    asked = engine_config(model="", kv_offload_dir="/kv")
    with pytest.raises(ConfigError, match="set swap_space to a size too"):
        kept_blocks(asked, 100, "cuda", 0, (None,))
    assert kept_blocks(replace(asked, swap_space=1000), 100, "cuda", 0, (None,)) == 0


def test_a_block_that_comes_back_wrong_changes_tokens(monkeypatch):
    """The comparison above can fail."""
    from quire_engine.execution.kv.kv_storage import HostKV

    swap = HostKV.swap
    monkeypatch.setattr(
        HostKV, "swap", lambda self, out, into, _=(): swap(self, out, [(0, target) for _, target in into])
    )
    requests = mixed_requests(20, seed=3)
    assert generate(tight("qwen3", requests), requests) != solo(requests, model="qwen3")


def test_on_a_cpu_it_is_refused_with_the_reason():
    with pytest.raises(
        ConfigError, match=r"swap_space=1024, but on a CPU the KV cache lies in the same memory.*kv_memory"
    ):
        engine(swap_space=1024)


@pytest.mark.parametrize(
    ("space", "message"),
    [(100, "holds no block of .*; set swap_space to [0-9]+ or more"), (1 << 60, "more than the .* of host memory")],
)
def test_a_swap_space_that_cannot_be_is_refused(space, message):
    with pytest.raises(ConfigError, match=message):
        engine(swap_space=space, swap_on_cpu=True)


def test_the_plan_tells_of_the_swap_space():
    plan = engine(**HOST).plan
    assert plan.scheduler.num_host_blocks == HOST["swap_space"] // plan.pool.bytes_per_block
    assert plan.scheduler.swap_seconds > 0
    (line,) = [line for line in plan_text(plan).splitlines() if line.startswith("swap space")]
    assert "8.00 MiB of host memory = " in line
    assert "ms one way" in line
    assert "swap space" not in plan_text(engine().plan)
