"""The results of `LLM.generate` and `LLM.chat`, in vLLM's shapes.

Promises: plain values; log-probabilities by token id, as in the server's `prompt_logprobs`. Must not know: HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire_engine.contract.types import TokenLogprobs
from quire_server.answering.choice import ChoiceDelta, ChoiceFinish
from quire_server.answering.generation import Generation
from quire_server.answering.prepare import Job
from quire_server.text.logprobs import LogprobFormat
from quire_server.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """The log-probability of one token at a position."""

    logprob: float  # natural logarithm; -9999 for minus infinity
    rank: int | None  # 1 is the most likely; None for a token from `logprob_token_ids` alone
    decoded_token: str


PositionLogprobs = dict[int, Logprob]  # by token id: the actual token and the requested number of the most likely ones


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of a prompt's `n` continuations."""

    index: int
    text: str
    token_ids: list[int]  # with the stop token, if one ended it
    cumulative_logprob: float | None  # None where no log-probabilities were asked for
    logprobs: list[PositionLogprobs] | None  # one per token id
    finish_reason: ChoiceFinish
    stop_reason: str | int | None  # the stop string or stop token id; None for the end-of-text token
    beam_score: float | None = None  # score of a beam search hypothesis

    def finished(self) -> bool:
        """Always true: only complete outputs are returned."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt with its continuations."""

    request_id: str  # the number of the prompt in this LLM
    prompt: str | None  # None for token ids; for a conversation the rendered template
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None  # one per prompt token, None for the first
    outputs: list[CompletionOutput]
    num_cached_tokens: int  # prompt tokens from the prefix cache
    finished: bool = True


def request_output(
    request_id: str, job: Job, generation: Generation, choices: Sequence[ChoiceDelta], *, tokenizer: TextTokenizer
) -> RequestOutput:
    """The output of a job of one prompt from its complete choices."""
    sampling = job.options.sampling
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    if sampling.num_prompt_logprobs is not None:
        prompt_logprobs = _positions(generation.prompt_logprobs.get(0, ()), sampling.num_prompt_logprobs, tokenizer)
    return RequestOutput(
        request_id=request_id,
        prompt=job.prompt_texts[0] if job.prompt_texts else None,
        prompt_token_ids=list(job.requests[0].prompt_token_ids),
        prompt_logprobs=prompt_logprobs,
        outputs=[_completion(choice, sampling.num_logprobs, tokenizer) for choice in choices],
        num_cached_tokens=generation.usage.cached_tokens,
    )


def empty_line(outputs: Sequence[RequestOutput]) -> str:
    """A line for the user where the model itself ended outputs with their first token; empty where it ended none."""
    choices = [choice for output in outputs for choice in output.outputs]
    empty = sum(one.finish_reason == "stop" and one.stop_reason is None and not one.text for one in choices)
    if not empty:
        return ""
    return (
        f"{empty} of {len(choices)} outputs are empty: the model took these prompts for complete texts. chat() asks it"
        " for an answer; SamplingParams(ignore_eos=True) continues whatever it thinks."
    )


def _completion(choice: ChoiceDelta, num_logprobs: int | None, tokenizer: TextTokenizer) -> CompletionOutput:
    if choice.finish_reason is None:
        raise ValueError(f"choice {choice.index} has not ended")
    logprobs = None if num_logprobs is None else _positions(choice.logprobs, num_logprobs, tokenizer)
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids,
        cumulative_logprob=None if num_logprobs is None else sum(each.logprob for each in choice.logprobs),
        logprobs=None if logprobs is None else [position for position in logprobs if position is not None],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        beam_score=choice.beam_score,
    )


def _positions(
    positions: Sequence[TokenLogprobs | None], num_top: int, tokenizer: TextTokenizer
) -> list[PositionLogprobs | None]:
    shown = LogprobFormat(tokenizer, names_are_ids=False).prompt(positions, num_top)
    return [
        None if entries is None else {int(token_id): Logprob(**entry) for token_id, entry in entries.items()}
        for entries in shown
    ]
