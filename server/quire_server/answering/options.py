"""What a generation is asked for, whichever dialect asked: the neutral request between the wire and the engine.

None stands for what the server decides; names that an error must give are the dialect's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages for the model's chat template, each as templates expect it; together one prompt."""

    messages: Sequence[Mapping[str, object]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_variables: Mapping[str, object] = field(default_factory=dict)
    tools: Sequence[Mapping[str, object]] = ()  # as templates expect them: {"type": "function", "function": {...}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """The prompts are what stands before the text to be written; this is what stands around them."""

    suffix: str
    param: str = "suffix"  # what the dialect calls it
    begun: str = ""  # the beginning of the text to be written
    extras: tuple[tuple[str, str], ...] = ()  # other files: name and text


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What is to be continued, and how it becomes token ids."""

    source: Conversation | Sequence[str | Sequence[int]]  # of several texts or lists of ids each is a prompt
    param: str  # what the dialect calls the source
    add_special_tokens: bool = True
    keep_tokens: int | None = None  # only so many tokens of each prompt; -1: what leaves room for the answer
    keep_start: bool = False  # of a prompt that is cut; else its end is kept
    cache_salt: str = ""
    infill: Infill | None = None  # None: what follows the prompts is to be written


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNumbers:
    """The numbers that shape a token's distribution. The engine's have the same names and defaults."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(SamplingNumbers):
    """How tokens are chosen, as asked for; not yet checked against the model."""

    n: int = 1
    n_param: str = "n"
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[str, ...] = ()
    num_logprobs: int | None = None  # None: none; k: of the chosen token and of the k most likely ones
    logprob_token_ids: tuple[int, ...] = ()  # theirs too, whatever their rank; needs num_logprobs
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions:
    """Beam search instead of sampling."""

    width: int  # beams that are followed at once; the n best are returned
    width_param: str = "n"
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOptions:
    """When a choice ends."""

    max_tokens: int | None = None  # what the client asked for
    max_tokens_param: str = "max_tokens"
    default_max_tokens: int | None = None  # where the client asked for nothing; None: all that fits
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # what stopped the choice is part of its text


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None  # a JSON schema; None: whatever the model writes
    strict: bool = False  # the arguments must follow the schema, whatever the model would write


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """What may be called, and whether it must be."""

    tools: tuple[Tool, ...]
    choice: Literal["auto", "none", "required", "function"] = "auto"
    function: str | None = None  # the one that must be called, with the choice "function"
    parallel: bool = True  # several calls in one reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What the answer's text must obey."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: str = ""  # the schema as JSON, the regular expression, a JSON list of texts, or the grammar's text
    param: str = "response_format"  # what the dialect calls it
    compact: bool = False  # JSON without whitespace between its parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """What the model may think before it answers, where it can."""

    effort: str | None = None  # for chat templates that have such a variable
    effort_param: str = "reasoning_effort"
    max_tokens: int | None = None  # after as many the block is ended
    max_tokens_param: str = "max_reasoning_tokens"
    show: bool = True  # the thoughts are part of the reply


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """What the reply shows, and how it comes."""

    id: str | None = None  # None: the HTTP request's
    stream: bool = False
    keep_best: int | None = None  # only so many of each prompt's choices, the likeliest by token; None: all
    echo: bool = False  # the prompt is part of the text
    skip_special_tokens: bool = True
    num_logprobs: int | None = None  # None: none; k: k alternatives beside the chosen token
    num_prompt_logprobs: int | None = None
    token_ids: bool = False
    names_are_ids: bool = False
    usage_at_end: bool = False  # of a stream
    usage_always: bool = False  # in every part of a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """One request. What has a default here can be left out by every dialect."""

    prompt: PromptOptions
    model: str | None = None  # None: the one that is served
    sampling: SamplingOptions = SamplingOptions()
    beam: BeamOptions | None = None  # None: tokens are sampled
    stop: StopOptions = StopOptions()
    reply: ReplyOptions = ReplyOptions()
    tools: ToolOptions | None = None
    structure: Structure | None = None  # None: any text
    reasoning: ReasoningOptions = ReasoningOptions()
    priority: int = 0  # lower is earlier, under the priority policy
    timeout: float | None = None  # seconds; None: as long as it takes
    is_batch: bool = False  # it may wait for those that are not
    ignored: tuple[str, ...] = ()  # names of fields that were accepted without effect

    @property
    def num_sequences(self) -> int:
        """What is computed side by side for each prompt: choices, or beams."""
        return self.sampling.n if self.beam is None else self.beam.width
