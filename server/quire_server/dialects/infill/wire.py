"""The wire models of POST /infill as in llama-server: the fields that editors send, its defaults, its replies.

Unsupported fields that would change the answer are refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quire_server.answering.options import (
    GenerationOptions,
    Infill,
    PromptOptions,
    ReplyOptions,
    SamplingOptions,
    StopOptions,
)
from quire_server.dialects.common import (
    Int64,
    Penalty,
    Probability,
    RepetitionPenalty,
    ReplyModel,
    Speculates,
    StopStrings,
    Temperature,
    Timings,
    TopK,
    TopP,
    WantsTimings,
    WireModel,
    number_field,
    review_extras,
    switch_field,
)
from quire_server.errors import Unsupported

MAX_FILES = 256
# llama-server's fields that would change the answer and are not supported, with the values that turn them off.
_OFF: dict[str, tuple[object, ...]] = {
    "logit_bias": ([], {}),
    "n_probs": (0,),
    "dynatemp_range": (0, 0.0),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "grammar": ("",),
    "json_schema": (),
}

# The neutral names of the numbers that a checkpoint may have defaults for, and this route's; those go before
# llama-server's, as a GGUF's own do there.
_NUMBERS = {name: name for name in ("temperature", "top_k", "top_p", "min_p")} | {
    "repetition_penalty": "repeat_penalty"
}


class ExtraFile(WireModel):
    text: str
    filename: Annotated[str, Field(max_length=4096)] = "tmp"


class InfillRequest(WireModel):
    """The defaults are llama-server's and differ from the other routes'."""

    input_prefix: str = Field(description="the text before the middle")
    input_suffix: str = Field(description="the text after the middle")
    input_extra: Annotated[list[ExtraFile], Field(fail_fast=True, max_length=MAX_FILES)] | None = Field(
        None, description="other files for the model to read"
    )
    prompt: str | None = Field(None, description="the beginning of the middle")
    model: Annotated[str, Field(max_length=256)] | None = None
    stream: bool | None = switch_field(False)
    n_predict: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(None, description="-1: as many as fit")
    temperature: Temperature | None = number_field("temperature", 0.8)
    top_k: TopK | None = number_field("top_k", 40, "0 is off")
    top_p: TopP | None = number_field("top_p", 0.95)
    min_p: Probability | None = number_field("min_p", 0.05)
    seed: Int64 | None = Field(None, description="-1: a random one")
    repeat_penalty: RepetitionPenalty | None = number_field("repetition_penalty", 1.0, "1 is off")
    presence_penalty: Penalty | None = number_field("presence_penalty", 0.0, models=False)
    frequency_penalty: Penalty | None = number_field("frequency_penalty", 0.0, models=False)
    stop: StopStrings = None
    ignore_eos: bool | None = switch_field(False)
    return_tokens: bool | None = switch_field(False)
    timings: WantsTimings = None
    speculation: Speculates = None

    def options(self) -> GenerationOptions:
        """The neutral options. Raises BadRequest for unsupported values."""
        extras = dict(self.model_extra or {})
        for name, values in _OFF.items():
            value = extras.pop(name, None)
            if value is not None and value not in values:
                raise Unsupported(f"'{name}' is not supported by this route.", param=name)
        limit = None if self.n_predict in {None, -1} else self.n_predict
        return GenerationOptions(
            prompt=PromptOptions(
                source=[self.input_prefix],
                param="input_prefix",
                infill=Infill(
                    suffix=self.input_suffix,
                    param="input_suffix",
                    begun=self.prompt or "",
                    extras=tuple((each.filename, each.text) for each in self.input_extra or ()),
                ),
            ),
            model=self.model,
            sampling=SamplingOptions(
                given=frozenset(name for name, own in _NUMBERS.items() if getattr(self, own) is not None),
                temperature=0.8 if self.temperature is None else self.temperature,
                top_k=40 if self.top_k is None else max(self.top_k, 0),
                top_p=0.95 if self.top_p is None else self.top_p,
                min_p=0.05 if self.min_p is None else self.min_p,
                seed=None if self.seed == -1 else self.seed,
                repetition_penalty=1.0 if self.repeat_penalty is None else self.repeat_penalty,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
            ),
            stop=StopOptions(
                max_tokens=limit,
                max_tokens_param="n_predict",
                strings=tuple(self.stop or ()),
                ignore_eos=bool(self.ignore_eos),
            ),
            reply=ReplyOptions(
                stream=bool(self.stream), token_ids=bool(self.return_tokens), timings=bool(self.timings)
            ),
            speculates=self.speculation is not False,
            ignored=tuple(review_extras(extras)),
        )


class InfillPart(ReplyModel):
    """A part of a streamed reply; the last one has no content and the reason of the end."""

    index: Literal[0]
    content: str
    tokens: list[int]
    stop: bool
    id_slot: Literal[-1]
    tokens_predicted: int
    tokens_evaluated: int
    model: str | None = None
    prompt: str | None = None
    truncated: Literal[False] | None = None
    stop_type: Literal["eos", "word", "limit", "none"] | None = None
    stopping_word: str | None = None
    tokens_cached: int | None = None
    timings: Timings | None = None


class InfillResponse(InfillPart):
    """The whole reply."""
