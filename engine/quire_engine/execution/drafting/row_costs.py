"""Measures what steps of few rows take, before the first request: the stairs that drafts are counted against.

They depend on the machine, the kernels, the model and its quantisation: int4's sixth row costs a third of a step, which
bf16's has for nothing. Must not know: the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quire_engine.contract.batch import Batch, ScheduledSequence, StepResult
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.types import SamplingParams, StopParams

_MEASURED = -1  # the sequence of the steps
_ROWS = (*range(1, 9), 12, 13, 18, 19, 24, 25, 30, 31, 36, 48, 64)  # around the ends of tiles of four and of six
_ROUNDS = 3
_MOST_SECONDS = 1.0  # of all rounds; a step that has begun is waited for
_GREEDY, _STOP = SamplingParams(temperature=0.0), StopParams(max_new_tokens=1)


def measured_rows(
    execute: Callable[[Batch], StepResult],
    config: SchedulerConfig,
    most: int,
    *,
    has_graphs: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Seconds of a step by its rows, the shortest of a few; of fewer numbers of rows where steps are slow.

    Each step is one decode with drafts behind it, in blocks that no sequence holds yet. What it writes there is never
    read. The result is empty where a step fails, which requests then find out. `most`: rows of a step at most.
    `has_graphs`: a step's first run captures a graph, and says nothing about later ones.
    """
    limits = config.limits
    most = min(most, config.max_model_len, config.num_blocks * limits.block_size)
    batches = {rows: measuring_step(rows, config) for rows in _ROWS if rows <= most}
    found: dict[int, float] = {}
    first = list(batches.values()) if has_graphs else [batches[1]]
    if any(_fails(execute(batch)) for batch in first):
        return {}
    began = clock()
    for _ in range(_ROUNDS):
        for rows, batch in batches.items():
            started = clock()
            if started - began >= _MOST_SECONDS and found:
                return found
            if _fails(execute(batch)):
                return {}
            found[rows] = min(clock() - started, found.get(rows, float("inf")))
    return found


def measuring_step(rows: int, config: SchedulerConfig, *, guessed: bool = True) -> Batch:
    """A step of one sequence, to be measured before any other has blocks: a decode with guessed tokens, or a prompt."""
    num_blocks, num_groups = config.limits.num_blocks_for(rows), len(config.windows)
    item = ScheduledSequence(
        sequence_id=_MEASURED,
        choice=0,
        prompt_token_ids=(),
        output_token_ids=(),
        token_ids=(0,) * rows,
        start=0,
        block_ids=tuple(range(num_blocks)),
        other_block_ids=(tuple(range(num_blocks)),) * (num_groups - 1),
        wants_sample=True,
        wants_prompt_logprobs=False,
        forks=(),
        sampling=_GREEDY,
        stop=_STOP,
        num_drafts=rows - 1 if guessed else 0,
    )
    return Batch(step_id=0, items=(item,), num_tokens=rows, num_decodes=int(guessed))


def _fails(result: StepResult) -> bool:
    return bool(result.errors) or any(sample.error is not None for sample in result.samples.get(_MEASURED, ()))
