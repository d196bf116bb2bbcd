"""The options of a generation request, independent of the dialect.

None means that the server decides. Errors name fields as the dialect does, by the `param` fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt of messages for the model's chat template, each in the form that templates expect."""

    messages: Sequence[Mapping[str, object]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_variables: Mapping[str, object] = field(default_factory=dict)
    template: str | None = None  # the name of one of the model's templates; None: the one for such a request
    tools: Sequence[Mapping[str, object]] = ()  # as templates expect them: {"type": "function", "function": {...}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """Fill in the middle: the prompts are the text before the middle; this has the text after it."""

    suffix: str
    param: str = "suffix"  # the field's name in the dialect, for errors
    begun: str = ""  # the beginning of the middle
    extras: tuple[tuple[str, str], ...] = ()  # other files as (name, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The prompts, and how they become token ids."""

    source: Conversation | Sequence[str | Sequence[int]]  # a conversation, or texts and lists of token ids
    param: str  # the source's field name in the dialect, for errors
    add_special_tokens: bool = True
    keep_tokens: int | None = None  # most tokens of each prompt; -1: the context length less the answer
    keep_start: bool = False  # keep the start of a prompt that is cut, else its end
    cache_salt: str = ""
    cache_ttl: float = 0.0  # seconds for which the prompt's cached prefix is to be kept; 0: as any other
    infill: Infill | None = None  # None: continue the prompts


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

    given: frozenset[str] = frozenset()  # the numbers that the request brings; the model's defaults fill in the others
    n: int = 1
    n_param: str = "n"
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[str, ...] = ()
    num_logprobs: int | None = None  # None: none; k: the chosen token and the k most likely
    logprobs_param: str = "logprobs"  # the field's name in the dialect, for errors
    logprob_token_ids: tuple[int, ...] = ()  # also scored, whatever their rank; needs num_logprobs
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions:
    """Beam search instead of sampling."""

    width: int  # live beams; the n best hypotheses are returned
    width_param: str = "n"
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOptions:
    """The conditions that end a choice: limits of tokens, stop strings, stop tokens."""

    max_tokens: int | None = None  # the client's
    max_tokens_param: str = "max_tokens"
    default_max_tokens: int | None = None  # without the client's; None: as many as fit
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # the stop string or token is part of the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None  # a JSON schema; None: any arguments
    strict: bool = False  # the schema is enforced by a grammar
    input_grammar: str = ""  # of the text that is the one argument `input`, and enforced where calls are JSON
    input_syntax: Literal["lark", "regex"] = "lark"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """The tools that may be called, and whether one must be."""

    tools: tuple[Tool, ...]
    choice: Literal["auto", "none", "required", "function"] = "auto"
    function: str | None = None  # the one that must be called, with the choice "function"
    parallel: bool = True  # several calls in one reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The form that the answer's text must have."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: str = ""  # the schema as JSON, the regular expression, a JSON list of texts, or the grammar's text
    param: str = "response_format"  # the field's name in the dialect, for errors
    compact: bool = False  # JSON without whitespace between its parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    """The options for the reasoning of models that think before they answer."""

    effort: str | None = None  # for chat templates with a variable for it
    effort_param: str = "reasoning_effort"
    max_tokens: int | None = None  # most tokens in the block of thoughts
    max_tokens_param: str = "max_reasoning_tokens"
    show: bool = True  # the reply has the reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """The content and the form of the reply."""

    id: str | None = None  # None: the HTTP request's id
    stream: bool = False
    keep_best: int | None = None  # return this many of each prompt's choices, by mean log-probability; None: all
    echo: bool = False  # the prompt is part of the text
    begins_with: str = ""  # the text before the generated one: the message that a chat echoes
    skip_special_tokens: bool = True
    num_logprobs: int | None = None  # None: none; k: the chosen token and k alternatives
    num_prompt_logprobs: int | None = None
    token_ids: bool = False
    names_are_ids: bool = False
    usage_at_end: bool = False  # usage in the last chunk of a stream
    usage_always: bool = False  # usage in every chunk of a stream
    progress: bool = False  # how far the prompt is computed, before the first token of a stream
    timings: bool = False  # how long its phases took; in the last chunk of a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """One generation request. Every field with a default may be left out by a dialect."""

    prompt: PromptOptions
    model: str | None = None  # None: the served model
    sampling: SamplingOptions = SamplingOptions()
    beam: BeamOptions | None = None  # None: tokens are sampled
    stop: StopOptions = StopOptions()
    reply: ReplyOptions = ReplyOptions()
    tools: ToolOptions | None = None
    structure: Structure | None = None  # None: any text
    reasoning: ReasoningOptions = ReasoningOptions()
    priority: int = 0  # lower is earlier, under the priority policy
    timeout: float | None = None  # seconds; None: no limit
    is_batch: bool = False  # service class batch
    speculates: bool = True  # guessed tokens may be computed, where the server does that
    prediction: str = ""  # the client's guess of the answer
    ignored: tuple[str, ...] = ()  # names of fields that were accepted without effect

    @property
    def num_sequences(self) -> int:
        """Sequences that are computed in parallel for each prompt: choices, or beams."""
        return self.sampling.n if self.beam is None else self.beam.width
