"""Whether, how hard and how long the model thinks, in the words of several APIs; one request may use several of them.

OpenAI and vLLM have `reasoning_effort` and budgets, DeepSeek, GLM and Anthropic `thinking`, Qwen `enable_thinking` and
`thinking_budget`, OpenRouter `reasoning`. Words that contradict each other are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from quire_server.answering.options import ReasoningOptions
from quire_server.dialects.common import TokenCount, WireModel, review_extras
from quire_server.errors import BadRequest, Unsupported

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
USUAL_EFFORT = "medium"  # where thinking is switched on without one
_THINKING_TYPES = ("enabled", "disabled", "adaptive", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One field of a request and what it asks for; None: nothing."""

    param: str  # the field's name in the dialect
    thinks: bool | None = None
    effort: str | None = None
    budget: int | None = None  # most tokens of thinking


def check_thinking(value: object) -> object:
    """Refuse types that are not supported, in words that name those that are."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in _THINKING_TYPES:
        raise Unsupported(
            f"Thinking of type '{kind[:64]}' is not supported; 'enabled', 'disabled', 'adaptive' and 'auto' are.",
            param="thinking",
        )
    return value


class Thinking(WireModel):
    type: Literal["enabled", "disabled", "adaptive", "auto"] = Field(
        description="adaptive is enabled without a budget; auto leaves it to the template and the model"
    )
    budget_tokens: TokenCount | None = Field(None, description="most tokens of thinking before the answer")

    @model_validator(mode="after")
    def _check_disabled(self) -> Thinking:
        if self.type == "disabled" and self.budget_tokens:
            raise ValueError("the type 'disabled' has no 'budget_tokens'")
        return self

    def wishes(self) -> Iterator[Wish]:
        """Yield what each of its fields asks for."""
        thinks = {"enabled": True, "adaptive": True, "disabled": False, "auto": None}[self.type]
        yield Wish(param="thinking.type", thinks=thinks)
        yield Wish(param="thinking.budget_tokens", budget=self.budget_tokens)


class Reasoning(WireModel):
    effort: ReasoningEffort | None = Field(None, description="passed to chat templates that use it")
    enabled: bool | None = Field(None, description="whether the model is to think")
    max_tokens: TokenCount | None = Field(None, description="most tokens of thinking before the answer")
    exclude: bool | None = Field(None, description="true: the reply has no reasoning")

    @model_validator(mode="after")
    def _check_enabled(self) -> Reasoning:
        if self.enabled is False and self.max_tokens:
            raise ValueError("with 'enabled': false there is no 'max_tokens'")
        return self

    def wishes(self) -> Iterator[Wish]:
        """Yield what each of its fields asks for."""
        yield Wish(param="reasoning.effort", effort=self.effort)
        yield Wish(param="reasoning.enabled", thinks=self.enabled)
        yield Wish(param="reasoning.max_tokens", budget=self.max_tokens)


class ThinkingFields(WireModel):
    """The fields by all their names."""

    reasoning_effort: ReasoningEffort | None = Field(None, description="passed to chat templates that use it")
    max_reasoning_tokens: TokenCount | None = Field(
        None, description="most tokens of thinking before the answer; for models that think"
    )
    thinking_token_budget: TokenCount | None = Field(None, description="vLLM's name of max_reasoning_tokens")
    include_reasoning: bool | None = Field(None, description="false: the reply has no reasoning")
    thinking: Annotated[Thinking, BeforeValidator(check_thinking)] | None = Field(
        None, description="whether to think, and for how long, as DeepSeek, GLM and Anthropic have it"
    )
    enable_thinking: bool | None = Field(None, description="whether to think, as Qwen has it")
    thinking_budget: TokenCount | None = Field(None, description="Qwen's name of max_reasoning_tokens")
    reasoning: Reasoning | None = Field(None, description="OpenRouter's form of all of these")

    def reasoning_options(self, *own: Wish, show: bool = True) -> ReasoningOptions:
        """The neutral options. `own`: what the dialect's other fields say. Raises BadRequest for a contradiction."""
        wishes = [*own, *self._wishes()]
        hides = self.include_reasoning is False or (self.reasoning is not None and bool(self.reasoning.exclude))
        return combined(wishes, show=show and not hides)

    def ignored_thinking_fields(self) -> list[str]:
        """The names of fields without effect. Raises BadRequest for unsupported ones."""
        parts: tuple[tuple[str, WireModel | None], ...] = (("thinking", self.thinking), ("reasoning", self.reasoning))
        return [f"{name}.{extra}" for name, part in parts if part for extra in review_extras(part.model_extra)]

    def _wishes(self) -> Iterator[Wish]:
        yield Wish(param="reasoning_effort", effort=self.reasoning_effort)
        yield from () if self.reasoning is None else self.reasoning.wishes()
        yield from () if self.thinking is None else self.thinking.wishes()
        yield Wish(param="enable_thinking", thinks=self.enable_thinking)
        for name in ("max_reasoning_tokens", "thinking_token_budget", "thinking_budget"):
            yield Wish(param=name, budget=getattr(self, name))


def combined(wishes: Iterable[Wish], *, show: bool) -> ReasoningOptions:
    """Combine all of them. Raises BadRequest for a contradiction.

    A budget is a bound: it does not switch thinking on, and says nothing where that is off. Only one of 0 switches it
    off.
    """
    wishes = list(wishes)
    effort_param, effort = _one((wish.param, wish.effort) for wish in wishes)
    budget_param, budget = _one((wish.param, wish.budget) for wish in wishes)
    switches = [(wish.param, wish.thinks) for wish in wishes]
    efforts = [(effort_param, None if effort is None else effort != "none")]
    off = [(budget_param, False if budget == 0 else None)]
    switch_param, thinks = _one([*efforts, *switches])
    _one([(switch_param, thinks), *off])
    if effort is None and thinks is not None:
        effort_param, effort = switch_param, USUAL_EFFORT if thinks else "none"
    return ReasoningOptions(
        effort=effort,
        effort_param=effort_param or "reasoning_effort",
        max_tokens=budget,
        max_tokens_param=budget_param or "max_reasoning_tokens",
        show=show,
    )


Value = TypeVar("Value")


def _one(values: Iterable[tuple[str, Value | None]]) -> tuple[str, Value | None]:
    """The first value that is given, with its field. Raises BadRequest where a later one differs."""
    found: tuple[str, Value | None] = ("", None)
    for param, value in values:
        if value is None:
            continue
        if found[1] is None:
            found = param, value
        elif found[1] != value:
            raise BadRequest(f"'{found[0]}' and '{param}' contradict each other.", param=param)
    return found
