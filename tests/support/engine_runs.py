"""Generation by the engine itself, stepped until all requests have ended, whatever its executor computes ahead.

Promises: audits the scheduler after every step; raises when a request is sent anything after its end.
Must not know: processes, text, kinds of devices.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire_engine.build import BuiltEngine
from quire_engine.engine import Engine
from quire_engine.types import GenerationRequest, StepOutput
from support.offline import Generated


def run_to_end(built: BuiltEngine, requests: Iterable[GenerationRequest]) -> dict[tuple[str, int], Generated]:
    """What each choice of each request was sent; all are submitted at once."""
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
            result.finish, result.error = output.finish, output.error
            result.num_cached_tokens = max(result.num_cached_tokens, output.num_cached_tokens)
            if output.timing is not None:
                result.num_preemptions = output.timing.num_preemptions

    engine = Engine(built.scheduler, built.runner, check_invariants=True)
    engine.on_step = take
    for request in requests:
        results |= {(request.request_id, choice): Generated() for choice in range(request.n)}
        engine.submit(request)
    while engine.has_work:
        engine.step()
    assert all(result.finish is not None for result in results.values())
    return results
