"""What can be served at all: the limits' consistency at start, a request's feasibility at submission.

Promises: what passes here can be finished by the elder rule; what is refused could not be, whoever else runs.
Must not know: what is running or waiting.
"""

from __future__ import annotations

from quire_engine.config import SchedulerConfig
from quire_engine.errors import ConfigError, InfeasibleRequest
from quire_engine.types import GenerationRequest


def check_config(config: SchedulerConfig) -> None:
    """Raise ConfigError, naming the setting and a value that works."""
    for name in (
        "num_blocks",
        "block_size",
        "max_model_len",
        "max_num_seqs",
        "prefill_chunk",
        "max_partial_prefills",
        "min_chunk",
    ):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}, must be at least 1")
    for name in ("max_bypasses", "elder_age_steps"):
        if getattr(config, name) < 0:
            raise ConfigError(f"{name} is {getattr(config, name)}, must be at least 0")
    if config.itl_target < 0:
        raise ConfigError(f"itl_target is {config.itl_target:g}, must be at least 0")
    if config.min_chunk > config.prefill_chunk:
        raise ConfigError(
            f"min_chunk {config.min_chunk} is larger than prefill_chunk {config.prefill_chunk}; "
            f"set min_chunk to at most {config.prefill_chunk}"
        )
    needed = config.max_num_seqs + config.min_chunk
    if needed > config.max_num_batched_tokens:
        raise ConfigError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} cannot hold one token for each of "
            f"max_num_seqs {config.max_num_seqs} and min_chunk {config.min_chunk}; set it to at least {needed}"
        )


def footprint(config: SchedulerConfig, *, num_prompt: int, max_new_tokens: int, n: int) -> int:
    """Blocks that a request holds at most: its prompt's full blocks once, the rest once per choice.

    The last token of a choice is never computed, so it needs no slot.
    """
    size = config.block_size
    if max_new_tokens <= 1:
        return -(-num_prompt // size)
    full, partial = divmod(num_prompt, size)
    return full + n * -(-(partial + max_new_tokens - 1) // size)


def largest_max_tokens(config: SchedulerConfig, *, num_prompt: int, n: int) -> int:
    """The largest max_new_tokens with which such a request is feasible; -1 if not even 0 is."""
    full, partial = divmod(num_prompt, config.block_size)
    if num_prompt > config.max_model_len or full + (1 if partial else 0) > config.num_blocks:
        return -1
    blocks_per_choice = (config.num_blocks - full) // n
    by_blocks = max(1, blocks_per_choice * config.block_size - partial + 1)
    return min(by_blocks, config.max_model_len - num_prompt)


def check_request(config: SchedulerConfig, request: GenerationRequest) -> None:
    """Raise InfeasibleRequest, naming the largest max_tokens that would do."""
    num_prompt, n, max_new = len(request.prompt_token_ids), request.n, request.stop.max_new_tokens
    max_n = min(config.max_num_seqs, config.min_chunk)
    if num_prompt == 0:
        raise InfeasibleRequest("the prompt is empty")
    if not 1 <= n <= max_n:
        raise InfeasibleRequest(f"n is {n}, must be 1 to {max_n}")
    if max_new < 0:
        raise InfeasibleRequest(f"max_tokens is {max_new}, must be at least 0")
    _check_resumed(request)
    largest = largest_max_tokens(config, num_prompt=num_prompt, n=n)
    remedy = f"largest max_tokens is {largest}" if largest >= 0 else "the prompt alone does not fit"
    if num_prompt + max_new > config.max_model_len:
        raise InfeasibleRequest(
            f"needs {num_prompt + max_new} tokens, the context has {config.max_model_len}; {remedy}"
        )
    needed = footprint(config, num_prompt=num_prompt, max_new_tokens=max_new, n=n)
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
