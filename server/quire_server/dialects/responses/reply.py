"""The wire models of replies of /v1/responses: the response, its items and events, and the other routes' replies.

They document replies; the renderer does not use them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from quire_server.dialects.common import ReplyModel, TokenLogprob

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
    namespace: str | None = Field(None, description="of a function of a namespace; other items lack it")
    arguments: str


class CustomCallOutput(ReplyModel):
    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = Field(None, description="of a tool of a namespace; other items lack it")
    input: str


OutputItem = ReasoningOutput | MessageOutput | FunctionCallOutput | CustomCallOutput


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


class NumberedEvent(ReplyModel):
    sequence_number: int


class WholeResponse(NumberedEvent):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(NumberedEvent):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class OfItem(NumberedEvent):
    output_index: int
    item_id: str


class PartEvent(OfItem):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: Literal[0]
    part: OutputText | ReasoningText


class TextDelta(OfItem):
    type: Literal["response.output_text.delta"]
    content_index: Literal[0]
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(OfItem):
    type: Literal["response.output_text.done"]
    content_index: Literal[0]
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(OfItem):
    type: Literal["response.reasoning_text.delta"]
    content_index: Literal[0]
    delta: str


class ReasoningDone(OfItem):
    type: Literal["response.reasoning_text.done"]
    content_index: Literal[0]
    text: str


class ArgumentsDelta(OfItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(OfItem):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class CustomInputDelta(OfItem):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class CustomInputDone(OfItem):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ErrorEvent(NumberedEvent):
    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


class ResponseEvent(
    RootModel[
        Annotated[
            WholeResponse
            | ItemEvent
            | PartEvent
            | TextDelta
            | TextDone
            | ReasoningDelta
            | ReasoningDone
            | ArgumentsDelta
            | ArgumentsDone
            | CustomInputDelta
            | CustomInputDone
            | ErrorEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """Any event of a stream."""
