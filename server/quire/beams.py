"""The parameters and results of `LLM.beam_search`, with vLLM's names and shapes.

Promises: parameters that exist have passed the checks of the server's own request model; results are plain values.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from quire.outputs import PositionLogprobs, RequestOutput
from quire.tokenizer import Tokenizer
from quire_server.answering.choice import ChoiceFinish
from quire_server.answering.options import GenerationOptions, PromptOptions
from quire_server.dialects.completions.wire import CompletionRequest
from quire_server.errors import BadRequest
from quire_server.http.body import validate


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """The parameters of a beam search. Raises ValueError for values that are not supported."""

    beam_width: int  # live beams, all of which are returned
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # 0 or 1: beams are ranked by the model's own log-probabilities
    length_penalty: float = 1.0  # a score is divided by the number of tokens to this power
    include_stop_str_in_output: bool = False  # the end-of-text token is among the tokens
    early_stopping: bool | Literal["never"] = False  # as in transformers

    def __post_init__(self) -> None:
        try:
            self.options()
        except BadRequest as error:
            raise ValueError(error.message) from None

    def options(self) -> GenerationOptions:
        """The neutral request of these parameters, its prompt still to be put in. Raises BadRequest."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["n"] = given.pop("beam_width")
        return validate(CompletionRequest, {"prompt": "", "use_beam_search": True, "logprobs": 0, **given}).options()


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One hypothesis."""

    tokens: list[int]  # the prompt's tokens and the continuation's
    logprobs: list[PositionLogprobs]  # one per token of the continuation, the end-of-text token included
    cum_logprob: float  # their sum
    score: float  # the score by which beams are ranked
    text: str  # the text of all tokens, including the prompt
    finish_reason: ChoiceFinish
    stop_reason: str | int | None  # the stop token id; None for the end-of-text token


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """The hypotheses of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def searches(prompts: list[str | list[int]], params: BeamSearchParams) -> list[GenerationOptions]:
    """One request for each prompt."""
    options = params.options()
    return [replace(options, prompt=PromptOptions(source=[prompt], param="prompt")) for prompt in prompts]


def beams_of(output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer) -> BeamSearchOutput:
    """The beams of an output in vLLM's shape."""
    sequences = []
    for found in output.outputs:
        hidden = int(found.finish_reason == "stop" and not params.include_stop_str_in_output)
        tokens = output.prompt_token_ids + found.token_ids[: len(found.token_ids) - hidden]
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                logprobs=found.logprobs or [],
                cum_logprob=found.cumulative_logprob or 0.0,
                score=found.beam_score or 0.0,
                text=tokenizer.decode(tokens),
                finish_reason=found.finish_reason,
                stop_reason=found.stop_reason,
            )
        )
    return BeamSearchOutput(sequences=sequences)
