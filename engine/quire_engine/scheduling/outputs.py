"""What the server is told about a sequence: a token, an end, where its time went.

Promises: prompt scores go out once, with the first output of choice 0; timing with a choice's first and last output.
Must not know: queues, blocks, batches.
"""

from __future__ import annotations

from quire_engine.batch import SampledToken
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.types import FinishReason, RequestTiming, TokenOutput


def token_output(sequence: Sequence, sample: SampledToken) -> TokenOutput:
    """The output for the token that was just appended to the sequence; it says so if the token is the last."""
    group = sequence.group
    finish: FinishReason | None = None
    stop_token_id = None
    if sample.token_id in group.stop_token_ids:
        finish, stop_token_id = "stop", sample.token_id
    elif sequence.num_output_tokens == group.max_new_tokens:
        finish = "length"
    is_first = sequence.note_output()
    return TokenOutput(
        request_id=group.request.request_id,
        choice=sequence.choice,
        token_ids=(sample.token_id,),
        logprobs=None if sample.logprobs is None else (sample.logprobs,),
        prompt_logprobs=group.take_prompt_logprobs() if sequence.choice == 0 else None,
        finish=finish,
        stop_token_id=stop_token_id,
        num_cached_tokens=group.num_cached_tokens,
        timing=_timing(group) if is_first or finish is not None else None,
    )


def prompt_only_output(sequence: Sequence) -> TokenOutput:
    """The only output of a choice that was asked for no token."""
    group = sequence.group
    return TokenOutput(
        request_id=group.request.request_id,
        choice=sequence.choice,
        prompt_logprobs=group.take_prompt_logprobs() if sequence.choice == 0 else None,
        finish="length",
        num_cached_tokens=group.num_cached_tokens,
        timing=_timing(group),
    )


def error_output(sequence: Sequence, message: str) -> TokenOutput:
    """The last output of a choice whose own step failed: steps are deterministic, it would fail again."""
    group = sequence.group
    return TokenOutput(
        request_id=group.request.request_id,
        choice=sequence.choice,
        finish="error",
        error=message,
        culprit=True,
        num_cached_tokens=group.num_cached_tokens,
        timing=_timing(group),
    )


def _timing(group: Group) -> RequestTiming | None:
    """None for a group that was never scheduled."""
    if group.first_scheduled is None:
        return None
    first_token = group.first_scheduled if group.first_token is None else group.first_token
    return RequestTiming(
        queue_seconds=max(0.0, group.first_scheduled - group.request.arrival_time),
        kv_wait_seconds=group.kv_wait_seconds,
        prefill_seconds=first_token - group.first_scheduled,
        num_preemptions=group.num_preemptions,
    )
