"""Generation without a server: the scheduler and the runner in a plain loop.

Promises: audits the scheduler after every step; raises when it stops before all requests have ended.
Must not know: processes, text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire_engine.batch import Batch
from quire_engine.build import BuiltEngine
from quire_engine.types import GenerationRequest, TokenLogprobs


@dataclass(slots=True)
class Generated:
    """Everything one choice of one request was sent. Comparing two compares what a client sees, bit for bit."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: str | None = None
    error: str | None = None
    num_cached_tokens: int = field(default=0, compare=False)
    num_preemptions: int = field(default=0, compare=False)


def generate(
    built: BuiltEngine, requests: Iterable[GenerationRequest], *, on_batch: Callable[[Batch], None] | None = None
) -> dict[tuple[str, int], Generated]:
    """Run all requests to their end, submitted at once; results by request id and choice."""
    results: dict[tuple[str, int], Generated] = {}
    step = 0
    for request in requests:
        built.scheduler.add(request, 0.0)
        results |= {(request.request_id, choice): Generated() for choice in range(request.n)}
    while built.scheduler.has_work:
        batch = built.scheduler.schedule(float(step))
        if batch is None:
            raise AssertionError("nothing is scheduled although requests are unfinished")
        if on_batch is not None:
            on_batch(batch)
        outputs = built.scheduler.apply(batch, built.runner.execute(batch), float(step))
        built.scheduler.check_invariants()
        step += 1
        for output in outputs:
            result = results[output.request_id, output.choice]
            if result.finish is not None:
                raise AssertionError(f"{output.request_id} was sent an output after its last one")
            result.token_ids += output.token_ids
            result.logprobs += output.logprobs or ()
            if output.prompt_logprobs is not None:
                result.prompt_logprobs = list(output.prompt_logprobs)
            result.finish, result.error = output.finish, output.error
            result.num_cached_tokens = max(result.num_cached_tokens, output.num_cached_tokens)
            if output.timing is not None:
                result.num_preemptions = output.timing.num_preemptions
    return results
