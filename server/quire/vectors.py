"""The computation and the results of `LLM.embed` and `LLM.score`, in vLLM's shapes.

Promises: the same vectors as the server; plain values. Must not know: threads, processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire_engine.contract.types import GenerationRequest
from quire_server.answering.ranking import PairOptions, asked_texts, compute_scores, cosine
from quire_server.answering.vectors import TextInput, VectorOptions, compute_vectors, prepare_vectors, shaped
from quire_server.state import ServerState


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """A prompt with its embedding."""

    request_id: str  # the number of the prompt in this LLM
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOutput:
    """The score of two texts: a probability, or their cosine similarity, -1 to 1."""

    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequestOutput:
    """A pair of texts with its score."""

    request_id: str
    prompt_token_ids: list[int]  # the ids of one text, then of the other
    outputs: ScoringOutput
    finished: bool = True


def vector_options(
    prompts: Sequence[str | list[int]],
    *,
    dimensions: int | None = None,
    normalize: bool = True,
    truncate_prompt_tokens: int | None = None,
) -> VectorOptions:
    """The neutral options. Raises ValueError."""
    for name, value, least in (("dimensions", dimensions, 1), ("truncate_prompt_tokens", truncate_prompt_tokens, -1)):
        if value is not None and (value < least or value == 0):
            raise ValueError(f"{name} is {value}, must be at least 1{' or -1' if least < 0 else ''}")
    several = len(prompts) > 1
    return VectorOptions(
        inputs=[
            TextInput(source=prompt, param=f"prompt {number}" if several else "prompt")
            for number, prompt in enumerate(prompts)
        ],
        keep_tokens=truncate_prompt_tokens,
        dimensions=dimensions,
        normalize=normalize,
    )


async def embed_all(
    state: ServerState, options: VectorOptions, ids: Iterator[int], on_finished: Callable[[None], None]
) -> list[EmbeddingRequestOutput]:
    """Every prompt's embedding, in order. Raises BadRequest before anything runs, EngineFailed."""
    requests: list[GenerationRequest] = await prepare_vectors(state, options)
    vectors: list[list[float]] = [[]] * len(requests)

    def take(number: int, values: tuple[float, ...]) -> None:
        vectors[number] = shaped(values, options, state.model_text.pooling)
        on_finished(None)

    await compute_vectors(requests, take, client=state.client, metrics=state.metrics)
    return [
        EmbeddingRequestOutput(
            request_id=str(next(ids)),
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=EmbeddingOutput(embedding=vector),
        )
        for request, vector in zip(requests, vectors, strict=True)
    ]


async def score_all(
    state: ServerState, options: PairOptions, ids: Iterator[int], on_finished: Callable[[None], None]
) -> list[ScoringRequestOutput]:
    """The scores of pairs that the model reads as one prompt each. Raises as `embed_all`."""
    asked = await asked_texts(state, options)
    requests = await prepare_vectors(state, asked)
    scores, _ = await compute_scores(state, options, asked, requests)
    for _ in requests:
        on_finished(None)
    return [
        ScoringRequestOutput(
            request_id=str(next(ids)),
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=ScoringOutput(score=score),
        )
        for request, score in zip(requests, scores, strict=True)
    ]


def scored(embedded: Sequence[EmbeddingRequestOutput], num_left: int) -> list[ScoringRequestOutput]:
    """Pairs of the first `num_left`, or of the first alone, with the others."""
    left, right = embedded[:num_left], embedded[num_left:]
    pairs = zip(left if num_left > 1 else [left[0]] * len(right), right, strict=True)
    return [
        ScoringRequestOutput(
            request_id=other.request_id,
            prompt_token_ids=one.prompt_token_ids + other.prompt_token_ids,
            outputs=ScoringOutput(score=cosine(one.outputs.embedding, other.outputs.embedding)),
        )
        for one, other in pairs
    ]
