"""Blocks of a pool that several ranks hold in parts go to the host, to files and to other engines, and come back whole.

The tokens and log-probabilities are those of one process, to the last bit.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from model.test_bitwise import mixed_requests
from model.test_ranks import ranks, settings_of
from model.test_transfer import BLOCKS, LONG, SIZE, Side, asked
from quire_engine.build import BuiltEngine, build
from quire_engine.contract.config import KVTransferConfig
from quire_engine.contract.types import KVSource
from quire_engine.scheduling import kept_prefixes
from quire_engine.scheduling.scheduler import Scheduler
from support.offline import generate

CACHING = {"enable_prefix_caching": True}


def alone(model: str) -> BuiltEngine:
    return build(settings_of(model, num_threads=2))


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((2, 2, 1, 4), marks=pytest.mark.matrix)])
def test_after_a_restart_ranks_find_the_prefixes_in_files(
    sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of ranks that wrote them: a file has a block as one process has it."""
    monkeypatch.setattr(kept_prefixes, "LEAST_TOKENS", 300)
    keeping = {**CACHING, "kv_offload_dir": str(tmp_path / "kv")}
    expected = generate(alone("bf16"), [asked("a", 5)])
    for start, size in enumerate(sizes):
        with ranks("bf16", size, **keeping) as built:
            found = generate(built, [asked("a", 5)])
            assert found == expected
            assert found["a", 0].num_cached_tokens == (BLOCKS * SIZE if start else 0)
            assert built.store is not None
            built.store.close(5)
    assert len([each for each in (tmp_path / "kv").iterdir() if each.is_dir()]) == 1


class Ranks(Side):
    """Ranks whose blocks others may have."""

    def __init__(self, stack: ExitStack, model: str, size: int) -> None:
        transfer = KVTransferConfig(listen="127.0.0.1:0")
        self._built = stack.enter_context(ranks(model, size, kv_transfer=transfer, **CACHING))
        super().__init__(model)

    def build(self, model: str, changes: dict[str, object]) -> BuiltEngine:
        del model, changes
        return self._built


# Prefixes in files, above, are those of one, two and four ranks.
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        pytest.param("bf16", (2, 1), marks=pytest.mark.matrix),
        pytest.param("bf16", (1, 2), marks=pytest.mark.matrix),
        pytest.param("int8-kv", (2, 4), marks=pytest.mark.matrix),
    ],
)
def test_ranks_fetch_the_blocks_of_other_ranks(model: str, sizes: tuple[int, int]) -> None:
    """Of another number of them too; four have each of two heads twice."""
    expected = generate(alone(model), [asked("a", 5)])["a", 0]
    with ExitStack() as stack:
        prefill, decode = (Ranks(stack, model, size) for size in sizes)
        prefill.run(asked("p", 5, max_new_tokens=0))
        source = KVSource(address=prefill.address, is_computing=True, own_seconds=LONG)
        decode.run(replace(asked("a", 5), kv_source=source))
        assert decode.cached["a"] == BLOCKS * SIZE
        tokens = [token for token_ids, _ in decode.said["a"] for token in token_ids]  # type: ignore[attr-defined]
        logprobs = [each for _, found in decode.said["a"] for each in found]  # type: ignore[attr-defined]
        assert (tokens, logprobs) == (expected.token_ids, expected.logprobs)
        assert prefill.leased() == 0


def test_swapped_requests_of_ranks_come_back_whole() -> None:
    wanted = mixed_requests(12, seed=3)
    plan = alone("bf16").plan
    limits = plan.scheduler.limits
    most = max(
        limits.footprint(num_prompt=len(r.prompt_token_ids), max_new_tokens=r.stop.max_new_tokens, n=r.n)
        for r in wanted
    )
    length = max(len(r.prompt_token_ids) + r.stop.max_new_tokens for r in wanted)
    tight = {"kv_memory": int(1.2 * most) * plan.pool.bytes_per_block, "max_model_len": length, "prefill_chunk": 24}
    host = {"swap_space": 8 << 20, "swap_on_cpu": True}
    with ranks("bf16", 2, **CACHING, **tight, **host) as built:
        free = replace(built, scheduler=Scheduler(replace(built.plan.scheduler, swap_seconds=0.0)))
        assert generate(free, wanted) == generate(alone("bf16"), wanted)
        stats = free.scheduler.stats()
        assert stats.total_preemptions_by_mode["swap"] > 1
        assert stats.total_swapped_in_blocks > 3
