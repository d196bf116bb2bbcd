"""How much of a trace's prompts the prefix cache finds, by the size of the pool: our allocator, no model.

    python -m benchmarks.prefix_hits TRACE.jsonl [TRACE.jsonl ...] [--blocks N ...]

Reads traces as Mooncake publishes them (one request a line: `input_length` and `hash_ids`, one id for each 512 tokens
and all before them). Each request is matched, computed and released before the next: what can be found then is all
that an LRU of so many blocks can keep. Prints the share of prompt tokens found, and of blocks in parentheses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.scheduling.blocks import PageTable, SequenceKV
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.sequence import Group, Sequence

TRACE_BLOCK = 512  # tokens behind one id
SIZES = (1_000, 5_000, 10_000, 30_000, 50_000, 100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request of a trace."""

    num_tokens: int
    blocks: tuple[int, ...]  # equal where all up to there is equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of a trace's prompts, what was there already."""

    tokens: float  # shares, 0 to 1
    blocks: float


def read_trace(path: Path) -> Iterator[Prompt]:
    """The requests in order. Raises KeyError and ValueError for lines that are none."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            plain = json.loads(line)
            yield Prompt(num_tokens=int(plain["input_length"]), blocks=tuple(plain["hash_ids"]))


def found(prompts: Iterable[Prompt], num_blocks: int) -> Found:
    """Run the prompts one after the other through a pool of so many of the trace's blocks."""
    kv = KVAllocator(num_blocks=num_blocks, block_size=1, enable_prefix_caching=True)
    tokens = hit_tokens = blocks = hit_blocks = 0
    for prompt in prompts:
        sequence = _sequence(prompt)
        match = kv.match(sequence, len(prompt.blocks))
        kv.seat(sequence, match)
        kv.commit(sequence, len(prompt.blocks))
        kv.release(sequence)
        tokens += prompt.num_tokens
        hit_tokens += min(match.num_tokens * TRACE_BLOCK, prompt.num_tokens)
        blocks += len(prompt.blocks)
        hit_blocks += match.num_tokens
    return Found(tokens=hit_tokens / tokens, blocks=hit_blocks / blocks)


def _sequence(prompt: Prompt) -> Sequence:
    """With the ids in the place of tokens: one id is one block."""
    request = GenerationRequest(
        request_id="",
        prompt_token_ids=prompt.blocks,
        sampling=SamplingParams(),
        stop=StopParams(max_new_tokens=0),
    )
    return Sequence(
        sequence_id=0,
        choice=0,
        group=Group(request=request, arrival=0, added_step=0),
        own_token_ids=list(prompt.blocks),
        num_prompt_tokens=len(prompt.blocks),
        kv=SequenceKV(tables=(PageTable(1),)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument(
        "--blocks", nargs="+", type=int, default=SIZES, help="sizes of the pool, in blocks of the trace"
    )
    arguments = parser.parse_args()
    for path in arguments.traces:
        prompts = list(read_trace(path))
        needed = len({block for prompt in prompts for block in prompt.blocks})
        print(f"{path.name}: {len(prompts)} requests, {needed} different blocks")
        for size in (*arguments.blocks, needed):
            share = found(prompts, size)
            print(f"  {size:>9,} blocks: {share.tokens:6.1%} of the tokens ({share.blocks:.1%} of the blocks)")


if __name__ == "__main__":
    main()
