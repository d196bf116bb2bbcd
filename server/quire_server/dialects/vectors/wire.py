"""The wire models of embeddings, scores, ranks and classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from quire_server.answering.ranking import PairOptions
from quire_server.answering.vectors import TextInput, VectorOptions
from quire_server.dialects.common import (
    BATCH_TIER,
    KeptTokens,
    Prompts,
    ReplyModel,
    RequestName,
    ServiceTier,
    ServingFields,
    UsageInfo,
    WireModel,
    one_or_many,
    review_extras,
)
from quire_server.errors import BadRequest

MAX_TEXTS = 2048  # most texts of a request


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


_ListedTexts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)] | None
Texts = Annotated[_ListedTexts, BeforeValidator(_listed, json_schema_input_type=str | _ListedTexts)]


class VectorFields(ServingFields):
    """The fields of all these endpoints."""

    user: Annotated[str, Field(max_length=256)] | None = Field(None, description="without effect")
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: KeptTokens | None = Field(
        None, description="keep only this many tokens of each text; -1 is the context length"
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="which end is cut off; right by default")
    service_tier: ServiceTier | None = Field(None, description="flex: after requests without it; others are reported")
    request_id: RequestName | None = None

    def _options(
        self,
        inputs: Sequence[TextInput],
        *,
        dimensions: int | None = None,
        normalize: bool | None = True,
        prompt_name: str | None = None,
    ) -> VectorOptions:
        return VectorOptions(
            inputs=inputs,
            model=self.model,
            id=self.request_id,
            add_special_tokens=self.add_special_tokens is not False,
            keep_tokens=self.truncate_prompt_tokens,
            keep_start=self.truncation_side != "left",
            dimensions=dimensions,
            normalize=normalize,
            prompt_name=prompt_name,
            priority=self.priority or 0,
            timeout=self.timeout,
            is_batch=self.service_tier == BATCH_TIER,
            cache_salt=self.cache_salt or "",
            cache_ttl=self.cache_ttl or 0.0,
            ignored=tuple(review_extras({"service_tier": self.service_tier} | (self.model_extra or {}))),
        )


_check_input, _input_schema = one_or_many(MAX_TEXTS, "inputs")


def _named(sources: Sequence[str | Sequence[int]]) -> list[TextInput]:
    """The texts of the field `input`."""
    names = ["input"] if len(sources) == 1 else [f"input[{i}]" for i in range(len(sources))]
    return [TextInput(source=source, param=name) for source, name in zip(sources, names, strict=True)]


class EmbeddingRequest(VectorFields):
    input: Annotated[Prompts, _check_input, _input_schema]
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of little-endian float32 numbers; float by default"
    )
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        None, description="length to cut vectors to, for models that were trained for it"
    )
    normalize: bool | None = Field(
        None, description="whether vectors get length 1; as the checkpoint says by default, which is yes for most"
    )
    prompt_name: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="the checkpoint's prompt that is put before each text, such as query"
    )

    def options(self) -> VectorOptions:
        """The neutral options. Raises BadRequest for unsupported values."""
        return self._options(
            _named(self.input), dimensions=self.dimensions, normalize=self.normalize, prompt_name=self.prompt_name
        )


class PairFields(VectorFields):
    """The fields of requests that compare texts."""

    instruction: Annotated[str, Field(max_length=65536)] | None = Field(
        None, description="the task, for models that are asked in words; others ignore it"
    )
    use_activation: bool | None = Field(None, description="false: logits instead of probabilities, where there are any")

    def _pairs(
        self, left: list[str], right: list[str], names: tuple[str, str], *, right_tokens: int | None = None
    ) -> PairOptions:
        inputs = [
            TextInput(source=text, param=name if len(side) == 1 else f"{name}[{i}]")
            for name, side in zip(names, (left, right), strict=True)
            for i, text in enumerate(side)
        ]
        return PairOptions(
            texts=self._options(inputs),
            num_left=len(left),
            instruction=self.instruction,
            activates=self.use_activation is not False,
            right_tokens=right_tokens,
        )


class ScoreRequest(PairFields):
    """`text_1` and `text_2`, or the same under the names `queries` and `documents`."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None

    @model_validator(mode="after")
    def _check_texts(self) -> ScoreRequest:
        pairs = [("text_1", "text_2"), ("queries", "documents")]
        given = [names for names in pairs if any(getattr(self, name) is not None for name in names)]
        if len(given) != 1:
            raise BadRequest("Give 'text_1' and 'text_2', or 'queries' and 'documents'.", param="text_1")
        for name in given[0]:
            if getattr(self, name) is None:
                raise BadRequest(f"'{name}' is missing.", param=name)
        left, right = self.texts
        if len(left) not in {1, len(right)}:
            raise BadRequest(
                f"'{given[0][0]}' must be one text, or as many as '{given[0][1]}': {len(left)} and {len(right)}.",
                param=given[0][0],
            )
        if len(left) + len(right) > MAX_TEXTS:
            raise BadRequest(f"At most {MAX_TEXTS} texts per request.", param=given[0][1])
        return self

    @property
    def texts(self) -> tuple[list[str], list[str]]:
        """Left and right texts: one left text, or as many as right ones."""
        return self.text_1 or self.queries or [], self.text_2 or self.documents or []

    def options(self) -> PairOptions:
        """The neutral options."""
        names = ("text_1", "text_2") if self.text_1 is not None else ("queries", "documents")
        return self._pairs(*self.texts, names)


class RerankDocument(WireModel):
    """A document as an object, as Jina and Cohere have it; other fields are not read."""

    text: str


_Documents = Annotated[list[str | RerankDocument], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS - 1)]


class RerankRequest(PairFields):
    """Cohere's and Jina's fields; both give texts, or objects with a text, as documents."""

    query: str
    documents: _Documents
    top_n: Annotated[int, Field(ge=0)] | None = Field(None, description="most results; 0 and none: all documents")
    return_documents: bool | None = Field(
        None, description="whether results have the documents' texts; by default all do but those of /v2/rerank"
    )
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = Field(None, description="most tokens of each document")

    def options(self) -> PairOptions:
        """The neutral options."""
        texts = [each if isinstance(each, str) else each.text for each in self.documents]
        return self._pairs([self.query], texts, ("query", "documents"), right_tokens=self.max_tokens_per_doc)


class ClassifyRequest(VectorFields):
    input: Annotated[Prompts, _check_input, _input_schema]
    use_activation: bool | None = Field(None, description="false: logits instead of probabilities")

    def options(self) -> VectorOptions:
        """The neutral options."""
        return self._options(_named(self.input))


class Embedding(ReplyModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(ReplyModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: UsageInfo


class Score(ReplyModel):
    object: Literal["score"]
    index: int
    score: float = Field(description="a probability, or the cosine of the two vectors' angle: -1 to 1")


class ScoreResponse(ReplyModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: UsageInfo


class RerankedText(ReplyModel):
    text: str


class RerankResult(ReplyModel):
    index: int = Field(description="of the document in the request")
    relevance_score: float
    document: RerankedText | None = None


class RerankResponse(ReplyModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    results: list[RerankResult] = Field(description="the most relevant first")
    usage: UsageInfo


class Classification(ReplyModel):
    index: int
    label: str = Field(description="of the most likely class")
    probs: list[float] = Field(description="of each class; logits where the request asks for them")
    num_classes: int


class ClassificationResponse(ReplyModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: UsageInfo
