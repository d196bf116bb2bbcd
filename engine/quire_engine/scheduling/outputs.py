"""Makes the outputs that the server gets for a sequence: tokens, ends, errors and timing.

Prompt scores are sent once, with the first output of choice 0; timing with a choice's first and last output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from quire_engine.contract.batch import SampledToken
from quire_engine.contract.types import (
    DEADLINE_EXCEEDED,
    DEADLINE_PASSED,
    FinishReason,
    PromptProgress,
    RequestTiming,
    TokenLogprobs,
    TokenOutput,
)
from quire_engine.scheduling.beams import Hypothesis
from quire_engine.scheduling.sequence import Group, Sequence


def token_output(
    sequence: Sequence,
    samples: tuple[SampledToken, ...],
    token_ids: tuple[int, ...],
    finish: FinishReason | None,
    predicted: tuple[int, int] | None = None,
) -> TokenOutput:
    """The output for `token_ids`, the first of `samples`. With a `finish` the last of them ends the sequence."""
    group = sequence.group
    is_first = not sequence.has_output
    if is_first:
        sequence.note_output()
    return TokenOutput(
        request_id=group.request.request_id,
        choice=sequence.choice,
        token_ids=token_ids,
        logprobs=None if samples[0].logprobs is None else _logprobs(samples[: len(token_ids)]),
        prompt_logprobs=group.take_prompt_logprobs() if group.prompt_logprobs_due and sequence.choice == 0 else None,
        finish=finish,
        stop_token_id=token_ids[-1] if finish == "stop" else None,
        num_cached_tokens=group.num_cached_tokens,
        timing=_timing(group) if is_first or finish is not None else None,
        predicted=predicted,
    )


def prompt_only_output(sequence: Sequence) -> TokenOutput:
    """The only output of a choice with max_tokens 0."""
    group = sequence.group
    return TokenOutput(
        request_id=group.request.request_id,
        choice=sequence.choice,
        prompt_logprobs=group.take_prompt_logprobs() if group.prompt_logprobs_due and sequence.choice == 0 else None,
        embedding=None if group.pooled is None else group.pooled.vector(group.num_prompt_tokens),
        finish="length",
        num_cached_tokens=group.num_cached_tokens,
        timing=_timing(group),
    )


def progress_output(sequence: Sequence, num_computed: int, now: float) -> TokenOutput:
    """The output of a step that has computed a prompt up to `num_computed` of its tokens, and not to its end."""
    group = sequence.group
    began = now if group.first_scheduled is None else group.first_scheduled
    return TokenOutput(
        request_id=group.request.request_id,
        choice=sequence.choice,
        num_cached_tokens=group.num_cached_tokens,
        progress=PromptProgress(num_computed=num_computed, seconds=now - began),
    )


def error_output(sequence: Sequence, message: str) -> TokenOutput:
    """The last output of a choice whose own step failed. Steps are deterministic: it would fail again."""
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


def error_outputs(group: Group, ended: Iterable[Sequence], message: str) -> list[TokenOutput]:
    """The last outputs of a group that failed as a whole, one per choice; a search has more beams than choices."""
    return [error_output(sequence, message) for sequence in ended if sequence.choice < group.request.n]


def beam_output(group: Group, found: Hypothesis, choice: int) -> TokenOutput:
    """The only output of a choice that beam search found."""
    tokens = found.tokens()
    wanted = group.request.sampling.num_logprobs is not None
    return TokenOutput(
        request_id=group.request.request_id,
        choice=choice,
        token_ids=tuple([token.token_id for token in tokens]),
        logprobs=tokens if wanted else None,
        prompt_logprobs=group.take_prompt_logprobs() if group.prompt_logprobs_due and choice == 0 else None,
        beam_score=found.score,
        finish=found.finish,
        stop_token_id=tokens[-1].token_id if found.finish == "stop" else None,
        num_cached_tokens=group.num_cached_tokens,
        timing=_timing(group),
    )


def expired_outputs(group: Group, ended: Iterable[Sequence]) -> list[TokenOutput]:
    """The last outputs of a group at its deadline: one for each choice that was not finished."""
    failed = error_outputs(group, ended, DEADLINE_PASSED)
    return [replace(output, culprit=False, error_code=DEADLINE_EXCEEDED) for output in failed]


def _logprobs(samples: tuple[SampledToken, ...]) -> tuple[TokenLogprobs, ...]:
    return tuple([sample.logprobs for sample in samples if sample.logprobs is not None])


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
