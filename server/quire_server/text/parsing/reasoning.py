"""The marks around models' reasoning, by name and by detection from the model's files.

Promises: an unknown name is refused with a list of the known ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.errors import ConfigError

TokenId = Callable[[str], int | None]  # the id of a text that is one token of the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """A block of reasoning is `start`, the reasoning, `end`."""

    names: tuple[str, ...]
    start: str
    end: str

    def marks(self, token_id: TokenId) -> ThinkingMarks:
        """The marks with their ids in a model's vocabulary."""
        return ThinkingMarks(start=self.start, end=self.end, start_id=token_id(self.start), end_id=token_id(self.end))


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingMarks:
    """The marks as texts, and as ids if they are tokens."""

    start: str
    end: str
    start_id: int | None = None
    end_id: int | None = None

    @property
    def are_tokens(self) -> bool:
        return self.start_id is not None and self.end_id is not None


_FORMATS = (
    ReasoningFormat(
        names=("qwen3", "deepseek_r1", "think", "glm45", "olmo3", "ernie45", "minimax_m2"),
        start="<think>",
        end="</think>",
    ),
    ReasoningFormat(names=("mistral", "magistral"), start="[THINK]", end="[/THINK]"),
    ReasoningFormat(names=("cohere",), start="<|START_THINKING|>", end="<|END_THINKING|>"),
    ReasoningFormat(names=("seed_oss",), start="<seed:think>", end="</seed:think>"),
    ReasoningFormat(names=("granite",), start="Here is my thought process:", end="Here is my response:"),
)
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
        if form.end in template:
            return form
    return next((form for form in spelled if form.marks(token_id).are_tokens), None)
