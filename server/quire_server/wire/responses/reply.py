"""What /v1/responses replies: the response, its items, and the lists and receipts of the other routes.

Promises: these models document replies, they are rendered elsewhere. Must not know: how text is generated.
"""

from __future__ import annotations

from typing import Any, Literal

from quire_server.wire.chat import TokenLogprob
from quire_server.wire.reply import ReplyModel

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ReasoningText(ReplyModel):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(ReplyModel):
    type: Literal["summary_text"]
    text: str


class OutputText(ReplyModel):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[TokenLogprob]


class ReasoningOutput(ReplyModel):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: None


class MessageOutput(ReplyModel):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class FunctionCallOutput(ReplyModel):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = ReasoningOutput | MessageOutput | FunctionCallOutput


class InputTokensDetails(ReplyModel):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(ReplyModel):
    reasoning_tokens: int


class ResponseUsage(ReplyModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(ReplyModel):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(ReplyModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(ReplyModel):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default", "flex"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None


class InputItems(ReplyModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(ReplyModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(ReplyModel):
    object: Literal["response.input_tokens"]
    input_tokens: int
