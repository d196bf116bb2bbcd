"""Answers requests for scores of pairs of texts, for an order of documents, and for classes of texts.

A pair is scored as the model was trained for it: by its classifier's head, by its answer "yes" or "no", or else by the
cosine of two vectors.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul

import msgspec
from fastapi import Request
from fastapi.responses import Response

from quire_engine.contract.types import GenerationRequest
from quire_server.answering.vectors import (
    MAX_INPUT_TOKENS,
    TextInput,
    VectorOptions,
    VectorUsage,
    compute_vectors,
    prepared,
    shaped,
    vector_notes,
    vector_reply,
)
from quire_server.errors import BadRequest
from quire_server.http.disconnect import unless_client_gone
from quire_server.state import ServerState, state_of
from quire_server.text.scoring_method import Classifier, question, share_of_yes

_encode = msgspec.json.Encoder().encode
_AT_ONCE = 16  # scores between two yields to the event loop
_CUTS = 4  # attempts to cut a document: the tokens of a text that was cut may join otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """Pairs of texts to score, in any dialect."""

    texts: VectorOptions  # the left texts, then the right ones
    num_left: int  # one left text, or as many as right ones
    instruction: str | None = None  # the task, for models whose prompt has a place for it
    activates: bool = True  # False: logits instead of probabilities, where the model gives them
    right_tokens: int | None = None  # most tokens of each right text; None: all

    @property
    def pairs(self) -> list[tuple[TextInput, TextInput]]:
        left, right = self.texts.inputs[: self.num_left], self.texts.inputs[self.num_left :]
        return [(left[number if self.num_left > 1 else 0], other) for number, other in enumerate(right)]


async def answer_scores(request: Request, options: PairOptions) -> Response:
    """The score of each pair.

    Raises BadRequest, ContextLengthExceeded, QueueFull, EngineFailed, ClientGone.
    """
    headers = vector_notes(state_of(request), options.texts)
    scores, usage = await _scores(request, options)
    entries = [_encode({"object": "score", "index": i, "score": score}) for i, score in enumerate(scores)]
    return vector_reply(request, options.texts, entries, usage, prefix="score-", headers=headers)


async def answer_rerank(
    request: Request, options: PairOptions, *, top_n: int | None, shows_documents: bool
) -> Response:
    """The documents, which are the right texts, the most relevant first. Raises as `answer_scores`."""
    headers = vector_notes(state_of(request), options.texts)
    scores, usage = await _scores(request, options)
    entries = []
    for index in sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:top_n]:
        entry: dict[str, object] = {"index": index, "relevance_score": scores[index]}
        if shows_documents:
            entry["document"] = {"text": options.texts.inputs[options.num_left + index].source}
        entries.append(_encode(entry))
    return vector_reply(request, options.texts, entries, usage, prefix="rerank-", headers=headers, name="results")


async def answer_classes(request: Request, options: VectorOptions, *, activates: bool) -> Response:
    """The classes' probabilities of each text. Raises as `answer_scores`."""
    state = state_of(request)
    classifier = state.model_text.scoring.classifier
    if classifier is None:
        raise BadRequest(
            "This model does not classify: it is not a …ForSequenceClassification.", code="classification_not_supported"
        )
    headers = vector_notes(state, options)
    requests = await prepared(request, options)
    entries = [b""] * len(requests)

    def take(number: int, row: Sequence[float]) -> None:
        values = classifier.values(row, activates=activates)
        best = max(range(len(values)), key=values.__getitem__)
        label, size = classifier.labels[best], len(values)
        entries[number] = _encode({"index": number, "label": label, "probs": values, "num_classes": size})

    work = compute_vectors(requests, take, client=state.client, metrics=state.metrics)
    usage = await unless_client_gone(request, work)
    return vector_reply(request, options, entries, usage, prefix="classify-", headers=headers)


async def _scores(request: Request, options: PairOptions) -> tuple[list[float], VectorUsage]:
    state = state_of(request)
    asked = await unless_client_gone(request, asked_texts(state, options))
    requests = await prepared(request, asked)
    return await unless_client_gone(request, compute_scores(state, options, asked, requests))


async def asked_texts(state: ServerState, options: PairOptions) -> VectorOptions:
    """The texts that the engine computes: each one, or each pair as one prompt. Raises BadRequest."""
    method, texts = state.model_text.scoring, options.texts
    if method.classifier is not None and len(method.classifier.labels) > 1:
        count = len(method.classifier.labels)
        raise BadRequest(f"This model tells {count} classes apart, and a score needs one; use /classify.")
    if options.right_tokens is not None:
        left, right = texts.inputs[: options.num_left], texts.inputs[options.num_left :]
        cut = [replace(each, source=await _shortened(state, each.source, options.right_tokens)) for each in right]
        texts = replace(texts, inputs=[*left, *cut])
        options = replace(options, texts=texts)
    if method.is_cosine:
        return replace(texts, normalize=True)
    inputs: list[TextInput] = []
    total = 0
    for one, other in options.pairs:
        inputs.append(await _joined(state, one, other, options))
        total += len(inputs[-1].source)
        if total > MAX_INPUT_TOKENS:  # at once: the left text is a part of every pair
            raise BadRequest(f"A request may have {MAX_INPUT_TOKENS} tokens in all pairs.", param=other.param)
        await asyncio.sleep(0)  # let streams run between thousands of short pairs
    return replace(texts, inputs=inputs, keep_tokens=None, answers=method.answers or ())


async def compute_scores(
    state: ServerState, options: PairOptions, asked: VectorOptions, requests: Sequence[GenerationRequest]
) -> tuple[list[float], VectorUsage]:
    """The scores, once the requests for the `asked` texts are prepared. Raises QueueFull, EngineFailed."""
    method = state.model_text.scoring
    if method.is_cosine:
        return await _cosines(state, options, asked, requests)
    scores = [0.0] * len(requests)
    take: Callable[[int, Sequence[float]], None]
    if method.classifier is not None:
        classifier: Classifier = method.classifier

        def take(number: int, row: Sequence[float]) -> None:
            (scores[number],) = classifier.values(row, activates=options.activates)

    else:

        def take(number: int, row: Sequence[float]) -> None:
            scores[number] = share_of_yes(*row, activates=options.activates)

    usage = await compute_vectors(requests, take, client=state.client, metrics=state.metrics)
    return scores, usage


async def _cosines(
    state: ServerState, options: PairOptions, asked: VectorOptions, requests: Sequence[GenerationRequest]
) -> tuple[list[float], VectorUsage]:
    vectors: list[array[float]] = [array("d")] * len(requests)

    def take(number: int, values: Sequence[float]) -> None:
        vectors[number] = array("d", shaped(values, asked, state.model_text.pooling))

    usage = await compute_vectors(requests, take, client=state.client, metrics=state.metrics)
    scores = []
    left, right = vectors[: options.num_left], vectors[options.num_left :]
    for number, other in enumerate(right):
        scores.append(cosine(left[number if options.num_left > 1 else 0], other))
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
    return scores, usage


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine similarity of two vectors of length 1, clamped against rounding."""
    product: float = sum(map(mul, one, other))
    return max(-1.0, min(1.0, product))


async def _joined(state: ServerState, left: TextInput, right: TextInput, options: PairOptions) -> TextInput:
    """A pair as one prompt; the right text is cut where the request limits the tokens. Raises BadRequest."""
    one, other = left.source, right.source
    if not isinstance(one, str) or not isinstance(other, str):
        raise BadRequest("This model scores texts, not tokens.", param=right.param)
    for side in (left, right):
        if not side.source:
            raise BadRequest("The text is empty: it has no tokens.", param=side.param)
    most = options.texts.keep_tokens
    if most is not None:
        largest = state.max_model_len - (state.model_text.scoring.answers is not None)
        most = largest if most == -1 else min(most, largest)
    ids = await _pair_ids(state, one, other, options)
    for _ in range(_CUTS):
        if most is None or len(ids) <= most:
            break
        plain = await state.text.encode(other, add_special_tokens=False)
        keep = len(plain) - (len(ids) - most)
        if keep < 1:
            raise BadRequest(f"The pair's other tokens alone are more than {most}.", param=left.param)
        kept = plain[:keep] if options.texts.keep_start else plain[-keep:]
        other = await state.text.decode(kept)
        ids = await _pair_ids(state, one, other, options)
    return TextInput(source=ids, param=right.param)


async def _pair_ids(state: ServerState, one: str, other: str, options: PairOptions) -> Sequence[int]:
    """The tokens of a pair: by a chat template with a place for both, the reranker's prompt, or one after the other."""
    text: str | None = None
    if state.model_text.prompts is not None and state.model_text.prompts.shows_pairs:
        messages: list[Mapping[str, object]] = [
            *([{"role": "system", "content": options.instruction}] if options.instruction else []),
            {"role": "query", "content": one},
            {"role": "document", "content": other},
        ]
        text = await state.text.render(
            messages,
            add_generation_prompt=True,
            continue_final_message=False,
            kwargs={"instruction": options.instruction} if options.instruction else {},
        )
    elif state.model_text.scoring.answers is not None:
        text = question(one, other, options.instruction)
    if text is not None:
        return await state.text.encode(text, add_special_tokens=False)
    special = options.texts.add_special_tokens
    return await state.text.encode_pair(one, other, add_special_tokens=special)


async def _shortened(state: ServerState, source: str | Sequence[int], most: int) -> str | Sequence[int]:
    """Return the text or its ids, cut to at most `most` tokens."""
    if not isinstance(source, str):
        return source[:most]
    await asyncio.sleep(0)
    ids = await state.text.encode(source, add_special_tokens=False)
    return source if len(ids) <= most else await state.text.decode(ids[:most])
