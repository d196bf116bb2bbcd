"""What can be served at all: a request's feasibility at submission.

Promises: what passes here can be finished by the elder rule; what is refused could not be, whoever else runs.
Must not know: what is running or waiting.
"""

from __future__ import annotations

from quire_engine.errors import InfeasibleRequest
from quire_engine.limits import SchedulerConfig
from quire_engine.types import GenerationRequest


def check_request(config: SchedulerConfig, request: GenerationRequest) -> None:
    """Raise InfeasibleRequest, naming the largest max_tokens that would do."""
    num_prompt, n, max_new = len(request.prompt_token_ids), request.n, request.stop.max_new_tokens
    if num_prompt == 0:
        raise InfeasibleRequest("the prompt is empty")
    if not 1 <= n <= config.limits.max_choices:
        raise InfeasibleRequest(f"n is {n}, must be 1 to {config.limits.max_choices}")
    if max_new < 0:
        raise InfeasibleRequest(f"max_tokens is {max_new}, must be at least 0")
    _check_resumed(request)
    if request.pooling and (max_new or n > 1 or request.sampling.num_prompt_logprobs is not None):
        raise InfeasibleRequest("a request for a vector can ask for nothing else")
    largest = config.largest_max_tokens(num_prompt=num_prompt, n=n)
    remedy = f"largest max_tokens is {largest}" if largest >= 0 else "the prompt alone does not fit"
    if num_prompt + max_new > config.max_model_len:
        raise InfeasibleRequest(
            f"needs {num_prompt + max_new} tokens, the context has {config.max_model_len}; {remedy}"
        )
    needed = config.limits.footprint(num_prompt=num_prompt, max_new_tokens=max_new, n=n)
    if needed > config.num_blocks:
        raise InfeasibleRequest(f"needs {needed} blocks, pool has {config.num_blocks}; {remedy}")


def _check_resumed(request: GenerationRequest) -> None:
    resumed, finished = request.resumed_token_ids, request.finished_choices
    if resumed and len(resumed) != request.n:
        raise InfeasibleRequest(f"resumed_token_ids has {len(resumed)} entries for {request.n} choices")
    unfinished = [choice for choice in range(request.n) if choice not in finished]
    if not unfinished:
        raise InfeasibleRequest("every choice has already finished")
    for choice in unfinished:
        if resumed and len(resumed[choice]) >= max(1, request.stop.max_new_tokens):
            raise InfeasibleRequest(f"choice {choice} already has its {len(resumed[choice])} tokens")
