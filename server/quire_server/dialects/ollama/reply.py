"""The wire models of Ollama's replies. They document replies; the renderer does not use those of generations."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from quire_server.answering.capabilities import Capability
from quire_server.dialects.common import ReplyModel, TokenLogprob


class CallOut(ReplyModel):
    index: int
    name: str
    arguments: dict[str, Any]


class ToolCallOut(ReplyModel):
    id: str
    function: CallOut


class MessageOut(ReplyModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[ToolCallOut] | None = Field(None, description="whole calls, also in a stream")


class _Reply(ReplyModel):
    """A whole reply, or a line of a stream; the last line has the fields behind `done`."""

    model: str
    created_at: str
    logprobs: list[TokenLogprob] | None = None
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = Field(None, description="nanoseconds, as all durations")
    load_duration: Literal[0] | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class ChatReply(_Reply):
    message: MessageOut


class GenerateReply(_Reply):
    response: str
    thinking: str | None = None


class EmbedReply(ReplyModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int | None = Field(None, description="absent, as those below, where there was no text")
    load_duration: Literal[0] | None = None
    prompt_eval_count: int | None = None


class EmbeddingsReply(ReplyModel):
    embedding: list[float]


class Details(ReplyModel):
    parent_model: str = Field(description="of an adapter the model that it adds to")
    format: Literal["safetensors", "gguf"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(ReplyModel):
    name: str
    model: str
    modified_at: str
    size: int = Field(description="bytes of its weights in memory")
    digest: str = Field(description="changes when a file of the model does")
    details: Details


class ModelTags(ReplyModel):
    models: list[ListedModel]


class RunningModel(ReplyModel):
    name: str
    model: str
    size: int = Field(description="bytes of its weights and its KV cache")
    digest: str
    details: Details
    expires_at: str = Field(description="far away: a model stays as long as the server")
    size_vram: int
    context_length: int


class RunningModels(ReplyModel):
    models: list[RunningModel]


class ShownModel(ReplyModel):
    license: str
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[Capability]
    modified_at: str


class ApiVersion(ReplyModel):
    version: str = Field(description="the version of Ollama whose API this is; clients ask for a least one")
    quire: str
