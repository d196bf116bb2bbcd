"""What the prefix cache finds of a trace, against an LRU of a few lines."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path

import pytest
from benchmarks.prefix_hits import Prompt, found, read_trace

from support.covering import few

SAMPLE = Path(__file__).parents[3] / "benchmarks" / "data" / "mooncake_conversation_sample.jsonl"


def modelled(prompts: list[Prompt], size: int) -> tuple[int, int]:
    """(blocks, tokens) found by a list of the least recent first, of a prompt its end before its beginning."""
    recent: OrderedDict[int, None] = OrderedDict()
    hit_blocks = hit_tokens = 0
    for prompt in prompts:
        hits = 0
        while hits < len(prompt.blocks) and prompt.blocks[hits] in recent:
            del recent[prompt.blocks[hits]]
            hits += 1
        while len(recent) + len(prompt.blocks) > size:
            recent.popitem(last=False)
        for block in reversed(prompt.blocks):
            recent.setdefault(block, None)
        hit_blocks += hits
        hit_tokens += min(512 * hits, prompt.num_tokens)
    return hit_blocks, hit_tokens


def conversations(seed: int) -> list[Prompt]:
    """Turns of many at once, each with all before it; some come back late, some begin as another did."""
    dice, unused = random.Random(seed), iter(range(1_000_000))
    live: list[tuple[int, ...]] = []
    prompts: list[Prompt] = []
    for _ in range(400):
        start = dice.choice(live) if live and dice.random() < 0.7 else ()
        start = start[: dice.randint(1, len(start))] if start and dice.random() < 0.2 else start
        blocks = (*start, *(next(unused) for _ in range(dice.randint(1, 12))))[:60]
        live.append(blocks)
        prompts.append(Prompt(num_tokens=512 * len(blocks) - dice.randint(0, 511), blocks=blocks))
    return prompts


@pytest.mark.parametrize("size", [60, 100, 200, 400, 5000])
@pytest.mark.parametrize("seed", few(range(5), 0))
def test_the_allocator_finds_what_an_lru_of_as_many_blocks_does(size: int, seed: int) -> None:
    prompts = conversations(seed)
    blocks, tokens = modelled(prompts, size)
    share = found(prompts, size)
    assert share.blocks == pytest.approx(blocks / sum(len(prompt.blocks) for prompt in prompts), abs=1e-12)
    assert share.tokens == pytest.approx(tokens / sum(prompt.num_tokens for prompt in prompts), abs=1e-12)


def test_a_larger_pool_finds_more_and_at_most_what_is_there_twice() -> None:
    prompts = conversations(0)
    shares = [found(prompts, size).blocks for size in (60, 200, 800, 5000, 9000)]
    assert shares == sorted(shares)
    assert shares[0] < shares[1] / 2
    assert shares[3] == shares[4]
    every = [block for prompt in prompts for block in prompt.blocks]
    assert shares[4] == pytest.approx(1 - len(set(every)) / len(every))


def test_the_sample_of_a_published_trace() -> None:
    """Sixty requests that begin alike and share nothing else, so a small pool finds as much as a large one."""
    prompts = list(read_trace(SAMPLE))
    blocks, tokens = modelled(prompts, 250)
    assert (len(prompts), blocks, tokens) == (60, 59, 59 * 512)
    for size in (250, 2000):
        assert found(prompts, size).blocks == pytest.approx(59 / 1486)
