"""The marks around models' reasoning, by name and by detection from the model's files.

Promises: an unknown name is refused with a list of the known ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.contract.errors import ConfigError
from quire_server.text.parsing import harmony

TokenId = Callable[[str], int | None]  # the id of a text that is one token of the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """A block of reasoning is `start`, the reasoning, `end`."""

    names: tuple[str, ...]
    start: str
    end: str
    markers: tuple[
        str, ...
    ] = ()  # the parts of `start` and `end` that may be tokens, if they are not tokens as a whole
    after: str = ""  # the text that follows the block
    before_answer: str = ""  # the text with which every answer begins

    def marks(self, token_id: TokenId) -> ThinkingMarks:
        """The marks with their ids in a model's vocabulary."""
        start_id, end_id = (None, None) if self.markers else (token_id(self.start), token_id(self.end))
        return ThinkingMarks(
            start=self.start,
            end=self.end,
            start_id=start_id,
            end_id=end_id,
            markers=self.markers or (self.start, self.end),
            after=self.after,
            before_answer=self.before_answer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarks:
    """The marks as texts, and as ids if they are tokens; the other fields as in the format."""

    start: str
    end: str
    start_id: int | None = None
    end_id: int | None = None
    markers: tuple[str, ...] = ()
    after: str = ""
    before_answer: str = ""

    @property
    def are_tokens(self) -> bool:
        return self.start_id is not None and self.end_id is not None


_FORMATS = (
    ReasoningFormat(
        names=(
            "qwen3", "deepseek_r1", "think", "glm45", "olmo3", "ernie45", "minimax_m2", "deepseek_v3", "deepseek_v31",
            "deepseek_v32", "deepseek_v4", "glm47", "holo2", "kimi_k2", "mimo", "nemotron_v3", "poolside_v1", "step3",
            "step3p5",
        ),
        start="<think>",
        end="</think>",
    ),
    ReasoningFormat(names=("mistral", "magistral"), start="[THINK]", end="[/THINK]"),
    ReasoningFormat(
        names=("cohere", "cohere_command3", "cohere_command4"), start="<|START_THINKING|>", end="<|END_THINKING|>"
    ),
    ReasoningFormat(names=("seed_oss",), start="<seed:think>", end="</seed:think>"),
    ReasoningFormat(names=("granite",), start="Here is my thought process:", end="Here is my response:"),
    ReasoningFormat(
        names=("gemma4",), start="<|channel>thought", end="<channel|>", markers=("<|channel>", "<channel|>")
    ),
    ReasoningFormat(
        names=("openai_gptoss",),
        start=harmony.THOUGHTS,
        end=harmony.END_OF_THOUGHTS,
        markers=harmony.MARKERS,
        after=harmony.NEXT_MESSAGE,
        before_answer=harmony.ANSWER,
    ),
)  # fmt: skip
REASONING_FORMATS = {name: form for form in _FORMATS for name in form.names}


def reasoning_format(name: str) -> ReasoningFormat:
    """The format with that name. Raises ConfigError."""
    if name not in REASONING_FORMATS:
        raise ConfigError(f"reasoning parser {name!r} is unknown; known are {', '.join(sorted(REASONING_FORMATS))}")
    return REASONING_FORMATS[name]


def detect_reasoning(template: str, token_id: TokenId) -> ReasoningFormat | None:
    """The format that the chat template writes or removes, else one whose marks are tokens of the vocabulary.

    Marks in words cannot be detected; such a format must be set by name.
    """
    spelled = [form for form in _FORMATS if " " not in form.start]
    for form in spelled:
        if (form.start if form.after else form.end) in template:  # a general mark of messages says nothing
            return form
    return next((form for form in spelled if form.marks(token_id).are_tokens), None)
