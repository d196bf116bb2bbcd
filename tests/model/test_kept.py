"""Prefixes that files kept give the tokens and log-probabilities of computed ones, to the last bit, on a CPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from model.test_bitwise import engine
from quire_engine.build import BuiltEngine
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.memory_plan import plan_text
from quire_engine.scheduling import kept_prefixes
from support.checkpoints import VOCAB_SIZE
from support.covering import few
from support.offline import generate
from support.plans import changed

PROMPT = tuple(3 + 37 * i % (VOCAB_SIZE - 3) for i in range(330))
SIZE = 16


@pytest.fixture(autouse=True)
def _these_prompts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_prefixes, "LEAST_TOKENS", 300)


def asked(name: str, *last: int) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.8, seed=5, num_logprobs=2)
    return GenerationRequest(
        request_id=name, prompt_token_ids=(*PROMPT, *last), sampling=sampling, stop=StopParams(max_new_tokens=6)
    )


def keeping(model: str, directory: Path, **changes: object) -> BuiltEngine:
    return engine(model, enable_prefix_caching=True, kv_offload_dir=str(directory), **changes)


def served(built: BuiltEngine, request: GenerationRequest) -> object:
    (result,) = generate(built, [request]).values()
    assert result.error is None
    return result.token_ids, result.logprobs, result.num_cached_tokens


def end(built: BuiltEngine) -> None:
    assert built.store is not None
    built.store.close(5)


@pytest.mark.parametrize("model", few(["qwen3", "bf16", "int8-kv", "experts-int4"], "qwen3", "int8-kv"))
def test_after_a_restart_the_bits_are_those_of_a_computed_prefix(model: str, tmp_path: Path) -> None:
    first = keeping(model, tmp_path / "kv")
    tokens, logprobs, cached = served(first, asked("a", 5, 6))
    assert cached == 0
    end(first)
    again = keeping(model, tmp_path / "kv")
    assert served(again, asked("b", 5, 6)) == (tokens, logprobs, len(PROMPT) // SIZE * SIZE)
    stats = again.scheduler.stats()
    assert stats.total_kept_read == len(PROMPT) // SIZE
    end(again)


def test_changed_bytes_in_a_file_change_nothing(tmp_path: Path) -> None:
    first = keeping("qwen3", tmp_path / "kv")
    expected = served(first, asked("a", 5, 6))[:2]  # type: ignore[index]
    end(first)
    files = sorted((tmp_path / "kv").glob("*/*.kv"), key=lambda path: -path.stat().st_mtime_ns)  # in the prompt's order
    assert len(files) == len(PROMPT) // SIZE
    body = bytearray(files[10].read_bytes())
    body[-7] ^= 1
    files[10].write_bytes(body)
    again = keeping("qwen3", tmp_path / "kv")
    tokens, logprobs, cached = served(again, asked("b", 5, 6))
    assert ((tokens, logprobs), cached) == (expected, 10 * SIZE)
    assert again.scheduler.stats().total_kept_refused == 1
    end(again)


def test_files_of_other_weights_are_not_read_wherever_they_lie(tmp_path: Path) -> None:
    first = keeping("qwen3", tmp_path / "kv")
    served(first, asked("a"))
    end(first)
    other = keeping("bf16", tmp_path / "kv")
    assert other.scheduler.stats().kept_blocks == 0
    end(other)
    old, new = sorted((tmp_path / "kv").iterdir(), key=lambda folder: -len(list(folder.iterdir())))
    for path in old.glob("*.kv"):
        os.rename(path, new / path.name)
    planted = keeping("bf16", tmp_path / "kv")
    assert planted.scheduler.stats().kept_blocks == len(PROMPT) // SIZE
    assert served(planted, asked("b")) == served(engine("bf16"), asked("b"))
    end(planted)


def test_a_block_that_comes_back_wrong_changes_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail."""
    from quire_engine.execution.kv.prefix_files import PrefixFiles

    first = keeping("qwen3", tmp_path / "kv")
    expected = served(first, asked("a", 5, 6))
    end(first)
    monkeypatch.setattr(PrefixFiles, "place", lambda *_: None)
    again = keeping("qwen3", tmp_path / "kv")
    assert served(again, asked("b", 5, 6))[:2] != expected[:2]  # type: ignore[index]
    end(again)


def test_a_block_with_a_wrong_number_leaves_the_disk(tmp_path: Path) -> None:
    """What is invalid in the pool is so in the files."""
    first = keeping("qwen3", tmp_path / "kv")
    engine_of = first.scheduler
    served(first, asked("a"))
    assert first.store is not None
    deadline = time.monotonic() + 300
    while first.store.counts.blocks < len(PROMPT) // SIZE and time.monotonic() < deadline:
        time.sleep(0.01)
    engine_of.add(asked("b"), 0.0)
    batch = engine_of.schedule(0.0)
    assert batch is not None
    result = first.executor.launch(batch) or first.executor.collect()
    result.non_finite.update(item.sequence_id for item in batch.items)
    engine_of.apply(batch, result, 0.0)
    end(first)
    assert list((tmp_path / "kv").glob("*/*.kv")) == []


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("mistral-windowed", {}, "is not possible: some layers of this model have a sliding window"),
        ("qwen3", {"enable_prefix_caching": False}, "is not possible: what it keeps are cached prefixes"),
        ("qwen3", {"kv_offload_size": 100}, "may have 100 bytes, which hold no block of .*; give it [0-9]+ or more"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    model: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(model, **{"enable_prefix_caching": True, "kv_offload_dir": str(tmp_path / "kv"), **changes})


def test_the_plan_tells_of_it(tmp_path: Path) -> None:
    built = keeping("qwen3", tmp_path / "kv", kv_offload_size=1 << 20)
    end(built)
    (line,) = [line for line in plan_text(built.plan).splitlines() if line.startswith("kept prefixes")]
    assert f"= {built.plan.pool.kept_blocks:,} blocks in files, in {tmp_path / 'kv'}" in line
    assert built.plan.pool.kept_blocks == (1 << 20) // (built.plan.pool.bytes_per_block + 48)
    assert "kept prefixes" not in plan_text(changed(built.plan, pool={"kept_blocks": 0}))
