"""Admission check at submission: refuses requests that no schedule could serve.

The elder rule can finish every request that passes; a refused one could not finish even alone.
"""

from __future__ import annotations

from quire_engine.contract.errors import InfeasibleRequest
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.types import GenerationRequest


def check_request(config: SchedulerConfig, request: GenerationRequest) -> None:
    """Raise InfeasibleRequest, naming the largest max_tokens that fits."""
    num_prompt, n, max_new = len(request.prompt_token_ids), request.num_sequences, request.stop.max_new_tokens
    if num_prompt == 0:
        raise InfeasibleRequest("the prompt is empty")
    if not 1 <= n <= config.limits.max_choices:
        name = "n" if request.beam is None else "the beam width"
        raise InfeasibleRequest(f"{name} is {n}, must be 1 to {config.limits.max_choices}")
    if max_new < 0:
        raise InfeasibleRequest(f"max_tokens is {max_new}, must be at least 0")
    if request.beam is not None:
        if config.has_states:
            raise InfeasibleRequest("beam search is not possible: this model keeps a recurrent state for each sequence")
        _check_beams(request)
    _check_resumed(request)
    if config.why_no_text and not request.pooling:
        raise InfeasibleRequest(f"this model makes vectors and no text: {config.why_no_text}")
    if request.pooling and (max_new or n > 1 or request.sampling.num_prompt_logprobs is not None):
        raise InfeasibleRequest("a request for a vector can ask for nothing else")
    largest = config.largest_max_tokens(num_prompt=num_prompt, n=n)
    remedy = f"largest max_tokens is {largest}" if largest >= 0 else "the prompt alone does not fit"
    if num_prompt + max_new > config.max_model_len:
        raise InfeasibleRequest(
            f"needs {num_prompt + max_new} tokens, the context has {config.max_model_len}; {remedy}"
        )
    needed = config.footprint(num_prompt=num_prompt, max_new_tokens=max_new, n=n)
    if needed > config.num_blocks:
        raise InfeasibleRequest(f"needs {needed} blocks, pool has {config.num_blocks}; {remedy}")


def _check_beams(request: GenerationRequest) -> None:
    """Beams are ranked by the model's own log-probabilities, and no output is sent before the search ends."""
    if not 1 <= request.n <= request.num_sequences:
        raise InfeasibleRequest(f"n is {request.n}, must be 1 to the beam width, {request.num_sequences}")
    if request.stop.max_new_tokens == 0:
        raise InfeasibleRequest("beam search needs a max_tokens of 1 or more")
    if request.resumed_token_ids or request.finished_choices:
        raise InfeasibleRequest("beam search cannot be resumed, it begins again")
    sampling = request.sampling
    if sampling.reads_output or sampling.logit_bias or sampling.allowed_token_ids or sampling.banned_token_ids:
        raise InfeasibleRequest(
            "beam search cannot be combined with penalties, logit biases, allowed or banned tokens, grammars or limits"
            " of thinking"
        )


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
