"""Generation without a server: an engine in a plain loop.

Promises: audits the scheduler after every step; raises when it stops before all requests have ended.
Must not know: processes, text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire_engine.build import BuiltEngine
from quire_engine.contract.batch import Batch
from quire_engine.contract.types import GenerationRequest, StepOutput, TokenLogprobs
from quire_engine.engine import Engine, StepExecutor

MAX_STEPS = 100_000


@dataclass(slots=True)
class Generated:
    """Everything one choice of one request was sent. Comparing two compares what a client sees, bit for bit."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: tuple[float, ...] | None = None
    beam_score: float | None = None
    finish: str | None = None
    error: str | None = None
    num_cached_tokens: int = field(default=0, compare=False)
    num_preemptions: int = field(default=0, compare=False)


class _Watched:
    """An executor whose batches are shown as they are launched."""

    def __init__(self, executor: StepExecutor, on_batch: Callable[[Batch], None]) -> None:
        self.max_in_flight, self.collect = executor.max_in_flight, executor.collect
        self._executor, self._on_batch = executor, on_batch

    def launch(self, batch: Batch) -> None:
        self._on_batch(batch)
        self._executor.launch(batch)


def generate(
    built: BuiltEngine,
    requests: Iterable[GenerationRequest],
    *,
    on_batch: Callable[[Batch], None] | None = None,
    between: Callable[[Engine], None] | None = None,
) -> dict[tuple[str, int], Generated]:
    """Run all requests to their end, submitted at once; results by request id and choice.

    `between` is called before each step, and once more when no work is left.
    """
    results: dict[tuple[str, int], Generated] = {}

    def take(step: StepOutput) -> None:
        for output in step.outputs:
            result = results[output.request_id, output.choice]
            if result.finish is not None:
                raise AssertionError(f"{output.request_id} was sent an output after its last one")
            result.token_ids += output.token_ids
            result.logprobs += output.logprobs or ()
            if output.prompt_logprobs is not None:
                result.prompt_logprobs = list(output.prompt_logprobs)
            result.embedding = output.embedding
            result.beam_score = output.beam_score
            result.finish, result.error = output.finish, output.error
            result.num_cached_tokens = max(result.num_cached_tokens, output.num_cached_tokens)
            if output.timing is not None:
                result.num_preemptions = output.timing.num_preemptions

    executor = built.executor if on_batch is None else _Watched(built.executor, on_batch)
    engine = Engine(built.scheduler, executor, adapters=built.adapters, check_invariants=True)
    engine.on_step = take
    for request in requests:
        engine.submit(request)
        results |= {(request.request_id, choice): Generated() for choice in range(request.n)}
    for _ in range(MAX_STEPS):
        if between is not None:
            between(engine)
        if not engine.has_work:
            return results
        engine.step()
    raise AssertionError(f"requests are unfinished after {MAX_STEPS} steps")
