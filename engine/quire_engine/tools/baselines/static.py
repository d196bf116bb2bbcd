"""Static batching on our own engine: `python -m quire_engine.tools.baselines.static`.

Promises: the server's kernels and scheduler, but every member of a batch occupies its slot until the longest member
ends, as in servers without continuous batching. Must not know: sockets, HTTP.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial

from quire_engine.build import build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.types import GenerationRequest, SamplingParams, StepOutput, StopParams
from quire_engine.engine import Engine
from quire_engine.tools.baselines.batches import Member, RunBatch, Times, answer


def load(config: EngineConfig) -> RunBatch:
    """Load the model; returns the function that runs a batch. Raises ConfigError, ModelLoadError."""
    built = build(config)
    return partial(run_batch, Engine(built.scheduler, built.executor))


def run_batch(engine: Engine, members: Sequence[Member]) -> Times:
    """Every member computes as many tokens as the longest; only times of tokens it asked for are reported."""
    longest = max(member.output_tokens for member in members)
    times: Times = [[] for _ in members]
    started = time.perf_counter()

    def note(step: StepOutput) -> None:
        now = time.perf_counter() - started
        for output in step.outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            times[int(output.request_id)] += [now] * len(output.token_ids)

    engine.on_step = note
    for number, member in enumerate(members):
        engine.submit(
            GenerationRequest(
                request_id=str(number),
                prompt_token_ids=tuple(member.prompt),
                sampling=SamplingParams(temperature=0.0),
                stop=StopParams(max_new_tokens=longest),
            )
        )
    while engine.has_work:
        engine.step()
    return [arrivals[: member.output_tokens] for arrivals, member in zip(times, members, strict=True)]


if __name__ == "__main__":
    sys.exit(answer(load))
