"""What replies of both endpoints have in common: a closed model, token counts, prompt log-probabilities.

Promises: the usage's total is the sum of its parts. These models document replies; they are rendered elsewhere.
Must not know: which endpoint replies, how text is generated.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FinishedBecause = Literal["stop", "length", "tool_calls", "abort"]


class ReplyModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(ReplyModel):
    cached_tokens: int


class CompletionTokensDetails(ReplyModel):
    reasoning_tokens: int


class UsageInfo(ReplyModel):
    """`completion_tokens` are those really generated for the reply, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(
        None, description="of models that think before they answer"
    )


class PromptLogprob(ReplyModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
